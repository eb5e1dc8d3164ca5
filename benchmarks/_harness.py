"""What the benchmarks share: starting and ending processes, nodes of a local cluster, and the record of commits.

Instants are CLOCK_MONOTONIC, which all processes of one machine share.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import random
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

BIN = pathlib.Path(sys.executable).parent
HERE = pathlib.Path(__file__).parent
T = TypeVar("T")
SMOKE = "as little as possible: shows that it runs, its figures mean nothing"


class TooLate(Exception):
    """Something did not happen in its time."""


def wait_for(check: Callable[[], T | None], deadline_s: float, what: str, every_s: float = 0.005) -> T:
    """What `check` returns once that is neither None nor False. Raises TooLate."""
    end_s = time.monotonic() + deadline_s
    while True:
        if (value := check()) is not None and value is not False:
            return value
        if time.monotonic() > end_s:
            raise TooLate(f"not within {deadline_s:g} s: {what}")
        time.sleep(every_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────


class Processes:
    """Starts processes, and ends them and all that they started: found by a tag in the environment."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._tag = f"{os.getpid()}-{time.monotonic_ns()}"

    def start(
        self,
        name: str,
        argv: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str] | None = None,
        cwd: pathlib.Path | None = None,
    ) -> str:
        """Start in the background; output goes to NAME.log in the folder, which is removed with all that torchrun and
        torch leave in TMPDIR. Returns the tag for `end`."""
        tag = f"{self._tag}.{name}"
        with (self._folder / f"{name}.log").open("ab") as log:
            subprocess.Popen(
                [os.fspath(a) for a in argv],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(self._folder),
                    **(env or {}),
                    "ELASTIC_BENCH_TAG": tag,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=cwd,
            )
        return tag

    def pids(self, tag: str = "") -> list[int]:
        wanted = f"ELASTIC_BENCH_TAG={tag or self._tag}".encode()
        found = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(line == wanted or (not tag and line.startswith(wanted + b".")) for line in environment):
                found.append(int(process.name))
        return found

    def end(self, tag: str = "", deadline_s: float = 10.0) -> None:
        """SIGKILL all of one start, or of all; returns when they are gone."""
        end_s = time.monotonic() + deadline_s
        while pids := [pid for pid in self.pids(tag) if not _zombie(pid)]:
            for pid in pids:
                kill(pid)
            if time.monotonic() > end_s:
                raise TooLate(f"processes {pids} do not end")
            time.sleep(0.02)
        while True:  # our own children, ended
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    return
            except ChildProcessError:
                return


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def ended(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice: the second must not break into the clean-up
    sys.exit(128 + number)


@contextlib.contextmanager
def workplace(keep: bool = False) -> Iterator[tuple[pathlib.Path, Processes]]:
    """A temporary folder and the processes working in it; both gone at the end, also after Ctrl-C."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="elastic-bench-"))
    processes = Processes(folder)
    signal.signal(signal.SIGTERM, ended)
    try:
        yield folder, processes
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        processes.end()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


# ── a cluster on this machine ───────────────────────────────────────────────────────────────────────────────────


class Node:
    """One elasticd with a state directory of its own. The first of a cluster runs the embedded etcd."""

    def __init__(self, folder: pathlib.Path, processes: Processes, name: str, *, slots: int, etcd: str = "") -> None:
        self.name, self._processes = name, processes
        self.folder = folder / name
        self.folder.mkdir()
        self.socket = self.folder / "s"
        self.etcd = etcd or f"unix:{self.folder}/state/etcd/client:0"
        endpoints = f'endpoints = ["{etcd}"]' if etcd else ""
        self.config = self.folder / "elasticd.toml"
        self.config.write_text(
            f'cluster = "bench"\nnode = "{name}"\naddress = "127.0.0.1"\nslots = {slots}\n'
            f'state_dir = "{self.folder}/state"\nsocket = "{self.socket}"\n[etcd]\n{endpoints}\n[http]\nlisten = ""\n'
        )
        self.tag = ""

    def start(self) -> None:
        self.tag = self._processes.start(self.name, [BIN / "elasticd", "--config", self.config])
        wait_for(self._ready, 30.0, f"{self.name} is ready, see {self.folder}.log", every_s=0.1)

    def _ready(self) -> bool:
        return self.socket.exists() and self.ctl("nodes", check=False).returncode == 0

    def ctl(self, *words: str | os.PathLike[str], check: bool = True) -> subprocess.CompletedProcess[str]:
        argv = [BIN / "elasticctl", "--socket", self.socket, *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=check)

    def json(self, *words: str) -> Any:
        return json.loads(self.ctl(*words, "--json").stdout)


# ── the record of commits ───────────────────────────────────────────────────────────────────────────────────────

_RECORD = struct.Struct("<6q")


@dataclass(frozen=True, slots=True)
class Commit:
    at_s: float
    step: int
    """Steps committed, with this one."""
    generation: int
    world_size: int
    rank: int
    pid: int


class Recorder:
    """Worker side: one short write per commit, to a file of this process."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._fd = os.open(f"{os.fspath(folder)}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def commit(self, step: int, *, generation: int, world_size: int, rank: int) -> None:
        os.write(self._fd, _RECORD.pack(time.monotonic_ns(), step, generation, world_size, rank, os.getpid()))


class Record:
    """Driver side: all commits so far, in order of time."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.commits: list[Commit] = []
        self._read: dict[str, int] = {}

    def update(self) -> list[Commit]:
        fresh = []
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                file.seek(self._read.get(path.name, 0))
                raw = file.read()
            whole = len(raw) // _RECORD.size * _RECORD.size
            self._read[path.name] = self._read.get(path.name, 0) + whole
            for ns, step, generation, world_size, rank, pid in _RECORD.iter_unpack(raw[:whole]):
                fresh.append(Commit(ns / 1e9, step, generation, world_size, rank, pid))
        fresh.sort(key=lambda c: c.at_s)
        self.commits += fresh
        return fresh

    def newest(self) -> dict[int, Commit]:
        """rank -> its newest commit."""
        return {c.rank: c for c in self.commits}

    def wait_step(self, step: int, world_size: int, deadline_s: float) -> None:
        """Until every rank of a world of `world` has committed `step` in one generation. Raises TooLate."""

        def there() -> bool:
            self.update()
            last = self.newest()
            newest = max((c.generation for c in last.values()), default=0)
            now = [c for c in last.values() if c.generation == newest and c.step >= step]
            return len(now) == world_size

        wait_for(there, deadline_s, f"step {step} on {world_size} ranks")

    def step_times_s(self, skip: int) -> list[float]:
        """Time between consecutive commits of rank 0, without the first `skip`."""
        times = [c.at_s for c in self.commits if c.rank == 0]
        return [b - a for a, b in zip(times[skip:], times[skip + 1 :], strict=False)]


@dataclass(frozen=True, slots=True)
class Recovery:
    seconds: float
    """From the kill until every rank of the full world has committed a step again."""
    first_s: float
    """Until any rank has, whatever the size of its world."""
    steps_lost: int
    rank: int
    step: int
    killed_wall_s: float


def kill_and_measure(
    record: Record,
    world_size: int,
    rng: random.Random,
    limit_s: float,
    number: int = signal.SIGKILL,
    strike: Callable[[int], None] | None = None,
    spared: Collection[int] = (),
) -> Recovery:
    """Kill the worker of a random rank now, or `strike` its process, but none of the processes `spared`.

    A rank is back with its first commit after those of the old processes' group: in a newer generation, or (where there
    are no generations) by a process that was not there before. Raises TooLate after `limit_s`.
    """
    record.update()
    before = record.newest()
    victim = rng.choice([before[rank] for rank in range(world_size) if before[rank].pid not in spared])
    generation = max(c.generation for c in before.values())
    old_pids = {c.pid for c in before.values()}
    at_s, wall_s = time.monotonic(), time.time()
    if strike is None:
        kill(victim.pid, number)
    else:
        strike(victim.pid)
    back: dict[int, Commit] = {}
    new_at_s: list[float] = []
    mark = len(record.commits)

    def everyone() -> bool:
        nonlocal mark
        record.update()
        for c in record.commits[mark:]:
            newer = c.generation > generation if generation else c.pid not in old_pids
            if newer:
                new_at_s.append(c.at_s)
            if newer and c.world_size == world_size:
                back.setdefault(c.rank, c)
        mark = len(record.commits)
        return len(back) == world_size

    wait_for(everyone, limit_s, f"{world_size} ranks stepping again; back: {sorted(back)}", every_s=0.01)
    reached = max(c.step for c in record.commits if c.generation <= generation and c.pid in old_pids)
    first_new = min(c.step for c in back.values())
    return Recovery(
        seconds=max(c.at_s for c in back.values()) - at_s,
        first_s=min(new_at_s) - at_s,
        steps_lost=max(0, reached - (first_new - 1)),
        rank=victim.rank,
        step=victim.step,
        killed_wall_s=wall_s,
    )


# ── saying it ───────────────────────────────────────────────────────────────────────────────────────────────────


def machine() -> str:
    import torch

    with open("/proc/cpuinfo") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())
    memory_gb = psutil.virtual_memory().total / 2**30
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores ({model}), {memory_gb:.0f} GiB, torch {torch.__version__}, load {load:.1f}"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """'median (least – most, n)'."""
    if not values:
        return "none"
    median, best, worst = (f"{f(values):.{digits}f}" for f in (statistics.median, min, max))
    return f"{median} ({best} – {worst}, n = {len(values)})"
