"""What was really done to a job: a file of JSON lines, one for each fault, written before it strikes. It also knows,
for a later process, that a fault has struck."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import msgspec

from .faults import AnyFault

FILE = "ground-truth.jsonl"
PLAN_ENV, NODE_ENV = "ELASTIC_TESTING", "ELASTIC_TESTING_NODE"
"""In the environment of a job's workers: the path of the plan, and what their node is called."""


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that struck, or was about to."""

    fault: AnyFault
    wall_s: float
    at_s: float
    """CLOCK_MONOTONIC of that machine."""
    pid: int = 0
    """Of the process that it struck; 0: not of one alone."""
    node: str = ""


def now(fault: AnyFault, *, pid: int = 0, node: str = "") -> Struck:
    return Struck(fault=fault, wall_s=time.time(), at_s=time.monotonic(), pid=pid, node=node)


def read(folder: str | os.PathLike[str]) -> list[Struck]:
    """All faults that have struck, in the order of their strikes."""
    file = Path(folder, FILE)
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [msgspec.json.decode(line, type=Struck) for line in lines]


def claim(folder: str | os.PathLike[str], struck: Struck) -> bool:
    """Write down that this fault strikes now, durably; False: it has struck already."""
    os.makedirs(folder, exist_ok=True)
    with Path(folder, FILE).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if any(known.fault == struck.fault for known in read(folder)):
            return False
        file.write(msgspec.json.encode(struck) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return True
