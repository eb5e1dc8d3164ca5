"""Messages between an agent and its workers, over a socket pair (SOCK_SEQPACKET, one JSON message per packet).

File descriptors are passed with SCM_RIGHTS where a message says so. Every message about a group names its generation:
one of an older generation than the receiver's is stale and is ignored.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from elastic.contract.origin import Origin
from elastic.contract.records.reasons import Text

MAX_MESSAGE_BYTES = 192 * 1024
"""Below the default socket buffer (212,992), so that a packet never fails with EMSGSIZE."""


class TooLarge(ValueError):
    """A message has more than MAX_MESSAGE_BYTES."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    pass


# ── agent → worker ──────────────────────────────────────────────────────────────────────────────────────────


class ToWorker(Message, frozen=True, kw_only=True):
    pass


class Form(ToWorker, frozen=True, kw_only=True):
    """Join generation `generation` as `rank`. Sent to a worker without a group."""

    generation: int
    rank: int
    world_size: int
    group_rank: int
    group_world_size: int
    local_rank: int
    """Position among this node's ranks; not the slot, which determines the device."""
    local_world_size: int
    store_host: str
    store_port: int
    store_secret: str = ""
    """See `GenerationHead`."""
    restore: str = "newest"
    timeout_s: float = 600.0
    """Timeout of the process group's collectives."""
    saved_step: int = 0
    """The newest step for which the job is known to have had a checkpoint; 0: none."""
    saved_generation: int = 0
    """The generation of that checkpoint."""
    reached: tuple[int, int] = (0, 0)
    """(generation, step) of the newest commit known to the agent, perhaps of a worker that has died."""


class AbortGroup(ToWorker, frozen=True, kw_only=True):
    """The generation is broken: abort its group now, whatever is in flight, and answer GroupClosed."""

    generation: int
    why: Text


class StopAtStep(ToWorker, frozen=True, kw_only=True):
    """A planned change: leave the group of `generation` once `at_step` steps are committed, and answer GroupClosed."""

    generation: int
    at_step: int
    why: Text


class Assign(ToWorker, frozen=True, kw_only=True):
    """To a standby: take this slot (and so its device)."""

    slot: int


class SaveSoon(ToWorker, frozen=True, kw_only=True):
    """Take a checkpoint at the next step that all ranks agree on (rank 0 decides; the others ignore it)."""

    stop: bool = False
    """All ranks stop at the step that is saved, and answer GroupClosed."""


class Arena(ToWorker, frozen=True, kw_only=True):
    """One of the shared-memory buffers (its descriptor is passed) in answer to NeedArena; 0 bytes: no memory."""

    nbytes: int
    request: int = 0
    """As in the NeedArena that this answers."""
    buffer: int = 0
    """Which of them."""
    guest: bool = False
    """As in the NeedArena that this answers."""
    busy: bool = False
    """The previous worker filled it, and it is still being written to disk: a SaveResult will free it."""


class SaveResult(ToWorker, frozen=True, kw_only=True):
    """A checkpoint is durable, or failed; frees the buffer it was written from."""

    step: int
    buffer: int
    error: str = ""
    seconds: float = 0.0


class InMemorySnapshot(ToWorker, frozen=True, kw_only=True):
    """Answer to RequestSnapshot, once pending writes are on disk. Passes the descriptors of the arenas that together
    hold the newest complete snapshot, none if this node does not have all of it; or of all complete arenas."""

    generation: int
    arenas: int = 0
    """Number of descriptors: the kernel drops those for which the receiver has no room."""


class SampleGradients(ToWorker, frozen=True, kw_only=True):
    """Sample the gradients and weights of step `at_step`, or of the next one."""

    at_step: int


class Finish(ToWorker, frozen=True, kw_only=True):
    """The job has succeeded on all nodes: end with exit code 0."""


# ── worker → agent ──────────────────────────────────────────────────────────────────────────────────────────


class FromWorker(Message, frozen=True, kw_only=True):
    pass


class CopyState(StrEnum):
    """How a rank's part of a sharded state is protected against the loss of its node; the worst is the last."""

    REPLICAS = "replicas"
    """Ranks of another node have the same part."""
    COPIED = "copied"
    """Another node has a copy of its snapshots."""
    SENDING = "sending"
    """It has none yet."""
    NO_NODE = "no node"
    """There is no other node, or none with a rank in this one's place."""
    NO_MEMORY = "no memory"
    """The other node has no memory for a copy."""
    UNREACHABLE = "unreachable"
    """There is no connection to the other node."""


