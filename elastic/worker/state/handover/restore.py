"""Converts between checkpoints or snapshots and this worker's state: what is saved beside the tensors, and loading."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from elastic.checkpoint.format.errors import IncompleteSnapshot, NoGoodCheckpoint
from elastic.checkpoint.format.manifest import Shard, overlap
from elastic.checkpoint.format.plain import tensors_named
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.memory.progress import Progress, unreported
from elastic.checkpoint.stored import find, read
from elastic.checkpoint.stored.remote import RemoteError, fetch_newest, list_remote, unusable_step
from elastic.checkpoint.stored.retention import Entry
from elastic.contract.origin import Origin
from elastic.contract.worker import messages
from elastic.contract.worker.tensor_table import Table, TensorInfo
from elastic.worker.link.misuse import MisuseRuntimeError, MisuseValueError
from elastic.worker.link.session import Session
from elastic.worker.state.state import State
from elastic.worker.state.state_source import Saved, UnreadableRange, Version
from elastic.worker.torch_internals import gc_pause

ASK_S = 90.0
"""Longer than the agent takes to answer in any case."""


def extra_of(extra: dict[str, Any], positions: Sequence[int], key: int = 0, *, staged: bool = False) -> dict[str, Any]:
    """The data of a shard beside its tensors: the state's `extra`, the positions of its tensors in the complete table,
    and the key (`State.shard_key`) if it is a rank's own part. `staged`: see `RankPosition`.

    `positions` in the order of the shard's file (`layout.file_order`).
    """
    return {
        "state": extra,
        "positions": list(positions),
        **({"key": key} if key else {}),
        **({"staged": True} if staged else {}),
    }


def whole_table(shards: Iterable[tuple[Mapping[str, Any], Table]]) -> Table:
    """The table of the complete state, assembled from the shards' (extra, table)."""
    placed: list[tuple[int, TensorInfo]] = []
    for extra, table in shards:
        placed += zip(extra["positions"], table, strict=True)
    return tuple(info for _, info in sorted(placed, key=lambda pair: pair[0]))


def saved_for(shards: Sequence[Shard], key: int) -> tuple[dict[str, Any], Table]:
    """Of a checkpoint the `extra` of the state and the table for a rank of `key`: the boxes, and what its own key has
    saved besides; where that is not in it, what rank 0 has. Raises MisuseValueError for stages of another layout."""
    first = shards[0]
    own = next((shard for shard in shards if key and shard.extra.get("key") == key), first)
    extra: dict[str, Any] = own.extra["state"]
    if first.extra.get("staged"):
        if own.extra.get("key") != key or len(shards) != (dist.get_world_size() if dist.is_initialized() else 1):
            raise MisuseValueError(
                f"the checkpoint of step {first.step} has parts whose names differ by rank, as stages do, "
                "and none that is this rank's: it is read by the number of ranks, and with the stages, that it was "
                "saved with. Set nodes and workers_per_node as then"
            )
        return extra, own.tensors
    if not first.extra.get("key"):
        return extra, whole_table((shard.extra, shard.tensors) for shard in shards)
    dropped = {info.name for info in own.tensors if not info.of} if own is not first else set[str]()
    dropped |= tensors_named(first.extra["state"]) - tensors_named(extra)
    placed = [
        (place, info)
        for shard in shards
        for place, info in zip(shard.extra["positions"], shard.tensors, strict=True)
        if info.of or shard is own or (shard is first and info.name not in dropped)
    ]
    return extra, tuple(info for _, info in sorted(placed, key=lambda pair: pair[0]))


class HeldSnapshots:
    """One complete snapshot in the memory of this node's agent."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self._arenas = arenas

    def version(self) -> Version | None:
        if not self._arenas:
            return None
        header = self._arenas[0].header()
        return (header.generation, header.step) if header.complete else None

    @property
    def key(self) -> int:
        """See `extra_of`."""
        return self._arenas[0].key()

    def arena(self) -> Arena:
        """Of a rank's own part."""
        (arena,) = self._arenas
        return arena

    @gc_pause.paused()
    def load(self, state: State, progress: Progress = unreported) -> str:
        """Copy it into `state`; returns a description. Raises IncompleteSnapshot if an arena is being overwritten."""
        extras = [arena.extra() for arena in self._arenas]
        besides = [arena.beside() for arena in self._arenas]
        own = ((extra, arena.table()) for extra, arena in zip(extras, self._arenas, strict=True))
        others = (({"positions": beside.positions}, beside.table) for beside in besides)
        table = whole_table([*own, *others])
        here = {info.name: t for info, t in zip(table, state.adopt(table, extras[0]["state"]), strict=True)}
        for arena in self._arenas:
            arena.load(here, progress)
        state.filled()
        return f"snapshot step {state.step} in this node's memory"

    def clear(self) -> None:
        for arena in self._arenas:
            arena.clear()

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()


