"""A Lightning Trainer, and what it writes down. A worker can be told to die at any place of its loop."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import signal
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.nn.functional import mse_loss
from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic.integrations.lightning import ElasticStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--record", type=pathlib.Path, required=True)
parser.add_argument("--kind", default="automatic")
parser.add_argument("--kill", default="", help="place:rank:step,…; each is done once, by the first process there")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1)
ARGS = parser.parse_args()
ARGS.record.mkdir(exist_ok=True)
KILLS = [(place, int(rank), int(step)) for place, rank, step in (k.split(":") for k in ARGS.kill.split(",") if k)]
warnings.filterwarnings("ignore")


def write(**line: object) -> None:
    with open(ARGS.record / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), "rank": int(os.environ.get("RANK", "0")), **line}) + "\n")


def die(place: str, step: int) -> None:
    rank = int(os.environ.get("RANK", "0"))
    for number, kill in enumerate(KILLS):
        if kill == (place, rank, step):
            try:
                (ARGS.record / f"killed-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            write(killed=place, step=step)
            os.kill(os.getpid(), signal.SIGKILL)


class Data(torch.utils.data.Dataset):
    def __init__(self, count: int, seed: int) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(8) * 0.01  # drawn in training: has to come out the same again
        return self.x[index] + noise, self.x[index].sum().reshape(1)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(),
                                       torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        die("forward", self.global_step)
        return self.net(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        output = self(batch[0])
        output.register_hook(lambda grad: die("backward", self.global_step))
        loss = mse_loss(output, batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, index: int) -> None:
        labels = batch[1].flatten().tolist()  # each sample has another
        write(batch=self.trainer.fit_loop.total_batch_idx, sum=float(batch[0].sum()), labels=labels)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        die("validation", self.global_step)
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        die("save", self.global_step)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        total = int(self.trainer.estimated_stepping_batches)
        step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": step, "interval": "step"}}


class Manual(Module):
    """Two optimizers, stepped by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        loss = super().training_step(batch, index)
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()

    def configure_optimizers(self) -> list:
        head = list(self.net[4].parameters())
        body = [p for layer in self.net[:4] for p in layer.parameters()]
        return [torch.optim.AdamW(body, 1e-2), torch.optim.SGD(head, 1e-2, momentum=0.9)]


class Plateau(Module):
    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(self.parameters(), 1e-1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


KINDS = {"automatic": Module, "monitored": Module, "subset": Module, "manual": Manual, "plateau": Plateau}


def data() -> torch.utils.data.DataLoader:
    if ARGS.kind != "subset":
        return torch.utils.data.DataLoader(Data(96, 1), batch_size=4, shuffle=True)
    of_them = torch.utils.data.SubsetRandomSampler([index for index in range(120) if index % 5])
    return torch.utils.data.DataLoader(Data(120, 1), batch_size=4, sampler=of_them)


def main() -> None:
    lightning.seed_everything(7, verbose=False)
    model = KINDS[ARGS.kind]()
    register_optimizer_step_post_hook(lambda *_: die("optimizer", model.global_step))
    saver = ModelCheckpoint(ARGS.record / "saved", monitor="val_loss", save_last=True, save_top_k=2,
                            filename="{epoch}-{step}")  # fmt: skip
    # Of the loss of training: a recovery repeats the validation and the save that follow a step, and not the step.
    chosen = {"monitor": "loss", "save_top_k": 2} if ARGS.kind == "monitored" else {"save_top_k": -1}
    every = ModelCheckpoint(ARGS.record / "every", every_n_train_steps=5, filename="{step}", **chosen)
    stopper = EarlyStopping("val_loss", patience=5)
    trainer = lightning.Trainer(
        strategy=ElasticStrategy(), accelerator="cpu", max_epochs=ARGS.epochs, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[saver, every, stopper],
        val_check_interval=5 if ARGS.kind == "monitored" else None, accumulate_grad_batches=ARGS.accumulate,
        gradient_clip_val=None if ARGS.kind == "manual" else 1.0,
    )  # fmt: skip
    trainer.fit(model, data(), torch.utils.data.DataLoader(Data(16, 2), batch_size=4))
    weights = hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in model.state_dict().values())).hexdigest()
    write(final=weights, at=trainer.global_step, best=float(saver.best_model_score), wait=stopper.wait_count,
          rate=trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None,
          saved=sorted(os.listdir(ARGS.record / "saved")), every=sorted(os.listdir(ARGS.record / "every")))  # fmt: skip


main()
