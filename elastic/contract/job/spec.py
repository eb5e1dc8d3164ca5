"""A job's description: the fields of ``job.toml``, validated. Unknown or wrong fields are rejected by name."""

from __future__ import annotations

import difflib
import functools
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec

from elastic.contract.keys import check_name

from .field_words import explained
from .spec_values import MAX_NODES, MAX_WORKERS_PER_NODE, NODES, complaint, environment_complaint

MEMORY = re.compile(r"[1-9][0-9]{0,14}[KMGT]?|[1-9][0-9]?%|100%")
"""A size in bytes, with a unit of 1024, or a share of the machine's memory, as systemd takes them."""
MAX_MESSAGE_CHARS = 1_000


class InvalidSpec(ValueError):
    """A job's description is wrong. The message names the field, the value and what is allowed."""

    def __init__(self, message: str) -> None:
        if len(message) > MAX_MESSAGE_CHARS:  # a value may be as long as a request
            message = f"{message[: MAX_MESSAGE_CHARS // 2]} … {message[-MAX_MESSAGE_CHARS // 2 :]}"
        super().__init__(message)


class SpecTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Checkpoint(SpecTable, frozen=True, kw_only=True):
    dir: str = ""
    """Folder for checkpoints; empty: none are written. Give every node the same shared folder where there is one."""

    every_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Steps between checkpoints; 0: not by steps."""

    every_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds between checkpoints; 0: not by time. With neither, the interval is 'auto' (Young/Daly)."""

    keep: Annotated[int, msgspec.Meta(ge=1)] = 3
    """How many of the newest good checkpoints are kept."""

    keep_every_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """A checkpoint whose step is a multiple of this is kept forever; 0: none."""

    shared: bool = True
    """Whether `dir` is one folder for all nodes. False: each node keeps a complete copy of its own."""

    remote: str = ""
    """An fsspec URL to copy finished checkpoints to; empty: none. If `shared` is false the leader's node copies its
    own: a checkpoint whose save fails there is not copied."""


class Restarts(SpecTable, frozen=True, kw_only=True):
    budget: Annotated[int, msgspec.Meta(ge=0, le=5000)] = 20
    """Failures allowed within `window_s`; one more stops the job. Membership changes never count. At most 5000: all
    failures that count are kept in one record."""

    window_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """Length of the sliding window of `budget`."""

    same_failure: Annotated[int, msgspec.Meta(ge=1)] = 3
    """The same failure at the same step this many times is a crash loop: the job is stopped with it."""

    backoff_s: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    """First pause before a slot is tried again after a repeated failure; doubles, with jitter."""

    backoff_max_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """Longest such pause."""


class Hang(SpecTable, frozen=True, kw_only=True):
    floor_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """No worker counts as hung sooner than this after its last sign of progress; a stopped process does after it."""

    ceiling_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """A worker without progress that another rank waits for is hung after this long, whatever its step time. It is also
    the patience before the first commit of a generation and in a save, and that of a job's only rank."""

    factor: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """Between floor and ceiling, the patience is this many of the job's own recent step times."""


