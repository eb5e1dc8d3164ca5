"""Training loops that change the state in other ways than one step of one optimizer.

LOOP says which; RECORD_DIR is the folder for what it writes. Once, at step KILL_STEP, rank KILL_RANK ends itself in the
middle of the step, while the other waits in the collective that follows.

    adversarial   two optimizers, and the kill between their steps
    closure       the backward runs within `optimizer.step(closure)`, in a loop of its own that skips what fails;
                  and hooks that `train` registers
    skips         gradients are averaged without `job.ddp`, and what fails is skipped: a turn has no commit then
    manual        parameters are changed without an optimizer, and a collective follows before the commit
    restored      everything that a step changes beside parameters: buffers, extra state, a schedule, counters
    stranger      an optimizer that is not part of the state
    zero          torch's ZeroRedundancyOptimizer
    sharded       torch's fully_shard in `train`
    calls         `job.broadcast`, `job.evaluate` and gradients in 16 bits; KILL_IN says in which of them the kill is
    epochs        a loader of its own, and a schedule at the end of each epoch of nine steps; KILL_IN as above, or `end`
    late          the schedule is stepped at the end of each epoch, after its last commit
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import signal
import types

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F

import elastic

FOLDER = pathlib.Path(os.environ["RECORD_DIR"])
LOOP = os.environ["LOOP"]
STEPS = int(os.environ.get("STEPS", "30"))
KILL_STEP = int(os.environ.get("KILL_STEP", "-1"))
KILL_IN = os.environ.get("KILL_IN", "")
KILL_RANK = int(os.environ.get("KILL_RANK", "1"))


class Sums(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, x.sum().reshape(1)


class Scaled(torch.nn.Linear):
    """Uses a counter of its forwards, which is extra state, and a number that is a tensor made for the occasion."""

    calls = 0
    factor = 1.0

    def forward(self, x):
        self.calls += 1
        self.factor *= 0.99
        return super().forward(x) * (1 + self.factor * (self.calls % 5))

    def get_extra_state(self):
        return torch.tensor([float(self.calls), self.factor], dtype=torch.float64)

    def set_extra_state(self, held):
        self.calls, self.factor = int(held[0]), float(held[1])


def setup(job):
    torch.manual_seed(0)
    if LOOP == "restored":
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(16, 16)),
            Scaled(16, 1),
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return elastic.State(model=net, optimizer=optimizer, scheduler=scheduler, seen={"samples": 0, "steps": []})
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    if LOOP in ("manual", "stranger", "zero", "sharded"):
        return elastic.State(model=net)
    if LOOP == "calls":
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        return elastic.State(model=net, optimizer=optimizer, best=1e9, shifts=[])
    if LOOP == "adversarial":
        other = torch.nn.Linear(1, 1)
        return elastic.State(
            model=net,
            other=other,
            optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
            second=torch.optim.AdamW(other.parameters(), lr=1e-2),
        )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if LOOP in ("late", "epochs"):
        return elastic.State(
            model=net, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        )
    return elastic.State(model=net, optimizer=optimizer)


def die(job, state):
    if (job.rank, state.step) != (KILL_RANK, KILL_STEP):
        return
    try:
        (FOLDER / "struck").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def train(job, state):
    if LOOP == "sharded":
        torch.distributed.fsdp.fully_shard(state.model)
    compress = "bf16" if LOOP == "calls" else None
    model = state.model if LOOP in ("sharded", "skips") else job.ddp(state.model, compress=compress)
    other = job.ddp(state.other) if LOOP == "adversarial" else None
    optimizer = None
    if LOOP in ("stranger", "sharded"):
        optimizer = torch.optim.SGD(state.model.parameters(), lr=0.05)
    if LOOP == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(state.model.parameters(), torch.optim.AdamW, lr=1e-2)
    if LOOP == "closure":
        state.model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        state.model[1].register_forward_hook(lambda module, inputs, output: output * 0.9)
        state.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: state.model[2].weight.data.mul_(0.99))
    noise = torch.randn(16, 1)  # drawn before the loop: the same at each entry
    while LOOP == "closure" and state.step < STEPS:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * state.step + job.rank))
        with contextlib.suppress(Exception):
            loss = turn(job, state, model, other, optimizer, types.SimpleNamespace(x=x, y=x.sum(1, keepdim=True).sin()))
            job.commit(state, loss=loss)
    if LOOP == "epochs":
        epochs(job, state, model)
    for end in {"late": range(10, STEPS + 1, 10), "epochs": ()}.get(LOOP, [STEPS]):
        for batch in job.batches(Sums(), state, batch_size=16, steps=end):
            with contextlib.suppress(Exception if LOOP == "skips" else ()):
                if LOOP == "calls":
                    batch.x.add_(noise[: len(batch.x)])
                loss = turn(job, state, model, other, optimizer, batch)
                job.commit(state, loss=loss)
        if LOOP == "late":
            state.scheduler.step()
    digest = hashlib.sha256()
    for name, tensor in [(info.name, tensor) for info, tensor in state.tensors()]:
        digest.update(name.encode() + tensor.numpy().tobytes())
    digest.update(json.dumps(state.extra()["parts"], sort_keys=True).encode())
    (FOLDER / f"final.{job.rank}.json").write_text(json.dumps({"step": state.step, "sha256": digest.hexdigest()}))


class Noisy(Sums):
    def __len__(self):
        return 144

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 0.1 * torch.randn(6), y


def epochs(job, state, model):
    sampler = torch.utils.data.DistributedSampler(Noisy(), job.world_size, job.rank)
    for _ in job.epochs(state, STEPS // 10):
        for x, y in job.steps(torch.utils.data.DataLoader(sampler.dataset, 8, sampler=sampler), state):
            loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)
            if KILL_IN == "backward":
                die(job, state)
            loss.backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            job.commit(state)
        state.scheduler.step()
        if KILL_IN == "end":
            die(job, state)
        job.gather(state.step)  # where the others wait


def calls(job, state, batch):
    """Every third step, at the top of an iteration. The results go into the state."""

    def measure(part):
        if KILL_IN == "evaluate":
            die(job, state)
        return {"loss": F.mse_loss(state.model(part.x), part.y, reduction="sum")}

    if state.step % 3 == 0:
        if KILL_IN == "broadcast":
            die(job, state)
        shift = job.broadcast({"by": torch.full((1,), state.step / 100), "why": ("a", 1)} if job.rank == 0 else None)
        sums = job.evaluate(state, Sums(), measure, batch_size=24)
        state.best = min(state.best, sums["loss"] / sums["count"])
        state.shifts.append(shift["by"].item())
        batch.x.add_(shift["by"])


def turn(job, state, model, other, optimizer, batch):
    if LOOP == "calls":
        calls(job, state, batch)
    if LOOP == "closure":

        def closure():
            state.optimizer.zero_grad()
            loss = F.mse_loss(model(batch.x), batch.y)
            die(job, state)
            loss.backward()
            return loss

        return state.optimizer.step(closure)
    loss = F.mse_loss(model(batch.x), batch.y)
    if LOOP == "restored":
        state.seen["samples"] += 16
        state.seen["steps"].append(state.step)
        state.scheduler.step()
        die(job, state)
    if KILL_IN == "backward":
        die(job, state)
    loss.backward()
    if LOOP == "skips":
        die(job, state)
        for parameter in state.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= job.world_size
    if LOOP == "manual":
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter -= 0.05 * parameter.grad
        state.model.zero_grad()
        die(job, state)
        dist.all_reduce(loss.detach())
        return loss
    (optimizer or state.optimizer).step()
    state.model.zero_grad()
    if LOOP == "adversarial":
        die(job, state)
        F.mse_loss(other(batch.y), batch.y).backward()
        state.second.step()
        state.second.zero_grad()
    return loss


if __name__ == "__main__":
    elastic.run(setup, train)
