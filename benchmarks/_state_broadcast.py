"""Part of state.py: how long recovered state takes to the ranks that lack it, beside a raw socket and torch's own ways.

Real processes on one machine, gloo over loopback. The state is that of a GPT under AdamW: fp32 parameters and two
moments. Every way fills the same, warm storage; the ways take turns, so that a busy machine is busy for all of them.
Each run has processes, memory and connections of its own, since these decide how fast a raw socket is (1.9 to 4.3 GB/s
were seen, the same for the whole life of two processes): ratios are within a run, and medians over the runs.
What is timed is from the moment all ranks are ready until the last one is done; ours includes agreeing on the source,
the table, the copy into the tensors' own storage and the check of every byte. 'ours_sockets' is forbidden to read
the source's memory, as between hosts; 'ours_fresh' has to make the optimizer's storage first, as a new process has.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _state_save import peak_mb
from torch import nn
from torch._C._distributed_c10d import TCPStore, _broadcast_coalesced

from elastic.worker.comm.group import Group
from elastic.worker.state.handover import pull
from elastic.worker.state.handover.sync import Handover
from elastic.worker.state.state import State

PR_SET_PDEATHSIG = 1


class Blocks(nn.Module):
    """The tensors of a GPT: a few large, many small."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        width = 1024 if nbytes >= 30e6 else 256
        layers = max(1, round(nbytes / 12 / (12 * width * width)))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )


def build(nbytes: int, fill: float) -> State:
    with torch.device("meta"):
        model = Blocks(nbytes)
    model = model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.data.fill_(fill)
        moments = {key: torch.full_like(param.data, fill) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(fill), **moments}
    return State(model=model, optimizer=optimizer)


class Rank:
    """One process; every way is a method that leaves the source's bytes in every rank's storage."""

    def __init__(self, rank: int, world_size: int, nbytes: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.state = build(nbytes, 2.0 if rank == 0 else 1.0)
        self.tensors = [tensor for _, tensor in self.state.tensors()]
        self.sockets: list[socket.socket] = []
        if rank == 0:
            self.state.establish(1)

    def socket(self) -> None:
        """What one connection can do: the same bytes, no table, no check; along a chain where there are more ranks."""
        for tensor in self.tensors:
            view = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            for start in range(0, len(view), 8 << 20):
                part = view[start : start + (8 << 20)]
                if self.rank:
                    got = 0
                    while got < len(part):
                        got += self.sockets[0].recv_into(part[got:])
                if self.rank < self.world_size - 1:
                    self.sockets[-1].sendall(part)

    def ours(self) -> None:
        if self.rank:
            self.state._whole = False
        Handover(self.state, rank=self.rank, world_size=self.world_size, generation=1).run()

    def ours_sockets(self) -> None:
        """As between hosts: no rank reads the source's memory."""
        really, pull.can_read = pull.can_read, lambda window: False
        self.ours()
        pull.can_read = really

    def ours_fresh(self) -> None:
        """As for a process that has just come: the optimizer's storage does not exist yet."""
        if self.rank:
            self.state.optimizer.state.clear()
        self.ours()
        self.tensors = [tensor for _, tensor in self.state.tensors()]

    def per_tensor(self) -> None:
        for tensor in self.tensors:
            dist.broadcast(tensor, 0)

    def all_in_flight(self) -> None:
        for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in self.tensors]:
            work.wait()

    def coalesced(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        _broadcast_coalesced(group, self.tensors, 25 << 20, 0)

    def object_list(self) -> None:
        held = [dict(enumerate(self.tensors)) if self.rank == 0 else {}]
        dist.broadcast_object_list(held, 0)
        if self.rank:
            for tensor, came in zip(self.tensors, held[0].values(), strict=True):
                tensor.copy_(came)


WAYS = ("socket", "ours", "ours_sockets", "ours_fresh", "per_tensor", "all_in_flight", "coalesced", "object_list")


def _connect(rank: Rank, ports: list[socket.socket]) -> None:
    """Rank r listens on ports[r]; a chain 0 → 1 → 2 …"""
    if rank.rank:
        rank.sockets.append(ports[rank.rank].accept()[0])
    if rank.rank < rank.world_size - 1:
        rank.sockets.append(socket.create_connection(ports[rank.rank + 1].getsockname()))


def _run(rank_number: int, world_size: int, nbytes: int, port: int, ports: list[socket.socket]) -> Any:
    torch.set_num_threads(1)
    group = Group(
        backend="gloo", rank=rank_number, world_size=world_size, store_host="127.0.0.1", store_port=port, generation=1
    )
    rank = Rank(rank_number, world_size, nbytes)
    _connect(rank, ports)
    group.form()
    seconds: dict[str, float] = {}
    extra_mb = 0.0
    for warm in (False, True):  # the first turn warms connections and memory and is not counted
        for way in WAYS:
            if way == "object_list" and not warm:
                continue  # it makes all its memory anew each time, and takes twenty times as long as the others
            if rank_number:
                for tensor in rank.tensors:
                    tensor.fill_(1.0)
            before_mb = peak_mb(reset=True)
            dist.barrier()
            begun_s = time.monotonic()
            getattr(rank, way)()
            dist.barrier()
            seconds[way] = time.monotonic() - begun_s
            if way in ("ours", "ours_sockets"):
                extra_mb = max(extra_mb, peak_mb() - before_mb)
            assert all(bool((tensor == 2.0).all()) for tensor in rank.tensors), f"{way} did not deliver"
    group.close()
    return {"seconds": seconds, "extra_mb": extra_mb, "nbytes": sum(info.nbytes for info in rank.state.table())}


class Run(NamedTuple):
    seconds: dict[str, float]
    """By way."""
    nbytes: int
    extra_mb: float
    """The most extra memory of any rank."""

    def over(self, way: str, other: str) -> float:
        return self.seconds[way] / self.seconds[other]


def measure(nbytes: int, world_size: int) -> Run:
    ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(world_size)]
    store = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = store.getsockname()[1]
    children = []
    for rank in range(world_size):
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reading)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if rank == 0:
                server = TCPStore(
                    "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=store.fileno()
                )
            result = _run(rank, world_size, nbytes, port, ports)
            os.write(writing, json.dumps(result).encode())
            if rank == 0:
                del server
            os._exit(0)
        os.close(writing)
        children.append((pid, reading))
    for listener in (*ports, store):
        listener.close()
    results = []
    for pid, reading in children:
        with open(reading) as pipe:
            raw = pipe.read()
        os.waitpid(pid, 0)
        if not raw:
            raise SystemExit(f"a rank of {world_size} failed, see above")
        results.append(json.loads(raw))
    return Run(results[0]["seconds"], results[0]["nbytes"], max(result["extra_mb"] for result in results))


