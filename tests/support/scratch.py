"""Folders of tests outside of pytest's own, named after the process that made them: one that is killed cannot remove
them, and the next run does."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from elastic.util.processes import stat_fields

ROOTS = tuple(root for root in ("/dev/shm", "/tmp") if os.path.isdir(root))
"""The first is memory, on Linux."""
_OWNED = re.compile(r"elt-[a-z]+-(?P<pid>[0-9]+)\.(?P<began>[0-9]+)-.*")
_BEGAN = 19
"""Field of /proc/PID/stat from the state on: when the process began. No later process with its id has the same."""


def folder(kind: str, root: str = ROOTS[0]) -> str:
    """A new folder `elt-KIND-…`, for this process to remove."""
    return tempfile.mkdtemp(prefix=f"elt-{kind}-{os.getpid()}.{_began(os.getpid())}-", dir=root)


def remove_orphans() -> list[str]:
    """Remove those whose process has ended; returns their paths."""
    found = [
        os.path.join(root, name)
        for root in ROOTS
        for name in os.listdir(root)
        if (owned := _OWNED.fullmatch(name)) and _began(int(owned["pid"])) != owned["began"]
    ]
    if found:
        mounts = [line.split()[4] for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((m for m in mounts for path in found if m.startswith(f"{path}/")), reverse=True):
            subprocess.run(["umount", "-l", mount], check=False, timeout=10, capture_output=True)
    for path in found:
        shutil.rmtree(path, ignore_errors=True)  # another run may be at it, or it is another user's
    return found + remove_semaphores()


def remove_semaphores() -> list[str]:
    """Remove the semaphores of `multiprocessing` that no process has mapped: their tracker removes them, and is killed
    with the processes that it keeps them for. Returns their paths."""
    found: dict[pathlib.Path, os.stat_result] = {}
    for path in pathlib.Path(ROOTS[0]).glob("sem.mp-*"):
        with contextlib.suppress(FileNotFoundError):  # its tracker removes it right now
            found[path] = path.stat()
    mapped: set[str] = set()
    for maps in pathlib.Path("/proc").glob("[0-9]*/maps") if found else ():
        try:
            # By inode: glibc maps a semaphore before it has its name.
            mapped |= {line.split()[4] for line in maps.read_text(errors="replace").splitlines() if "/sem." in line}
        except OSError:  # gone meanwhile, or another user's
            continue
    own = os.geteuid()
    orphans = [path for path, stat in found.items() if str(stat.st_ino) not in mapped and stat.st_uid == own]
    for path in orphans:
        path.unlink(missing_ok=True)
    return [str(path) for path in orphans]


def of_another(name: str) -> bool:
    """Whether the folder of this name belongs to another process that is alive."""
    owned = _OWNED.fullmatch(name)
    return owned is not None and int(owned["pid"]) != os.getpid() and _began(int(owned["pid"])) == owned["began"]


def _began(pid: int) -> str:
    """'': there is no such process, or it is dead and only not reaped."""
    fields = stat_fields(pid)
    return fields[_BEGAN] if fields and fields[0] not in "ZX" else ""
