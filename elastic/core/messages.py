"""What an agent and its workers say to each other over a socket pair (SOCK_SEQPACKET, one JSON message a packet).

Descriptors ride along by SCM_RIGHTS where a message says so. Every message about a group names its generation:
one that names an older generation than the receiver knows is stale and is ignored.
"""

from __future__ import annotations

import msgspec

MAX_MESSAGE_BYTES = 192 * 1024
"""Below the default socket buffer (212,992), so that a packet never fails with EMSGSIZE."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    pass


# ── agent → worker ──────────────────────────────────────────────────────────────────────────────────────────


class Form(Message, frozen=True, kw_only=True):
    """Join generation `generation` as `rank`. Sent to a worker without a group."""

    generation: int
    rank: int
    world_size: int
    group_rank: int
    group_world_size: int
    local_rank: int
    """Position among this node's ranks; the slot (and so the device) is another thing."""
    local_world_size: int
    store_host: str
    store_port: int
    restore: str = "newest"
    timeout_s: float = 600.0
    """Time-out of the process group's collectives."""
    saved_step: int = 0
    """The newest step that a checkpoint of the job is known to have held; 0: none."""
    reached: tuple[int, int] = (0, 0)
    """(generation, step) of the newest commit that the agent knows of, of a worker that has died, say."""


class AbortGroup(Message, frozen=True, kw_only=True):
    """The generation is broken: abort its group now, whatever is in flight, and say GroupClosed."""

    generation: int
    why: str


class StopAtStep(Message, frozen=True, kw_only=True):
    """A planned change: leave generation `generation` once `at_step` steps are committed, and say GroupClosed."""

    generation: int
    at_step: int
    why: str


class Assign(Message, frozen=True, kw_only=True):
    """To a standby: take this slot (and so its device)."""

    slot: int


class SaveSoon(Message, frozen=True, kw_only=True):
    """Take a checkpoint at the next step that all ranks agree on (rank 0 decides; the others ignore it)."""

    reason: str = "asked"
    stop: bool = False
    """All ranks stop at the step that is saved, and say GroupClosed."""


class Arena(Message, frozen=True, kw_only=True):
    """One of two shared-memory buffers (its descriptor rides along) in answer to NeedArena; 0 bytes: no memory."""

    nbytes: int
    busy: bool = False
    """The worker before this one filled it, and it is still being written to disk: a Saved will free it."""


class SaveResult(Message, frozen=True, kw_only=True):
    """A checkpoint is durable, or failed; frees the buffer it was written from."""

    step: int
    buffer: int
    error: str = ""
    seconds: float = 0.0


class InMemorySnapshot(Message, frozen=True, kw_only=True):
    """Answer to RequestSnapshot, once what was being written is on disk: descriptors of the arenas that together hold
    the newest whole snapshot ride along; none when this node does not have all of it."""

    generation: int


class Finish(Message, frozen=True, kw_only=True):
    """The job is over for everybody: end with exit code 0."""


ToWorker = Form | AbortGroup | StopAtStep | Assign | SaveSoon | Arena | SaveResult | InMemorySnapshot | Finish


# ── worker → agent ──────────────────────────────────────────────────────────────────────────────────────────


class Managed(Message, frozen=True, kw_only=True):
    """The script has called `elastic.run`: from now on this worker waits for Form, and keeps its process."""


class Ready(Message, frozen=True, kw_only=True):
    """Imports and `setup` are done; waiting for Form."""

    state_bytes: int


class NeedArena(Message, frozen=True, kw_only=True):
    """What this worker keeps of the state takes `nbytes`: make two buffers of that size."""

    nbytes: int
    optional: bool = False
    """It can do with less: only where the node has plenty of memory."""


class RequestSnapshot(Message, frozen=True, kw_only=True):
    """No rank has live state: what is left of the snapshots?"""

    generation: int
    saved: bool = False
    """The job goes back to what was saved: snapshots that were meant for memory alone are forgotten."""


class Formed(Message, frozen=True, kw_only=True):
    """The process group stands."""

    generation: int


class Synced(Message, frozen=True, kw_only=True):
    """The state is here; `train` is entered at `step`."""

    generation: int
    step: int
    source: str
    """'live', 'snapshot', 'checkpoint step 40 at PATH', 'setup'."""
    seconds: float = 0.0
    nbytes: int = 0
    reached: int = 0
    """The newest step that any rank, or any rank's agent, knows to have been committed before this generation."""


class Stepping(Message, frozen=True, kw_only=True):
    """The first commit of this generation on this rank."""

    generation: int
    step: int


