"""Accelerate's loop as in its documentation: it saves its state each 20 steps, and skips the batches it has had."""

import probe
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

STEPS, EVERY = 80, 20


def newest() -> int:
    """The step of the last state that was saved completely; 0 without any."""
    return max((int(done.parent.name.partition("-")[2]) for done in probe.FOLDER.glob("step-*/done")), default=0)


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    x = torch.randn(2000, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if step := newest():
        accelerator.load_state(str(probe.FOLDER / f"step-{step}"))
        loader = accelerator.skip_first_batches(loader, step * 2)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        probe.step(step)
        if step % EVERY == 0:
            folder = probe.FOLDER / f"step-{step}"
            accelerator.save_state(str(folder))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (folder / "done").touch()
        if step == STEPS:
            break
    probe.final(model.parameters())


if __name__ == "__main__":
    main()
