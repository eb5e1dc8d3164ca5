"""Files of other users are read whole or not at all, within a limit, and no link is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.checkpoint.format.files import METADATA_BYTES, REAL
from elastic.util.files import FileTooLarge, read_file
from elasticd.base import folders
from elasticd.base.folders import Folder


def sparse(path: Path, nbytes: int) -> Path:
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


def test_a_file_up_to_the_limit_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_file(tmp_path / "file", 100) == folders.read_file(Folder(tmp_path), "file", 100) == b"x" * 100
    assert read_file(tmp_path / "file", 10, from_end=True) == b"x" * 10


@pytest.mark.parametrize("nbytes", [101, 40_000_000_000])
def test_a_larger_one_is_refused_before_it_is_read(tmp_path: Path, nbytes: int) -> None:
    sparse(tmp_path / "file", nbytes)
    for read in (lambda: read_file(tmp_path / "file", 100), lambda: folders.read_file(Folder(tmp_path), "file", 100)):
        with pytest.raises(FileTooLarge, match=f"has {nbytes} bytes, and 100 at most"):
            read()
    assert len(read_file(tmp_path / "file", 100, from_end=True)) == 100


def test_a_link_and_a_pipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"secret")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            read_file(tmp_path / name)
        with pytest.raises(OSError):
            folders.read_file(Folder(tmp_path), name, 100)


def test_a_manifest_of_any_size_is_refused_by_its_size(tmp_path: Path) -> None:
    with pytest.raises(FileTooLarge):
        REAL.read(str(sparse(tmp_path / "manifest.json", METADATA_BYTES + 1)))
