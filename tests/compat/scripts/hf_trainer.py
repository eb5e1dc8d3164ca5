"""A Trainer on the source text of Python's own modules, and what it writes down. A worker can be told to die."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import pathlib
import signal
import tempfile
import time

import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from transformers.trainer_callback import ExportableState

from elastic.integrations.transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--record", type=pathlib.Path, required=True)
parser.add_argument("--kind", default="causal")
parser.add_argument("--kill", default="", help="place:rank:step,…; each is done once, by the first process there")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=0, help="over all ranks; 0: of the first world")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--counts", default="all", help="the ranks on which a callback counts the steps: all, first")
parser.add_argument("--more", default="{}", help="further TrainingArguments, as JSON")
ARGS = parser.parse_args()
KILLS = [(place, int(rank), int(step)) for place, rank, step in (k.split(":") for k in ARGS.kill.split(",") if k)]
LENGTH = 24
tempfile.tempdir = str(ARGS.record.resolve())  # what is left behind is seen there


def write(**line: object) -> None:
    with open(ARGS.record / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"at_s": time.monotonic(), "pid": os.getpid(), **line}) + "\n")


class Text(torch.utils.data.Dataset):
    """Lines of a module's source as bytes, of different length: every sample has another number of tokens."""

    def __init__(self, module: object, count: int) -> None:
        lines = [line.encode()[:LENGTH] for line in inspect.getsource(module).splitlines() if len(line) > 8]
        self.lines = lines[:count]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        line = self.lines[index]
        ids = torch.tensor(list(line.ljust(LENGTH, b"\0")))
        labels = ids.clone()
        labels[len(line) :] = -100
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, text: Text) -> None:
        self.text = text

    def __iter__(self):
        return (self.text[index] for index in range(len(self.text)))


def streamed(text: Text) -> torch.utils.data.IterableDataset:
    """The same, as a streaming dataset of Hugging Face's `datasets`."""
    import datasets

    def samples():
        for index in range(len(text)):
            yield {name: value.tolist() for name, value in text[index].items()}

    return datasets.IterableDataset.from_generator(samples)


def die(place: str, step: int) -> None:
    rank = int(os.environ.get("RANK", "0"))
    for number, kill in enumerate(KILLS):
        if kill == (place, rank, step):
            try:
                (ARGS.record / f"killed-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            write(killed=place, step=step, rank=rank)
            os.kill(os.getpid(), signal.SIGKILL)


class Probe(transformers.TrainerCallback):
    step = 0

    def on_step_begin(self, args, state, control, **_):
        Probe.step = state.global_step

    def on_step_end(self, args, state, control, **_):
        write(step=state.global_step, rank=args.process_index, world_size=args.world_size,
              generation=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) + 1)  # fmt: skip

    def on_prediction_step(self, args, state, control, **_):
        die("evaluation", state.global_step)

    def on_log(self, args, state, control, logs, **_):
        write(log=logs, at=state.global_step, rank=args.process_index)

    def on_pre_optimizer_step(self, args, state, control, **_):
        die("clipped", state.global_step)


class Counted(transformers.TrainerCallback, ExportableState):
    """Its state is what it is made of."""

    def __init__(self, steps=0, losses=()):
        self.steps = steps
        self.losses = list(losses)

    def on_step_end(self, args, state, control, **_):
        self.steps += ARGS.counts == "all" or args.process_index == 0

    def on_evaluate(self, args, state, control, metrics, **_):
        self.losses.append([state.global_step, metrics["eval_loss"]])

    def state(self):
        return {"args": {"steps": self.steps, "losses": self.losses}, "attributes": {}}


def make_model() -> torch.nn.Module:
    model = bare_model()
    model.register_forward_pre_hook(lambda module, _: die("forward", Probe.step) if module.training else None)
    first = next(p for p in model.parameters() if p.requires_grad)
    first.register_hook(lambda grad: die("backward", Probe.step))
    return model


def bare_model() -> torch.nn.Module:
    torch.manual_seed(0)
    if ARGS.kind == "seq2seq":
        return T5ForConditionalGeneration(T5Config(
            vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0,
            dropout_rate=ARGS.dropout,
        ))  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=ARGS.dropout, embd_pdrop=ARGS.dropout, attn_pdrop=ARGS.dropout,
    ))  # fmt: skip
    if ARGS.kind == "lora":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    return model


def main() -> None:
    options = dict(  # noqa: C408 - as in a script
        output_dir=str(ARGS.record / "out"), per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_steps=ARGS.steps, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=5, logging_steps=5,
        eval_strategy="steps", eval_steps=10, save_strategy="steps", save_steps=10, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", report_to=[], disable_tqdm=True, use_cpu=True,
        global_train_batch_size=ARGS.batch,
    ) | json.loads(ARGS.more)  # fmt: skip
    seq2seq = ARGS.kind == "seq2seq"
    args = Seq2SeqTrainingArguments(predict_with_generate=True, **options) if seq2seq else TrainingArguments(**options)
    model = {"model_init": make_model} if "fsdp" in options else {"model": make_model()}
    train = Text(argparse, 150)
    data = Stream(train) if ARGS.kind == "stream" else streamed(train) if ARGS.kind == "datasets" else train
    counted = Counted()
    trainer = (Seq2SeqTrainer if seq2seq else Trainer)(
        **model, args=args, train_dataset=data,
        eval_dataset=Text(inspect, 20), callbacks=[EarlyStoppingCallback(5), counted, Probe()],
    )  # fmt: skip
    register_optimizer_step_post_hook(lambda *_: die("optimizer", Probe.step))
    save = trainer.save_model

    def save_model(*given, **named):
        die("save", trainer.state.global_step)
        return save(*given, **named)

    trainer.save_model = save_model
    result = trainer.train()
    digest = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    norm = float(sum(p.detach().double().abs().sum() for p in trainer.model.parameters()))
    stopping = next(c for c in trainer.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback))
    history = [{k: v for k, v in line.items() if "runtime" not in k and "per_second" not in k}
               for line in trainer.state.log_history]  # fmt: skip
    write(
        final=digest.hexdigest(), norm=norm, at=result.global_step, loss=result.training_loss, history=history,
        best=trainer.state.best_global_step, patience=stopping.early_stopping_patience_counter,
        counted=counted.state()["args"],
        rank=int(os.environ.get("RANK", "0")), saves=args.should_save,
    )  # fmt: skip


main()
