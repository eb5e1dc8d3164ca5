"""Snapshots on the agent's side: owns the arenas that workers fill, has checkpoints written, has the leader commit.

Arenas outlive their worker, so a snapshot that it has completed is still written.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from elastic.checkpoint.format.errors import ArenaError
from elastic.checkpoint.format.shard_plan import newest_complete
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.saving import orders
from elastic.checkpoint.saving.client import Busy, WriterProcess
from elastic.checkpoint.saving.failures import FailuresInRow
from elastic.contract.job.spec import Checkpoint
from elastic.contract.records.reasons import Code, Text, reason
from elastic.contract.worker import messages

MEMINFO = Path("/proc/meminfo")
GROUPS = Path("/sys/fs/cgroup")
SPARE_SHARE = 0.5
"""Fraction of the free memory that snapshots beyond those needed for checkpoints may take."""


def plenty(nbytes: int, *, available_nbytes: int | None) -> bool:
    """Whether taking `nbytes` leaves at least as much free. True if the free memory is not known."""
    return available_nbytes is None or nbytes <= SPARE_SHARE * available_nbytes


def available_nbytes(
    meminfo: Path = MEMINFO, groups: Path = GROUPS, own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Bytes still available on the machine, or in this process's cgroup (version 2) or one above it if that is less.

    None: it cannot be read.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    amounts = [int(found[1]) * 1024] if found else []
    amounts += _left_in_groups(groups, own)
    return min(amounts, default=None)


def _left_in_groups(groups: Path, own: Path) -> list[int]:
    try:
        named = re.search(r"^0::/(.*)$", own.read_text(), re.MULTILINE)
    except OSError:
        return []
    left: list[int] = []
    folder = groups / named[1] if named else groups
    while folder != groups and groups in folder.parents:
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            cached = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            if limit.isdecimal():
                left.append(max(0, int(limit) - used + (int(cached[1]) if cached else 0)))
        except (OSError, ValueError):
            pass  # this cgroup has no limit
        folder = folder.parent
    return left


KEPT_WRITE_S, KEPT_COMMIT_S = 60.0, 3.0
"""How long a recovery without live state waits for the checkpoint under way: for this node's writes, and for other
nodes' shards, which may never come."""
LOOK_S = 0.5
MAX_KEPT = 250
"""Descriptors in one message; the kernel takes 253. Part of a snapshot is useless: if more are needed none is sent."""

log = structlog.get_logger()

