"""What a job is: the fields of ``job.toml``, checked. Unknown or wrong fields are refused by name."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from .keys import check_name


class BadSpec(ValueError):
    """A job's description is wrong. The message names the field, the value and what is allowed."""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Checkpoint(Table, frozen=True, kw_only=True):
    dir: str = ""
    """Folder for checkpoints; empty: none are written. Give every node the same shared folder where there is one."""

    every_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Steps between checkpoints; 0: not by steps."""

    every_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds between checkpoints; 0: not by time. With neither, the interval is 'auto' (Young/Daly)."""

    keep: Annotated[int, msgspec.Meta(ge=1)] = 3
    """How many of the newest good checkpoints stay."""

    keep_every_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """A checkpoint whose step is a multiple of this stays for ever; 0: none."""

    shared: bool = True
    """Whether `dir` is one folder for all nodes. False: each node keeps a complete copy of its own."""

    remote: str = ""
    """An fsspec URL to copy finished checkpoints to; empty: none."""


class Restarts(Table, frozen=True, kw_only=True):
    budget: Annotated[int, msgspec.Meta(ge=0, le=5000)] = 20
    """Failures allowed within `window_s`; one more stops the job. Membership changes are never charged. At most 5000:
    all that count are kept in one record."""

    window_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """Length of the sliding window of `budget`."""

    same_failure: Annotated[int, msgspec.Meta(ge=1)] = 3
    """The same failure at the same step this many times is a crash loop: the job is stopped with it."""

    backoff_s: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    """First pause before a slot is tried again after a repeated failure; doubles, with jitter."""

    backoff_max_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """Longest such pause."""


class Hang(Table, frozen=True, kw_only=True):
    floor_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """No worker is called hung sooner than this after its last sign of progress."""

    ceiling_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """A worker without progress for this long is hung, whatever its step time was; also before the first step."""

    factor: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """Between floor and ceiling: this many of the job's own recent step times."""


class JobSpec(Table, frozen=True, kw_only=True):
    name: str
    """What the job is called: a-z 0-9 . _ -"""

    script: str = ""
    """Path of the training script. Either this or `module`."""

    module: str = ""
    """Module to run, as ``python -m`` would. Either this or `script`."""

    args: tuple[str, ...] = ()
    """Arguments of the script."""

    python: str = ""
    """Interpreter with torch and elastic; empty: the daemon's own."""

    workdir: str = ""
    """Working directory of the workers; empty: where the job was submitted."""

    env: dict[str, str] = {}
    """Environment added for the workers."""

    nodes: str = "1:1"
    """How many nodes, 'min:max' or one number."""

    workers_per_node: int | Literal["auto"] = "auto"
    """Workers on each node; 'auto': one per GPU, else one per CPU slot."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Process group backend; 'auto': nccl where there are GPUs, else gloo."""

    preload: tuple[str, ...] = ()
    """Modules imported ahead in the zygote, so that a new worker has them at once. Must not start CUDA or threads."""

    standby: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0
    """Workers per node kept ready through imports and `setup`, without a rank, to take a dead one's place."""

    on_loss: Literal["wait", "shrink"] = "wait"
    """After a loss: 'wait' for the replacement, or 'shrink': step on without it and take it in when it is ready."""

    join_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """First forming only: with min nodes there, how long to wait for more up to max."""

    stop_grace_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """From SIGTERM to SIGKILL when the job is stopped."""

    log_limit_mb: Annotated[float, msgspec.Meta(gt=0)] = 64.0
    """What one worker's log may take on disk; above that its middle goes: the beginning and the newest lines stay."""

    on_bad_numbers: Literal["stop", "rollback", "ignore"] = "stop"
    """When the loss is NaN or infinite, or replicas drifted apart."""

    fingerprint_every_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Steps between comparisons of the replicas' weights; 0: never."""

    checkpoint: Checkpoint = Checkpoint()
    restarts: Restarts = Restarts()
    hang: Hang = Hang()

    @property
    def min_nodes(self) -> int:
        return node_range(self.nodes)[0]

    @property
    def max_nodes(self) -> int:
        return node_range(self.nodes)[1]


