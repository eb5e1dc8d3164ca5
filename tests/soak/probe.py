"""Inside a worker of the soak: writes down what happened, and kills its own process where the case says.

Told by the environment: SOAK_RECORD, a folder shared by all ranks; SOAK_KILL, a JSON list of what is to be struck in
the first generation, in the second, and so on, each a list of orders (see `Killer`).
Each process appends to RECORD/<pid>.jsonl and, at the end of `train`, writes final.<rank>.json: a hash of every tensor
and value that the script holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import xxhash

import elastic

RECORD = os.environ["SOAK_RECORD"]
KILL = json.loads(os.environ.get("SOAK_KILL") or "[]")
_TORCH, _ELASTIC = (os.path.dirname(str(module.__file__)) for module in (torch, elastic))
PATHS = {
    "forward": f"{_TORCH}/nn/", "optimizer": f"{_TORCH}/optim/", "elastic": f"{_ELASTIC}/", "finish": f"{_ELASTIC}/",
}  # fmt: skip
"""How the name of a file begins whose lines count for a region."""

_log = os.open(os.path.join(RECORD, f"{os.getpid()}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


TOGETHER_S = 20.0
"""For so long a rank waits where all are to be killed until each has got there: the death of the first one would take
the others out of their step."""

_killers: list[Killer] = []
"""Of this process and generation: one at most."""


def note(**content: object) -> None:
    os.write(_log, (json.dumps({"at_s": time.monotonic(), **content}) + "\n").encode())


def _struck_in(generation: int) -> int:
    """How many processes have noted that they are struck in it."""
    lines = (line for path in pathlib.Path(RECORD).glob("*.jsonl") for line in path.read_text().splitlines())
    entries = [json.loads(line) for line in lines if '"struck"' in line and line.endswith("}")]
    return sum(entry["generation"] == generation for entry in entries)


class Killer:
    """Ends this process at the place of an order: {"rank", "step", "region", "line", "nth", "linger_s", "together"}."""

    def __init__(self, job: Any, state: Any, plan: dict[str, Any]) -> None:
        self._job, self._state, self._plan = job, state, plan
        self._seen = 0

    def due(self) -> bool:
        return bool(self._state.step == self._plan["step"])

    def missed(self) -> None:
        """At each commit, and at the end: strike at the latest here when the place is not reached."""
        region, step = self._plan["region"], self._state.step
        if step > self._plan["step"] or (self.due() and region not in ("elastic", "loop", "finish")):
            self.strike("a commit or the end, as the place was not reached")

    def strike(self, where: str) -> None:
        note(struck=where, step=self._state.step, rank=self._job.rank, generation=self._job.generation)
        end_s = time.monotonic() + TOGETHER_S
        while _struck_in(self._job.generation) < self._plan["together"] and time.monotonic() < end_s:
            time.sleep(0.002)
        time.sleep(self._plan["linger_s"])
        os.kill(os.getpid(), signal.SIGKILL)

    def arm(self, frame: FrameType) -> None:
        """From now on, in this thread; `frame` is that of `train`, which runs already."""
        if self._plan["region"] == "finish":
            return
        if self._plan["region"] == "backward":
            self._hook()
            return
        if self._plan["region"] == "loop":
            frame.f_trace = self._line
        sys.settrace(self._call)

    def trained(self) -> None:
        """`train` is about to return: what is traced from now on is how elastic finishes."""
        finishing = self._plan["region"] == "finish" and self.due()
        sys.settrace(self._call if finishing else None)

    def _hook(self) -> None:
        modules = [getattr(self._state, name, None) for name in ("model", "critic")]
        found = [p for module in modules if module is not None for p in module.parameters() if p.requires_grad]
        found[self._plan["nth"] % len(found)].register_hook(lambda _: self.strike("backward") if self.due() else None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        region, file = self._plan["region"], frame.f_code.co_filename
        if region == "loop":
            return self._line if file == sys.argv[0] else None
        return self._count if file.startswith(PATHS[region]) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and frame.f_lineno == self._plan["line"] and self.due():
            self.strike(f"line {frame.f_lineno}")
        return self._line

    def _count(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and self.due():
            self._seen += 1
            if self._seen > self._plan["nth"]:
                self.strike(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return self._count


def start(job: Any, state: Any) -> None:
    """The first line of `train`."""
    note(entered=state.step, generation=job.generation, rank=job.rank, world_size=job.world_size)
    orders = KILL[job.generation - 1] if job.generation <= len(KILL) else []
    plan = next((order for order in orders if order["rank"] == job.rank), None)
    killer = Killer(job, state, plan) if plan else None
    _killers[:] = [killer] if killer else []
    job.commit = lambda of, loss=None: _commit(job, of, loss, killer)
    sys.settrace(None)
    if killer is not None:
        killer.arm(sys._getframe(1))


def _commit(job: Any, state: Any, loss: Any, killer: Killer | None) -> None:
    before = state.step
    if killer is not None:
        killer.missed()
    try:
        type(job).commit(job, state, loss)
    finally:  # at the end of a generation `commit` raises, though the step is committed
        if state.step == before + 1:
            note(step=state.step, generation=job.generation, rank=job.rank)


def finish(job: Any, state: Any, **parts: Any) -> None:
    """The last line of `train`: the fingerprint of all parts."""
    for killer in _killers:
        killer.missed()  # a line that only some steps run, and none after the kill before
    found = {"step": str(state.step)}
    for name, part in parts.items():
        held = part.state_dict() if hasattr(part, "state_dict") else part
        found.update(_leaves(name, held))
    half = os.path.join(RECORD, f"half.{os.getpid()}")
    with open(half, "w") as file:
        json.dump(found, file)
    os.rename(half, os.path.join(RECORD, f"final.{job.rank}.json"))
    if KILL:
        sys.settrace(None)
    for killer in _killers:
        killer.trained()


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1)
        with contextlib.suppress(RuntimeError):  # no bytes at all
            flat = flat.view(torch.uint8)
        short = f" {flat.numel()} bytes" if value.numel() > 1 else f" {value.reshape(-1).tolist()}"
        yield path, f"{value.dtype} {list(value.shape)} {xxhash.xxh3_64(flat.numpy()).hexdigest()}{short}"
    elif isinstance(value, dict):
        yield path, f"{len(value)} entries"
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        yield path, f"{len(value)} items"
        for index, item in enumerate(value):
            yield from _leaves(f"{path}.{index}", item)
    else:
        yield path, repr(value)