Kept = list[tuple[Version | None, HeldSnapshots]]


def kept_in(arenas: Sequence[Arena], key: int, rank: int, world_size: int) -> tuple[Kept, Kept]:
    """(version, snapshot) of what `arenas` hold for a rank of `key`, the newest first; and for ranks of other keys.
    Incomplete ones are closed. Raises MisuseRuntimeError if `rank` of as many ranks had other boxes."""
    own: Kept = []
    others: Kept = []
    for arena in arenas:
        snapshot, header = HeldSnapshots([arena]), arena.header()
        if not header.complete or header.parts != 1 or not snapshot.key:
            arena.close()
        elif snapshot.key == key:
            own.append((snapshot.version(), snapshot))
        elif (header.shard, header.shards) == (rank, world_size):
            raise MisuseRuntimeError(
                f"setup() has built other boxes of the state for rank {rank} of {world_size} than it had before: the "
                "meshes, the sharding and the model's shapes must follow from the ranks and the job's arguments alone"
            )
        else:
            others.append((snapshot.version(), snapshot))
    return sorted(own, key=lambda each: each[0] or (-1, -1), reverse=True), others


class Boxes:
    """Where the boxes of a checkpoint are read to: into the tensors that they are the contents of, else aside, for
    `cut` to take what this rank's box has in common with them."""

    def __init__(self) -> None:
        self._aside: list[tuple[torch.Tensor, TensorInfo, torch.Tensor, TensorInfo]] = []

    def into(self, here: Mapping[str, tuple[TensorInfo, torch.Tensor]], wanted: Iterable[TensorInfo]) -> read.Into:
        """`here`: what this rank is to hold, by name. A box that several ranks have saved is read once. `wanted`: the
        objects in the manifest, as tensors of several keys may have one name."""
        ids = set(map(id, wanted))
        self._aside.clear()
        taken = set[tuple[str, tuple[int, ...]]]()

        def target(info: TensorInfo) -> torch.Tensor | None:
            if id(info) not in ids:
                return None
            own, tensor = here[info.name]
            if (info.name, info.at) in taken or overlap(own, info) is None:
                return tensor if own == info else None
            taken.add((info.name, info.at))
            if (own.of, own.at, own.shape) == (info.of, info.at, info.shape):
                return tensor
            self._aside.append((tensor, own, torch.empty(info.shape, dtype=tensor.dtype), info))
            return self._aside[-1][2]

        return target

    def cut(self) -> None:
        for tensor, own, read_box, info in self._aside:
            if (common := overlap(own, info)) is not None:
                tensor[common[0]].copy_(read_box[common[1]])
        self._aside.clear()


