"""Snapshot backend of a worker that has an agent: copies into arenas that the agent owns.

The agent writes the arenas to disk, even after this process has died. It is told of a snapshot once that is copied.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import msgspec
import torch

from elastic.checkpoint.format.errors import ArenaError
from elastic.checkpoint.format.layout import arena_nbytes
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.memory.buffers import Buffers
from elastic.checkpoint.memory.memcpy import WORTH_A_THREAD_BYTES
from elastic.contract.structs import replace
from elastic.contract.worker import messages
from elastic.contract.worker.beat import Doing
from elastic.contract.worker.messages import Copies, CopyState
from elastic.contract.worker.tensor_table import NO_REPLICAS, ReplicaTensors, Table
from elastic.worker.link.misuse import MisuseRuntimeError

from .arena_requests import ArenaRequests
from .buddy import Buddy, Neighbour

ASK_AGAIN_S = 60.0
"""Pause after the agent has refused memory for more than the shards to be written, because the node has not enough."""


class SaverLink(Protocol):
    """The way to the saver, as `Session` is."""

    save_wanted: bool
    stop_wanted: bool

    def on(self, kind: type[messages.Message], handler: Callable[[messages.Message, list[int]], None]) -> None: ...
    def send(self, message: messages.Message) -> None: ...
    def beat(self, doing: Doing) -> None: ...
    def copied(self, nbytes: int) -> None: ...
    def stood_still(self, seconds: float) -> None: ...


class SnapshotPart(msgspec.Struct, frozen=True):
    """This rank's part of a snapshot."""

    step: int
    commit_generation: int
    shard: int
    shards: int
    table: Table
    tensors: Sequence[torch.Tensor]
    """The tensors of `table`, then those of `beside`."""
    extra: dict[str, Any]
    interval: str
    """The checkpoint interval, as text."""
    beside: ReplicaTensors = NO_REPLICAS
    """Shards of other nodes, which this rank keeps in memory in addition to its own."""
    part: int | None = None
    parts: int | None = None
    """Which piece of a complete snapshot this rank's tensors are (own shard and those beside it): `part` of the `parts`
    of the node, or of one where each rank restores its own. None: as `shard` of `shards`."""
    save: bool = True
    """Write the shard to disk; False: keep it in memory only."""
    kept: str = ""
    """The interval of in-memory snapshots, as text."""
    skipped: int = 0
    """Number of checkpoints so far that were due and not taken."""
    copies: Copies | None = None
    """See `Filled`."""
    volatile: Collection[int] = ()
    """Indices of tensors that may change before the next optimizer step: copied before any work that is queued
    later."""

    def own(self) -> SnapshotPart:
        """The same part without the other nodes' shards."""
        count = len(self.table)
        volatile = frozenset(place for place in self.volatile if place < count)
        return replace(self, tensors=self.tensors[:count], beside=NO_REPLICAS, part=None, parts=None, volatile=volatile)


