"""What the workers of a dead agent have left is ended, and no other process."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest
from support.procs import alive
from support.wait import eventually

from elastic.contract.agent_files import MARK_ENV, mark
from elasticd.machine.processes import shutdown as leftovers


def marked(folder: pathlib.Path, *, inode: int = 0) -> str:
    found = folder.stat()
    return mark(found.st_dev, inode or found.st_ino, str(folder))


@pytest.fixture
def folders(tmp_path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    for name in ("mine", "others"):
        (tmp_path / name).mkdir()
    return tmp_path / "mine", tmp_path / "others"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        process.kill()
        process.wait()


def test_leftover_cleanup_ends_only_marked_processes(
    folders: tuple[pathlib.Path, pathlib.Path], started: list[subprocess.Popen[bytes]]
) -> None:
    mine, others = folders
    values = (marked(mine), marked(others), marked(mine, inode=1), str(mine), marked(mine) + "/x", "")
    for value in values:
        env = {**os.environ, MARK_ENV: value}
        started.append(subprocess.Popen(["sleep", "600"], env=env, start_new_session=True))
    eventually(lambda: all(b"sleep" in pathlib.Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in started), 5.0)
    assert leftovers.end_leftovers(mine) == [started[0].pid]
    eventually(lambda: not alive(started[0].pid), 5.0)
    assert all(alive(process.pid) for process in started[1:])
    assert leftovers.end_leftovers(mine) == []
    assert leftovers.end_leftovers(mine / "absent") == []
