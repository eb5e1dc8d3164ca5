"""Scenarios of several gloo ranks, run in processes of their own: `python gloo_scenarios.py` prints one JSON object.

One interpreter imports torch once and forks the ranks of each scenario from there.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch._dynamo  # DDP and optimizers import it at their first use: once here instead of in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn import functional as F

from elastic.worker.checks import numerics
from elastic.worker.comm.ddp import GradientWeight, wrap
from elastic.worker.comm.errors import GroupAborted
from elastic.worker.data.batches import batches
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.state import State

G = torch.Generator().manual_seed(0)
X = torch.randn(64, 5, generator=G, dtype=torch.float64)
Y = torch.randint(0, 3, (64,), generator=G)
DATA = torch.utils.data.TensorDataset(X, Y)


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 31), nn.LayerNorm(31), nn.Tanh(), nn.Linear(31, 3)).to(dtype)


class CountingLink(Link):
    contributions = 0

    def contributed(self) -> None:
        self.contributions += 1


def join(folder: str, name: str, rank: int, world_size: int) -> None:
    store = dist.FileStore(os.path.join(folder, name), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=20)
    )


def flat(tensors: Any) -> list[float]:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).tolist()


def exact_gradient(
    rank: int, world_size: int, folder: str, *, batch_size: int, micro_batch: int | None, **ddp: Any
) -> Any:
    """The exchanged gradient, beside that of one process over the same samples; and how often we contributed."""
    join(folder, "store", rank, world_size)
    net, weight, link = model(), GradientWeight(), CountingLink()
    wrapped = wrap(net, weight=weight, link=link, **ddp)
    state = SimpleNamespace(step=0)
    gradients, ids = [], []
    for batch in batches(
        DATA,
        state,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        steps=2,
        gradient_weight=weight,
        micro_batch=micro_batch,
    ):
        ids.append(batch.indices)
        for part in batch.parts():
            F.cross_entropy(wrapped(part.x), part.y).backward()
        gradients.append(flat(p.grad for p in net.parameters()))
        net.zero_grad(set_to_none=True)
        weight.committed()
        state.step += 1
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, ids)
    expected = []
    for step in range(2):
        whole = [i for theirs in gathered for i in theirs[step]]
        assert len(whole) == batch_size
        alone = model()
        F.cross_entropy(alone(X[whole]), Y[whole]).backward()
        expected.append(flat(p.grad for p in alone.parameters()))
    return {"got": gradients, "want": expected, "contributed": link.contributions}


def without_a_group(rank: int, world_size: int, folder: str) -> Any:
    """A script that runs alone, with micro-batches of unequal size: the model is not wrapped."""
    net, weight, state = model(), GradientWeight(), SimpleNamespace(step=0)
    weight.attach(net)
    got = []
    for batch in batches(
        DATA, state, batch_size=13, rank=0, world_size=1, steps=1, gradient_weight=weight, micro_batch=5
    ):
        for part in batch.parts():
            F.cross_entropy(net(part.x), part.y).backward()
        got = flat(p.grad for p in net.parameters())
        net.zero_grad()
        F.cross_entropy(net(batch.x), batch.y).backward()
        state.step += 1
    return {"got": [got], "want": [flat(p.grad for p in net.parameters())]}


def same_bits(rank: int, world_size: int, folder: str, *, reform_at: tuple[int, ...]) -> Any:
    """Weights after 6 steps, with new groups and new DDPs before the steps of `reform_at`."""
    torch.set_num_threads(1)
    net, weight = model(torch.float32), GradientWeight()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    state = SimpleNamespace(step=0)
    for start, stop in zip((0, *reform_at), (*reform_at, 6), strict=True):
        join(folder, f"store{start}", rank, world_size)
        wrapped = wrap(net, weight=weight, link=Link(), bucket_cap_mb=0.0008)
        for batch in batches(
            DATA, state, batch_size=11, rank=rank, world_size=world_size, steps=stop, gradient_weight=weight
        ):
            F.cross_entropy(wrapped(batch.x.float()), batch.y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            weight.committed()
            state.step += 1
        weight.detach_all()
        del wrapped
        dist.destroy_process_group()
    return flat(net.parameters())


def buffers(rank: int, world_size: int, folder: str, *, sync: bool) -> Any:
    """Running mean of a BatchNorm on each rank after a forward on data of its own and one more forward."""
    join(folder, "store", rank, world_size)
    net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    torch.manual_seed(0)
    wrapped = wrap(net, weight=GradientWeight(), link=Link(), sync_buffers=sync)
    for _ in range(2):
        wrapped(torch.tensor([[rank + 1.0], [rank + 1.0]])).sum().backward()
    return net[0].running_mean.tolist()


def buffers_of_rare_types(rank: int, world_size: int, folder: str) -> Any:
    """The buffers, which each rank has with its own number, after a forward."""
    join(folder, "store", rank, world_size)
    net = nn.Linear(1, 1)
    for number, dtype in enumerate((torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64)):
        net.register_buffer(f"b{number}", torch.tensor([float(rank), 0.0]).to(dtype))
    wrap(net, weight=GradientWeight(), link=Link())(torch.ones(1, 1)).sum().backward()
    return [buffer.to(torch.complex64).abs().sum().item() for buffer in net.buffers()]


def buffers_shared(rank: int, world_size: int, folder: str) -> Any:
    """As `buffers`, and exchanged before each step is applied: (running mean, exchanges in all)."""
    join(folder, "store", rank, world_size)
    net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    torch.manual_seed(0)
    weight, link = GradientWeight(), CountingLink()
    wrapped = wrap(net, weight=weight, link=link)
    for _ in range(3):
        wrapped(torch.tensor([[rank + 1.0], [rank + 1.0]])).sum().backward()
        weight.share_buffers()
    return [*net[0].running_mean.tolist(), link.contributions - 3]  # without those of the backwards


def buffers_of_a_part(rank: int, world_size: int, folder: str, *, grad: bool) -> Any:
    """The model is in evaluation mode and its BatchNorm in training, or trains without gradients: running mean at
    the commit of each step."""
    join(folder, "store", rank, world_size)
    net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    job = Job(name="job", device=torch.device("cpu"), local_rank=rank, link=Link())
    state = State(model=net)
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None)
    state.begin()
    wrapped = job.ddp(net)
    found = []
    for _ in range(3):
        if grad:
            net.eval()
            net[0].train()
        with torch.set_grad_enabled(grad):
            for _ in range(1 if grad else 1 + rank):
                loss = wrapped(torch.tensor([[rank + 1.0], [rank + 1.0]])).sum()
        if grad:
            loss.backward()
        job.commit(state)
        found += net[0].running_mean.tolist()
    return found


def skipped_step(rank: int, world_size: int, folder: str) -> Any:
    """As `buffers`; GradScaler skips the optimizer's step for its infinite gradients, and an evaluation follows the
    commit: (running mean at the commit, what the loop is told at its next batch)."""
    join(folder, "store", rank, world_size)
    net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    job = Job(name="job", device=torch.device("cpu"), local_rank=rank, link=Link())
    state = State(model=net, optimizer=optimizer, scaler=scaler)
    state.watch_optimizers(job.guard())
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None)
    state.begin()
    wrapped = job.ddp(net)
    x = torch.tensor([[rank + 1.0], [rank + 1.0]])
    scaler.scale(wrapped(x).sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    job.commit(state)
    mean = net[0].running_mean.item()
    wrapped.eval()
    with torch.no_grad():
        wrapped(x)
    try:
        state.turned()
    except RuntimeError as error:
        return [mean, str(error)]
    return [mean, ""]


def swallowed(rank: int, world_size: int, folder: str) -> Any:
    """torch's Join is refused. Then rank 1 is gone, and rank 0 catches what its backward raises, steps, commits and
    takes its next turn: (weights changed, clean, what Join raises, what the step, the commit and the next forward
    raise, steps committed)."""
    join(folder, "store", rank, world_size)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job = Job(name="job", device=torch.device("cpu"), local_rank=rank, link=Link())
    state = State(model=net, optimizer=optimizer)
    state.watch_optimizers(job.guard())
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None)
    state.begin()
    wrapped = job.ddp(net)
    said = []
    try:
        Join([wrapped])
    except RuntimeError as error:
        said.append(str(error))
    if rank == 1:
        return None
    before = net.weight.tolist()
    with contextlib.suppress(RuntimeError):
        wrapped(torch.ones(1, 2)).sum().backward()
    calls = optimizer.step, functools.partial(job.commit, state), functools.partial(wrapped, torch.ones(1, 2))
    for call in calls:
        try:
            with contextlib.suppress(Exception):  # as a loop that skips a bad batch
                call()
        except GroupAborted as error:
            said.append(str(error))
    return [net.weight.tolist() != before, state.clean(), *said, state.step]


def empty_loss_is_nan(rank: int, world_size: int, folder: str) -> Any:
    """A rank of no weight whose gradients are NaN does not spoil the others'."""
    join(folder, "store", rank, world_size)
    net = nn.Linear(2, 1)
    weight = GradientWeight()
    weight.begin(1.0 - rank)
    wrapped = wrap(net, weight=weight, link=Link())
    (wrapped(torch.ones(0 if rank else 4, 2)).mean()).backward()
    return flat(p.grad for p in net.parameters())


