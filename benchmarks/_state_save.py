"""Part of state.py: snapshot, checkpoint and resume, beside torch.save and torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict_saver import async_save

from elastic.checkpoint.format.dtypes import code_of
from elastic.checkpoint.format.files import Files
from elastic.checkpoint.format.layout import arena_nbytes
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.saving import orders
from elastic.checkpoint.saving.client import WriterProcess
from elastic.checkpoint.stored.read import load_newest
from elastic.contract.worker.tensor_table import Table, TensorInfo

PIECE = 16 * 2**20
USUAL_STEPS = 3
"""Measured before and after a save."""
TOKENS = 32
"""In a step: few, so that it is short. What is not copied by its end blocks the optimizer."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Options:
    nbytes: int
    """Size of the state: fp32 parameters and Adam's two moments."""
    runs: int
    """Medians are over this many."""
    dir: str
    """Where files go; a folder on the disk that is to be measured."""
    what: tuple[str, ...]
    """Of "save" and "resume"."""


def clock() -> float:
    return time.perf_counter()


class Job:
    """A model of GPT's shapes with AdamW's state, and the work of its steps."""

    def __init__(self, nbytes: int) -> None:
        width = 512 if nbytes < 1e9 else 1024
        block = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
        self.params: Tensors = {}
        layer = 0
        while 12 * sum(p.numel() for p in self.params.values()) < nbytes:
            for name, shape in block.items():
                self.params[f"h.{layer}.{name}"] = torch.randn(shape)
                self.params[f"h.{layer}.{name}.bias"] = torch.randn(shape[0])
            layer += 1
        self.moments = {
            n: {"exp_avg": torch.randn_like(p), "exp_avg_sq": torch.rand_like(p)} for n, p in self.params.items()
        }
        self._grads = {name: torch.empty_like(p) for name, p in self.params.items() if p.dim() == 2}
        self._inputs = {p.shape[1]: torch.randn(TOKENS, p.shape[1]) for p in self.params.values() if p.dim() == 2}
        self._outputs = {p.shape[0]: torch.randn(TOKENS, p.shape[0]) for p in self.params.values() if p.dim() == 2}
        self._a, self._b = torch.randn(512, 1024), torch.randn(1024, 1024)

    def state_dict(self) -> dict[str, Any]:
        return {"model": dict(self.params), "optimizer": {name: dict(m) for name, m in self.moments.items()}}

    def flat(self) -> Tensors:
        found = {f"model.{name}": tensor for name, tensor in self.params.items()}
        for name, moments in self.moments.items():
            found |= {f"optimizer.{name}.{key}": tensor for key, tensor in moments.items()}
        return found

    def forward_backward(self) -> None:
        """The matrix products of a step over `TOKENS` tokens, gradients and all; no optimizer."""
        weights = {name: self.params[name] for name in self._grads}
        for weight in weights.values():
            self._inputs[weight.shape[1]] @ weight.T
        for name in reversed(weights):
            given = self._outputs[weights[name].shape[0]]
            given @ weights[name]
            torch.mm(given.T, self._inputs[weights[name].shape[1]], out=self._grads[name])

    def warm(self) -> None:
        """Both cores at work for some 60 ms: caches and threads as training leaves them."""
        for _ in range(6):
            self._a @ self._b


def table_of(tensors: Tensors) -> Table:
    return tuple(TensorInfo(name, code_of(t.dtype), tuple(t.shape), t.nbytes) for name, t in tensors.items())


@dataclass(frozen=True)
class Save:
    """One begun in the commit of a step."""

    guard: Callable[[], None]
    """Before the optimizer of the next step: blocks until the state may be changed."""
    done: Callable[[], bool]
    """Whether the checkpoint is durable; not before `guard`."""


class Ours:
    """Arena and writer process, as an agent uses them, with one rank."""

    def __init__(self, tensors: Tensors, directory: str) -> None:
        self.tensors, self.directory = list(tensors.values()), directory
        self.table = table_of(tensors)
        # One buffer is enough here, where a save is durable before the next begins.
        self.arena = Arena.create(arena_nbytes(self.table))
        self.arena.layout(self.table)
        os.mkdir(directory)
        self.writer = WriterProcess()
        self.writer.start()
        self.saves = 0

    def save(self) -> Save:
        self.saves += 1
        # As for a job: parameters and what the optimizer holds may be copied beside a forward and backward.
        fill = self.arena.fill(self.tensors)

        def guard() -> None:
            fill.finish()
            self.arena.seal(self.saves, 1)
            order = orders.Write(directory=self.directory, job="j", step=self.saves, generation=1)
            self.writer.submit(order, self.arena)
            self.writer.submit(
                orders.Commit(
                    directory=self.directory, job="j", step=self.saves, generation=1, shards=1, world_size=1, keep=1
                )
            )

        def done() -> bool:
            for result in self.writer.results():
                assert result.ok, result.error
            return len(self.writer.under_way()) == 0

        return Save(guard, done)

    def close(self) -> None:
        self.writer.close()
        self.arena.close()


