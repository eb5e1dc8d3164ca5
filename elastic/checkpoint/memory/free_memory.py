"""How much memory snapshots may take on this machine."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

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
        with contextlib.suppress(OSError, ValueError):  # this cgroup has no limit
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            cached = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            if limit.isdecimal():
                left.append(max(0, int(limit) - used + (int(cached[1]) if cached else 0)))
        folder = folder.parent
    return left
