"""Faults as values: what is to fail, where, and when. Each refuses fields that are wrong, by name and with the fix."""

from __future__ import annotations

import builtins
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import msgspec

from elastic.util.files import replace_file

Place = Literal["data", "forward", "backward", "collective", "optimizer", "commit"]
"""Of the training loop, in their order within a step: before the next batch is fetched, before the model's forward,
while gradients are computed, before a collective, before the optimizer applies them, at the end of the step."""


class BadFaultError(ValueError):
    """A fault with a field that cannot be, or a plan that cannot be read; the text says which and what to write."""


Check = tuple[Callable[[Any], bool], str]  # whether a value can be, and what to write instead


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_COUNT: Check = (lambda v: _number(v) and v >= 0 and v == int(v), "a whole number from 0 on")
_LENGTH: Check = (lambda v: v is None or (_number(v) and v > 0), "a number of seconds above 0, or None: for good")
_PLACE: Check = (get_args(Place).__contains__, f"one of {', '.join(get_args(Place))}")
_DEADLY: Check = (
    lambda v: v in signal.Signals.__members__ and v not in ("SIGSTOP", "SIGTSTP", "SIGCONT", "SIGCHLD"),
    "the name of a signal that ends a process, such as SIGKILL; Stop stops one",
)
_INSIDE: Check = (("python", "c").__contains__, "'python' (a loop) or 'c' (a call that keeps the interpreter's lock)")
_ERROR: Check = (
    lambda v: BaseException in getattr(getattr(builtins, v, None), "__mro__", ()),
    "the name of an exception of Python's, such as ValueError",
)
_FUNCTION: Check = (
    lambda v: v.count(":") == 1 and all(map(str.isidentifier, v.replace(":", ".").split("."))),
    "'module:function', such as '__main__:leak'",
)
_NODE: Check = (bool, "the name of a node, such as 'node1'")


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="do"):
    """`step`: the steps that are done before it strikes. Two faults of a plan that are equal strike once."""

    step: int = 0
    verb: ClassVar[str]
    checks: ClassVar[Mapping[str, Check]] = {"step": _COUNT}

    def __post_init__(self) -> None:
        for field, (can_be, fix) in self.checks.items():
            if not can_be(value := getattr(self, field)):
                raise BadFaultError(f"{type(self).__name__}.{field} = {value!r}: {fix}")

    def __str__(self) -> str:
        return f"{self.verb} at step {self.step}"


class RankFault(Fault, frozen=True, kw_only=True):
    """Of the process that has `rank`, at `place` of the training loop."""

    rank: int
    place: Place = "forward"
    checks = {**Fault.checks, "rank": _COUNT, "place": _PLACE}

    def __str__(self) -> str:
        return f"rank {self.rank} {self.verb} in the {self.place} of step {self.step}"


class Kill(RankFault, frozen=True, kw_only=True, tag="kill"):
    """The process ends by a signal."""

    signal: str = "SIGKILL"
    verb = "was killed"
    checks = {**RankFault.checks, "signal": _DEADLY}


class Stop(RankFault, frozen=True, kw_only=True, tag="stop"):
    """SIGSTOP: all threads stop, and go on after `for_s` seconds; None: never."""

    for_s: float | None = None
    verb = "was stopped"
    checks = {**RankFault.checks, "for_s": _LENGTH}


class Hang(Stop, frozen=True, kw_only=True, tag="hang"):
    """The main thread goes no further for `for_s` seconds (None: for good): in a loop in Python, or in a call of a C
    function, which keeps the interpreter's lock."""

    inside: Literal["python", "c"] = "python"
    verb = "hung"
    checks = {**Stop.checks, "inside": _INSIDE}


class Fail(RankFault, frozen=True, kw_only=True, tag="fail"):
    """An exception, by the name of its class in Python; `SystemExit` has the exit code as its `message`."""

    error: str = "RuntimeError"
    message: str = "a planted fault"
    verb = "failed"
    checks = {**RankFault.checks, "error": _ERROR}


class Call(RankFault, frozen=True, kw_only=True, tag="call"):
    """A function of the script's own is called, without arguments: 'module:function'; '__main__' is the script."""

    function: str
    verb = "called a function"
    checks = {**RankFault.checks, "function": _FUNCTION}


class LoseNode(Fault, frozen=True, kw_only=True, tag="lose_node"):
    """All processes of a node of a `Cluster` are killed at once, its daemon among them; after `for_s` seconds (None:
    never) it is started anew."""

    node: str
    for_s: float | None = None
    verb = "was lost"
    checks = {**Fault.checks, "node": _NODE, "for_s": _LENGTH}

    def __str__(self) -> str:
        return f"{self.node} {super().__str__()}"


class StopEtcd(Fault, frozen=True, kw_only=True, tag="stop_etcd"):
    """etcd answers nothing for `for_s` seconds; connections stay."""

    for_s: float
    verb = "etcd was stopped"
    checks = {**Fault.checks, "for_s": _LENGTH}


class WipeEtcd(Fault, frozen=True, kw_only=True, tag="wipe_etcd"):
    """etcd ends, loses its data and is started anew."""

    verb = "etcd lost its data"


InProcess = Kill | Stop | Hang | Fail | Call
AnyFault = InProcess | LoseNode | StopEtcd | WipeEtcd


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a job is to suffer."""

    faults: tuple[AnyFault, ...] = ()
    record: str = ""
    """Folder for the ground truth and the recorded steps, relative to the plan's; all nodes must see the same one."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Raises BadFaultError, OSError."""
        file = Path(path).resolve()
        try:
            plan = msgspec.json.decode(file.read_bytes(), type=cls)
        except ValueError as error:
            raise BadFaultError(f"{file}: {error}") from error
        return msgspec.structs.replace(plan, record=str(file.parent / (plan.record or f"{file.stem}.record")))

    def write(self, path: str | os.PathLike[str]) -> None:
        replace_file(Path(path), msgspec.json.format(msgspec.json.encode(self)), mode=0o644)
