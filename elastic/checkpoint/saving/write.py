"""From arenas to a checkpoint on disk: each process writes the shard that it holds, then one rename commits them.

    step-40.g3.j….tmp/                      created by the first writer
        shard-00000-of-00002.safetensors    space reserved, written past the page cache, hashed, fsynced
        shard-00000-of-00002.json           its note: sizes, hashes, tensors. Written aside and renamed, last
        shard-00001-of-00002.…
        manifest.json                       when all notes exist. Written aside, fsynced, renamed; directory fsynced
    step-40/                                the rename is the commit; then the parent is fsynced

No collective is needed and no shard waits for another, so a dead rank delays a checkpoint but cannot hang it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence

import msgspec

from elastic.checkpoint.format import files
from elastic.checkpoint.format import manifest as m
from elastic.checkpoint.format.errors import Damaged, SaveFailed, ShardsMissing
from elastic.checkpoint.format.layout import pad
from elastic.checkpoint.format.names import each, final_names, head_of, tmp_name
from elastic.checkpoint.memory.arena import Arena

WRITE_THREADS = 4


def write_shard(
    arena: Arena, directory: str, job: str, *, threads: int = WRITE_THREADS, piece_nbytes: int = m.PIECE_BYTES
) -> m.Shard:
    """Write the shard that `arena` holds to its place below `directory`, durably, then its note.

    Raises OSError (the disk), IncompleteSnapshot, and SaveFailed if the arena was filled again meanwhile; the shard's
    disk space is then freed.
    """
    before = arena.header()
    data = arena.view(padded=True)
    folder = os.path.join(directory, tmp_name(before.step, before.generation, job))
    shard = m.Shard(
        job=job, file=m.shard_file(before.shard, before.shards), shard=before.shard, shards=before.shards,
        step=before.step, generation=before.generation, nbytes=before.nbytes, data_at=before.data_at,
        piece_nbytes=piece_nbytes, tensors=arena.table(), extra=arena.extra(),
    )  # fmt: skip
    path = os.path.join(folder, shard.file)
    note = os.path.join(folder, m.shard_note(shard.shard, shard.shards))
    _make_folder(directory)
    files.REAL.mkdir(folder)  # its name need not be durable before the commit
    with contextlib.suppress(FileNotFoundError):
        files.REAL.unlink(note)  # of an earlier try: a commit must not take it for that of the shard being written
    try:
        hashes = _write_pieces(path, data, shard, threads)
    except OSError:
        _give_back(path)
        raise
    if arena.header() != before:
        _give_back(path)
        raise SaveFailed(f"step {before.step}: the arena was filled again while it was written")
    shard = msgspec.structs.replace(shard, xxh3=hashes)
    files.REAL.sync_dir(folder)
    # A visible note implies a durable shard. The note itself need not survive a crash, which ends the save.
    _write_whole(note, m.encode(shard), safe=False)
    return shard


def _make_folder(path: str) -> None:
    """Create a directory and its parents. Each new one is made durable: fsync of a directory does not cover its own
    name."""
    if files.REAL.identity(path) is None:
        parent = os.path.dirname(os.path.abspath(path))
        _make_folder(parent)
        files.REAL.mkdir(path)
        files.REAL.sync_dir(parent)


def _write_pieces(path: str, data: memoryview, shard: m.Shard, threads: int) -> tuple[str, ...]:
    """Write the file and return the hash of each piece. `data` extends to a page boundary, the file does not."""
    fd = files.REAL.create(path, direct=True)
    try:
        files.REAL.reserve(fd, pad(shard.nbytes))

        def piece(at: int) -> str:
            end = at + shard.piece_nbytes
            files.REAL.write_at(fd, data[at:end], at)
            return m.digest(data[at : min(end, shard.nbytes)])

        hashes = tuple(each(piece, range(0, shard.nbytes, shard.piece_nbytes), threads))
        files.REAL.truncate(fd, shard.nbytes)
        files.REAL.sync(fd)
    finally:
        files.REAL.close(fd)
    return hashes


def _write_whole(path: str, raw: bytes, *, safe: bool = True) -> None:
    """Write a small file atomically; with `safe` also across a crash, once its directory is synced. Raises SaveFailed
    for one that would not be read."""
    if len(raw) > files.METADATA_BYTES:
        have, most = len(raw) / 1e6, files.METADATA_BYTES / 1e6
        what = f"{os.path.basename(path)} would have {have:.0f} MB, and at most {most:.0f}"
        raise SaveFailed(f"{what} are read: the state that is not tensors is too large; keep it as a tensor")
    aside = path + ".part"
    fd = files.REAL.create(aside)
    try:
        files.REAL.write_at(fd, memoryview(raw), 0)
        if safe:
            files.REAL.sync(fd)
    finally:
        files.REAL.close(fd)
    files.REAL.rename(aside, path)


def _give_back(path: str) -> None:
    with contextlib.suppress(OSError):  # if the disk refuses this too, the clean-up removes it later
        files.REAL.unlink(path)


def shards_missing(directory: str, job: str, step: int, generation: int, shards: int) -> tuple[int, ...]:
    """Shards without a note so far. Does not wait."""
    names = set(files.REAL.names(os.path.join(directory, tmp_name(step, generation, job))))
    return tuple(shard for shard in range(shards) if m.shard_note(shard, shards) not in names)


def commit(
    directory: str,
    job: str,
    *,
    step: int,
    generation: int,
    shards: int,
    world_size: int,
    versions: Mapping[str, str] | None = None,
    created_wall_s: float = 0.0,
) -> str:
    """Commit the checkpoint of `step`, and return its directory.

    Raises ShardsMissing, SaveFailed for an invalid note, OSError. Doing it twice is harmless.
    """
    folder = os.path.join(directory, tmp_name(step, generation, job))
    try:
        if missing := shards_missing(directory, job, step, generation, shards):
            raise ShardsMissing(step, missing, shards)
        manifest = m.Manifest(
            job=job,
            step=step,
            generation=generation,
            world_size=world_size,
            shards=tuple(_note(folder, job, shard, shards) for shard in range(shards)),
            versions=dict(versions or {}),
            created_wall_s=created_wall_s,
        )
        return _put_together(directory, folder, manifest)
    except (ShardsMissing, FileNotFoundError):
        # Another leader was faster: the directory has its final name already.
        if done := _committed(directory, job, step, generation):
            files.REAL.sync_dir(directory)  # the other leader may have failed before that
            return done
        raise


def _put_together(directory: str, folder: str, manifest: m.Manifest) -> str:
    raw = m.encode(manifest)
    try:
        m.decode(raw)  # shards of different partitionings must not form a checkpoint
    except Damaged as error:
        raise SaveFailed(f"step {manifest.step}: {error.detail}") from error
    _write_whole(os.path.join(folder, m.MANIFEST), raw)
    files.REAL.sync_dir(folder)
    target = _rename_to_a_free_name(folder, directory, final_names(manifest.step, manifest.generation, manifest.job))
    files.REAL.sync_dir(directory)
    return target


def _rename_to_a_free_name(folder: str, directory: str, names: Sequence[str]) -> str:
    """A name may be that of an earlier checkpoint of the step, or of another job's."""
    taken = files.REAL.names(directory)
    for name in names:
        if name in taken and name != names[-1]:
            continue
        try:
            files.REAL.rename(folder, target := os.path.join(directory, name))
            return target
        except OSError as error:
            # Another job has committed under this name since the look: a rename replaces no folder that holds files.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or name == names[-1]:
                raise
    raise AssertionError("unreachable: the last name is tried or its error is raised")


def _note(folder: str, job: str, shard: int, shards: int) -> m.Shard:
    try:
        shard_note = m.decode_note(files.REAL.read(os.path.join(folder, m.shard_note(shard, shards))))
    except Damaged as error:
        raise SaveFailed(f"shard {shard} of {shards}: {error.detail}") from error
    if shard_note.job != job:
        raise SaveFailed(f"shard {shard} of {shards}: it belongs to job {shard_note.job!r}, not {job!r}")
    return shard_note


def _committed(directory: str, job: str, step: int, generation: int) -> str | None:
    """The directory of this checkpoint, if it is committed already."""
    for name in final_names(step, generation, job):
        path = os.path.join(directory, name)
        head = head_of(path)
        if head is not None and (head.job, head.step, head.generation) == (job, step, generation):
            return path
    return None