def peak_mb(*, reset: bool = False) -> float:
    """Peak resident memory of this process, from now on if `reset` (then what is resident now)."""
    if reset:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
    with open("/proc/self/status") as status:
        field = next(line for line in status if line.startswith("VmHWM"))
    return int(field.split()[1]) / 1024


class Extra:
    """The most memory that some work has taken beyond what was there before it."""

    def __init__(self) -> None:
        self.mb = 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        before_mb = peak_mb(reset=True)
        yield
        self.mb = max(self.mb, peak_mb() - before_mb)


def timed(work: Callable[[], object]) -> float:
    start = clock()
    work()
    return clock() - start


def until(done: Callable[[], bool], fileno: int | None = None) -> None:
    import select

    poller = select.poll()
    if fileno is not None:
        poller.register(fileno, select.POLLIN)
    while not done():
        poller.poll(2)


def disk_limit(arena: Arena, directory: str, *, reserve: bool) -> float:
    """The same bytes with O_DIRECT and fsync, and nothing else; seconds."""
    files, path = Files(), os.path.join(directory, "raw")
    view = arena.view(padded=True)
    start = clock()
    fd = files.create(path, direct=True)
    if reserve:
        files.reserve(fd, len(view))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: files.write_at(fd, view[at : at + PIECE], at), range(0, len(view), PIECE)))
    files.sync(fd)
    files.close(fd)
    took = clock() - start
    os.unlink(path)
    return took


def torch_save(job: Job, directory: str) -> None:
    with open(os.path.join(directory, "whole.pt"), "wb") as file:
        torch.save(job.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())


def blocked(job: Job, save: Callable[[], Save]) -> tuple[float, float, Save]:
    """Seconds that the training thread waits for a save: in the commit, and before the optimizer changes a byte.

    Between the two a forward and backward runs; how long that took is the second number.
    """
    saves: list[Save] = []
    commit_s = timed(lambda: saves.append(save()))
    beside_s = timed(job.forward_backward)
    return commit_s + timed(saves[0].guard), beside_s, saves[0]


def lost(job: Job, save: Callable[[], Save], saves: int) -> float:
    """Seconds of training that one save costs: how much longer the steps take from its start until it is durable."""
    usual = [timed(job.forward_backward) for _ in range(USUAL_STEPS)]
    steps, start = 0, clock()
    for _ in range(saves):
        under_way = save()
        job.forward_backward()
        under_way.guard()
        steps += 1
        while not under_way.done():
            job.forward_backward()
            steps += 1
    took = clock() - start
    usual += [timed(job.forward_backward) for _ in range(USUAL_STEPS)]
    return (took - steps * statistics.median(usual)) / saves


def dcp_save(job: Job, directory: str) -> Save:
    target = tempfile.mkdtemp(prefix="dcp-", dir=directory)
    future = async_save(job.state_dict(), checkpoint_id=target)
    return Save(lambda: None, future.done)  # type: ignore[union-attr]


def settle(directory: str, ours: Ours) -> None:
    """All but the newest checkpoint are removed from the disk first, so that no measurement pays for the one before."""
    for name in os.listdir(directory):
        if name.startswith("dcp-"):
            shutil.rmtree(os.path.join(directory, name))
    while len(os.listdir(ours.directory)) > 1:  # the writer removes the earlier checkpoint outside the measured time
        time.sleep(0.005)
    os.sync()


@contextmanager
def quiet_group() -> Iterator[None]:
    """dcp.async_save asks for a process group; of one rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def forget_cached(folder: str) -> None:
    """Drop the files' pages, so that the next read comes from the disk."""
    for name in os.listdir(folder):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_file(folder: str, buffer: bytearray) -> None:
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def run(options: Options) -> dict[str, float]:
    directory = tempfile.mkdtemp(prefix="elastic-state-", dir=options.dir)
    job = Job(options.nbytes)
    tensors = job.flat()
    spare = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    ours, extra = Ours(tensors, os.path.join(directory, "ours")), Extra()
    took: dict[str, list[float]] = {}
    try:
        if "save" in options.what:
            with quiet_group():
                took = measure_saves(options, job, tensors, spare, ours, directory, extra)
        if "resume" in options.what:
            took |= measure_resume(options, tensors, spare, ours, extra)
    finally:
        ours.close()
        shutil.rmtree(directory)
    figures = report(took, sum(t.nbytes for t in tensors.values()), len(tensors))
    return figures | {"_".join((*options.what, "extra_mb")): extra.mb}


def say_round(number: int, took: dict[str, list[float]]) -> None:
    print(f"round {number}: " + "; ".join(f"{name} {seconds[-1]:.3f}" for name, seconds in took.items()), flush=True)


