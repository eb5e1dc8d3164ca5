"""Messages between an agent and its writer process: one JSON message per packet on a socket pair."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

ERROR_CHARS = 2000
"""Of an error's text: a storage service may answer with a page, and a result must fit into one packet."""


class Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    id: int = 0
    """Set by `WriterProcess.submit`; the result carries it."""
    directory: str = ""
    """The checkpoint directory: an absolute path."""


class Write(Order, frozen=True, kw_only=True):
    """Write the shard in the arena whose descriptor is sent along."""

    job: str
    step: int
    generation: int
    """Step and generation that the arena must hold; the order fails otherwise."""
    alone: bool = False
    """No other process writes into the directory for this job: what is unfinished there before the first order is of an
    earlier run."""


class Commit(Order, frozen=True, kw_only=True):
    """Wait for the notes of all shards, write the manifest, rename; then apply retention."""

    job: str
    step: int
    generation: int
    shards: int
    world_size: int
    versions: dict[str, str] = {}
    wait_s: float = 60.0
    """How long to wait for the next shard of another node: anew at each that arrives, without the time in which
    this node's own are written. Other orders are carried out meanwhile."""
    keep: int = 3
    """Newest good checkpoints to keep; 0: nothing is removed."""
    keep_every_steps: int = 0


class CopyUp(Order, frozen=True, kw_only=True):
    """Copy the checkpoint directory `path` to an fsspec URL. Runs concurrently with other orders."""

    path: str
    url: str
    keep: int = 0
    """Newest ones to keep at the remote end; 0: nothing is removed there."""
    keep_every_steps: int = 0


class Forget(Order, frozen=True, kw_only=True):
    """Unmap all arenas seen so far: they are about to be replaced. Has no result."""


Answered = Write | Commit | CopyUp
AnyOrder = Answered | Forget


class Result(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    kind: str
    """The order's type: 'Write', 'Commit', 'CopyUp'."""
    step: int
    generation: int
    error: str = ""
    """Empty: the write is durable."""
    path: str = ""
    """Commit: the checkpoint's directory; CopyUp: its URL; Write: the shard's file."""
    missing: tuple[int, ...] = ()
    """Commit: shards that no process has written."""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """Commit: old checkpoints that could not be removed after the previous commit, and why."""

    @property
    def ok(self) -> bool:
        return not self.error


encode: Callable[[Order | Result], bytes] = msgspec.json.encode
decode_order: Callable[[bytes], AnyOrder] = msgspec.json.Decoder[AnyOrder](AnyOrder).decode
decode_result: Callable[[bytes], Result] = msgspec.json.Decoder(Result).decode


def describe(error: BaseException) -> str:
    """One line for an operator: what failed, and on which file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(f"{error}".split("\n"))[:ERROR_CHARS] or type(error).__name__
