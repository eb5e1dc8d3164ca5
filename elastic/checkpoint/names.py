"""Names of the directories in a checkpoint directory.

step-40                      a checkpoint
step-40.g7                   another one of the same step, committed in generation 7 (after a roll-back)
step-40.g7.tmp               being written, or left over from a crash
step-40.damaged-shard-hash   quarantined because it failed a check; never deleted by elastic
step-40.fetch-…              being fetched from remote storage, or left over from a crash
step-40.gone                 being removed by retention
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import xxhash

from . import manifest as m
from .files import REAL, Files

_FINAL = re.compile(r"step-(\d+)(?:\.g(\d+))?")
_TMP = re.compile(r"step-(\d+)\.g(\d+)\.tmp")
_ASIDE = re.compile(r"step-(\d+)(?:\.g\d+)?\.damaged-.+")
_GONE = re.compile(r"step-\d+(\..+)?\.gone")
_FETCH = re.compile(r"step-\d+(?:\.g\d+)?\.fetch-[^.]+")


def tmp_name(step: int, generation: int) -> str:
    return f"step-{step}.g{generation}.tmp"


def final_name(step: int, generation: int, *, taken: Iterable[str] | None) -> str:
    """`step-N`, or with the generation if that name is taken (`taken=None`: it is)."""
    plain = f"step-{step}"
    return plain if taken is not None and plain not in taken else f"{plain}.g{generation}"


def is_final(name: str) -> bool:
    return _FINAL.fullmatch(name) is not None


def step_of(name: str) -> int:
    """The step in the name of a checkpoint, complete or not; -1 for other names."""
    found = re.match(r"step-(\d+)", name)
    return int(found[1]) if found else -1


def tmp_of(name: str) -> tuple[int, int] | None:
    """(step, generation) of a directory being written."""
    found = _TMP.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def is_aside(name: str) -> bool:
    return _ASIDE.fullmatch(name) is not None


def is_gone(name: str) -> bool:
    return _GONE.fullmatch(name) is not None


def is_fetch(name: str) -> bool:
    return _FETCH.fullmatch(name) is not None


def head_of(path: str, files: Files = REAL) -> m.Head | None:
    """The head of the manifest in `path`; None if there is no valid manifest."""
    try:
        return m.decode_head(files.read(os.path.join(path, m.MANIFEST)), xxhash.xxh3_64_hexdigest)
    except (OSError, m.BadManifest):
        return None
