"""Re-forming a gloo group: a new one for each generation, beside torch's `reconfigure`, which keeps the group object.

    python benchmarks/reform.py [--quick]

4 ranks on this machine, both implementations of `Group` in turn; and the second with its DDP wrapper kept as well. For
each way: the time from "all ranks know the store" until a first all-reduce of gradients is done, with a DDP wrapper
made anew unless it is kept; the descriptors and threads that re-forming leaves behind; how soon a rank is free after an
abort when it waits in an all-reduce for a rank that does not come, and when it waits for one while forming; the time of
the forming after that, and what the half-way one has left. torch has `reconfigure` from 2.14 on: an older one has the
first way only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist
from _harness import SMOKE, machine
from torch._C._distributed_c10d import TCPStore

from elastic.util.resolver import without_dns
from elastic.worker.comm.errors import FormError, GroupAborted
from elastic.worker.comm.group import Group
from elastic.worker.comm.reconfigured import group_kind
from elastic.worker.torch_internals import torch_private

WORLD = 4
LIMIT_S = 20.0
"""Time-out of collectives, where a rank does not come."""
ABORT_AFTER_S = 0.3


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    forming: Literal["new", "reconfigure"]
    keep_ddp: bool = False


WAYS = [Way("new", "new"), Way("reconfigure", "reconfigure"), Way("reconfigure, DDP kept", "reconfigure", True)]


class Rank:
    def __init__(self, way: Way, rank: int, port: int) -> None:
        self._way, self._rank, self._port = way, rank, port
        self._model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        self._wrapped: torch.nn.Module | None = None
        self._generation = 0
        self.absent = rank == WORLD - 1
        """Of this rank the others wait in vain."""

    def next_group(self) -> Group:
        self._generation += 1
        return group_kind(self._way.forming, "gloo")(
            backend="gloo", rank=self._rank, world_size=WORLD, store_host="127.0.0.1", store_port=self._port,
            generation=self._generation, timeout_s=LIMIT_S, form_timeout_s=LIMIT_S,
        )  # fmt: skip

    def step(self) -> tuple[Group, float]:
        """Form, and exchange gradients once. Returns the seconds."""
        begun_s = time.monotonic()
        group = self.next_group()
        group.form()
        if self._wrapped is None or not self._way.keep_ddp:
            self._wrapped = torch.nn.parallel.DistributedDataParallel(self._model)
        self._wrapped(torch.ones(2, 64)).sum().backward()
        if not self._way.keep_ddp:
            self._wrapped = None
        return group, time.monotonic() - begun_s

    def freed(self, group: Group, blocked: Callable[[], object]) -> float:
        """Seconds from an abort until `blocked` returns."""
        at_s: list[float] = []
        threading.Timer(ABORT_AFTER_S, lambda: (at_s.append(time.monotonic()), group.abort("benchmark"))).start()
        try:
            blocked()
        except (RuntimeError, GroupAborted, FormError):
            pass
        return time.monotonic() - at_s[0] if at_s else -1.0

    def freed_from_both(self) -> tuple[float, float]:
        """From a collective, then from forming. The absent rank closes its connections only when the others are free:
        they go on to the next generation, where it waits for them, and does not form."""
        group, _ = self.step()
        self._wrapped = None
        following = self.next_group()
        if self.absent:
            following._arrive(lambda: False)
            group.close()
            following.close()
            return 0.0, 0.0
        collective_s = self.freed(group, lambda: dist.all_reduce(torch.ones(4)))
        group.close()
        forming_s = self.freed(following, following.form)
        following.close()
        return collective_s, forming_s


def _held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _least(held: list[tuple[int, int]]) -> tuple[int, int]:
    """Of several looks: gloo's own thread closes connections a moment after the group is closed."""
    return min(fds for fds, _ in held), min(tasks for _, tasks in held)


def _rank(way: Way, rank: int, port: int, rounds: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch reports each connection that an abort cuts, with its stack
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    made = Rank(way, rank, port)
    formed_s, held = [], []
    for _ in range(rounds):
        group, seconds = made.step()
        formed_s.append(seconds)
        group.close()
        held.append(_held())
    found: dict[str, Any] = {"formed_s": formed_s[1:], "early": _least(held[5:15]), "late": _least(held[-10:])}
    found["freed_s"], found["freed_forming_s"] = made.freed_from_both()
    after = []
    for number in range(10):
        group, seconds = made.step()
        if number == 0:
            found["after_half_s"] = seconds
        group.close()
        after.append(_held())
    pipe.send(found | {"after": _least(after)})
    os._exit(0)


def _measure(way: Way, rounds: int) -> dict[str, Any]:
    with without_dns():  # torch would look up the name of each peer that connects
        server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(WORLD)]
    processes = [
        context.Process(target=_rank, args=(way, rank, server.port, rounds, pipes[rank][1])) for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    try:
        found = []
        for mine, _ in pipes:
            if not mine.poll(90.0 + rounds):
                raise SystemExit(f"{way.name}: a rank did not answer")
            found.append(mine.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    slowest = [max(per_rank) for per_rank in zip(*(f["formed_s"] for f in found), strict=True)]

    def left(kind: int, until: str) -> int:
        return max(int(f[until][kind] - f["early"][kind]) for f in found)

    return {
        "form_ms": round(1000 * statistics.median(slowest), 1),
        "form_worst_ms": round(1000 * max(slowest), 1),
        "descriptors_left": left(0, "late"),
        "threads_left": left(1, "late"),
        "freed_s": round(max(f["freed_s"] for f in found), 3),
        "freed_forming_s": round(max(f["freed_forming_s"] for f in found), 3),
        # The rank that did not come waits for the others meanwhile.
        "after_half_ms": round(1000 * max(f["after_half_s"] for f in found[: WORLD - 1]), 1),
        "descriptors_left_by_half": left(0, "after"),
        "threads_left_by_half": left(1, "after"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="30 re-formations each instead of 200")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    args = parser.parse_args()
    rounds = 10 if args.smoke else 30 if args.quick else 200
    print(f"{machine()}; torch {torch.__version__}; {WORLD} ranks, {rounds} re-formations each way")
    result: dict[str, Any] = {"torch": torch.__version__}
    for way in WAYS if torch_private.RECONFIGURABLE else WAYS[:1]:
        result[way.name] = _measure(way, rounds)
        print(f"{way.name:22} {result[way.name]}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