def measure_saves(
    options: Options, job: Job, tensors: Tensors, spare: Tensors, ours: Ours, directory: str, extra: Extra
) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        took.setdefault(name, []).append(seconds)

    def rest() -> None:
        """Then some work, as before every snapshot: each way finds the caches and threads that training leaves."""
        settle(directory, ours)
        job.warm()

    saves = 1 if options.nbytes >= 1e9 else 3
    sources, warm = list(tensors.values()), list(spare.values())
    for number in range(options.runs + 1):
        if number == 1:
            took.clear()  # the first round warmed everything up
        rest()
        note("memcpy, torch", timed(lambda: [to.copy_(source) for to, source in zip(warm, sources, strict=True)]))
        rest()
        note("memcpy, memmove", timed(lambda: [
            ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)
            for to, source in zip(warm, sources, strict=True)
        ]))  # fmt: skip
        rest()
        note("a forward and backward", timed(job.forward_backward))
        rest()
        with extra.watch():
            stall_s, beside_s, save = blocked(job, ours.save)
            until(save.done, ours.writer.fileno())
        note("ours, blocked", stall_s)
        note("ours, the pass beside", beside_s)
        rest()
        start = clock()
        (save := ours.save()).guard()
        note("ours, nothing beside", clock() - start)
        until(save.done, ours.writer.fileno())
        note("ours, durable", clock() - start)
        rest()
        note("disk, plain", disk_limit(ours.arena, directory, reserve=False))
        rest()
        note("disk, reserved", disk_limit(ours.arena, directory, reserve=True))
        rest()
        note("torch.save + fsync", timed(lambda: torch_save(job, directory)))
        os.unlink(os.path.join(directory, "whole.pt"))
        rest()
        start = clock()
        stall_s, beside_s, save = blocked(job, lambda: dcp_save(job, directory))
        note("dcp.async_save, blocked", stall_s)
        note("dcp.async_save, the pass beside", beside_s)
        until(save.done)
        note("dcp.async_save, done", clock() - start)
        rest()
        note("ours, lost", lost(job, ours.save, saves))
        rest()
        note("dcp.async_save, lost", lost(job, lambda: dcp_save(job, directory), saves))
        say_round(number, took)
    return took


def measure_resume(
    options: Options, tensors: Tensors, back: Tensors, ours: Ours, extra: Extra
) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {"read, cold": [], "resume, cold": [], "read, warm": [], "resume, warm": []}
    for tensor in back.values():
        tensor.zero_()
    (save := ours.save()).guard()
    until(save.done)
    settle(os.path.dirname(ours.directory), ours)
    (folder,) = (entry.path for entry in os.scandir(ours.directory) if entry.name.startswith("step-"))
    buffer = bytearray(PIECE)

    def ours_back() -> None:
        with extra.watch():
            load()

    def load() -> None:
        assert load_newest(ours.directory, "j", lambda _: lambda info: back[info.name]) is not None

    for number in range(options.runs + 1):
        for how in ("cold", "warm"):
            for name, work in (("read", lambda: read_file(folder, buffer)), ("resume", ours_back)):
                if how == "cold":
                    forget_cached(folder)
                seconds = timed(work)
                took[f"{name}, {how}"].append(seconds)
        say_round(number, took)
        if number == 0:
            took = {name: [] for name in took}
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    return took


def report(took: dict[str, list[float]], nbytes: int, count: int) -> dict[str, float]:
    print(f"\n{nbytes / 1e9:.2f} GB in {count} tensors              median       best      worst  (seconds)")
    for name, seconds in took.items():
        print(f"  {name:32s} {statistics.median(seconds):9.3f}  {min(seconds):9.3f}  {max(seconds):9.3f}")
    median = {name: statistics.median(seconds) for name, seconds in took.items()}
    figures: dict[str, float] = {}
    if blocked := median.get("ours, blocked"):
        figures |= {
            "stall_over_memcpy": blocked / min(median["memcpy, torch"], median["memcpy, memmove"]),
            "torch_save_over_stall": median["torch.save + fsync"] / blocked,
            "dcp_async_over_stall": median["dcp.async_save, blocked"] / blocked,
            "durable_over_disk": median["ours, durable"] / min(median["disk, plain"], median["disk, reserved"]),
            "lost_time_dcp_over_ours": median["dcp.async_save, lost"] / max(median["ours, lost"], 1e-3),
        }
    if "resume, cold" in median:
        figures["resume_over_read"] = median["resume, cold"] / median["read, cold"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--what", default="save,resume")
    args = parser.parse_args()
    what = tuple(args.what.split(","))
    ratios = run(Options(nbytes=args.mb * 10**6, runs=args.runs, dir=args.dir, what=what))
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


if __name__ == "__main__":
    main()
