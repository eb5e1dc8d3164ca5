"""Selection of the checkpoint to resume from: the newest that matches its manifest. Others are reported and
quarantined.

Nothing is deleted here and nothing is unpickled. Several processes may search at once: quarantining is a rename, and
the later processes find it done.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import xxhash

from elastic.checkpoint.format import files
from elastic.checkpoint.format import manifest as m
from elastic.checkpoint.format.errors import Damaged, NoGoodCheckpoint
from elastic.checkpoint.format.names import (
    each,
    head_of,
    is_aside,
    is_final,
    is_foreign,
    job_of,
    names_another,
    step_of,
    tmp_of,
)
from elastic.util.files import closed_after

READ_THREADS = 2
_LOOKS = 20

KEEP_IN_PLACE = frozenset({"other-job", "other-format", "unreadable"})
"""Not damage: a checkpoint of another job or version, or one that this process cannot read at the moment."""


@dataclass(frozen=True, slots=True)
class Aside:
    """A checkpoint that was passed over."""

    path: str
    """Its current path."""
    reason: str
    """manifest-missing, manifest-damaged, shard-missing, shard-size, shard-hash, other-job, other-format, unreadable"""
    detail: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.path)}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Found:
    path: str
    manifest: m.Manifest
    aside: tuple[Aside, ...] = ()
    """Newer ones that were passed over, newest first."""

    @property
    def step(self) -> int:
        return self.manifest.step


def newest_good(directory: str, job: str, *, hashes: bool = True, skip: Iterable[Aside] = ()) -> Found | None:
    """The newest checkpoint of `job` that passes its checks; None if there has never been one.

    `hashes=False` checks manifests and sizes only, for a caller that goes on to `load`, which verifies while it reads.
    `skip`: checkpoints that such a caller found damaged; they come first in the result's `aside`. Raises
    NoGoodCheckpoint if there are checkpoints, even long quarantined ones, but none is good: starting from zero must
    then be an operator's decision.
    """
    aside = list(skip)
    for _ in range(_LOOKS):
        paths = _by_age(directory)
        for path in paths:
            if any(path == a.path for a in aside):
                continue
            before = files.REAL.identity(path)
            try:
                return Found(path, verify(path, job, hashes=hashes), tuple(aside))
            except Damaged as damage:
                if files.REAL.identity(path) != before or before is None:
                    break  # another process moved it: look again
                aside.append(set_aside(path, damage, before=before))
        else:
            _refuse_a_silent_start(directory, job, aside)
            return None
    raise NoGoodCheckpoint(f"{directory} changes all the time: looked {_LOOKS} times")


def _by_age(directory: str) -> list[str]:
    """All directories of checkpoints: first those without a valid manifest, then the others, newest first."""
    paths = [os.path.join(directory, name) for name in files.REAL.names(directory) if is_final(name)]
    heads = {path: head_of(path) for path in paths}
    lost = [path for path in paths if heads[path] is None and not is_foreign(path)]
    lost.sort(key=lambda path: -step_of(os.path.basename(path)))
    known = [(head.generation, head.step, path) for path, head in heads.items() if head is not None]
    return lost + [path for _, _, path in sorted(known, reverse=True)]


def _refuse_a_silent_start(directory: str, job: str, aside: list[Aside]) -> None:
    old = [name for name in files.REAL.names(directory) if is_aside(name)]
    why = [str(a) for a in aside]
    why += [f"{name}: quarantined before" for name in old if not any(a.path.endswith(name) for a in aside)]
    if why:
        raise NoGoodCheckpoint(
            f"{directory} has no good checkpoint of job {job!r}. Repair one, or move these away to start from zero:\n  "
            + "\n  ".join(why)
        )


def peek(directory: str, job: str | None = None) -> list[tuple[int, int, str]]:
    """(step, generation, path) of each checkpoint, newest first, from manifests alone: nothing is verified or moved."""
    checkpoints = []
    for name in files.REAL.names(directory):
        path = os.path.join(directory, name)
        if is_final(name) and (head := head_of(path)) and job in (None, head.job):
            checkpoints.append((head.step, head.generation, path))
    return sorted(checkpoints, key=lambda f: (f[1], f[0]), reverse=True)


def unusable_step(directory: str, job: str) -> int:
    """The newest step of the checkpoints of `job` without a readable manifest, and of its quarantined ones; 0: none.

    One that does not tell its job counts, unless another user owns it, or no file in it is named as elastic's.
    """
    steps = [0]
    for name in files.REAL.names(directory):
        path = os.path.join(directory, name)
        if (is_final(name) or is_aside(name)) and not names_another(name, job):
            told = job_of(path)
            if told == job or (told is None and _may_be_ours(path)):
                steps.append(step_of(name))
    return max(steps)


def _may_be_ours(path: str) -> bool:
    """Root's jobs may have been another user's before. Without an owner it is gone by now."""
    owner = files.REAL.owner(path)
    return owner is not None and os.geteuid() in (0, owner) and not is_foreign(path)


def newest_generation(directory: str, job: str) -> int:
    """The highest generation of the checkpoints of `job`, and of its unfinished ones; 0: there is none. An
    unfinished one counts: a save of the same step and generation would be completed with its shards."""
    unfinished = [save[1] for name in files.REAL.names(directory) if (save := tmp_of(name, job))]
    return max([0, *unfinished, *(generation for _, generation, _ in peek(directory, job))])


def verify(path: str, job: str | None = None, *, hashes: bool = True, threads: int = READ_THREADS) -> m.Manifest:
    """Verify one checkpoint against its manifest, and return the manifest. Raises Damaged."""
    try:
        manifest = m.decode(files.REAL.read(os.path.join(path, m.MANIFEST)))
    except FileNotFoundError:
        raise Damaged("manifest-missing", "it has no manifest") from None
    except OSError as error:
        raise Damaged("unreadable", f"its manifest cannot be read: {error.strerror}") from error
    if job is not None and manifest.job != job:
        raise Damaged("other-job", f"it belongs to job {manifest.job!r}, not {job!r}")
    for shard in manifest.shards:
        with _reading(shard):
            size = files.REAL.size(os.path.join(path, shard.file))
        if size != shard.nbytes:
            raise Damaged("shard-size", f"{shard.file} has {size} bytes instead of {shard.nbytes}")
    if hashes:
        spare = Spare()

        def check(piece: tuple[m.Shard, int]) -> None:
            shard, index = piece
            nbytes = min(shard.piece_nbytes, shard.nbytes - index * shard.piece_nbytes)
            read_piece(path, shard, index, [spare.take(nbytes)])

        each(check, [(shard, i) for shard in manifest.shards for i in range(len(shard.xxh3))], threads)
    return manifest


class Spare(threading.local):
    """Buffer of each reading thread for bytes that are only hashed; allocated once, because fresh memory is slow."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def take(self, nbytes: int) -> memoryview:
        """`nbytes` of the buffer; valid until this thread's next call."""
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]


