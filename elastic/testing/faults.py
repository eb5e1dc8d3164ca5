"""Faults as values: what is to fail, where, and when. Each refuses fields that are wrong, by name and with the fix."""

from __future__ import annotations

import builtins
import os
import re
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


Check = tuple[Callable[[Any], object], str]  # whether a value can be, and what to write instead

_COUNT: Check = (lambda v: type(v) in (int, float) and v >= 0 and v == int(v), "a whole number from 0 on")
_DEADLY = signal.Signals.__members__.keys() - {"SIGSTOP", "SIGTSTP", "SIGCONT", "SIGCHLD"}
_ERRORS = {name for name, value in vars(builtins).items() if BaseException in getattr(value, "__mro__", ())}
_CHECKS: Mapping[str, Check] = {
    "step": _COUNT, "rank": _COUNT, "other": _COUNT,
    "for_s": (
        lambda v: v is None or (type(v) in (int, float) and v > 0), "a number of seconds above 0, or None: for good",
    ),
    "place": (get_args(Place).__contains__, f"one of {', '.join(get_args(Place))}"),
    "signal": (lambda v: v in _DEADLY, "the name of a signal that ends a process, such as SIGKILL; Stop stops one"),
    "inside": (("python", "c").__contains__, "'python' (a loop) or 'c' (a call that keeps the interpreter's lock)"),
    "error": (lambda v: v in _ERRORS, "the name of an exception of Python's, such as ValueError"),
    "function": (re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*").fullmatch, "'module:function', such as '__main__:leak'"),
    "node": (bool, "the name of a node, such as 'node1'"),
    "folder": (os.path.isabs, "the path of a folder, from / on"),
}  # fmt: skip
"""By the names of fields, of all faults."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="do"):
    """`step`: the steps that are done before it strikes. Two faults of a plan that are equal strike once."""

    step: int = 0
    verb: ClassVar[str]

    def __post_init__(self) -> None:
        for field, (can_be, fix) in _CHECKS.items():
            if field in self.__struct_fields__ and not can_be(value := getattr(self, field)):
                raise BadFaultError(f"{type(self).__name__}.{field} = {value!r}: {fix}")

    def __str__(self) -> str:
        return f"{self.verb.format(self)} at step {self.step}"


class RankFault(Fault, frozen=True, kw_only=True):
    """Of the process that has `rank`, at `place` of the training loop."""

    rank: int
    place: Place = "forward"

    def __str__(self) -> str:
        return f"rank {self.rank} {self.verb} in the {self.place} of step {self.step}"


class Kill(RankFault, frozen=True, kw_only=True, tag="kill"):
    """The process ends by a signal."""

    signal: str = "SIGKILL"
    verb = "was killed"


class Stop(RankFault, frozen=True, kw_only=True, tag="stop"):
    """SIGSTOP: all threads stop, and go on after `for_s` seconds; None: never."""

    for_s: float | None = None
    verb = "was stopped"


class Hang(Stop, frozen=True, kw_only=True, tag="hang"):
    """The main thread goes no further for `for_s` seconds (None: for good): in a loop in Python, or in a call of a C
    function, which keeps the interpreter's lock."""

    inside: Literal["python", "c"] = "python"
    verb = "hung"


class Fail(RankFault, frozen=True, kw_only=True, tag="fail"):
    """An exception, by the name of its class in Python; `SystemExit` has the exit code as its `message`."""

    error: str = "RuntimeError"
    message: str = "a planted fault"
    verb = "failed"


class Call(RankFault, frozen=True, kw_only=True, tag="call"):
    """A function of the script's own is called, without arguments: 'module:function'; '__main__' is the script."""

    function: str
    verb = "called a function"


class LoseNode(Fault, frozen=True, kw_only=True, tag="lose_node"):
    """All processes of a node of a `Cluster` are killed at once, its daemon among them; after `for_s` seconds (None:
    never) it is started anew."""

    node: str
    for_s: float | None = None
    verb = "{0.node} was lost"


class StopEtcd(Fault, frozen=True, kw_only=True, tag="stop_etcd"):
    """etcd answers nothing for `for_s` seconds; connections stay."""

    for_s: float
    verb = "etcd was stopped"


class WipeEtcd(Fault, frozen=True, kw_only=True, tag="wipe_etcd"):
    """etcd ends, loses its data and is started anew."""

    verb = "etcd lost its data"


class FillDisk(Fault, frozen=True, kw_only=True, tag="fill_disk"):
    """The file system of `folder`, which must be a mount of its own, has no byte left for `for_s` seconds (None: until
    the cluster is left). The file that fills it has no name, and is gone with the process of the test."""

    folder: str
    for_s: float | None = None
    verb = "{0.folder} was full"


class DropLink(Fault, frozen=True, kw_only=True, tag="drop_link"):
    """The connections that two ranks have with each other carry nothing for `for_s` seconds (None: until the cluster
    is left): their packets are dropped. Those of other processes, and those made later, are not."""

    rank: int
    other: int
    for_s: float | None = None
    verb = "ranks {0.rank} and {0.other} were cut off from each other"


InProcess = Kill | Stop | Hang | Fail | Call
AnyFault = InProcess | LoseNode | StopEtcd | WipeEtcd | FillDisk | DropLink


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
