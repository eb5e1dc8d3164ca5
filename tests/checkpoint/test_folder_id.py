"""The id by which two nodes find out whether they see one folder."""

from __future__ import annotations

import concurrent.futures
import pathlib

import pytest

from elastic.checkpoint.format import folder_id as module
from elastic.checkpoint.format.folder_id import NAME, folder_id


def test_all_who_see_a_folder_read_one_id(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    paths = [str(tmp_path / "there"), str(tmp_path / "link")] * 8
    (tmp_path / "there").mkdir()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = set(pool.map(folder_id, paths))
    assert len(found) == 1
    assert folder_id(str(tmp_path / "another" / "one")) not in {"", *found}


def test_an_id_whose_writer_died_is_not_known(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_S", 0.0)
    (tmp_path / NAME).touch()
    assert folder_id(str(tmp_path)) == ""