class Copies(msgspec.Struct, frozen=True):
    """How all ranks' parts are protected."""

    state: CopyState
    """The worst of all ranks."""
    group_rank: int
    """A node with such a rank."""
    step: int
    """The newest of which there is a copy of each part that needs one; -1: none."""


class Managed(FromWorker, frozen=True, kw_only=True):
    """The script has called `elastic.run`: from now on this worker waits for Form, and keeps its process."""


class Ready(FromWorker, frozen=True, kw_only=True):
    """Imports and `setup` are done; waiting for Form."""


class NeedArena(FromWorker, frozen=True, kw_only=True):
    """This worker's part of a snapshot takes `nbytes`: create its buffers of that size."""

    nbytes: int
    request: int = 0
    """Number of the request: an answer to an earlier one, which came too late, is told by it."""
    optional: bool = False
    """The worker can do with less: create them only if the node has plenty of memory."""
    guest: bool = False
    """For copies of the part of a rank of another node; see `worker/snapshots/buddy.py`."""


class RequestSnapshot(FromWorker, frozen=True, kw_only=True):
    """No rank has live state: send what is left of the snapshots (InMemorySnapshot)."""

    generation: int
    saved: bool = False
    """The job goes back to a saved state: snapshots that were only for memory are dropped."""
    own_parts: bool = False
    """Each rank restores a part of its own: all complete arenas of the node are sent."""


class Formed(FromWorker, frozen=True, kw_only=True):
    """The process group has been initialised."""

    generation: int


class Synced(FromWorker, frozen=True, kw_only=True):
    """This rank has the state; it enters `train` at `step`."""

    generation: int
    step: int
    origin: Origin
    source: str
    """The same in words, as 'checkpoint step 40 at PATH'."""
    reached: int = 0
    """The newest step known to any rank, or to any rank's agent, to have been committed before this generation."""


class Stepping(FromWorker, frozen=True, kw_only=True):
    """The first commit of this generation on this rank."""

    generation: int
    step: int


class GroupClosed(FromWorker, frozen=True, kw_only=True):
    """The group is closed; process and state are kept. Waiting for Form."""

    generation: int
    step: int
    clean: bool
    """False: the state was being changed when the group was aborted, and must not be a source."""
    between: bool = False
    """This rank has left between two steps: it took no part in one after `step`, so no rank can have committed that."""
    stepless_s: float | None = None
    """For how long it has committed none; None: it has committed none in this generation."""


class CollectiveFailed(FromWorker, frozen=True, kw_only=True):
    """A collective failed here without an order to abort. Implies GroupClosed."""

    generation: int
    step: int
    clean: bool
    error: Text
    altered: str = ""
    """The key of a value in the generation's store that this rank has refused; empty: it has refused none."""
    stepless_s: float | None = None
    """As in GroupClosed."""


class Filled(FromWorker, frozen=True, kw_only=True):
    """This rank's part of the snapshot of `step` is complete in buffer `buffer`."""

    generation: int
    step: int
    buffer: int
    nbytes: int
    shard: int
    shards: int
    stall_s: float
    interval: str = ""
    """The checkpoint interval, in words."""
    save: bool = True
    """Write this rank's shard to disk. False: the snapshot only stays in memory."""
    kept: str = ""
    """The interval of snapshots that stay in memory, in words."""
    skipped: int = 0
    """Checkpoints that were due while the previous one was still being written, so far in this worker's lifetime."""
    copies: Copies | None = None
    """As of the snapshot before; None: the state is not sharded."""


class BadNumbers(FromWorker, frozen=True, kw_only=True):
    """Non-finite loss (NaN or infinite) on this rank, or replicas that drifted apart."""

    generation: int
    step: int
    kind: str
    detail: str
    ranks: tuple[int, ...] = ()


class LoggedRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the script logged in one step."""

    step: int
    wall_s: float
    values: dict[str, float]
    not_finite: dict[str, str] = {}
    """Those of `values` for which JSON has no number, as text: in messages and files alone."""

    def as_json(self) -> LoggedRow:
        odd = {name: str(value) for name, value in self.values.items() if not math.isfinite(value)}
        values = {name: value for name, value in self.values.items() if name not in odd}
        return LoggedRow(step=self.step, wall_s=self.wall_s, values=values, not_finite=odd) if odd else self

    def from_json(self) -> LoggedRow:
        odd = {name: float(text) for name, text in self.not_finite.items()}
        return LoggedRow(step=self.step, wall_s=self.wall_s, values=self.values | odd) if odd else self


class Logged(FromWorker, frozen=True, kw_only=True):
    """Rows of `job.log`, in the order of their steps; from rank 0 only."""

    generation: int
    begun: int
    """Steps that were committed when `generation` began: later ones that were logged before are done again."""
    rows: tuple[LoggedRow, ...]
    repeated: bool = False
    """Of the generations before: rank 0 of that time may have passed them on already."""


class GradientRow(msgspec.Struct, frozen=True, array_like=True):
    """One parameter in one step. Norms are 2-norms; None: there is none, or it is not finite."""

    name: str
    own: float | None
    """Of the gradient over this rank's samples, before it is summed."""
    mean: float | None
    """Of the gradient that the optimizer got."""
    weight: float | None
    trained: bool
    """`requires_grad`."""
    bad: bool = False
    """A gradient is not finite."""