class GroupClosed(Message, frozen=True, kw_only=True):
    """The group is gone; process and state are kept. Waiting for Form."""

    generation: int
    step: int
    clean: bool
    """False: the state was being changed when the group went; it must not be a source."""


class CollectiveFailed(Message, frozen=True, kw_only=True):
    """A collective failed here though nobody told this worker to let go. Also a GroupClosed."""

    generation: int
    step: int
    clean: bool
    error: str


class Filled(Message, frozen=True, kw_only=True):
    """This rank's part of the snapshot of `step` is whole in buffer `buffer`."""

    generation: int
    step: int
    buffer: int
    nbytes: int
    share: int
    shares: int
    stall_s: float
    interval: str = ""
    """How often this job saves, in words."""
    save: bool = True
    """Write this rank's share to disk. False: the snapshot stays in memory."""
    kept: str = ""
    """How often snapshots are taken for memory alone, in words."""
    skipped: int = 0
    """Checkpoints that were due while the one before was still being written, so far in this worker's life."""


class BadNumbers(Message, frozen=True, kw_only=True):
    """NaN or infinite loss on this rank, or replicas that drifted apart."""

    generation: int
    step: int
    kind: str
    detail: str
    ranks: tuple[int, ...] = ()


class Done(Message, frozen=True, kw_only=True):
    """`train` has returned on all ranks at `step`; kept alive as a source until Finish."""

    generation: int
    step: int


class ScriptEnded(Message, frozen=True, kw_only=True):
    """The script has ended with exit code `code`; threads and atexit handlers of its process may still run."""

    code: int


FromWorker = (
    Managed
    | ScriptEnded
    | Ready
    | NeedArena
    | RequestSnapshot
    | Formed
    | Synced
    | Stepping
    | GroupClosed
    | CollectiveFailed
    | Filled
    | BadNumbers
    | Done
)


# ── agent ⇄ zygote ──────────────────────────────────────────────────────────────────────────────────────────


class Preload(msgspec.Struct, frozen=True, kw_only=True):
    """What a zygote imports for its job beside torch."""

    modules: tuple[str, ...] = ()
    """Those that the job names."""
    argv: tuple[str, ...] = ()
    """What the workers will run: the imports at the top of that script come too."""
    workdir: str = ""
    skip: tuple[str, ...] = ()
    """Modules of the script not to be imported; '*': none of them."""

    def __bool__(self) -> bool:
        return bool(self.modules or self.argv)


class Fork(Message, frozen=True, kw_only=True):
    """Make a worker. Descriptors: channel, beat page, log (stdout and stderr)."""

    ticket: int
    env: dict[str, str]
    argv: tuple[str, ...]
    """Script path or ``-m module``, then its arguments."""
    workdir: str


class Forked(Message, frozen=True, kw_only=True):
    ticket: int
    pid: int


class ZygoteReady(Message, frozen=True, kw_only=True):
    seconds: float
    preloaded: tuple[str, ...]
    """What it has imported for the job."""
    problems: tuple[str, ...] = ()
    """Modules that could not be preloaded, with the reason; workers will import (and fail on) them themselves."""
    unfit: str = ""
    """Why no worker may be forked from it; empty: it is fit."""


class Refused(Message, frozen=True, kw_only=True):
    """The zygote has become unfit to fork: no worker came of this order, and none will of later ones."""

    ticket: int
    why: str


ToZygote = Fork
FromZygote = Forked | Refused | ZygoteReady

_encoder = msgspec.json.Encoder()
_to_worker: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_from_zygote: msgspec.json.Decoder[FromZygote] = msgspec.json.Decoder(FromZygote)
_to_zygote: msgspec.json.Decoder[ToZygote] = msgspec.json.Decoder(ToZygote)
_to_preload: msgspec.json.Decoder[Preload] = msgspec.json.Decoder(Preload)


def encode_preload(preload: Preload) -> bytes:
    return _encoder.encode(preload)


def to_preload(raw: bytes) -> Preload:
    return _to_preload.decode(raw)


def encode(message: Message) -> bytes:
    """Raises ValueError for a message that would not fit in one packet."""
    raw = _encoder.encode(message)
    if len(raw) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} takes {len(raw)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    return raw


def to_worker(raw: bytes) -> ToWorker:
    return _to_worker.decode(raw)


def from_worker(raw: bytes) -> FromWorker:
    return _from_worker.decode(raw)


def to_zygote(raw: bytes) -> ToZygote:
    return _to_zygote.decode(raw)


def from_zygote(raw: bytes) -> FromZygote:
    return _from_zygote.decode(raw)
