"""The jobs of benchmarks/frameworks.py: a Trainer and Accelerate's loop, with elastic's integrations or stock."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.trainer_utils import get_last_checkpoint

import elastic
from elastic.integrations import accelerate as ours_accelerate
from elastic.integrations import transformers as ours

sys.path.insert(0, os.fspath(pathlib.Path(__file__).resolve().parent))
from _harness import Recorder

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=["trainer", "accelerate"], required=True)
parser.add_argument("--record", required=True)
parser.add_argument("--out", type=pathlib.Path, required=True)
parser.add_argument("--stock", action="store_true", help="no elastic; a checkpoint every 20 steps")
ARGS = parser.parse_args()
STEPS, EVERY, LENGTH = 1_000_000, 20, 32
RECORDER = Recorder(ARGS.record)


def commit(step: int) -> None:
    generation = 0 if ARGS.stock else int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    world_size = int(os.environ["WORLD_SIZE"])
    RECORDER.commit(step, generation=generation, world_size=world_size, rank=int(os.environ["RANK"]))


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(index)).sort().values
        return {"input_ids": ids, "labels": ids}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


class Told(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        commit(state.global_step)


def trainer() -> None:
    home = transformers if ARGS.stock else ours
    args = home.TrainingArguments(
        output_dir=str(ARGS.out), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=STEPS,
        logging_steps=100, report_to=[], disable_tqdm=True, use_cpu=True, save_steps=EVERY if ARGS.stock else 10_000,
        save_total_limit=2, save_strategy="steps", lr_scheduler_type="cosine",
    )  # fmt: skip
    made = home.Trainer(model=make_model(), args=args, train_dataset=Words(), callbacks=[Told()])
    made.train(resume_from_checkpoint=get_last_checkpoint(str(ARGS.out)) if ARGS.stock and ARGS.out.exists() else None)


def setup(job: elastic.Job) -> elastic.State:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9999**step)
    return elastic.State(model=model, optimizer=optimizer, scheduler=scheduler)


def train(job: elastic.Job, state: elastic.State) -> None:
    accelerator = ours_accelerate.Accelerator(job, state, gradient_accumulation_steps=2)
    data = torch.utils.data.DataLoader(Words(), batch_size=8, shuffle=True)
    model, optimizer, data, scheduler = accelerator.prepare(state.model, state.optimizer, data, state.scheduler)
    for _ in accelerator.epochs(STEPS):
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.commit(loss)
            if accelerator.sync_gradients:
                commit(state.step)


def stock() -> None:
    import accelerate

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9999**step)
    data = torch.utils.data.DataLoader(Words(), batch_size=4, shuffle=True)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    step = 0
    kept = [folder for folder in ARGS.out.glob("step-*") if (folder / "done").exists()] if ARGS.out.exists() else []
    if kept:
        newest = max(kept, key=lambda folder: int(folder.name.partition("-")[2]))
        step = int(newest.name.partition("-")[2])
        accelerator.load_state(str(newest))
        data = accelerator.skip_first_batches(data, step * 2)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            commit(step)
            if step % EVERY == 0:
                accelerator.save_state(str(ARGS.out / f"step-{step}"))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    (ARGS.out / f"step-{step}" / "done").touch()


if ARGS.kind == "trainer":
    trainer()
elif ARGS.stock:
    stock()
else:
    elastic.run(setup, train)