def report(runs: Sequence[Run], world_size: int) -> None:
    nbytes, extra_mb = runs[0].nbytes, max(run.extra_mb for run in runs)
    print(f"\n{world_size} ranks, {nbytes / 1e9:.2f} GB; ours: {extra_mb:.0f} MB more memory in a rank at most")
    for way in sorted(WAYS, key=lambda way: statistics.median(run.seconds[way] for run in runs)):
        seconds = statistics.median(run.seconds[way] for run in runs)
        ratios = sorted(run.over(way, "socket") for run in runs)
        span = f"{statistics.median(ratios):6.2f} × socket ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"  {way:14} {seconds:7.3f} s  {nbytes / seconds / 1e9:6.2f} GB/s  {span}")


def summary(runs: Sequence[Run], world_size: int) -> dict[str, float]:
    """The figures that the project promises: medians of the ratios within each run."""

    def median(ratio: Callable[[Run], float]) -> float:
        return round(statistics.median(map(ratio, runs)), 3)

    def best(run: Run) -> str:
        return min(("per_tensor", "all_in_flight", "coalesced", "object_list"), key=run.seconds.__getitem__)

    extra_mb = round(max(run.extra_mb for run in runs), 3)
    if world_size == 2:
        return {
            "broadcast_over_socket": median(lambda run: run.over("ours", "socket")),
            "broadcast_by_socket_over_socket": median(lambda run: run.over("ours_sockets", "socket")),
            "object_list_over_broadcast": median(lambda run: run.over("object_list", "ours")),
            "broadcast_extra_mb": extra_mb,
        }
    return {
        "four_ranks_best_of_torch_over_broadcast": median(lambda run: run.over(best(run), "ours")),
        "four_ranks_by_socket_best_of_torch_over_broadcast": median(lambda run: run.over(best(run), "ours_sockets")),
        "four_ranks_extra_mb": extra_mb,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mb", type=int, default=2000)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--world", type=int, choices=(2, 4), default=2)
    options.add_argument("--dir", help="not used: nothing is written")
    given = options.parse_args()
    # The object list needs five times the state in every rank: with four it must be less.
    nbytes = given.mb * 10**6 * 4 // given.world**2
    runs = [measure(nbytes, given.world) for _ in range(given.runs)]
    report(runs, given.world)
    print(json.dumps(summary(runs, given.world)))


if __name__ == "__main__":
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch's store asks DNS for each connection
    sys.exit(main())
