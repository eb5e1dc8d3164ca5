"""Remote copies of finished checkpoints, through fsspec: s3://, gs://, file://, …

A checkpoint is copied after the local one is durable, the manifest last: a remote directory without a manifest is no
checkpoint either. Object stores have no rename, so the manifest is the commit there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elastic.checkpoint.format import files
from elastic.checkpoint.format import manifest as m
from elastic.checkpoint.format.errors import CheckpointError, Damaged, NoGoodCheckpoint, SaveFailed
from elastic.checkpoint.format.names import fetch_prefix, final_names, head_of, is_final, own_name, step_of, version_of
from elastic.util.files import closed_after

from .find import verify
from .retention import Entry, plan

_under_way: set[str] = set()
"""URLs of the copies that threads of this process are making; changed by single operations."""


class RemoteError(CheckpointError):
    """The remote storage cannot be reached, or refuses."""


@contextmanager
def _as_remote_error(what: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except ImportError as error:
        raise RemoteError(
            f"{what}: {error} (pip install 'elasticd[remote]' and the file system's own package)"
        ) from error
    except Exception as error:  # fsspec's file systems raise the exceptions of their own libraries
        raise RemoteError(f"{what}: {type(error).__name__}: {error}") from error


def _open(url: str) -> tuple[Any, str]:
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    return filesystem, root


def copy_up(path: str, url: str, *, keep: int = 0, keep_every_steps: int = 0) -> str:
    """Copy the checkpoint directory `path` below `url`, check the sizes there, and return its URL. The name there has
    generation and job in it: no other checkpoint gets it.

    `keep` > 0 then applies retention there. Raises RemoteError, Damaged, and SaveFailed for a wrong size.
    """
    manifest = verify(path, hashes=False)
    # Not the local name, which another job's checkpoint may have there, or an earlier one of this job's.
    name = final_names(manifest.step, manifest.generation, manifest.job)[-1]
    copy = posixpath.join(url, name)
    _under_way.add(copy)
    try:
        _copy_up(path, url, name, manifest, keep, keep_every_steps)
    finally:
        _under_way.discard(copy)
    return copy


def _copy_up(path: str, url: str, name: str, manifest: m.Manifest, keep: int, keep_every_steps: int) -> None:
    with _as_remote_error(f"copying {os.path.basename(path)} to {url}"):
        filesystem, root = _open(url)
        target = posixpath.join(root, name)
        complete = _is_complete(filesystem, target, manifest)
        if complete is False:  # invalid until it is replaced
            _remove_manifest(filesystem, target)
        if not complete:
            _put(filesystem, path, target, manifest)
        if keep:
            copies = list_remote(url, manifest.job)
            doomed = plan(copies, keep, keep_every_steps, lambda _: True)
            kept = copies[:keep] if len(copies) >= keep else []
            for each in (*doomed, *_broken_off(filesystem, root, manifest.job, kept)):
                if posixpath.join(url, each) not in _under_way:
                    _remove(filesystem, posixpath.join(root, each))


def _broken_off(filesystem: Any, root: str, job: str, kept: list[Entry]) -> list[str]:
    """Names of copies without a manifest that are older than all of `kept`, the newest copies, as many as are to be
    kept; none if there are fewer. Another node may be making a newer one."""
    oldest = min((generation, step) for step, generation, _ in kept) if kept else (0, 0)
    names = [posixpath.basename(folder.rstrip("/")) for folder in filesystem.ls(root, detail=False)]
    older = [name for name in names if (version := version_of(name, job)) and version < oldest]
    return [name for name in older if not filesystem.exists(posixpath.join(root, name, m.MANIFEST))]


def _is_complete(filesystem: Any, target: str, manifest: m.Manifest) -> bool | None:
    """Whether the copy that is there is complete, and of the same bytes; None: there is none, or another node is making
    it. Without a shared folder two nodes may both take themselves for the leader, and copy: one's manifest over shards
    of the other's would be damage that shows only when it is fetched."""
    manifest_at = posixpath.join(target, m.MANIFEST)
    if not filesystem.exists(manifest_at):
        return None
    try:
        copy = m.decode(filesystem.cat_file(manifest_at))
        sizes = [filesystem.size(posixpath.join(target, shard.file)) for shard in copy.shards]
    except (Damaged, FileNotFoundError):
        return False
    hashes = [(shard.file, shard.xxh3) for shard in manifest.shards]
    same = (copy.job, copy.step, copy.generation) == (manifest.job, manifest.step, manifest.generation)
    same = same and hashes == [(shard.file, shard.xxh3) for shard in copy.shards]
    return same and sizes == [shard.nbytes for shard in copy.shards]


def _put(filesystem: Any, path: str, target: str, manifest: m.Manifest) -> None:
    filesystem.makedirs(target, exist_ok=True)
    for shard in manifest.shards:
        there = posixpath.join(target, shard.file)
        filesystem.put_file(os.path.join(path, shard.file), there)
        filesystem.invalidate_cache()
        if (size := filesystem.size(there)) != shard.nbytes:
            raise SaveFailed(f"{there} has {size} bytes there, {shard.nbytes} here")
    filesystem.put_file(os.path.join(path, m.MANIFEST), posixpath.join(target, m.MANIFEST))
    _look_again(filesystem, target, manifest)