def read_piece(path: str, shard: m.Shard, index: int, into: list[memoryview]) -> None:
    """Read piece `index` of a shard into the buffers `into`, in order, and check its hash. Raises Damaged."""
    file = os.path.join(path, shard.file)
    at = index * shard.piece_nbytes
    with _reading(shard), closed_after(files.open_file(file)) as fd:
        for views in (into[i : i + _IOV_MAX] for i in range(0, len(into), _IOV_MAX)):
            at = _read_views(fd, views, at, shard)
    hasher = xxhash.xxh3_64()
    for view in into:
        hasher.update(view)
    if (is_ := hasher.hexdigest()) != (should := shard.xxh3[index]):
        raise Damaged("shard-hash", f"piece {index} of {shard.file} has hash {is_} instead of {should}")


@contextmanager
def _reading(shard: m.Shard) -> Iterator[None]:
    """Raises Damaged for an OSError at the shard's file."""
    try:
        yield
    except FileNotFoundError:
        raise Damaged("shard-missing", f"{shard.file} is missing") from None
    except OSError as error:
        raise Damaged("unreadable", f"{shard.file} cannot be read: {error.strerror}") from error


_IOV_MAX = 1024


def _read_views(fd: int, views: list[memoryview], at: int, shard: m.Shard) -> int:
    while views:
        done = os.preadv(fd, views, at)
        if done == 0:
            raise Damaged("shard-size", f"{shard.file} ends at {at} instead of {shard.nbytes}")
        at += done
        while views and done >= len(views[0]):
            done -= len(views[0])
            views = views[1:]
        if done:
            views = [views[0][done:], *views[1:]]
    return at


def set_aside(path: str, damage: Damaged, *, before: tuple[int, int] | None = None) -> Aside:
    """Quarantine a damaged checkpoint by renaming it, unless its reason is in `KEEP_IN_PLACE` or it is not `before` any
    more.

    If it cannot be renamed (a read-only disk) it stays, and is passed over again next time.
    """
    aside = Aside(path, damage.reason, damage.detail)
    if damage.reason in KEEP_IN_PLACE or (before is not None and files.REAL.identity(path) != before):
        return aside
    for number in range(1, 100):
        target = f"{path}.damaged-{damage.reason}" + (f"-{number}" if number > 1 else "")
        try:
            files.REAL.rename(path, target)
            files.REAL.sync_dir(os.path.dirname(path))
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            if error.errno == errno.ENOENT:  # another process was faster
                return replace(aside, path=target)
            return aside
        return replace(aside, path=target)
    return aside
