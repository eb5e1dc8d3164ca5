"""What a run leaves in its folder: its steps, a line each, in a file for each of its processes; and the ground truth, a
line for each fault, written before it strikes, by which later processes know that it has."""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from .faults import AnyFault


@dataclass(frozen=True)
class Commit:
    """One step committed on one rank. Instants are CLOCK_MONOTONIC: comparable, as all ran on one machine."""

    step: int  # counted from 0
    generation: int  # of a job under elasticd; elsewhere the number of times that torchrun has started the workers
    rank: int
    world_size: int
    at_s: float
    process: str  # '<node>.<pid>'
    ids: tuple[int, ...] = ()  # the samples, where the script writes them down
    loss: float = 0.0

    @property
    def node(self) -> str:
        return self.process.rpartition(".")[0]

    @property
    def pid(self) -> int:
        return int(self.process.rpartition(".")[2])


class History:
    """What the folder holds as of the last call of `read`, which adds what is new."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.commits: list[Commit] = []
        self._read: dict[str, int] = {}
        """Bytes of each file that have been read."""

    def read(self) -> Self:
        new: list[Commit] = []
        for path in sorted(self.folder.glob("commits.*.jsonl")):
            process = path.name.removeprefix("commits.").removesuffix(".jsonl")
            with path.open("rb") as file:
                file.seek(self._read.get(path.name, 0))
                whole, end, _ = file.read().rpartition(b"\n")  # the writer may just have been killed
            self._read[path.name] = self._read.get(path.name, 0) + len(whole) + len(end)
            for line in whole.splitlines():
                raw = json.loads(line)
                new.append(Commit(**{**raw, "ids": tuple(raw.get("ids", ()))}, process=process))
        if new:
            self.commits = sorted([*self.commits, *new], key=lambda c: c.at_s)
        return self

    def step(self) -> int:
        """Steps committed so far on some rank."""
        return max((c.step + 1 for c in self.commits), default=0)

    def generations(self) -> list[int]:
        return sorted({c.generation for c in self.commits})

    def of(self, generation: int) -> list[Commit]:
        return [c for c in self.commits if c.generation == generation]

    def redone(self, before: int, number: int) -> int:
        """Steps that were committed up to generation `before` and that generation `number` has done again."""
        top = max((c.step + 1 for c in self.commits if c.generation <= before), default=0)
        return max(0, top - min((c.step for c in self.of(number)), default=top))


FILE = "ground-truth.jsonl"
PLAN_ENV, NODE_ENV = "ELASTIC_TESTING", "ELASTIC_TESTING_NODE"
"""In the environment of a job's workers: the path of the plan, and what their node is called."""


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that struck, or was about to."""

    fault: AnyFault
    wall_s: float
    at_s: float  # CLOCK_MONOTONIC of that machine
    pid: int = 0  # of the process that it struck; 0: not of one alone
    node: str = ""


def struck(folder: str | os.PathLike[str]) -> list[Struck]:
    """All faults that have struck, in the order of their strikes."""
    file = Path(folder, FILE)
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [msgspec.json.decode(line, type=Struck) for line in lines]


def claim(folder: str | os.PathLike[str], fault: AnyFault, *, pid: int = 0, node: str = "") -> bool:
    """Write down that this fault strikes now, durably; False: it has struck already."""
    os.makedirs(folder, exist_ok=True)
    with Path(folder, FILE).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if any(known.fault == fault for known in struck(folder)):
            return False
        new = Struck(fault=fault, wall_s=time.time(), at_s=time.monotonic(), pid=pid, node=node)
        file.write(msgspec.json.encode(new) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return True