def _look_again(filesystem: Any, target: str, manifest: m.Manifest) -> None:
    """Another node that took this copy for one that broke off may have removed shards before the manifest came. The
    manifest then goes, too. Raises SaveFailed."""
    filesystem.invalidate_cache()
    for shard in manifest.shards:
        there = posixpath.join(target, shard.file)
        try:
            complete = filesystem.size(there) == shard.nbytes
        except FileNotFoundError:
            complete = False
        if not complete:
            _remove_manifest(filesystem, target)
            raise SaveFailed(f"{there} was removed or replaced by another node while this one made the copy")


def _remove(filesystem: Any, folder: str) -> None:
    """Another copy, or another node's, may be removing it as well."""
    # The manifest goes first, so that an interrupted removal leaves no checkpoint.
    _remove_manifest(filesystem, folder)
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm(folder, recursive=True)
    # It may have come since its folder was listed, and its node have seen all shards.
    filesystem.invalidate_cache()
    if filesystem.exists(posixpath.join(folder, m.MANIFEST)):
        _remove_manifest(filesystem, folder)


def _remove_manifest(filesystem: Any, folder: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # another node was faster
        filesystem.rm_file(posixpath.join(folder, m.MANIFEST))


def list_remote(url: str, job: str) -> list[Entry]:
    """(step, generation, name) of each checkpoint of `job` at `url`, newest first. Raises RemoteError."""
    heads = ((name, head) for name, head in _heads(url) if head is not None and head.job == job)
    found = [(head.step, head.generation, name) for name, head in heads]
    return sorted(found, key=lambda f: (f[1], f[0]), reverse=True)


def unusable_step(url: str, job: str) -> int:
    """The newest step of the copies of `job` at `url` whose manifest is damaged; 0: none. Raises RemoteError."""
    return max([0, *(step_of(name) for name, head in _heads(url) if head is None and version_of(name, job))])


def _heads(url: str) -> list[tuple[str, m.Head | None]]:
    """Names of the checkpoints of all jobs at `url`, and the heads of their manifests; None: it is damaged."""
    heads: list[tuple[str, m.Head | None]] = []
    with _as_remote_error(f"listing {url}"):
        filesystem, root = _open(url)
        if not filesystem.exists(root):
            return []
        for folder in filesystem.ls(root, detail=False):
            name = posixpath.basename(folder.rstrip("/"))
            manifest_at = posixpath.join(root, name, m.MANIFEST)
            if not is_final(name) or not filesystem.exists(manifest_at):
                continue
            try:
                heads.append((name, m.decode_head(filesystem.cat_file(manifest_at))))
            except Damaged:
                heads.append((name, None))
    return heads


def fetch(url: str, name: str, directory: str, job: str) -> str:
    """Fetch checkpoint `name` of `job` from `url` into `directory`, verify every byte, and return its directory.

    An existing local one is used as it is; several processes may do this at once. Raises RemoteError, Damaged, OSError.
    """
    target = os.path.join(directory, name)
    if (head := head_of(target)) is not None and head.job != job:
        target = os.path.join(directory, own_name(name, job))
    if os.path.exists(os.path.join(target, m.MANIFEST)):
        return target
    os.makedirs(directory, exist_ok=True)
    with closed_after(files.open_folder(directory)) as above:
        made = tempfile.mkdtemp(prefix=fetch_prefix(name, job), dir=f"/proc/self/fd/{above}")
    aside = os.path.join(directory, os.path.basename(made))
    # By its descriptor: the owner of `directory` could replace it by a link during the download.
    folder = os.open(aside, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "belongs to another user by now", aside)
        with _as_remote_error(f"fetching {name} from {url}"):
            filesystem, root = _open(url)
            for there in filesystem.ls(posixpath.join(root, name), detail=False):
                here = f"/proc/self/fd/{folder}/{posixpath.basename(there)}"
                filesystem.get_file(there, here)
                with open(here, "rb") as file:
                    os.fchmod(file.fileno(), files.FILE_MODE)
                    os.fsync(file.fileno())
        verify(aside, job)
        files.REAL.sync_dir(aside)
        os.fchmod(folder, files.FOLDER_MODE)
        try:
            files.REAL.rename(aside, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        files.REAL.sync_dir(directory)  # if another process was faster, its copy is used
    finally:
        os.close(folder)
        shutil.rmtree(aside, ignore_errors=True)
    return target


def fetch_newest(url: str, job: str, directory: str) -> str | None:
    """Fetch the newest good checkpoint; None if there is none. Raises RemoteError, NoGoodCheckpoint."""
    damaged = []
    for _, _, name in list_remote(url, job):
        try:
            return fetch(url, name, directory, job)
        except Damaged as damage:
            damaged.append(f"{name}: {damage.detail}")
    if damaged:
        raise NoGoodCheckpoint(f"{url} has no good checkpoint of job {job!r}:\n  " + "\n  ".join(damaged))
    return None