Tell = Callable[[int, messages.Message, tuple[int, ...]], None]


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
    kept_interval: str = ""

    @property
    def error(self) -> str | None:
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
    """`on_saved(generation, step)` is called when a checkpoint has become durable; `on_failed(step, error, wall_s)`
    when one failed, with step and time of the first in a row that failed alike: not if shards of it are missing and
    `cut(generation)` says that the job has left that generation for a failure, or ends."""

    rules: Checkpoint
    job: str
    tell: Tell
    on_saved: Callable[[int, int], None]
    on_failed: Callable[[int, Text, float], None]
    cut: Callable[[int], bool] = lambda generation: False
    apart: Callable[[], Text] = lambda: ""
    """Why the folder is not one for all nodes, although it is to be shared; empty: it is, as far as is known."""
    versions: dict[str, str] = field(default_factory=dict)
    slots: int = 1
    """Workers of this node; each of them requests the same memory."""
    patience_s: float = 300.0
    """A writer that has moved no byte for so long is not waited for any more."""

    def __post_init__(self) -> None:
        self.writer = WriterProcess()
        self.last = SaveStatus()
        self._slots: dict[int, _Slot] = {}
        self._writes: dict[int, tuple[int, int, int]] = {}
        self._committing: dict[tuple[int, int], bool] = {}
        """(generation, step) -> whether this node copies that checkpoint to the remote end."""
        self._to_copy = (0, 0)
        """(generation, step) of the newest checkpoint that this node is to copy."""
        self._asking: dict[int, tuple[int, float]] = {}
        self._moved: tuple[tuple[object, ...], float] = (), 0.0
        """The writer's activity at the last look, and since when it is that."""
        self._outdated = False
        """The writer still maps buffers that have been replaced."""

    @property
    def on(self) -> bool:
        return bool(self.rules.dir)

    # ── messages from workers ───────────────────────────────────────────────────────────────────────────────

    def need_arena(self, slot: int, worker_id: int, nbytes: int, *, request: int = 0, optional: bool = False) -> None:
        """Send this worker two buffers; those of the slot's previous worker are reused if they are large enough.

        `optional`: none are sent if they would take memory that the training may need.
        """
        buffers = self._slots.get(slot)
        if buffers is None or not buffers.arenas or buffers.arenas[0].capacity < nbytes:
            wanted = 2 * nbytes * self.slots
            if optional and not plenty(wanted, available_nbytes=available_nbytes()):
                log.warning("snapshot.no_memory", wanted_mb=round(wanted / 1e6))
                self.last.kept_interval = f"no memory: {wanted / 1e6:.0f} MB on this node would leave too little"
                self.tell(worker_id, messages.Arena(nbytes=0, request=request), ())
                return
            fresh: tuple[Arena, ...] = ()
            try:
                while len(fresh) < 2:
                    fresh += (Arena.create(nbytes, warm=False),)  # the worker warms them
            except ArenaError as error:
                for arena in fresh:
                    arena.close()
                self._fail(0, 0, f"no shared memory for snapshots: {error}")
                self.tell(worker_id, messages.Arena(nbytes=0, request=request), ())
                return
            if buffers is not None:
                self._outdated = True
                self._forget()
                for arena in buffers.arenas:
                    arena.close()
            buffers = self._slots[slot] = _Slot(worker_id, fresh)
            # Writes that still read the old buffers must not free the new ones.
            for ticket, (of, step, buffer) in tuple(self._writes.items()):
                if of == slot:
                    self._writes[ticket] = (-1, step, buffer)
            self._look_for_kept()
        buffers.worker_id = worker_id
        self.last.kept_mb = sum(arena.capacity for one in self._slots.values() for arena in one.arenas) / 1e6
        writing = {buffer for of, _, buffer in self._writes.values() if of == slot}
        for buffer, arena in enumerate(buffers.arenas):
            offer = messages.Arena(nbytes=arena.capacity, request=request, buffer=buffer, busy=buffer in writing)
            self.tell(worker_id, offer, (arena.fd,))

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
        self._look_for_kept()
        if not message.save:
            return
        if self.rules.shared and (why := self.apart()):  # nothing is written that no node could commit
            self._free(slot, message.step, message.buffer, str(why))
            if lead:
                self._fail(message.generation, message.step, why)
            return
        buffers.to_disk[message.buffer] = (message.generation, message.step)
        if copies:
            self._to_copy = (message.generation, message.step)
        try:
            order = orders.Write(
                directory=self.rules.dir,
                job=self.job,
                step=message.step,
                generation=message.generation,
                alone=not self.rules.shared,
            )
            ticket = self.writer.submit(order, buffers.arenas[message.buffer])
        except (Busy, OSError) as error:
            self._fail(message.generation, message.step, str(error))
            self._free(slot, message.step, message.buffer, str(error))
            return
        self._writes[ticket] = (slot, message.step, message.buffer)
        if lead and (message.generation, message.step) not in self._committing:
            try:
                self._commit(message, world_size, copies)
            except (Busy, OSError) as error:
                # The buffer is freed when its write has ended.
                self._fail(message.generation, message.step, f"commit: {error}")

    def _commit(self, message: messages.Filled, world_size: int, copies: bool) -> None:
        self.writer.submit(
            orders.Commit(
                directory=self.rules.dir,
                job=self.job,
                step=message.step,
                generation=message.generation,
                shards=message.shards,
                world_size=world_size,
                versions=self.versions,
                keep=self.rules.keep,
                keep_every_steps=self.rules.keep_every_steps,
            )
        )
        self._committing[message.generation, message.step] = copies

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
        if result.error:
            self._fail(result.generation, step, result.error)
        elif (result.generation, step) not in {*self._committing, self.last.failing.last}:
            self.last.failing = FailuresInRow()  # another node commits; this node's part is done
        self._free(slot, step, buffer, result.error, result.seconds)

    def _free(self, slot: int, step: int, buffer: int, error: str, seconds: float = 0.0) -> None:
        if buffers := self._slots.get(slot):
            self.tell(
                buffers.worker_id, messages.SaveResult(step=step, buffer=buffer, error=error, seconds=seconds), ()
            )

    def _committed(self, result: orders.Result) -> None:
        copies = self._committing.pop((result.generation, result.step), True)
        if result.missing and self.cut(result.generation):
            log.warning("checkpoint.cut", step=result.step, why=result.error)  # the incident is that of the failure
            return
        if result.error:
            self._fail(result.generation, result.step, result.error)
            return
        last = self.last
        last.generation, last.step = result.generation, result.step
        last.wall_s, last.seconds = time.time(), result.seconds
        last.failing = FailuresInRow()
        log.info("checkpoint.saved", step=result.step, path=result.path, seconds=round(result.seconds, 3))
        for note in result.notes:
            log.warning("checkpoint.not_removed", why=note)
        self.on_saved(result.generation, result.step)
        if self.rules.remote and copies:
            order = orders.CopyUp(
                path=result.path,
                url=self.rules.remote,
                keep=self.rules.keep,
                keep_every_steps=self.rules.keep_every_steps,
            )
            try:
                self.writer.submit(order)
            except (Busy, OSError) as error:
                self._copy_failed(result.generation, result.step, str(error))

    def _copied(self, result: orders.Result) -> None:
        if result.ok:
            self.last.copied, self.last.copying = result.path, FailuresInRow()
        else:
            self._copy_failed(result.generation, result.step, result.error)

    def _copy_failed(self, generation: int, step: int, error: str) -> None:
        self._count(self.last.copying, "copy", generation, step, f"copy to {self.rules.remote}: {error}")

    def _fail(self, generation: int, step: int, error: Text) -> None:
        """Report a failed checkpoint, which costs the job nothing. Step 0 or less: no particular checkpoint."""
        if self.rules.remote and not self.rules.shared and (generation, step) == self._to_copy:
            error = (
                f"{error}; no node copies this checkpoint to {self.rules.remote}: with checkpoint.shared = false the "
                "leader's node copies its own"
            )
        self._count(self.last.failing, "checkpoint", generation, step, error)

    def _count(self, row: FailuresInRow, what: str, generation: int, step: int, error: Text) -> None:
        if not row.add(str(error), generation, step, time.time()):
            return
        if row.escalate:
            error = reason(Code.IN_A_ROW, error, count=row.count)
        row.error = f"step {step}: {error}"
        say = log.error if row.escalate else log.warning
        say("checkpoint.failed", step=step, what=what, error=str(error), in_a_row=row.count)
        self.on_failed(row.began[0], error, row.began[1])

    # ── recovery without live state ─────────────────────────────────────────────────────────────────────────

    def ask_kept(self, worker_id: int, generation: int, *, saved: bool = False) -> None:
        """Answered at once, or when pending writes are on disk, since they may hold the newest state.

        `saved`: the job goes back to saved state. Snapshots that are in memory only are then cleared: they are newer,
        and as bad as the state that the job goes back from.
        """
        if saved:
            for buffers in self._slots.values():
                # By what the buffer holds: a worker that dies right after it has sealed one reports nothing.
                for buffer, arena in enumerate(buffers.arenas):
                    header = arena.header()
                    if header.complete and buffers.to_disk.get(buffer) != (header.generation, header.step):
                        arena.clear()
            self._look_for_kept()
        self._asking[worker_id] = (generation, time.monotonic())
        self.answer()

    def answer(self) -> None:
        """Called when the writer has returned results, and on every tick."""
        now_s = time.monotonic()
        for worker_id, (generation, since_s) in tuple(self._asking.items()):
            waited_s = now_s - since_s
            if (self._writes and waited_s < KEPT_WRITE_S) or (self._committing and waited_s < KEPT_COMMIT_S):
                continue
            del self._asking[worker_id]
            arenas = self._complete_snapshot()
            if len(arenas) > MAX_KEPT:
                log.warning("checkpoint.kept_too_many", arenas=len(arenas), limit=MAX_KEPT)
                arenas = []
            answer = messages.InMemorySnapshot(generation=generation, arenas=len(arenas))
            self.tell(worker_id, answer, tuple(arena.fd for arena in arenas))

    def _look_for_kept(self) -> None:
        arenas = self._complete_snapshot()
        self.last.kept_step = arenas[0].header().step if arenas else None

    def _complete_snapshot(self) -> list[Arena]:
        """The arenas of the newest snapshot of which this node has every part."""
        arenas = [arena for buffers in self._slots.values() for arena in buffers.arenas]
        complete = [(header, arena) for arena in arenas if (header := arena.header()).complete]
        newest = newest_complete([(h.generation, h.step, h.part, h.parts) for h, _ in complete])
        if newest is None:
            return []
        chosen = {h.part: arena for h, arena in complete if (h.generation, h.step, h.parts) == newest}
        return [chosen[part] for part in sorted(chosen)]

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
        """A checkpoint that is not committed yet has failed: nothing is left to do that."""
        for generation, step in sorted(self._committing):
            if not self.cut(generation):
                self._fail(generation, step, "the agent has left before it was durable")
        self.writer.close()
        for buffers in self._slots.values():
            for arena in buffers.arenas:
                arena.close()
        self._slots.clear()