def node_range(text: str) -> tuple[int, int]:
    """'2:4' -> (2, 4); '3' -> (3, 3). Raises BadSpec."""
    low, _, high = text.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        raise BadSpec(f"nodes = {text!r}: write 'min:max', as in '2:4', or one number") from None
    if not 1 <= least <= most:
        raise BadSpec(f"nodes = {text!r}: needs 1 <= min <= max")
    return least, most


def parse_job(raw: Mapping[str, Any]) -> JobSpec:
    """Check a job's description (as read from TOML or JSON). Raises BadSpec."""
    refuse_unknown(JobSpec, raw)
    try:
        spec = msgspec.convert(raw, JobSpec)
    except msgspec.ValidationError as error:
        raise BadSpec(_explain(error, raw)) from None
    if endless := _not_finite(spec):
        raise BadSpec(f"{endless}: a finite number is needed; a very large one does the same")
    try:
        check_name("name", spec.name)
    except ValueError as error:
        raise BadSpec(str(error)) from None
    if bool(spec.script) == bool(spec.module):
        raise BadSpec(f"script = {spec.script!r}, module = {spec.module!r}: give exactly one of them")
    node_range(spec.nodes)
    if isinstance(spec.workers_per_node, int) and spec.workers_per_node < 1:
        raise BadSpec(f"workers_per_node = {spec.workers_per_node}: a number from 1, or 'auto'")
    if spec.hang.floor_s > spec.hang.ceiling_s:
        raise BadSpec(f"hang.floor_s = {spec.hang.floor_s} is above hang.ceiling_s = {spec.hang.ceiling_s}")
    if spec.on_bad_numbers == "rollback" and not spec.checkpoint.dir:
        raise BadSpec("on_bad_numbers = 'rollback': needs checkpoint.dir, there is nothing else to go back to")
    if spec.checkpoint.every_steps and spec.checkpoint.every_s:
        raise BadSpec("checkpoint.every_steps and checkpoint.every_s: give one of them, or neither for 'auto'")
    return spec


def refuse_unknown(table: type[msgspec.Struct], raw: Mapping[str, Any], path: str = "") -> None:
    """Raise BadSpec for a field that `table` does not have, naming the nearest one."""
    hints = typing.get_type_hints(table)
    known = {f.encode_name: hints[f.name] for f in msgspec.structs.fields(table)}
    for name, value in raw.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
            raise BadSpec(f"{path}{name} = {value!r}: no such field{hint}")
        kind = known[name]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and not isinstance(kind, types.GenericAlias):
            if not isinstance(value, Mapping):
                raise BadSpec(f"{path}{name} = {value!r}: expected a table [{path}{name}]")
            refuse_unknown(kind, value, f"{path}{name}.")


def _not_finite(table: msgspec.Struct, path: str = "") -> str:
    """The first field that is infinite or no number, as 'hang.ceiling_s = inf'; '' when there is none. Records are
    JSON, which has neither: nobody could read such a job back."""
    for name in table.__struct_fields__:
        value = getattr(table, name)
        if isinstance(value, msgspec.Struct):
            if found := _not_finite(value, f"{path}{name}."):
                return found
        elif isinstance(value, float) and not math.isfinite(value):
            return f"{path}{name} = {value}"
    return ""


def _explain(error: msgspec.ValidationError, raw: Mapping[str, Any]) -> str:
    """msgspec says 'Expected `int`, got `str` - at `$.checkpoint.keep`'; say it with the value."""
    what, _, where = str(error).partition(" - at `$.")
    if not where:
        return str(error)
    path = where.rstrip("`")
    value: Any = raw
    for part in path.replace("[...]", "").split("."):
        value = value.get(part) if isinstance(value, Mapping) else value
    return f"{path} = {value!r}: {what[0].lower()}{what[1:]}"