class Disk(msgspec.Struct, frozen=True):
    """The job's checkpoints on a file system, with an optional remote copy."""

    directory: str
    job: str
    remote: str = ""
    known: Version = (0, 0)
    """The newest checkpoint that the job is known to have had; (0, 0): none."""
    one: bool = False
    """All ranks see the same folder, and what is damaged for one is so for all."""

    def newest(self, passed: Sequence[UnreadableRange] = ()) -> tuple[Version | None, int]:
        """The version that `load` would most likely load, and the id of its storage; reads names and manifests only.
        `passed`: what other ranks have found damaged."""
        storage_id = _hashed(self.directory) if self.one else _storage_id(self.directory)
        versions = _not_passed(find.peek(self.directory, self.job), storage_id, passed)
        if self.remote and (not versions or versions[0] < self.known):
            there = _not_passed(self._at_remote(optional=bool(versions)), _hashed(self.remote), passed)
            if there and (not versions or there[0] > versions[0]):
                return there[0], _hashed(self.remote)
        return (versions[0], storage_id) if versions else (None, 0)

    def _at_remote(self, *, optional: bool) -> list[Entry]:
        """The copies there. Raises RemoteError if there is no answer; with `optional` prints that, and returns none."""
        try:
            return list_remote(self.remote, self.job)
        except RemoteError as error:
            if not optional:
                raise
            self._say_older(str(error))
            return []

    def _fetch_newer(self) -> None:
        """This node may have been away for long: fetch the newest copy if it is newer than what is here."""
        here = _not_passed(find.peek(self.directory, self.job), 0, ())
        if not self.remote or not here or here[0] >= self.known:
            return
        there = _not_passed(self._at_remote(optional=True), 0, ())
        if not there or there[0] <= here[0]:
            return
        try:
            fetch_newest(self.remote, self.job, self.directory)
        except (RemoteError, NoGoodCheckpoint) as error:
            self._say_older(str(error))

    def _say_older(self, why: str) -> None:
        _, step = self.known
        said = f"the checkpoint in {self.directory} is older than that of step {step}, which the job has had"
        print(f"elastic: {said}: {why}", file=sys.stderr, flush=True)

    def saved(self) -> Saved:
        """`newest`. If there is none, the checkpoints that cannot be loaded count: training must not begin anew beside
        them."""
        newest, storage_id = self.newest()
        unusable = 0
        if newest is None:
            there = unusable_step(self.remote, self.job) if self.remote else 0
            unusable = max(there, find.unusable_step(self.directory, self.job))
        return Saved(checkpoint=newest, unusable_step=unusable, storage_id=storage_id, look_again=self.newest)

    def load(self, state: State, progress: Progress = unreported) -> str:
        """Load the newest intact checkpoint into `state`; returns a description. Damaged ones are quarantined on the
        way.

        Raises NoGoodCheckpoint if there are checkpoints but none is intact (restarting from step 0 is for an operator
        to decide), FileNotFoundError if there is none.
        """

        boxes = Boxes()

        def prepare(loaded: find.Found) -> read.Into:
            extra, saved = saved_for(loaded.manifest.shards, state.shard_key())
            table = state.table_for(saved)
            came = state.adopt(table, extra)
            return boxes.into({info.name: (info, tensor) for info, tensor in zip(table, came, strict=True)}, saved)

        self._fetch_newer()
        loaded = read.load_newest(self.directory, self.job, prepare, remote=self.remote, progress=progress)
        if loaded is None:
            raise FileNotFoundError(f"no checkpoint of job {self.job!r} in {self.directory}")
        boxes.cut()
        state.filled()
        said = f"checkpoint step {loaded.step} at {loaded.path}"
        return said + "".join(f"; quarantined {one}" for one in loaded.aside)


def _not_passed(found: Iterable[Entry], storage_id: int, passed: Sequence[UnreadableRange]) -> list[Version]:
    versions = [(generation, step) for step, generation, _ in found]
    return [
        version
        for version in versions
        if not any(one.storage_id == storage_id != 0 and one.covers(version) for one in passed)
    ]


def _storage_id(folder: str) -> int:
    """By host: what cannot be read on one may be readable on another. 0: not known."""
    try:
        found = os.stat(folder)
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return _hashed(f"{file.read()} {found.st_dev} {found.st_ino}")
    except OSError:
        return 0


def _hashed(place: str) -> int:
    """63 bits: it is sent as a signed number."""
    return xxhash.xxh3_64_intdigest(place.encode()) >> 1


