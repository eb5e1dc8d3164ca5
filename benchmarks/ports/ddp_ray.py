"""`examples/ddp_plain.py` with Ray Train, after its guides for PyTorch and for failures.

python ddp_ray.py
"""

import os
import tempfile

import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", "50"))
torch.manual_seed(0)
X = torch.rand(10_000, 16)
DATA = TensorDataset(X, X.sum(1, keepdim=True).sin())


def network():
    return torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))


def train():
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, "model.pt"))
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    model = ray.train.torch.prepare_model(net)
    loader = ray.train.torch.prepare_data_loader(DataLoader(DATA, batch_size=32, shuffle=True))
    rank = ray.train.get_context().get_world_rank()
    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
                torch.save(saved, os.path.join(folder, "model.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
                print(f"epoch {epoch}  loss {loss.item():.4f}", flush=True)
            ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)


def main():
    trainer = ray.train.torch.TorchTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=os.path.abspath("ray"), failure_config=ray.train.FailureConfig(max_failures=-1)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
