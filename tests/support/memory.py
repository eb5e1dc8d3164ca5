"""A limit on memory for single processes: a control group of their own, of either version of the kernel's interface."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

import pytest

from .machine import cgroup2
from .wait import eventually


class Limited:
    """A group with a limit; `take` puts a living process into it. What that has already is not counted."""

    def __init__(self, folder: pathlib.Path, counter: str) -> None:
        self._folder, self._counter = folder, counter

    def take(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """Processes that the kernel has killed here for want of memory."""
        found = re.search(r"^oom_kill (\d+)$", (self._folder / self._counter).read_text(), re.MULTILINE)
        assert found, f"no oom_kill in {self._folder / self._counter}"
        return int(found[1])


@contextlib.contextmanager
def limited(limit_mb: int) -> Iterator[Limited]:
    """Skips the test where this machine has no such groups for us."""
    root, version = _hierarchy()
    folder = root / f"elt{os.getpid()}mem"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup for us: {error}")
    try:
        limit = str(limit_mb << 20)
        if version == 2:
            (folder / "memory.max").write_text(limit)
            if (swap := folder / "memory.swap.max").exists():
                swap.write_text("0")
        else:
            (folder / "memory.limit_in_bytes").write_text(limit)
            if (both := folder / "memory.memsw.limit_in_bytes").exists():
                both.write_text(limit)
        yield Limited(folder, "memory.events" if version == 2 else "memory.oom_control")
    finally:
        eventually(lambda: _removed(folder), 10.0, f"{folder} is empty")


def _hierarchy() -> tuple[pathlib.Path, int]:
    root = cgroup2()
    if root is not None and "memory" in (root / "cgroup.subtree_control").read_text().split():
        return root, 2
    for line in pathlib.Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return pathlib.Path(where), 1
    pytest.skip("no memory controller among this machine's cgroups")


def _removed(folder: pathlib.Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