class GradientSample(FromWorker, frozen=True, kw_only=True):
    """A sample of one step; a long one in several parts."""

    generation: int
    step: int
    rank: int
    part: int
    parts: int
    rows: tuple[GradientRow, ...]
    gradients: str
    """Digest of this rank's own gradients; '' if it has none."""
    weights: str
    """Digest of the weights after the step."""


class Done(FromWorker, frozen=True, kw_only=True):
    """`train` has returned on all ranks at `step`; the worker stays alive as a source of state until Finish."""

    generation: int
    step: int


class ScriptEnded(FromWorker, frozen=True, kw_only=True):
    """The script has ended with exit code `code`; threads and atexit handlers of its process may still run."""

    code: int
    misuse: str = ""
    """What elastic has refused, if `elastic.run` ended with that."""
    terminated: bool = False
    """The script has handled a SIGTERM."""


# ── agent ⇄ zygote ──────────────────────────────────────────────────────────────────────────────────────────


PROGRAM = "--"
"""First word of a worker's command line that is no Python script: the program follows."""


class Preload(msgspec.Struct, frozen=True, kw_only=True):
    """What a zygote imports for its job besides torch."""

    modules: tuple[str, ...] = ()
    """Those that the job names."""
    argv: tuple[str, ...] = ()
    """Command line of the workers: the imports at the top of its script are included."""
    workdir: str = ""
    skip: tuple[str, ...] = ()
    """Modules of the script not to be imported; '*': none of them."""

    def __bool__(self) -> bool:
        return bool(self.modules or self.argv)


class Fork(Message, frozen=True, kw_only=True):
    """Fork a worker. Descriptors: channel, beat page, log (stdout and stderr)."""

    ticket: int
    env: dict[str, str]
    argv: tuple[str, ...]
    """Script path, ``-m module`` or PROGRAM and a program, then its arguments."""
    workdir: str


class Forked(Message, frozen=True, kw_only=True):
    ticket: int
    pid: int


class ZygoteReady(Message, frozen=True, kw_only=True):
    seconds: float
    preloaded: tuple[str, ...]
    """Modules that it has imported for the job."""
    problems: tuple[str, ...] = ()
    """Modules that could not be preloaded, with the reason; workers will import (and fail on) them themselves."""
    unfit: str = ""
    """Why no worker may be forked from it; empty: it is fit."""


class ForkRefused(Message, frozen=True, kw_only=True):
    """The zygote has become unfit to fork: this request has produced no worker, and later ones will not either."""

    ticket: int
    why: str


ToZygote = Fork
FromZygote = Forked | ForkRefused | ZygoteReady


def _union(kind: type[Message]) -> Any:
    """Of its subclasses, which msgspec tells apart by their tags."""
    return functools.reduce(operator.or_, kind.__subclasses__())


_encoder = msgspec.json.Encoder()
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What these raise."""
to_worker: Callable[[bytes], ToWorker] = msgspec.json.Decoder(_union(ToWorker)).decode
from_worker: Callable[[bytes], FromWorker] = msgspec.json.Decoder(_union(FromWorker)).decode
to_zygote: Callable[[bytes], ToZygote] = msgspec.json.Decoder(ToZygote).decode
from_zygote: Callable[[bytes], FromZygote] = msgspec.json.Decoder[FromZygote](FromZygote).decode
to_preload: Callable[[bytes], Preload] = msgspec.json.Decoder(Preload).decode
encode_preload: Callable[[Preload], bytes] = _encoder.encode


def encode(message: Message) -> bytes:
    """Raises TooLarge for a message that would not fit in one packet."""
    raw = _encoder.encode(message)
    if len(raw) > MAX_MESSAGE_BYTES:
        fork = isinstance(message, Fork)
        what = "the job's arguments and environment take" if fork else f"{type(message).__name__} takes"
        raise TooLarge(f"{what} {len(raw)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    return raw
