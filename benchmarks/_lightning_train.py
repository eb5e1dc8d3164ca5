"""The jobs of benchmarks/frameworks.py: Lightning's Trainer and a loop with Fabric, with elastic's integrations or
stock."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import elastic
from elastic.integrations.lightning import ElasticStrategy, fabric

sys.path.insert(0, os.fspath(pathlib.Path(__file__).resolve().parent))
from _harness import Recorder

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=["lightning", "fabric"], required=True)
parser.add_argument("--record", required=True)
parser.add_argument("--out", type=pathlib.Path, required=True)
parser.add_argument("--stock", action="store_true", help="no elastic; a checkpoint every 20 steps")
ARGS = parser.parse_args()
STEPS, EVERY, BATCH = 1_000_000, 20, 8
RECORDER = Recorder(ARGS.record)
warnings.filterwarnings("ignore")


def commit(step: int) -> None:
    generation = 0 if ARGS.stock else int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    world_size = int(os.environ["WORLD_SIZE"])
    RECORDER.commit(step, generation=generation, world_size=world_size, rank=int(os.environ["RANK"]))


class Sums(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1)
    )


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Told(Checkpoint):
    """Checkpoint callbacks are called once the step is committed; after a recovery again, which is no new step."""

    step_before: int | None = None

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: object) -> None:
        self.step_before = trainer.global_step

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        if self.step_before is not None and trainer.global_step > self.step_before:
            commit(trainer.global_step)


def trainer() -> None:
    callbacks: list[Callback] = [Told()]
    if ARGS.stock:
        callbacks.append(ModelCheckpoint(ARGS.out, save_last=True, every_n_train_steps=EVERY))
    made = lightning.Trainer(
        strategy="ddp" if ARGS.stock else ElasticStrategy(), accelerator="cpu", devices=2 if ARGS.stock else "auto",
        max_steps=STEPS, logger=False, callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=True,
    )  # fmt: skip
    made.fit(Module(), DataLoader(Sums(), BATCH // 2, shuffle=True), ckpt_path="last" if ARGS.stock else None)


def setup(job: elastic.Job) -> elastic.State:
    model = make_model()
    return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(job: elastic.Job, state: elastic.State) -> None:
    made = fabric(job)
    model, optimizer = made.setup(state.model, state.optimizer)
    for batch in job.batches(Sums(), state, batch_size=BATCH, epochs=100):
        loss = mse_loss(model(batch.data[0]), batch.data[1])
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        job.commit(state, loss=loss)
        commit(state.step)


def stock() -> None:
    made = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    made.launch()
    bare = make_model()
    model, optimizer = made.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))
    loader = made.setup_dataloaders(DataLoader(Sums(), BATCH // 2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    path = ARGS.out / "fabric.ckpt"
    if path.exists():
        made.load(path, state)
    for step, (x, y) in enumerate(loader, 1):
        if step <= state["step"]:
            continue
        optimizer.zero_grad()
        made.backward(mse_loss(model(x), y))
        optimizer.step()
        state["step"] = step
        commit(step)
        if step % EVERY == 0:
            made.save(path, state)


if ARGS.kind == "lightning":
    trainer()
elif ARGS.stock:
    stock()
else:
    elastic.run(setup, train)
