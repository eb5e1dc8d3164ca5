"""Retention: the newest good checkpoints are kept, those at every n-th step too; the last good one is never removed.

A removal begins with a rename, so a crash in the middle leaves a directory that is not named like a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence

from elastic.checkpoint.format import files
from elastic.checkpoint.format.errors import Damaged
from elastic.checkpoint.format.names import is_fetch, is_gone, tmp_of

from .find import peek, verify

Entry = tuple[int, int, str]
"""(step, generation, path), as `peek` returns them, newest first."""


def plan(found: Sequence[Entry], keep: int, keep_every_steps: int, good: Callable[[str], bool]) -> list[str]:
    """Paths to remove, oldest first.

    `good` is called from the newest on until `keep` have passed; those that fail do not count, and are not removed
    here. If none passes, nothing is removed.
    """
    kept: set[str] = set()
    failed: set[str] = set()
    for _, _, path in found:
        if len(kept) >= keep:
            break
        (kept if good(path) else failed).add(path)
    if not kept or keep < 1:
        return []
    return [
        path
        for step, _, path in reversed(found)
        if path not in kept | failed and not (keep_every_steps and step % keep_every_steps == 0)
    ]


def leftovers(names: Iterable[str], job: str, newest: Entry | None) -> list[str]:
    """Directories of saves of `job` that will never be committed, given its newest commit; and of its interrupted
    fetches. And `.gone` directories of any job: their checkpoints are no longer complete."""
    folders = []
    for name in names:
        # Fetches end before training starts, so none is in progress once there is a new commit.
        if is_gone(name) or (newest is not None and is_fetch(name, job)):
            folders.append(name)
        elif newest is not None and (save := tmp_of(name, job)):
            step, generation = save
            if (generation, step) <= (newest[1], newest[0]):
                folders.append(name)
    return folders


def prune(
    directory: str,
    job: str,
    keep: int,
    keep_every_steps: int = 0,
    *,
    trusted: str | None = None,
    spare: Collection[str] = (),
) -> tuple[list[str], list[str]]:
    """Apply retention and clean up. Returns the paths removed, and the failures as text; raises nothing.

    `trusted`: a checkpoint just written and fsynced, which is not verified again, and stays even if others count as
    newer. Others are checked by size, and until one has passed by hash too, so that a removal never costs the last good
    one. `spare`: paths that are in use.
    """
    sure = {trusted} if trusted else set()

    def good(path: str) -> bool:
        try:
            verify(path, job, hashes=not sure)
        except Damaged:
            return False
        sure.add(path)
        return True

    removed: list[str] = []
    failed: list[str] = []
    try:
        found = peek(directory, job)
        doomed = plan(found, keep, keep_every_steps, lambda path: path == trusted or good(path)) if keep else []
        doomed = [path for path in doomed if path != trusted and path not in spare]
        newest = found[0] if found else None
        doomed += [os.path.join(directory, name) for name in leftovers(files.REAL.names(directory), job, newest)]
    except OSError as error:
        return [], [f"{directory}: {error.strerror}"]
    for path in doomed:
        try:
            remove(path)
            removed.append(path)
        except OSError as error:
            failed.append(f"{path}: {error.strerror}")
    return removed, failed


def discard(directory: str, job: str, step: int, generation: int, *, spare: Collection[tuple[int, int]] = ()) -> None:
    """Free the space taken by the shards of a failed save of `job` and of its older ones. Raises nothing.

    Otherwise nothing newer could ever be committed on a full disk. `spare`: (step, generation) of saves in flight.
    """
    try:
        names = leftovers(files.REAL.names(directory), job, (step, generation, ""))
    except OSError:
        return
    for name in names:
        if tmp_of(name, job) not in spare:
            with contextlib.suppress(OSError):  # a disk error; the next commit tries again
                remove(os.path.join(directory, name))


def remove(path: str) -> None:
    """Remove a directory of plain files. It is renamed first, and then no longer a checkpoint. Raises OSError."""
    if not is_gone(os.path.basename(path)):
        gone = path.removesuffix(".tmp") + ".gone"
        files.REAL.rename(path, gone)
        files.REAL.sync_dir(os.path.dirname(path))
        path = gone
    for name in files.REAL.names(path):
        with contextlib.suppress(FileNotFoundError):  # another process is cleaning up as well
            files.REAL.unlink(os.path.join(path, name))
    with contextlib.suppress(FileNotFoundError):
        files.REAL.rmdir(path)