class Limits(SpecTable, frozen=True, kw_only=True):
    memory: str = ""
    """Most memory of the job on each node, agent and snapshots included: '64G', or '80%' of the machine's. Beyond it
    the kernel kills a worker. Empty: what elasticd.slice leaves. Limits hold where elasticd is a service of systemd."""

    cpu: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Most CPU time of the job on each node, in cores; 0: no limit."""

    tasks: Annotated[int, msgspec.Meta(ge=64, le=4_194_304)] = 16_384
    """Most processes and threads of the job on each node."""


class Debug(SpecTable, frozen=True, kw_only=True):
    gradients_every_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Steps between samples of the gradients' and weights' norms, per parameter and rank; 0: on request only
    (`elasticctl debug`). Each one waits for a GPU once."""

    window_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Seconds over which the times of steps are averaged, at least; a rank that is slower than the others in three such
    windows, one after the other, is named in `status` and `top`."""

    layers: bool = False
    """Look at each layer's output for values that are not finite, so that the incident of a loss that is NaN names the
    first such layer and its samples. Costs a pass over every output. Without it this is done only while steps are done
    again after such a loss (`on_bad_numbers` = 'rollback')."""


class JobSpec(SpecTable, frozen=True, kw_only=True):
    name: str
    """Name of the job: a-z 0-9 . _ -"""

    script: str = ""
    """Path of the training script. Either this, `module` or `program`."""

    module: str = ""
    """Module to run, as ``python -m`` would. Either this, `script` or `program`."""

    program: str = ""
    """Program to run instead of a Python script, such as a shell script: a path, or a name on the workers' PATH. Either
    this, `script` or `module`."""

    args: tuple[str, ...] = ()
    """Arguments of the script or program."""

    python: str = ""
    """Interpreter with torch and elastic; empty: the daemon's own."""

    workdir: str = ""
    """Working directory of the workers; empty: where the job was submitted."""

    env: dict[str, str] = {}
    """Environment added for the workers. It is stored in etcd: for secrets use `env_file`."""

    env_file: str = ""
    """File with lines NAME=VALUE, added to the workers' environment; `env` comes after it. Read on each node when the
    job's agent starts there, so its values stand neither in etcd nor in `status`."""

    nodes: str = "1:1"
    """How many nodes, 'min:max' or one number."""

    spare_nodes: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Nodes beyond the maximum of `nodes` that the job holds ready, as far as there are any: with an agent and workers
    that have done their imports (and `setup`, where it needs no group), but no ranks. One takes the place of a lost or
    drained node at once, which else waits for the loss to be sure, and for an agent and workers to start."""

    workers_per_node: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS_PER_NODE)] | Literal["auto"] = "auto"
    """Workers on each node; 'auto': one per GPU, else one per CPU slot."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Process group backend; 'auto': nccl on nodes with GPUs if the cluster has any, else gloo."""

    forming: Literal["new", "reconfigure"] = "new"
    """How the ranks form a process group again: 'new': each makes a new one. 'reconfigure': torch connects the one that
    the rank has anew, and the group object stays the same; gloo only, and torch 2.14 or newer, which calls it
    experimental."""

    preload: tuple[str, ...] = ()
    """Modules imported in advance by the zygote, so that a new worker has them at once. Modules that start CUDA or
    threads are left out again."""

    preload_skip: tuple[str, ...] = ()
    """Modules that the zygote does not import in advance though the script begins with their import; '*': all."""

    standby: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0
    """Workers per node kept ready, with imports and `setup` done but without a rank, to replace a dead worker."""

    on_loss: Literal["wait", "shrink"] = "wait"
    """After the loss of a worker: 'wait' for its replacement, or 'shrink': go on without it until that is ready."""

    join_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """First generation only: once the minimum of nodes is ready, how long to wait for more, up to the maximum."""

    stop_grace_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """From SIGTERM to SIGKILL when the job is stopped."""

    exit_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    """From the end of training until a worker's process must have exited: the rest of the script, its threads, its
    atexit handlers. A process that takes longer is killed, which is an incident; the job has then failed if its script
    had not come to its end: raise it for a long last evaluation or upload. A worker whose script has failed gets
    `stop_grace_s`, since the other ranks wait for its replacement."""

    log_limit_mb: Annotated[float, msgspec.Meta(gt=0)] = 64.0
    """Size limit on disk of one worker's log, and of the agent's own; beyond it the middle is dropped, and the
    beginning and the end stay."""

    on_bad_numbers: Literal["stop", "rollback", "ignore"] = "stop"
    """Reaction to a loss that is NaN or infinite, or to replicas that have drifted apart."""

    fingerprint_every_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Steps between comparisons of the replicas' weights; 0: never."""

    tensorboard: str = ""
    """Folder for what `job.log` gives: `tensorboard`/`name` gets TensorBoard's event files and metrics.jsonl, written
    on the node of rank 0. Give all nodes the same shared folder; otherwise each has the part that it wrote. Empty: no
    files."""

    snapshots: Literal["auto", "required", "off"] = "auto"
    """'auto': each node keeps the newest state in its agent's memory, in two buffers, as often as costs less than
    1 % of the training time, with or without checkpoints; a sharded job's nodes keep copies of each other's parts as
    well. A node without memory for that goes without. 'required': the job ends there, at its first step. 'off': only
    what is being written to a checkpoint."""

    checkpoint: Checkpoint = Checkpoint()
    restarts: Restarts = Restarts()
    hang: Hang = Hang()
    limits: Limits = Limits()
    debug: Debug = Debug()

    @property
    def min_nodes(self) -> int:
        return node_range(self.nodes)[0]

    @property
    def max_nodes(self) -> int:
        return node_range(self.nodes)[1]


