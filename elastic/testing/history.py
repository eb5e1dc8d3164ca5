"""The steps of a job, as each of its processes has written them down: in a file of its own, a line per step."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Commit:
    """One step committed on one rank. Instants are CLOCK_MONOTONIC: comparable, as all ran on one machine."""

    step: int
    """Counted from 0."""
    generation: int
    """Of a job under elasticd; elsewhere the number of times that torchrun has started the workers."""
    rank: int
    world_size: int
    at_s: float
    process: str
    """'<node>.<pid>'."""
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