def drift(rank: int, world_size: int, folder: str) -> Any:
    """Rank 1's weights differ in one unit in the last place: which checks see it."""
    join(folder, "store", rank, world_size)
    net = model(torch.float32)
    print_of = numerics.Fingerprint(list(net.parameters()), window_bytes=64)
    before = numerics.disagreeing(print_of.of(0), world_size=world_size)
    with torch.no_grad():
        if rank == 1:
            bias = list(net.parameters())[-1]
            bias[-1] = torch.nextafter(bias[-1], torch.tensor(torch.inf))
    found = [
        numerics.disagreeing(print_of.of(check), world_size=world_size) for check in range(print_of.checks_per_round)
    ]
    return {"before": before, "found": found}


def loader_orphans(rank: int, world_size: int, folder: str) -> Any:
    """A process with two loader processes is killed: which of them live on."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        loop = batches(DATA, SimpleNamespace(step=0), batch_size=1, rank=0, world_size=1, num_workers=2)
        next(loop)
        os.write(into, " ".join(str(c.pid) for c in psutil.Process().children()).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(into)
    children = [psutil.Process(int(n)) for n in os.read(out, 100).split()]
    os.waitpid(pid, 0)
    end_s = time.monotonic() + 30.0
    while (left := list(filter(_lives, children))) and time.monotonic() < end_s:
        time.sleep(0.02)
    for child in left:
        child.kill()
    return {"children": len(children), "left": len(left)}


def _lives(process: psutil.Process) -> bool:
    """A zombie does not: what adopts an orphan may be long in reaping it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


