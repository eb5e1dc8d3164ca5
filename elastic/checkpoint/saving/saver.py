"""Owns the arenas that workers fill, has checkpoints written and committed, and reports what has become of each.

It runs in the agent, whose arenas outlive their worker, so that a snapshot that it has completed is still written; in
the worker's own process if that has no agent.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import selectors
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from elastic.checkpoint.format.errors import ArenaError
from elastic.checkpoint.format.shard_plan import newest_complete
from elastic.checkpoint.memory.arena import Arena, Header
from elastic.checkpoint.memory.free_memory import available_nbytes, plenty
from elastic.contract.job.spec import Checkpoint
from elastic.contract.records.reasons import Code, Reason, Text, reason
from elastic.contract.worker import messages

from . import orders
from .client import Busy, WriterProcess

KEPT_WRITE_S, KEPT_COMMIT_S = 60.0, 3.0
"""How long a recovery without live state waits for the checkpoint under way: for this node's writes, and for other
nodes' shards, which may never come."""
LOOK_S = 0.5
MAX_KEPT = 250
"""Descriptors in one message; the kernel takes 253. Part of a snapshot is useless: if more are needed none is sent."""

ESCALATE_AFTER = 3
"""From this many in a row they are reported as errors."""

Tell = Callable[[int, messages.Message, tuple[int, ...]], None]


