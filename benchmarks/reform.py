"""Re-forming a gloo group: elastic's `Group`, which makes a new one, beside torch's `reconfigure`, which keeps it.

    python benchmarks/reform.py [--quick]

4 ranks on this machine, both ways in turn in the same processes. For each way: the time from "all ranks know the store"
until a first all-reduce is done, with a DDP wrapper made anew where the way needs it; how soon a rank that waits in an
all-reduce for a rank which does not come is freed by an abort (LIMIT_S: it was not, the collective ran into its
time-out); and the descriptors and threads that re-forming leaves behind. torch has `reconfigure` from 2.14 on: with an
older one it is left out. The store of a reconfigurable group is for life in torch; a store that forwards to the
generation's own (`Forwarding`) stands in for it here.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from _harness import machine
from torch._C._distributed_c10d import PrefixStore, TCPStore

from elastic.util.resolver import without_dns
from elastic.worker.comm.errors import GroupAborted
from elastic.worker.comm.group import Group

WORLD = 4
LIMIT_S = 10.0
"""Time-out of collectives where a rank does not come."""
ABORT_AFTER_S = 0.3
HAS_RECONFIGURE = "enable_reconfigure" in inspect.signature(dist.init_process_group).parameters


class Forwarding(dist.Store):
    """A store whose server changes with each generation, as torch takes one for the life of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Any = None

    def set(self, key: str, value: Any) -> None:
        self.now.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self.now.get(key))

    def add(self, key: str, number: int) -> int:
        return int(self.now.add(key, number))

    def wait(self, *args: Any) -> None:
        self.now.wait(*args)

    def check(self, keys: list[str]) -> bool:
        return bool(self.now.check(keys))

    def compare_set(self, *args: Any) -> bytes:
        return bytes(self.now.compare_set(*args))

    def delete_key(self, key: str) -> bool:
        return bool(self.now.delete_key(key))

    def num_keys(self) -> int:
        return int(self.now.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        self.now.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self.now.timeout
        return found

    def clone(self) -> dist.Store:
        return self


class Ours:
    """A new group and a new DDP wrapper for each generation."""

    def __init__(self, rank: int, model: torch.nn.Module) -> None:
        self._rank, self._model = rank, model
        self._group: Group | None = None

    def form(self, port: int, generation: int, timeout_s: float) -> torch.nn.Module:
        self._group = Group(
            backend="gloo", rank=self._rank, world_size=WORLD, store_host="127.0.0.1", store_port=port,
            generation=generation, timeout_s=timeout_s,
        )  # fmt: skip
        self._group.form()
        return torch.nn.parallel.DistributedDataParallel(self._model)

    def abort(self) -> None:
        assert self._group is not None
        self._group.abort("benchmark")

    def close(self) -> None:
        assert self._group is not None
        self._group.close()

    def end(self) -> None:
        pass


class Reconfigured:
    """One group and one DDP wrapper for the life of the process."""

    def __init__(self, rank: int, model: torch.nn.Module) -> None:
        self._rank, self._model = rank, model
        self._store = Forwarding()
        self._wrapped: torch.nn.Module | None = None

    def form(self, port: int, generation: int, timeout_s: float) -> torch.nn.Module:
        with without_dns():
            client = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30), wait_for_workers=False)
        self._store.now = PrefixStore(f"g{generation}", client)
        if self._wrapped is None:
            dist.init_process_group(
                "gloo", store=self._store, rank=self._rank, world_size=WORLD, enable_reconfigure=True,
                timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
        get, reconfigure = dist._get_reconfigure_handle, dist._reconfigure
        self._store.set(f"handle/{self._rank}", get())
        handles = [self._store.get(f"handle/{rank}").decode() for rank in range(WORLD)]
        reconfigure(uuid=generation, handles=handles, timeout=timedelta(seconds=timeout_s)).wait()
        if self._wrapped is None:
            self._wrapped = torch.nn.parallel.DistributedDataParallel(self._model)
        return self._wrapped

    def abort(self) -> None:
        dist.distributed_c10d._get_default_group().abort()

    def close(self) -> None:
        pass

    def end(self) -> None:
        dist.destroy_process_group()


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _step(model: torch.nn.Module) -> None:
    model(torch.ones(2, 64)).sum().backward()


def _rank(way: str, rank: int, ports: list[int], rounds: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    made: Ours | Reconfigured = Ours(rank, model) if way == "ours" else Reconfigured(rank, model)
    formed_s, early = [], (0, 0)
    for number in range(rounds):
        begun_s = time.monotonic()
        _step(made.form(ports[0], number + 1, LIMIT_S))
        formed_s.append(time.monotonic() - begun_s)
        if number == min(9, rounds // 2):
            early = _held()
        if number < rounds - 1:
            made.close()
    late, freed_s = _held(), 0.0
    if rank != WORLD - 1:
        threading.Timer(ABORT_AFTER_S, made.abort).start()
        begun_s = time.monotonic()
        try:
            dist.all_reduce(torch.ones(4))
        except (RuntimeError, GroupAborted):
            freed_s = time.monotonic() - begun_s - ABORT_AFTER_S
    else:
        threading.Event().wait(LIMIT_S + 1.0)
    made.close()
    pipe.send({"formed_s": formed_s[1:], "freed_s": freed_s, "early": early, "late": late})
    os._exit(0)


def _measure(way: str, rounds: int) -> dict[str, Any]:
    with without_dns():  # torch would look up the name of each peer that connects
        server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(WORLD)]
    processes = [
        context.Process(target=_rank, args=(way, rank, [server.port], rounds, pipes[rank][1])) for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    try:
        found = []
        for mine, _ in pipes:
            if not mine.poll(60.0 + rounds):
                raise SystemExit(f"{way}: a rank did not answer")
            found.append(mine.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    slowest = [max(per_rank) for per_rank in zip(*(f["formed_s"] for f in found), strict=True)]
    return {
        "form_ms": round(1000 * statistics.median(slowest), 1),
        "form_worst_ms": round(1000 * max(slowest), 1),
        "freed_s": round(max(f["freed_s"] for f in found), 3),
        "descriptors_left": max(f["late"][0] - f["early"][0] for f in found),
        "threads_left": max(f["late"][1] - f["early"][1] for f in found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="30 re-formations each instead of 200")
    rounds = 30 if parser.parse_args().quick else 200
    print(f"{machine()}; torch {torch.__version__}; {WORLD} ranks, {rounds} re-formations each way")
    result: dict[str, Any] = {"torch": torch.__version__, "ours": _measure("ours", rounds)}
    if HAS_RECONFIGURE:
        result["reconfigure"] = _measure("reconfigure", rounds)
        result["form_ratio"] = round(result["ours"]["form_ms"] / result["reconfigure"]["form_ms"], 2)
    for name, figures in result.items():
        print(f"{name:12} {figures}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