class AgentSnapshots:
    """Main thread only, except that `prepare` leaves its work to a thread, which `put` joins."""

    def __init__(
        self, session: SaverLink, *, buffers: int = 2, keep_newest: bool = False, required: bool = False
    ) -> None:
        """`buffers`: how many the saver offers. `keep_newest`: see `Buffers`; where each rank has a part of its own, a
        snapshot is of use only if all ranks have it. `required`: a node without memory ends the job."""
        self._required = required
        self._session = session
        self._buffers = Buffers(keep_newest=keep_newest)
        self._copied: tuple[SnapshotPart, float] | None = None
        """The copy in progress, and the seconds that starting it took."""
        self._cold: set[int] = set()
        """Indices of buffers whose pages may not be present yet."""
        self._refused_s = -math.inf
        self._sized: tuple[Table, ReplicaTensors, int] = ((), NO_REPLICAS, arena_nbytes(()))
        self._preparing: threading.Thread | None = None
        self._awaited = True
        """The main thread waits for the work done here, which then counts as progress of this worker."""
        self._requests = {guest: ArenaRequests(session.send, buffers, guest=guest) for guest in (False, True)}
        self.buddy = Buddy(self._requests[True], wake=lambda: self._results.put(None))
        self._results: queue.SimpleQueue[messages.SaveResult | None] = queue.SimpleQueue()
        """None: look again at what is `free`."""
        self.durable_s = 0.0
        """Seconds until the last snapshot was on disk; 0: not known."""
        self._failed_step = -1
        session.on(messages.Arena, self._on_arena)
        session.on(messages.SaveResult, self._on_saved)

    def _on_arena(self, message: messages.Message, descriptors: list[int]) -> None:
        assert isinstance(message, messages.Arena)
        self._requests[message.guest].take(message, descriptors)

    def _on_saved(self, message: messages.Message, _: list[int]) -> None:
        assert isinstance(message, messages.SaveResult)
        self._results.put(message)

    def wanted(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        if not self._session.save_wanted:
            return False
        self._session.save_wanted = False  # only now: the monitor thread may set it at any moment
        return True

    def stops(self) -> bool:
        """Whether training is to stop at the requested checkpoint."""
        return self._session.stop_wanted

    def free(self) -> bool:
        """Whether a buffer is free."""
        if not self._buffers.arenas:
            return True  # which buffers are busy is only learned when the agent sends them
        self._take_results()
        return self._buffers.free() is not None and not self.buddy.sending

    def copied(self) -> tuple[CopyState, int]:
        """See `Buddy.copied`."""
        return self.buddy.copied

    def failed(self, step: int) -> bool:
        """Whether this rank's part of the save of `step` is known to have failed."""
        self._take_results()
        return self._failed_step == step

    def wait(self, limit_s: float) -> None:
        """Return when a buffer is free, or after `limit_s` seconds."""
        deadline_s = time.monotonic() + limit_s
        while not self.free() and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                self._take(self._results.get(timeout=left_s))
            except queue.Empty:
                return

    # ── one snapshot ────────────────────────────────────────────────────────────────────────────────────────

    def put(self, part: SnapshotPart) -> bool:
        """Copy `part` into a free buffer, or begin to.

        Returns False if the agent has no memory for it, or is still writing both buffers, which the previous worker
        filled. Without memory for the other nodes' shards, only the own shard is put, if it is to be written to disk.
        Raises MisuseRuntimeError instead where snapshots are required.
        """
        self.settle()
        self._session.beat(Doing.SAVING)
        self._prepared()
        room = self._has_room(part, optional=bool(part.beside.table) or not part.save)
        if self._required and (not room or self.buddy.copied[0] is CopyState.NO_MEMORY):
            node = "the node after its own has no memory for copies" if room else "its node has no memory"
            raise MisuseRuntimeError(
                f"snapshots of rank {part.shard}'s part: {node}, 2 x {self._sized[2] / 1e6:.0f} MB more would leave "
                'too little: take more nodes, or snapshots = "auto", by which a failure costs the steps since the last '
                "checkpoint"
            )
        if not room and part.save and part.beside.table:
            part = part.own()
            room = self._has_room(part, optional=False)
        if not room:
            return False
        self._take_results()
        buffer = self._buffers.free()
        if buffer is None:
            return False
        began_s = time.monotonic()
        arena = self._buffers.arenas[buffer]
        if buffer in self._cold and part.tensors and part.tensors[0].is_cuda:
            arena.touch(self._session.copied)  # registering with CUDA would do that too, but without reporting progress
        arena.layout(
            part.table, shard=part.shard, shards=part.shards, beside=part.beside, part=part.part, parts=part.parts
        )
        done = self._buffers.begin(buffer, part.tensors, volatile=part.volatile, progress=self._session.copied)
        self._copied = part, time.monotonic() - began_s
        if done:
            self._settle()
        return True

    @property
    def copying(self) -> bool:
        """Whether a copy is under way that is still to be settled."""
        return self._buffers.copying

    @property
    def beside_s(self) -> float:
        """Core seconds that the last settled copy took from the steps it overlapped."""
        return self._buffers.beside_s

    def leave(self) -> None:
        """As `settle` if the copy is complete or done by a GPU; otherwise it is dropped, as the other ranks wait."""
        if self._buffers.drop():
            self.settle()
        self.buddy.leave()

    def settle(self) -> None:
        """Complete the copy and report the snapshot to the agent. Until it is sealed, the arena counts as half filled.

        Raises RuntimeError if the device failed.
        """
        if not self._buffers.copying:
            return
        began_s = time.monotonic()
        try:
            self._settle()
        finally:
            self._session.stood_still(time.monotonic() - began_s)

    def _settle(self) -> None:
        began_s = time.monotonic()
        buffer = self._buffers.finish()
        assert buffer is not None
        assert self._copied is not None
        (part, launched_s), self._copied = self._copied, None
        arena = self._buffers.arenas[buffer]
        try:
            arena.seal(part.step, part.commit_generation, extra=part.extra)
        except ArenaError as error:
            self._failed_step = part.step
            self._unsealed(part, error)
            return
        if part.save:
            self._buffers.busy.add(buffer)
        self._session.send(
            messages.Filled(
                generation=part.commit_generation,
                step=part.step,
                buffer=buffer,
                nbytes=arena.header().nbytes,
                shard=part.shard,
                shards=part.shards,
                stall_s=launched_s + time.monotonic() - began_s,
                interval=part.interval,
                save=part.save,
                kept=part.kept,
                skipped=part.skipped,
                copies=part.copies,
            )
        )
        self.buddy.send(arena)
        self._cold.discard(buffer)
        if self._cold:
            self._prepare_by_thread(self._warm, part.tensors)

    def _unsealed(self, part: SnapshotPart, error: ArenaError) -> None:
        warnings.warn(f"no snapshot of step {part.step}: {error}", stacklevel=3)

    # ── the buffers ─────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, part: SnapshotPart) -> None:
        """Get the buffers, make their pages present and register them with CUDA while training continues: on fresh
        memory that takes several times as long as a copy."""
        if self._preparing is not None or self._buffers.arenas:
            return

        def act(device: torch.device | None) -> None:
            if self._has_room(part, optional=bool(part.beside.table)) or self._has_room(part.own(), optional=False):
                self._warm(device)

        self._prepare_by_thread(act, part.tensors)

    def _prepare_by_thread(self, act: Callable[[torch.device | None], None], tensors: Sequence[torch.Tensor]) -> None:
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        self._awaited = False
        thread = threading.Thread(target=act, args=[device], name="elastic-arenas", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: the next copy does the work
            thread.start()
            self._preparing = thread

    def _prepared(self) -> None:
        self._awaited = True
        if self._preparing is not None:
            self._preparing.join()  # the thread has its own deadline
            self._preparing = None

    def _touched(self, nbytes: int) -> None:
        if self._awaited:
            self._session.copied(nbytes)

    def _warm(self, device: torch.device | None) -> None:
        """Make the pages of the buffers present, and register them with CUDA."""
        for buffer, arena in enumerate(self._buffers.arenas):
            with contextlib.suppress(ArenaError):  # raised again when the arena is filled
                if buffer in self._cold:
                    arena.touch(self._touched)
                if device is not None:
                    arena.pin(device, self._touched)
        self._cold.clear()

    def _has_room(self, part: SnapshotPart, *, optional: bool) -> bool:
        if self._sized[:2] != (part.table, part.beside):
            self._sized = part.table, part.beside, arena_nbytes(part.table, beside=part.beside.table)
        nbytes = self._sized[2]
        if self._buffers.fits(nbytes):
            return True
        if optional and time.monotonic() - self._refused_s < ASK_AGAIN_S:
            return False
        if self._make_room(nbytes, optional):
            return True
        if optional:
            self._refused_s = time.monotonic()
        return False

    def _make_room(self, nbytes: int, optional: bool) -> bool:
        """Get buffers of at least `nbytes` bytes from the agent. Returns False if it does not provide them."""
        self._buffers.replace(())
        self._cold = set()
        if (answer := self._requests[False].ask(nbytes, optional=optional)) is None:
            return False
        arenas, busy = answer
        self._cold = set(range(len(arenas)))
        self._buffers.replace(arenas, busy)
        if nbytes < WORTH_A_THREAD_BYTES:
            try:
                for arena in arenas:
                    arena.touch(self._touched)
            except ArenaError:
                self._buffers.replace(())
                return False
            self._cold = set()
        return True

    def room_for(self, nbytes: int) -> Arena | None:
        """Map the buffers, with what the slot's previous worker has left in them. Returns the one to be filled next;
        None: the node has no memory for `nbytes`."""
        if not self._buffers.fits(nbytes):
            self._make_room(nbytes, optional=True)
        free = self._buffers.free()
        return self._buffers.arenas[free] if free is not None else None

    def pair(self, rank: int, everyone: Sequence[Neighbour]) -> None:
        """A generation has the state. Before the next snapshot replaces anything, there is a copy of the newest one:
        the last generation may have ended before."""
        self.buddy.pair(rank, everyone)
        newest = self._buffers.newest()
        if newest is not None and newest.key() == everyone[rank].key:  # else it is of the part that the slot had before
            self.buddy.send(newest)

    # ── messages from the agent ─────────────────────────────────────────────────────────────────────────────

    def _take_results(self) -> None:
        while not self._results.empty():
            self._take(self._results.get_nowait())

    def _take(self, message: messages.SaveResult | None) -> None:
        if message is None:
            return
        self._buffers.busy.discard(message.buffer)
        self.durable_s = message.seconds or self.durable_s
        if message.error:
            self._failed_step = message.step