@functools.lru_cache
def node_range(text: str) -> tuple[int, int]:
    """'2:4' -> (2, 4); '3' -> (3, 3). Raises InvalidSpec."""
    if not NODES.fullmatch(text):
        raise InvalidSpec(f"nodes = {text!r}: write 'min:max', as in '2:4', or one number")
    low, _, high = text.partition(":")
    least, most = int(low), int(high or low)
    if not 1 <= least <= most <= MAX_NODES:
        raise InvalidSpec(f"nodes = {text!r}: needs 1 <= min <= max <= {MAX_NODES}")
    return least, most


_CHECKS: tuple[tuple[Callable[[JobSpec], object], Callable[[JobSpec], str]], ...] = (
    (lambda s: sum(map(bool, (s.script, s.module, s.program))) != 1,
     lambda s: f"script = {s.script!r}, module = {s.module!r}, program = {s.program!r}: give exactly one of them"),
    (complaint, complaint),
    (lambda s: s.limits.memory and not MEMORY.fullmatch(s.limits.memory),
     lambda s: f"limits.memory = {s.limits.memory!r}: write a size, as in '64G', or a share, as in '80%'"),
    (lambda s: 0 < s.limits.cpu < 0.01, lambda s: f"limits.cpu = {s.limits.cpu}: cores, from 0.01; 0: no limit"),
    (lambda s: s.hang.floor_s > s.hang.ceiling_s,
     lambda s: f"hang.floor_s = {s.hang.floor_s} is above hang.ceiling_s = {s.hang.ceiling_s}"),
    (lambda s: s.on_bad_numbers == "rollback" and not s.checkpoint.dir,
     lambda s: "on_bad_numbers = 'rollback': needs checkpoint.dir, there is nothing else to go back to"),
    (lambda s: s.forming == "reconfigure" and s.backend == "nccl",
     lambda s: "forming = 'reconfigure': needs backend 'gloo'; with nccl each group is made anew"),
    (lambda s: s.checkpoint.every_steps and s.checkpoint.every_s,
     lambda s: "checkpoint.every_steps and checkpoint.every_s: give one of them, or neither for 'auto'"),
)  # fmt: skip
"""(what is wrong, in which words), beyond the types and bounds of single fields: the first that holds is reported."""


def parse_job(raw: Mapping[str, Any]) -> JobSpec:
    """Validate a job's description (as read from TOML or JSON). Raises InvalidSpec."""
    refuse_unknown(JobSpec, raw)
    if isinstance(env := raw.get("env"), Mapping) and (wrong := environment_complaint(env)):
        raise InvalidSpec(wrong)
    try:
        spec = msgspec.convert(raw, JobSpec)
        check_name("name", spec.name)
    except msgspec.ValidationError as error:
        raise InvalidSpec(explained(error, JobSpec, raw)) from None
    except ValueError as error:
        raise InvalidSpec(str(error)) from None
    node_range(spec.nodes)
    for fails, words in _CHECKS:
        if fails(spec):
            raise InvalidSpec(words(spec))
    return spec


def _nearest(name: str, known: Collection[str]) -> list[str]:
    """The field that is most like `name`: one of which it is the beginning, or a word, before all others."""
    longer = [field for field in known if len(name) > 2 and f"_{name}" in f"_{field}"]
    return difflib.get_close_matches(name, longer, n=1, cutoff=0.0) or difflib.get_close_matches(name, known, n=1)


def refuse_unknown(table: type[msgspec.Struct], raw: Mapping[str, Any], path: str = "") -> None:
    """Raise InvalidSpec for a field that `table` does not have, naming the nearest one."""
    hints = typing.get_type_hints(table)
    kinds = {f.encode_name: hints[f.name] for f in msgspec.structs.fields(table)}
    for name, value in raw.items():
        if name not in kinds:
            near = _nearest(name, kinds)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(kinds))}"
            raise InvalidSpec(f"{path}{name} = {value!r}: no such field{hint}")
        kind = kinds[name]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and not isinstance(kind, types.GenericAlias):
            if not isinstance(value, Mapping):
                raise InvalidSpec(f"{path}{name} = {value!r}: expected a table [{path}{name}]")
            refuse_unknown(kind, value, f"{path}{name}.")
