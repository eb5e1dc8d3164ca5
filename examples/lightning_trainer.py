"""Lightning, with its strategy changed: a killed worker costs no step.

elasticctl run --workers 2 --checkpoints ckpt examples/lightning_trainer.py

Needs: pip install 'elasticd[lightning]'
"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic.integrations.lightning import ElasticStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--samples", type=int, default=4096)
ARGS = parser.parse_args()


class Squares(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def on_validation_epoch_end(self):
        loss = self.trainer.callback_metrics["val_loss"]
        print(f"step {self.global_step}  validation loss {loss.item():.6f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, ARGS.samples).unsqueeze(1)
    data = TensorDataset(x, x * x)
    trainer = lightning.Trainer(
        strategy=ElasticStrategy(),
        max_epochs=ARGS.epochs,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Squares(), DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=256))


if __name__ == "__main__":
    main()