def versions() -> dict[str, str]:
    """Versions of Python, elasticd and torch, without importing torch."""
    installed = {"python": platform.python_version()}
    for name in ("elasticd", "torch"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "unknown"
    return installed


@dataclass(slots=True)
class FailuresInRow:
    """Replaced by a new one after a success."""

    error: Text | None = None
    """The latest failure."""
    count: int = 0
    last: tuple[int, int] | None = None
    """(generation, step) of the last one: its shard and its commit may both report the failure."""
    began: tuple[int, float] = (0, 0.0)
    """Step and time of day of the first one of the present kind: all of a kind are one incident."""
    _kind: str = ""

    def add(self, error: Text, generation: int = 0, step: int = 0, wall_s: float = 0.0) -> bool:
        """Returns False if this one is counted already. Generation 0 or less: no particular checkpoint."""
        if generation > 0 and self.last == (generation, step):
            return False
        self.error, self.count, self.last = error, self.count + 1, (generation, step)
        if (kind := re.sub(r"[0-9]+", "", str(error))) != self._kind:
            self._kind, self.began = kind, (step, wall_s)
        return True

    @property
    def escalate(self) -> bool:
        return self.count >= ESCALATE_AFTER


class Saved(msgspec.Struct, frozen=True):
    """A checkpoint has become durable."""

    generation: int
    step: int
    path: str
    seconds: float
    notes: tuple[str, ...]
    """Old checkpoints that could not be removed, and why."""


class Failed(msgspec.Struct, frozen=True):
    what: Literal["checkpoint", "copy"]
    step: int
    error: Text
    row: FailuresInRow
    """With this one."""


class Cut(msgspec.Struct, frozen=True):
    """The job has left the generation of a checkpoint for a failure, or ends: its missing shards are no failure."""

    step: int
    why: str


class NotKept(msgspec.Struct, frozen=True):
    """Snapshots are not kept in memory, or not given to a worker that asked for them."""

    why: Reason


Outcome = Saved | Failed | Cut | NotKept


@dataclass(slots=True)
class SaveStatus:
    """Checkpoints and snapshots as the status shows them."""

    step: int | None = None
    generation: int = 0
    """In which `step` was committed."""
    wall_s: float | None = None
    seconds: float = 0.0
    failing: FailuresInRow = field(default_factory=FailuresInRow)
    """Of checkpoints."""
    copying: FailuresInRow = field(default_factory=FailuresInRow)
    """Of copies to the remote end."""
    skipped: int = 0
    """Checkpoints that were due while the previous one was still being written, over the life of a worker."""
    copied: str = ""
    """Newest copy at the remote end."""
    interval: str = ""
    kept_step: int | None = None
    """Newest snapshot of which this node has every part."""
    kept_mb: float = 0.0
    """Memory that this agent has allocated for snapshots, whether or not it has been touched yet."""
    kept_interval: Text = ""
    copies: messages.Copies | None = None
    """How the parts of a sharded state are protected against the loss of a node."""

    @property
    def error(self) -> Text | None:
        """What is wrong at present; None: the newest checkpoint is safe, and so is its copy."""
        return self.failing.error or self.copying.error


@dataclass(slots=True)
class _Slot:
    worker_id: int
    arenas: tuple[Arena, ...] = ()
    to_disk: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Buffer -> (generation, step) of the snapshot in it that was to be written to disk."""


@dataclass
class Saver:
    rules: Checkpoint
    job: str
    tell: Tell
    """Sends a message to a worker, with copies of the descriptors."""
    report: Callable[[Outcome], None]
    cut: Callable[[int], bool] = lambda generation: False
    """Whether the job has left this generation for a failure, or ends."""
    apart: Callable[[], Text] = lambda: ""
    """Why the folder is not one for all nodes, although it is to be shared; empty: it is, as far as is known."""
    buffers: int = 2
    """Of each worker. With one, no snapshot is taken while it is being written."""
    slots: int = 1
    """Workers of this node; each of them requests the same memory."""
    patience_s: float = 300.0
    """A writer that has moved no byte for so long is not waited for any more."""

    def __post_init__(self) -> None:
        self.writer = WriterProcess()
        self._versions = versions()
        self.last = SaveStatus()
        self._slots: dict[int, _Slot] = {}
        self._guests: dict[int, _Slot] = {}
        """Slot -> buffers for copies of the part of a rank of another node; they are never written to disk."""
        self._writes: dict[int, tuple[int, int, int]] = {}
        self._written_s = 0.0
        """When the last shard was written, or failed."""
        self._committing: dict[tuple[int, int], bool] = {}
        """(generation, step) -> whether this node copies that checkpoint to the remote end."""
        self._to_copy = (0, 0)
        """(generation, step) of the newest checkpoint that this node is to copy."""
        self._asking: dict[int, tuple[int, float, bool]] = {}
        self._moved: tuple[tuple[object, ...], float] = (), 0.0
        """The writer's activity at the last look, and since when it is that."""
        self._outdated = False
        """The writer still maps buffers that have been replaced."""

    @property
    def on(self) -> bool:
        return bool(self.rules.dir)

    # ── messages from workers ───────────────────────────────────────────────────────────────────────────────

    def need_arena(
        self, slot: int, worker_id: int, nbytes: int, *, request: int = 0, optional: bool = False, guest: bool = False
    ) -> None:
        """Send this worker its buffers; those of the slot's previous worker are reused if they are large enough.

        `optional`: none are sent if they would take memory that the training may need. `guest`: see `NeedArena`.
        """
        slots = self._guests if guest else self._slots
        refused = messages.Arena(nbytes=0, request=request, guest=guest)
        buffers = slots.get(slot)
        if buffers is None or not buffers.arenas or buffers.arenas[0].capacity < nbytes:
            wanted = self.buffers * nbytes * self.slots
            if optional and not plenty(wanted, available_nbytes=available_nbytes()):
                why = reason(Code.LEAVES_TOO_LITTLE, mb=round(wanted / 1e6))
                if not guest:  # the rank whose copy it is says so
                    self.last.kept_interval = why
                self.report(NotKept(why))
                self.tell(worker_id, refused, ())
                return
            fresh: tuple[Arena, ...] = ()
            try:
                while len(fresh) < self.buffers:
                    fresh += (Arena.create(nbytes, warm=False),)  # the worker warms them
            except (OSError, ArenaError) as error:
                for arena in fresh:
                    arena.close()
                self.fail(0, 0, reason(Code.NO_SHARED_MEMORY, str(error)))
                self.tell(worker_id, refused, ())
                return
            if buffers is not None:
                self._outdated = True
                self._forget()
                for arena in buffers.arenas:
                    arena.close()
            buffers = slots[slot] = _Slot(worker_id, fresh)
            # Writes that still read the old buffers must not free the new ones.
            for ticket, (of, step, buffer) in tuple(self._writes.items()):
                if of == slot and not guest:
                    self._writes[ticket] = (-1, step, buffer)
            self._look_for_kept()
        buffers.worker_id = worker_id
        self.last.kept_mb = sum(arena.capacity for one in self._all() for arena in one.arenas) / 1e6
        writing = {buffer for of, _, buffer in self._writes.values() if of == slot and not guest}
        for buffer, arena in enumerate(buffers.arenas):
            offer = messages.Arena(
                nbytes=arena.capacity, request=request, buffer=buffer, busy=buffer in writing, guest=guest
            )
            self.tell(worker_id, offer, (arena.fd,))

    def _all(self) -> list[_Slot]:
        return [*self._slots.values(), *self._guests.values()]

    def _forget(self) -> None:
        """Have the writer unmap the buffers that have been replaced; again with its next result if it is behind now."""
        if self._outdated:
            with contextlib.suppress(Busy, OSError):
                self.writer.submit(orders.Forget())
                self._outdated = False

    def filled(self, slot: int, message: messages.Filled, *, lead: bool, world_size: int, copies: bool = True) -> None:
        """A snapshot is complete in its arena. If it is to be saved: write its shard, and with `lead` commit, once per
        step. `copies`: this node, and no other, copies the checkpoint to the remote end."""
        self.last.interval, self.last.skipped = message.interval, message.skipped
        buffers = self._slots.get(slot)
        if buffers is None or not buffers.arenas:
            return
        self.last.kept_interval = message.kept or self.last.kept_interval
        self.last.copies = message.copies
        self._look_for_kept()
        if not message.save:
            return
        generation, step, rules = message.generation, message.step, self.rules
        if rules.shared and (why := self.apart()):  # nothing is written that no node could commit
            self._free(slot, step, message.buffer, str(why))
            if lead:
                self.fail(generation, step, why)
            return
        buffers.to_disk[message.buffer] = (generation, step)
        if copies:
            self._to_copy = (generation, step)
        try:
            order = orders.Write(
                directory=rules.dir, job=self.job, step=step, generation=generation, alone=not rules.shared
            )
            ticket = self.writer.submit(order, buffers.arenas[message.buffer])
        except (Busy, OSError) as error:
            self.fail(generation, step, str(error))
            self._free(slot, step, message.buffer, str(error))
            return
        self._writes[ticket] = (slot, step, message.buffer)
        if lead and (generation, step) not in self._committing:
            commit = orders.Commit(
                directory=rules.dir, job=self.job, step=step, generation=generation, shards=message.shards,
                world_size=world_size, versions=self._versions, keep=rules.keep,
                keep_every_steps=rules.keep_every_steps,
            )  # fmt: skip
            try:
                self.writer.submit(commit)
                self._committing[generation, step] = copies
            except (Busy, OSError) as error:
                # The buffer is freed when its write has ended.
                self.fail(generation, step, reason(Code.NOT_ORDERED, str(error)))

    # ── results from the writer ─────────────────────────────────────────────────────────────────────────────

    def readable(self) -> None:
        for result in self.writer.results():
            match result.kind:
                case "Write":
                    self._written(result)
                case "Commit":
                    self._committed(result)
                case "CopyUp":
                    self._copied(result)
        self._forget()
        self.answer()

    def _written(self, result: orders.Result) -> None:
        slot, step, buffer = self._writes.pop(result.id, (-1, result.step, 0))
        self._written_s = time.monotonic()
        if result.error:
            self.fail(result.generation, step, result.error)
        elif (result.generation, step) not in {*self._committing, self.last.failing.last}:
            self.last.failing = FailuresInRow()  # another node commits; this node's part is done
        self._free(slot, step, buffer, result.error, result.seconds)

    def _free(self, slot: int, step: int, buffer: int, error: str, seconds: float = 0.0) -> None:
        if buffers := self._slots.get(slot):
            result = messages.SaveResult(step=step, buffer=buffer, error=error, seconds=seconds)
            self.tell(buffers.worker_id, result, ())

    def _committed(self, result: orders.Result) -> None:
        copies = self._committing.pop((result.generation, result.step), True)
        if result.missing and self.cut(result.generation):
            self.report(Cut(result.step, result.error))
            return
        if result.error:
            self.fail(result.generation, result.step, result.error)
            return
        last, rules = self.last, self.rules
        last.generation, last.step = result.generation, result.step
        last.wall_s, last.seconds = time.time(), result.seconds
        last.failing = FailuresInRow()
        self.report(Saved(result.generation, result.step, result.path, result.seconds, result.notes))
        if rules.remote and copies:
            keep, every = rules.keep, rules.keep_every_steps
            try:
                self.writer.submit(orders.CopyUp(path=result.path, url=rules.remote, keep=keep, keep_every_steps=every))
            except (Busy, OSError) as error:
                self._copy_failed(result.generation, result.step, str(error))

    def _copied(self, result: orders.Result) -> None:
        if result.ok:
            self.last.copied, self.last.copying = result.path, FailuresInRow()
        else:
            self._copy_failed(result.generation, result.step, result.error)

    def _copy_failed(self, generation: int, step: int, error: str) -> None:
        why = reason(Code.COPY_FAILED, error, remote=self.rules.remote)
        self._count(self.last.copying, "copy", generation, step, why)

    def fail(self, generation: int, step: int, error: Text) -> None:
        """Report a failed checkpoint, which costs the job nothing. Generation 0: no particular checkpoint."""
        if self.rules.remote and not self.rules.shared and (generation, step) == self._to_copy:
            error = reason(Code.NOT_COPIED, error, remote=self.rules.remote)
        self._count(self.last.failing, "checkpoint", generation, step, error)

    def _count(
        self, row: FailuresInRow, what: Literal["checkpoint", "copy"], generation: int, step: int, error: Text
    ) -> None:
        if not row.add(error, generation, step, time.time()):
            return
        if row.escalate:
            error = reason(Code.IN_A_ROW, error, count=row.count)
        row.error = reason(Code.AT_STEP, error, step=step)
        self.report(Failed(what, step, error, row))

    # ── recovery without live state ─────────────────────────────────────────────────────────────────────────

    def ask_kept(self, worker_id: int, generation: int, *, saved: bool = False, own_parts: bool = False) -> None:
        """Answered at once, or when pending writes are on disk, since they may hold the newest state.

        `saved`: the job goes back to saved state. Snapshots that are in memory only are then cleared: they are newer,
        and as bad as the state that the job goes back from.
        """
        if saved:
            for buffers in self._all():
                # By what the buffer holds: a worker that dies right after it has sealed one reports nothing.
                for buffer, arena in enumerate(buffers.arenas):
                    header = arena.header()
                    if header.complete and buffers.to_disk.get(buffer) != (header.generation, header.step):
                        arena.clear()
            self._look_for_kept()
        self._asking[worker_id] = (generation, time.monotonic(), own_parts)
        self.answer()

    def answer(self) -> None:
        """Called when the writer has returned results, and on every tick."""
        now_s = time.monotonic()
        for worker_id, (generation, since_s, own_parts) in tuple(self._asking.items()):
            committing_s = now_s - max(since_s, self._written_s)
            if (self._writes and now_s - since_s < KEPT_WRITE_S) or (self._committing and committing_s < KEPT_COMMIT_S):
                continue
            del self._asking[worker_id]
            complete = self._complete_arenas(self._all()) if own_parts else []
            arenas = [arena for _, arena in complete] if own_parts else self._complete_snapshot()
            if len(arenas) > MAX_KEPT:
                self.report(NotKept(reason(Code.TOO_MANY_PARTS, parts=len(arenas), most=MAX_KEPT)))
                arenas = []
            answer = messages.InMemorySnapshot(generation=generation, arenas=len(arenas))
            self.tell(worker_id, answer, tuple(arena.fd for arena in arenas))

    def _look_for_kept(self) -> None:
        arenas = self._complete_snapshot()
        self.last.kept_step = arenas[0].header().step if arenas else None

    def _complete_snapshot(self) -> list[Arena]:
        """The arenas of the newest snapshot of which this node has every part."""
        complete = self._complete_arenas(self._slots.values())
        newest = newest_complete([(h.generation, h.step, h.part, h.parts) for h, _ in complete])
        if newest is None:
            return []
        chosen = {h.part: arena for h, arena in complete if (h.generation, h.step, h.parts) == newest}
        return [chosen[part] for part in sorted(chosen)]

    def _complete_arenas(self, slots: Iterable[_Slot]) -> list[tuple[Header, Arena]]:
        arenas = [arena for buffers in slots for arena in buffers.arenas]
        return [(header, arena) for arena in arenas if (header := arena.header()).complete]

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────

    def busy(self) -> bool:
        """Whether an order is under way, but for commits that a newer checkpoint has overtaken: the shard that such a
        one still waits for may be that of a rank that has died."""
        newest = self.last.generation, self.last.step or 0
        return self.on and any(
            not isinstance(order, orders.Commit) or (order.generation, order.step) > newest
            for order in self.writer.under_way()
        )

    def gets_on(self, now_s: float) -> bool:
        """Whether orders are under way, and the writer has moved a byte within `patience_s`. To be called often."""
        if not self.busy():
            return False
        if (seen := self.writer.activity()) != self._moved[0]:
            self._moved = seen, now_s
        return now_s - self._moved[1] < self.patience_s

    def finish(self, until_s: Callable[[], float], meanwhile: Callable[[], None]) -> None:
        """Wait for what is under way, as long as it gets on: events of all else have no receiver any more."""
        with selectors.DefaultSelector() as results:
            if self.busy():
                results.register(self.writer, selectors.EVENT_READ)
            while self.gets_on(now_s := time.monotonic()) and now_s < until_s():
                results.select(LOOK_S)
                self.readable()
                meanwhile()

    def close(self) -> None:
        """A checkpoint that is not committed yet has failed: nothing is left to do that. Safe to call twice."""
        self.readable()  # one may have been committed since the last look
        for generation, step in sorted(self._committing):
            if not self.cut(generation):
                self.fail(generation, step, reason(Code.NOT_DURABLE))
        self._committing.clear()
        self.writer.close()
        for buffers in self._all():
            for arena in buffers.arenas:
                arena.close()
        self._slots.clear()
        self._guests.clear()
