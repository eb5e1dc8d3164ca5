"""The lock and the socket of a daemon: nobody else can hold the one, and no other file gives way to the other."""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticd import main
from elasticd.api import server as api
from elasticd.base import ownership
from elasticd.base.errors import CannotStart


def test_the_lock_is_for_its_user_alone(tmp_path: Path) -> None:
    """A process that can open a file for reading can lock it."""
    tmp_path.chmod(0o755)
    (tmp_path / "lock").touch(mode=0o644)
    with main._own(tmp_path):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_file_where_the_socket_is_to_be_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    service: Any = None
    with pytest.raises(CannotStart, match="is no socket"):
        api.unix_server(str(precious), "", service)
    assert precious.read_text() == "data"


@pytest.mark.parametrize("stale", [False, True])
def test_a_socket_is_there_only_once_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool) -> None:
    """Between bind and listen a connection is refused, as by a daemon that has ended."""
    path, group, service = tmp_path / "s", grp.getgrgid(os.getgid()), cast(Any, SimpleNamespace(log=None))
    if stale:  # of a daemon that was killed, here and in between
        api.unix_server(str(path), "", service).listener.close()
        os.link(path, f"{path}~")
    before = path.stat().st_ino if stale else None

    def bound(name: str) -> grp.struct_group:
        assert (path.stat().st_ino if path.exists() else None) == before
        return group

    monkeypatch.setattr(grp, "getgrnam", bound)
    with contextlib.closing(api.unix_server(str(path), group.gr_name, service).listener):
        assert path.stat().st_mode & 0o777 == 0o660
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(path))
    assert os.listdir(tmp_path) == ["s"]


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Where every user gets to: pytest keeps its own folders closed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_python_that_another_user_cannot_run_is_named_with_the_place_that_is_closed(open_path: Path) -> None:
    """A virtual environment made with root's own Python: systemd then said 203/EXEC, and status "the agent ended"."""
    private, venv = open_path / "root" / "pyenv", open_path / "venv"
    private.mkdir(parents=True)
    venv.mkdir()
    (real := private / "python3").touch(mode=0o755)
    (link := venv / "python").symlink_to(real)
    assert ownership.closed_to(str(link)) == ""
    real.chmod(0o750)
    assert ownership.closed_to(str(link)) == f"other users cannot run {real}"
    assert ownership.closed_to(str(link), groups={real.stat().st_gid}) == ""
    assert ownership.closed_to(str(link), uid=real.stat().st_uid) == ""
    real.chmod(0o755)
    private.parent.chmod(0o700)
    assert ownership.closed_to(str(link)) == f"other users cannot enter {private.parent} ({link} leads there)"
    venv.chmod(0o750)
    assert ownership.closed_to(str(link)) == f"other users cannot enter {venv}"
    assert ownership.closed_to(str(open_path / "absent")) == f"{open_path / 'absent'}: No such file or directory"
