"""Copies at a remote end, and the formats of other tools."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ckpt import flip, save, share_paths, state_at

from elastic.checkpoint.errors import Damaged, SaveFailed
from elastic.checkpoint.export import to_dcp, to_torch_save
from elastic.checkpoint.find import newest_good
from elastic.checkpoint.remote import RemoteError, copy_up, fetch, list_remote


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/checkpoints"


def test_up_and_back(tmp_path: Path, url: str) -> None:
    assert list_remote(url, "job") == []
    for step in (10, 20):
        copy_up(save(str(tmp_path / "here"), step), url)
    assert [(step, name) for step, _, name in list_remote(url, "job")] == [(20, "step-20"), (10, "step-10")]
    assert list_remote(url, "another") == []
    (tmp_path / "there").mkdir()
    path = fetch(url, "step-20", str(tmp_path / "there"))
    found = newest_good(str(tmp_path / "there"), "job")
    assert found is not None
    assert (found.path, found.step) == (path, 20)
    assert os.listdir(tmp_path / "there") == ["step-20"]
    assert fetch(url, "step-20", str(tmp_path / "there")) == path


def test_retention_there(tmp_path: Path, url: str) -> None:
    for step in (10, 20, 30, 35):
        copy_up(save(str(tmp_path), step), url, keep=1, keep_every_steps=20)
    assert [step for step, _, _ in list_remote(url, "job")] == [35, 20]


def test_a_copy_that_breaks_off_is_no_checkpoint(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    filesystem = type(fsspec.filesystem("memory"))
    real = filesystem.put_file

    def put_file(self: Any, here: str, there: str, **more: Any) -> None:
        if "share-00001" in there:
            raise ConnectionResetError("the network is gone")
        real(self, here, there, **more)

    monkeypatch.setattr(filesystem, "put_file", put_file)
    path = save(str(tmp_path), 10)
    with pytest.raises(RemoteError, match=r"copying step-10 to memory:.*the network is gone"):
        copy_up(path, url)
    assert list_remote(url, "job") == []
    monkeypatch.undo()
    copy_up(path, url)
    assert len(list_remote(url, "job")) == 1


def test_damage_there_is_found_on_the_way_back(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    copy_up(save(str(tmp_path), 10), url)
    flip(share_paths(str(tmp_path / "remote" / "step-10"))[0], -1)
    (tmp_path / "back").mkdir()
    with pytest.raises(Damaged, match="share-hash"):
        fetch(url, "step-10", str(tmp_path / "back"))
    assert newest_good(str(tmp_path / "back"), "job") is None


def test_an_unknown_scheme_says_so(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="nosuch"):
        copy_up(save(str(tmp_path), 10), "nosuch://bucket")


def test_export_to_one_torch_file(tmp_path: Path) -> None:
    target = str(tmp_path / "out.pt")
    to_torch_save(save(str(tmp_path), 10), target)
    found = torch.load(target, weights_only=True)
    assert (found["step"], found["extra"]) == (10, {"step": 10, "share": 0})
    assert found["state"].keys() == state_at(10).keys()
    assert all(torch.equal(found["state"][name], tensor) for name, tensor in state_at(10).items())
    assert sorted(os.listdir(tmp_path)) == ["out.pt", "step-10"]


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")  # dcp's own, about running without a process group
def test_export_to_a_dcp_directory(tmp_path: Path) -> None:
    path, target = save(str(tmp_path), 10), str(tmp_path / "dcp")
    to_dcp(path, target)
    into = {"state": {name: torch.zeros_like(tensor) for name, tensor in state_at(10).items()}, "step": -1}
    dcp.load(into, storage_reader=dcp.FileSystemReader(target), no_dist=True)
    assert into["step"] == 10
    assert isinstance(into["state"], dict)
    assert all(torch.equal(into["state"][name], tensor) for name, tensor in state_at(10).items())
    with pytest.raises(SaveFailed, match="exists"):
        to_dcp(path, target)


def test_nothing_damaged_is_exported(tmp_path: Path) -> None:
    path = save(str(tmp_path), 10)
    flip(share_paths(path)[1], -1)
    with pytest.raises(Damaged):
        to_torch_save(path, str(tmp_path / "out.pt"))
    assert os.listdir(tmp_path) == ["step-10"]
