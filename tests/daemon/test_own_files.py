"""The lock and the socket of a daemon: nobody else can hold the one, and no other file gives way to the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticd import main
from elasticd.api import server as api
from elasticd.errors import CannotStart


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