SCENARIOS: dict[str, tuple[int, Callable[..., Any], dict[str, Any]]] = {
    "uneven": (3, exact_gradient, {"batch_size": 8, "micro_batch": None}),
    "empty": (3, exact_gradient, {"batch_size": 2, "micro_batch": None}),
    "alone": (1, exact_gradient, {"batch_size": 5, "micro_batch": None}),
    "micro": (2, exact_gradient, {"batch_size": 13, "micro_batch": 3}),
    "static": (2, exact_gradient, {"batch_size": 5, "micro_batch": None, "static_graph": True}),
    "unused": (2, exact_gradient, {"batch_size": 5, "micro_batch": None, "find_unused_parameters": True}),
    "no group": (1, without_a_group, {}),
    "undisturbed": (3, same_bits, {"reform_at": ()}),
    "disturbed": (3, same_bits, {"reform_at": (2, 3)}),
    "buffers synced": (2, buffers, {"sync": True}),
    "buffers apart": (2, buffers, {"sync": False}),
    "buffers of rare types": (2, buffers_of_rare_types, {}),
    "buffers shared": (2, buffers_shared, {}),
    "buffers of a part": (2, buffers_of_a_part, {"grad": True}),
    "buffers without gradients": (2, buffers_of_a_part, {"grad": False}),
    "skipped step": (2, skipped_step, {}),
    "swallowed": (2, swallowed, {}),
    "nan": (2, empty_loss_is_nan, {}),
    "drift": (3, drift, {}),
    "orphans": (1, loader_orphans, {}),
}


def play(name: str) -> list[Any]:
    """What each rank of a scenario returned, in rank order."""
    world_size, scenario, options = SCENARIOS[name]
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe(duplex=False) for _ in range(world_size)]

        def rank_main(rank: int) -> None:
            pipes[rank][1].send(scenario(rank, world_size, folder, **options))
            if dist.is_initialized():
                dist.destroy_process_group()

        ranks = [fork.Process(target=rank_main, args=(rank,)) for rank in range(world_size)]
        try:
            for process in ranks:
                process.start()
            for _, into in pipes:
                into.close()  # so that a rank that dies is seen at once
            return [out.recv() for out, _ in pipes]
        finally:
            for process in ranks:
                process.join(5.0)
                process.kill()


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({name: play(name) for name in sys.argv[1:] or SCENARIOS}, sys.stdout)
