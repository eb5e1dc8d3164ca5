"""A file is replaced as a whole, whatever lies where its next content is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.util.files import replace_file


def test_the_content_and_the_mode_are_the_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(b"old" * 100)
    content = os.urandom(3_000_000)
    before = os.umask(0o022)
    try:
        replace_file(path, content, mode=0o640)
    finally:
        os.umask(before)
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == [path.name]


def test_a_replacement_that_was_cut_off_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    (tmp_path / ".status.json.new").write_bytes(b"half")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == [path.name]


def test_a_link_in_its_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "status.json"
    target.write_bytes(b"of another user")
    (tmp_path / ".status.json.new").symlink_to(target)
    replace_file(path, b"new")
    assert target.read_bytes() == b"of another user"
    assert not path.is_symlink()
    assert path.read_bytes() == b"new"


def test_the_old_content_stays_where_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(b"old")
    (tmp_path / ".status.json.new").mkdir()
    with pytest.raises(OSError, match=r"\.status\.json\.new"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
