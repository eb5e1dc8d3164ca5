"""Lightning's Trainer with its own DDP, which saves each 20 steps and resumes from the last file."""

import lightning
import probe
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Probe(Callback):
    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        probe.step(trainer.global_step)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(160, 8)
    model = Module()
    saver = ModelCheckpoint(probe.FOLDER / "saved", save_last=True, every_n_train_steps=20)
    trainer = lightning.Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=4, logger=False, callbacks=[saver, Probe()],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4), ckpt_path="last")
    probe.final(model.parameters())


if __name__ == "__main__":
    main()
