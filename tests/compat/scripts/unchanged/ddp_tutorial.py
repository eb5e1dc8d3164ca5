"""In the shape of the fault-tolerant script of PyTorch's DDP tutorial series: a class, and a snapshot each epoch."""

import os

import probe
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH = 4, 8


class Trainer:
    def __init__(self, model: torch.nn.Module, data: DataLoader, optimizer: torch.optim.Optimizer, path: str) -> None:
        self.data, self.optimizer, self.path, self.epochs_run = data, optimizer, path, 0
        self.model = model
        if os.path.exists(path):
            snapshot = torch.load(path, weights_only=True)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DDP(self.model)

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, epochs):
            self.data.sampler.set_epoch(epoch)
            for index, (x, y) in enumerate(self.data):
                self.optimizer.zero_grad()
                torch.nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
                probe.step(epoch * len(self.data) + index + 1)
            if dist.get_rank() == 0:
                snapshot = {"MODEL_STATE": self.model.module.state_dict(),
                            "OPTIMIZER_STATE": self.optimizer.state_dict(), "EPOCHS_RUN": epoch + 1}  # fmt: skip
                torch.save(snapshot, self.path + ".new")
                os.replace(self.path + ".new", self.path)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(320, 20)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    data = DataLoader(dataset, BATCH, shuffle=False, sampler=DistributedSampler(dataset))
    trainer = Trainer(model, data, optimizer, str(probe.FOLDER / "snapshot.pt"))
    trainer.train(EPOCHS)
    probe.final(model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
