"""Names of the directories in a checkpoint directory.

step-40                      a checkpoint
step-40.g7                   another one of the same step, committed in generation 7 (after a roll-back)
step-40.g7.j…                another one, if other jobs have the names above: … is a hash of the job's name
step-40.g7.j….tmp            being written by that job, or left over from a crash
step-40.damaged-shard-hash   quarantined because it failed a check; never deleted by elastic
step-40.fetch-…-…            being fetched from remote storage by that job, or left over from a crash
step-40.gone                 being removed by retention
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from . import files
from . import manifest as m
from .errors import Damaged

Piece = TypeVar("Piece")
Done = TypeVar("Done")


def each(work: Callable[[Piece], Done], pieces: Sequence[Piece], threads: int) -> list[Done]:
    """The results of `work` on each of `pieces`, in their order, by up to `threads` threads. At a limit of threads the
    caller's does it all, which is slower; `work` may then be done twice on a piece. Raises what `work` raises."""
    if threads > 1 and len(pieces) > 1:
        with ThreadPoolExecutor(min(threads, len(pieces))) as pool:
            try:
                results = pool.map(work, pieces)
            except RuntimeError:  # no further thread can be started; errors of `work` come with its results
                pool.shutdown(cancel_futures=True)
            else:
                return list(results)
    return [work(piece) for piece in pieces]


_CHECKPOINT = r"step-\d+(?:\.g\d+)?(?:\.j[0-9a-f]{8})?"
_FULL = re.compile(r"step-(\d+)\.g(\d+)\.j([0-9a-f]{8})")
_TMP = re.compile(r"step-(\d+)\.g(\d+)\.j([0-9a-f]{8})\.tmp")
_FETCH = re.compile(_CHECKPOINT + r"\.fetch-([0-9a-f]{8})-[^.]+")

is_final = re.compile(_CHECKPOINT).fullmatch
is_aside = re.compile(_CHECKPOINT + r"\.damaged-.+").fullmatch
is_gone = re.compile(r"step-\d+(\..+)?\.gone").fullmatch


def _tag(job: str) -> str:
    """Tells the folders of jobs apart that save into one directory. Short: a note names its job in full."""
    return m.digest(job.encode())[:8]


def tmp_name(step: int, generation: int, job: str) -> str:
    return f"step-{step}.g{generation}.j{_tag(job)}.tmp"


def final_names(step: int, generation: int, job: str) -> tuple[str, str, str]:
    """The names that a checkpoint may get: the first that is free when it is committed."""
    plain = f"step-{step}"
    return plain, f"{plain}.g{generation}", f"{plain}.g{generation}.j{_tag(job)}"


def own_name(name: str, job: str) -> str:
    """`name`, of a checkpoint, with the job in it: for a place where another job's checkpoint has that name."""
    return re.sub(r"\.j[0-9a-f]{8}$", "", name) + f".j{_tag(job)}"


def names_another(name: str, job: str) -> bool:
    """Whether `name`, of a checkpoint or a quarantined one, has another job in it than `job`."""
    found = re.match(r"step-\d+(?:\.g\d+)?\.j([0-9a-f]{8})(?:\.|$)", name)
    return found is not None and found[1] != _tag(job)


def version_of(name: str, job: str) -> tuple[int, int] | None:
    """(generation, step) in the name of a checkpoint that has `job` in it, too, as those at the remote end have."""
    found = _FULL.fullmatch(name)
    return (int(found[2]), int(found[1])) if found and found[3] == _tag(job) else None


def fetch_prefix(name: str, job: str) -> str:
    """What the directory begins with into which `job` fetches checkpoint `name`."""
    return f"{name}.fetch-{_tag(job)}-"


def step_of(name: str) -> int:
    """The step in the name of a checkpoint, complete or not; -1 for other names."""
    found = re.match(r"step-(\d+)", name)
    return int(found[1]) if found else -1


def tmp_of(name: str, job: str | None = None) -> tuple[int, int] | None:
    """(step, generation) of a directory being written; with `job` of one that this job writes."""
    found = _TMP.fullmatch(name)
    return (int(found[1]), int(found[2])) if found and (job is None or found[3] == _tag(job)) else None


def is_fetch(name: str, job: str) -> bool:
    """A directory into which `job` fetches."""
    found = _FETCH.fullmatch(name)
    return found is not None and found[1] == _tag(job)


def head_of(path: str) -> m.Head | None:
    """The head of the manifest in `path`; None if there is no valid manifest."""
    try:
        return m.decode_head(files.REAL.read(os.path.join(path, m.MANIFEST)))
    except (OSError, Damaged):
        return None


def job_of(path: str) -> str | None:
    """The job of the checkpoint in `path`, by its manifest, else by the note of a shard; None: neither tells it."""
    if (head := head_of(path)) is not None:
        return head.job
    with contextlib.suppress(OSError):  # as unreadable as its manifest
        for name in files.REAL.names(path):
            if name.startswith("shard-") and name.endswith(".json"):
                with contextlib.suppress(Damaged):
                    return m.decode_note(files.REAL.read(os.path.join(path, name))).job or None
    return None


def is_foreign(path: str) -> bool:
    """Whether `path`, named as a checkpoint, holds files and none of elastic's: a script or another program may name
    its own folders so. An empty one, or one that cannot be read, is not known to be foreign."""
    if is_aside(os.path.basename(path)):
        return False
    try:
        names = files.REAL.names(path)
    except OSError:
        return False
    return bool(names) and not any(name == m.MANIFEST or name.startswith("shard-") for name in names)