class Store:
    """All saved states within reach of one worker: the agent's memory and, if there are checkpoints, the disk."""

    def __init__(
        self,
        session: Session,
        disk: Disk | None,
        state: State,
        form: messages.Form,
        room_for: Callable[[int], Arena | None] = lambda _: None,
    ) -> None:
        """`form.restore` = 'snapshot' leaves out snapshots taken for memory only. `room_for` returns a buffer for so
        many bytes of this rank's part, in the agent's memory."""
        self._session, self._form, self._room_for = session, form, room_for
        self._disk = disk
        self._state: State | None = state
        self._kept: Kept = []
        self._others: Kept = []
        self._key = 0
        self._answers: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        """None: descriptors were lost on the way."""
        self._closed = False

    def saved(self) -> Saved:
        """The agent answers once pending writes are on disk. Raises GenerationEnded, RuntimeError if this process has
        no room for the descriptors of the answer: older state must not be taken for the newest."""
        self._session.on(messages.InMemorySnapshot, self._on_kept)
        key = self._key = self._state.shard_key() if self._state is not None else 0
        form, saved_only = self._form, self._form.restore == "snapshot"
        self._session.send(messages.RequestSnapshot(generation=form.generation, saved=saved_only, own_parts=key != 0))
        self._session.wait(lambda: not self._answers.empty(), form.generation, ASK_S)
        descriptors = [] if self._answers.empty() else self._answers.get_nowait()
        if descriptors is None:
            raise RuntimeError(
                "the snapshot in the agent's memory cannot be received: this process has too many open files "
                "(RLIMIT_NOFILE, ulimit -n)"
            )
        arenas = [Arena.from_fd(descriptor, warm=False) for descriptor in descriptors]
        if key:
            self._kept, self._others = kept_in(arenas, key, form.rank, form.world_size)
        else:
            whole = HeldSnapshots(arenas)
            self._kept = [(whole.version(), whole)]
        # Replicas on one node have both kept the same steps.
        newest, older = (*dict.fromkeys(version for version, _ in self._kept), None, None)[:2]
        # The ranks of a node see the same: they share it out, so that several of them send.
        local, count = form.local_rank, form.local_world_size
        mine = [(each.key, at) for at, each in self._others if at and each.key % count == local]
        found = self._disk.saved() if self._disk else Saved()
        others = tuple(dict.fromkeys(mine))
        return Saved(newest, found.checkpoint, found.unusable_step, found.storage_id, found.look_again, older, others)

    def kept_for(self, key: int, version: Version) -> Arena:
        """A snapshot that `saved` has named among `others`."""
        for each in (each for _, each in self._others if each.version() == version and each.key == key):
            return each.arena()
        raise IncompleteSnapshot(f"the snapshot of step {version[1]} that was offered is there no more")

    def own_nbytes(self) -> int:
        """Size of the buffers of this rank's part in this node's memory; 0: there are none."""
        return max((each.arena().capacity for _, each in self._kept), default=0) if self._key else 0

    def arena_for(self, nbytes: int) -> Arena:
        """For a snapshot that comes from another node: it stays in the memory of this one, if that has room."""
        arena = self._room_for(nbytes)
        if arena is None or (arena.header().complete and arena.key() != self._key):  # another rank may be sent that
            arena = Arena.create(nbytes, warm=False)
            self._others.append((None, HeldSnapshots([arena])))  # closed with the others
        return arena

    def load_arena(self, arena: Arena) -> str:
        assert self._state is not None, "loaded after close"
        HeldSnapshots([arena]).load(self._state, self._session.copied)
        return f"snapshot step {self._state.step} in another node's memory"

    def _on_kept(self, message: messages.Message, descriptors: list[int]) -> None:
        """In the monitor thread. Closes the descriptors of an answer that came too late or for an earlier
        generation."""
        assert isinstance(message, messages.InMemorySnapshot)
        complete = len(descriptors) == message.arenas
        if message.generation != self._form.generation or not complete:
            _close_all(descriptors)
        if message.generation == self._form.generation:
            self._answers.put(descriptors if complete else None)
            if self._closed:
                self._drop_answers()

    def _drop_answers(self) -> None:
        while not self._answers.empty():
            with contextlib.suppress(queue.Empty):  # the other thread was faster
                _close_all(self._answers.get_nowait() or ())

    def load(self, origin: Origin, version: Version) -> str:
        assert self._state is not None, "loaded after close"
        if origin is Origin.SNAPSHOT:
            return dict(self._kept)[version].load(self._state, self._session.copied)
        assert self._disk is not None, "a job without a checkpoint directory offers no checkpoint"
        return self._disk.load(self._state, self._session.copied)

    def discard_newer(self, version: Version) -> None:
        """Another rank lacks them, so that all have gone back to `version`. To stay, they would be kept in place of
        what all ranks have."""
        for _, snapshot in (*self._kept, *self._others):
            if (kept := snapshot.version()) is not None and kept > version:
                snapshot.clear()

    def close(self) -> None:
        self._closed = True
        self._state = None  # the session holds `_on_kept`, and so this
        self._drop_answers()
        for _, snapshot in (*self._kept, *self._others):
            snapshot.close()


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
