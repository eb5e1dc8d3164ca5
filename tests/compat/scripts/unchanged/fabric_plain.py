"""A loop with Lightning Fabric's own DDP, which saves each 20 steps and resumes from the file."""

import probe
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

STEPS = 80


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    x = torch.randn(1000, 8)
    model = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    path = probe.FOLDER / "fabric.ckpt"
    if path.exists():
        fabric.load(path, state)
    for step, (inputs, targets) in enumerate(loader, 1):
        if step <= state["step"]:
            continue
        if step > STEPS:
            break
        optimizer.zero_grad()
        fabric.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        state["step"] = step
        probe.step(step)
        if step % 20 == 0:
            fabric.save(path, state)
    probe.final(model.parameters())


if __name__ == "__main__":
    main()
