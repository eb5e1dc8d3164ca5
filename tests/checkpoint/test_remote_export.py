"""Copies at a remote end, and the formats of other tools."""

from __future__ import annotations

import errno
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ckpt import PIECE, blank, filled, flip, save, shard_paths, state_at

from elastic.checkpoint.format.errors import Damaged, NoGoodCheckpoint, SaveFailed
from elastic.checkpoint.format.names import final_names
from elastic.checkpoint.saving.write import commit, write_shard
from elastic.checkpoint.stored import read
from elastic.checkpoint.stored.export import to_dcp, to_torch_save
from elastic.checkpoint.stored.find import newest_good
from elastic.checkpoint.stored.read import load_newest
from elastic.checkpoint.stored.remote import RemoteError, copy_up, fetch, fetch_newest, list_remote
from elastic.worker.state.handover.restore import Disk, extra_of
from elastic.worker.state.state import State


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/checkpoints"


def there(step: int) -> str:
    """The name of a copy."""
    return final_names(step, 1, "job")[-1]


def test_jobs_that_share_the_remote_end_and_the_folder_keep_their_checkpoints(tmp_path: Path, url: str) -> None:
    for job in ("a", "b"):
        copy_up(save(str(tmp_path / job), 20, job=job), url)
    assert [len(list_remote(url, job)) for job in ("a", "b")] == [1, 1]
    for job in ("a", "b"):
        assert fetch_newest(url, job, str(tmp_path / "back")) is not None
        found = newest_good(str(tmp_path / "back"), job)
        assert found is not None
        assert found.manifest.job == job


def test_copies_of_two_jobs_at_the_same_time_do_not_mix(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    filesystem = type(fsspec.filesystem("memory"))
    real = filesystem.put_file
    other = [save(str(tmp_path / "b"), 20, job="b", tensors=state_at(21))]

    def put_file(self: Any, here: str, there: str, **more: Any) -> None:
        real(self, here, there, **more)
        if other:
            copy_up(other.pop(), url)

    monkeypatch.setattr(filesystem, "put_file", put_file)
    copy_up(save(str(tmp_path / "a"), 20, job="a"), url)
    for job in ("a", "b"):
        assert fetch_newest(url, job, str(tmp_path / "back")) is not None


def test_the_only_copy_stays_while_one_of_the_same_step_is_made(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local checkpoint was damaged, the job went back and has come to that step again."""
    import fsspec

    copy_up(save(str(tmp_path / "before"), 20, generation=1), url)

    def put_file(self: Any, here: str, there: str, **more: Any) -> None:
        raise ConnectionResetError("the network is gone")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", put_file)
    with pytest.raises(RemoteError):
        copy_up(save(str(tmp_path / "after"), 20, generation=2), url)
    assert [(step, generation) for step, generation, _ in list_remote(url, "job")] == [(20, 1)]


def test_a_copy_of_another_node_is_not_taken_away_to_make_it_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a shared folder each node copies what it has saved itself."""
    import fsspec

    copy_up(save(str(tmp_path / "n0"), 20), url)

    def put_file(self: Any, here: str, there: str, **more: Any) -> None:
        raise ConnectionResetError("the network is gone")

    path = save(str(tmp_path / "n1"), 20)
    with monkeypatch.context() as broken:
        broken.setattr(type(fsspec.filesystem("memory")), "put_file", put_file)
        copy_up(path, url)
    assert fetch_newest(url, "job", str(tmp_path / "back")) is not None


def test_a_copy_with_other_bytes_of_the_same_size_is_made_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes have copied at once: the manifest there may be one's, and a shard the other's. At the moment at which
    this node replaces it, another one has removed the manifest already."""
    import fsspec

    filesystem = type(fsspec.filesystem("memory"))
    real = filesystem.rm_file

    def rm_file(self: Any, path: str) -> None:
        real(self, path)
        raise FileNotFoundError(path)

    copy_up(save(str(tmp_path / "n0"), 20, tensors=state_at(21)), url)
    monkeypatch.setattr(filesystem, "rm_file", rm_file)
    copy_up(save(str(tmp_path / "n1"), 20), url)
    fetched = fetch_newest(url, "job", str(tmp_path / "back"))
    assert fetched is not None
    ours = Path(shard_paths(str(tmp_path / "n1" / "step-20"))[0])
    assert Path(shard_paths(fetched)[0]).read_bytes() == ours.read_bytes()


def test_a_copy_that_another_one_has_removed_meanwhile_is_no_failure(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    filesystem = type(fsspec.filesystem("memory"))
    real = filesystem.rm_file

    def rm_file(self: Any, path: str) -> None:
        real(self, path)
        self.rm(path.rpartition("/")[0], recursive=True)

    copy_up(save(str(tmp_path), 10), url)
    monkeypatch.setattr(filesystem, "rm_file", rm_file)
    copy_up(save(str(tmp_path), 20), url, keep=1)
    assert [step for step, _, _ in list_remote(url, "job")] == [20]


def test_up_and_back(tmp_path: Path, url: str) -> None:
    assert list_remote(url, "job") == []
    for step in (10, 20):
        copy_up(save(str(tmp_path / "here"), step), url)
    assert [(step, name) for step, _, name in list_remote(url, "job")] == [
        (20, there(20)),
        (10, there(10)),
    ]
    assert list_remote(url, "another") == []
    (tmp_path / "there").mkdir()
    path = fetch(url, there(20), str(tmp_path / "there"), "job")
    found = newest_good(str(tmp_path / "there"), "job")
    assert found is not None
    assert (found.path, found.step) == (path, 20)
    assert os.listdir(tmp_path / "there") == [there(20)]
    assert fetch(url, there(20), str(tmp_path / "there"), "job") == path


def test_retention_there(tmp_path: Path, url: str) -> None:
    for step in (10, 20, 30, 35):
        copy_up(save(str(tmp_path), step), url, keep=1, keep_every_steps=20)
    assert [step for step, _, _ in list_remote(url, "job")] == [35, 20]


def test_a_copy_that_breaks_off_is_no_checkpoint(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    filesystem = type(fsspec.filesystem("memory"))
    real = filesystem.put_file

    def put_file(self: Any, here: str, there: str, **more: Any) -> None:
        if "shard-00001" in there:
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


def test_a_copy_that_broke_off_is_removed_once_newer_ones_are_kept(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a manifest retention does not see it. One of another job, and one that may be under way, stay."""
    import fsspec

    filesystem = type(fsspec.filesystem("memory"))

    def put_file(self: Any, here: str, there: str, **more: Any) -> None:
        if "shard-00001" in there:
            raise ConnectionResetError("the network is gone")
        real(self, here, there, **more)

    real = filesystem.put_file
    monkeypatch.setattr(filesystem, "put_file", put_file)
    for step, job in ((10, "job"), (10, "other"), (25, "job")):
        with pytest.raises(RemoteError):
            copy_up(save(str(tmp_path / job), step, job=job), url)
    monkeypatch.undo()
    for step in (20, 30):
        copy_up(save(str(tmp_path / "job"), step), url, keep=2)
    found, root = fsspec.core.url_to_fs(url)
    names = {path.rpartition("/")[2] for path in found.ls(root, detail=False)}
    assert names == {there(20), there(25), there(30), final_names(10, 1, "other")[-1]}


def test_a_copy_without_a_manifest_stays_until_as_many_newer_ones_are_complete_as_are_kept(
    tmp_path: Path, url: str
) -> None:
    """Another node may be making it: with a slow remote end a newer one is complete before it."""
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.pipe_file(f"{root}/{there(10)}/shard-00000-of-00002.safetensors", b"its first shard")
    for step, others in ((20, 1), (30, 2), (40, 2)):
        copy_up(save(str(tmp_path), step), url, keep=3)
        names = {path.rpartition("/")[2] for path in filesystem.ls(root, detail=False)}
        assert (there(10) in names) is (step < 40), others


def test_a_copy_whose_shards_were_removed_meanwhile_has_failed_and_is_no_checkpoint(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node has taken it for one that broke off: its manifest would lie over missing shards."""
    import fsspec

    filesystem = type(fsspec.filesystem("memory"))
    real = filesystem.put_file

    def put_file(self: Any, here: str, there: str, **more: Any) -> None:
        real(self, here, there, **more)
        if there.endswith("manifest.json"):
            self.rm_file(there.replace("manifest.json", "shard-00000-of-00002.safetensors"))

    monkeypatch.setattr(filesystem, "put_file", put_file)
    with pytest.raises(SaveFailed, match=r"shard-00000-of-00002\.safetensors was removed .* while"):
        copy_up(save(str(tmp_path), 20), url)
    assert list_remote(url, "job") == []


def test_a_manifest_that_comes_during_the_removal_is_removed_too(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that makes the copy has checked its shards before the first of them is gone."""
    import fsspec

    copy_up(save(str(tmp_path), 10), url)
    found, root = fsspec.core.url_to_fs(url)
    manifest_at = f"{root}/{there(10)}/manifest.json"
    manifest, real = found.cat_file(manifest_at), type(found).rm

    def rm(self: Any, path: str, **more: Any) -> None:
        real(self, path, **more)
        self.pipe_file(manifest_at, manifest)

    monkeypatch.setattr(type(found), "rm", rm)
    copy_up(save(str(tmp_path), 20), url, keep=1)
    assert [step for step, _, _ in list_remote(url, "job")] == [20]


def test_a_copy_with_a_damaged_manifest_counts_against_a_silent_start(tmp_path: Path, url: str) -> None:
    import fsspec

    copy_up(save(str(tmp_path / "here"), 10), url)
    copy_up(save(str(tmp_path / "other"), 40, job="other"), url)
    filesystem, root = fsspec.core.url_to_fs(url)
    for name in (there(10), final_names(40, 1, "other")[-1]):
        filesystem.pipe_file(f"{root}/{name}/manifest.json", b"no manifest")
    disk = Disk(str(tmp_path / "empty"), "job", url)
    assert (disk.newest()[0], disk.saved().unusable_step) == (None, 10)


def test_damage_there_is_found_on_the_way_back(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    copy_up(save(str(tmp_path), 10), url)
    flip(shard_paths(str(tmp_path / "remote" / there(10)))[0], -1)
    (tmp_path / "back").mkdir()
    with pytest.raises(Damaged) as damage:
        fetch(url, there(10), str(tmp_path / "back"), "job")
    assert damage.value.reason == "shard-hash"
    assert newest_good(str(tmp_path / "back"), "job") is None


def test_the_remote_copy_is_the_last_resort(tmp_path: Path, url: str) -> None:
    here = tmp_path / "here"
    for step in (10, 20):
        copy_up(save(str(tmp_path / "first life"), step), url)
    tensors = blank()

    def resumed() -> int:
        found = load_newest(str(here), "job", lambda _: lambda info: tensors[info.name], remote=url)
        assert found is not None
        assert torch.equal(tensors["weight"], state_at(found.step)["weight"])
        return found.step

    assert resumed() == 20  # nothing here
    assert sorted(os.listdir(here)) == [there(20)]
    shutil.rmtree(here)
    save(str(here), 5)
    assert resumed() == 5  # the local one comes first
    flip(shard_paths(str(here / "step-5"))[0], -1)
    assert resumed() == 20  # but not when it is damaged
    assert sorted(os.listdir(here)) == [there(20), "step-5.damaged-shard-hash"]


def test_a_load_that_failed_in_the_middle_is_never_called_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails once, and the remote storage has nothing yet: what was overwritten by half is read again."""
    here = str(tmp_path / "here")
    save(here, 10)
    failed = []

    def read_piece(*args: object) -> None:
        if args[2] == 1 and not failed:
            failed.append(args)
            raise Damaged("unreadable", "Input/output error")
        real(*args)  # type: ignore[arg-type]

    real = read.read_piece
    monkeypatch.setattr(read, "read_piece", read_piece)
    tensors = blank()
    found = load_newest(
        here, "job", lambda _: lambda info: tensors[info.name], remote=f"file://{tmp_path}/remote", threads=1
    )
    assert failed
    assert found is not None
    assert all(torch.equal(tensors[name], wanted) for name, wanted in state_at(10).items())


def test_remote_fetch_takes_the_newest_good_checkpoint(tmp_path: Path) -> None:
    url, remote = f"file://{tmp_path}/remote", tmp_path / "remote"
    for step in (10, 20):
        copy_up(save(str(tmp_path), step), url)
    flip(shard_paths(str(remote / there(20)))[0], -1)
    assert fetch_newest(url, "job", str(tmp_path / "back")) == str(tmp_path / "back" / there(10))
    assert os.listdir(tmp_path / "back") == [there(10)]
    flip(shard_paths(str(remote / there(10)))[0], -1)
    with pytest.raises(NoGoodCheckpoint, match=r"step-20\..*: piece .* has hash"):
        fetch_newest(url, "job", str(tmp_path / "again"))
    assert fetch_newest(url, "another", str(tmp_path / "again")) is None
    with pytest.raises(NoGoodCheckpoint):
        load_newest(str(tmp_path / "again"), "job", lambda _: lambda info: None, remote=url)


def test_several_fetch_at_once(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    copy_up(save(str(tmp_path / "here"), 10), url)
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: fetch(url, there(10), str(tmp_path / "there"), "job"), range(8)))
    assert set(paths) == {str(tmp_path / "there" / there(10))}
    assert os.listdir(tmp_path / "there") == [there(10)]


def test_an_unknown_scheme_says_so(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="nosuch"):
        copy_up(save(str(tmp_path), 10), "nosuch://bucket")


def test_checkpoint_exports_to_one_torch_file(tmp_path: Path) -> None:
    target = str(tmp_path / "out.pt")
    to_torch_save(save(str(tmp_path), 10), target)
    found = torch.load(target, weights_only=True)
    assert (found["step"], found["extra"]) == (10, {"step": 10, "shard": 0})
    assert found["state"].keys() == state_at(10).keys()
    assert all(torch.equal(found["state"][name], tensor) for name, tensor in state_at(10).items())
    assert sorted(os.listdir(tmp_path)) == ["out.pt", "step-10"]


def test_an_exported_state_loads_into_plain_torch(tmp_path: Path) -> None:
    """`load_state_dict` of the module and of the optimizer take what the file has, and train on alike."""

    def build() -> tuple[Any, Any, Any]:
        net = torch.nn.ModuleDict(
            {"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3), "n": torch.nn.BatchNorm1d(3)}
        )
        net["b"].weight = net["a"].weight
        optimizer = torch.optim.AdamW(
            [{"params": net["a"].parameters()}, {"params": [net["b"].bias], "lr": 0.5}], lr=0.1
        )
        return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def step(net: Any, optimizer: Any, scheduler: Any) -> None:
        net["n"](net["b"](net["a"](torch.arange(12.0).view(4, 3)))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    net, optimizer, scheduler = made = build()
    state = State(model=net, optimizer=optimizer, scheduler=scheduler, best=math.inf, seen={"t": [torch.ones(2)]})
    for _ in range(3):
        step(*made)
        state.committed(1)
    tensors = {info.name: tensor for info, tensor in state.tensors()}
    extra = extra_of(state.extra(), range(len(tensors)))
    with filled(tensors, 3, extra=extra) as arena:
        write_shard(arena, str(tmp_path), "job", threads=1, piece_nbytes=PIECE)
    path = commit(str(tmp_path), "job", step=3, generation=1, shards=1, world_size=1)
    to_torch_save(path, str(tmp_path / "out.pt"))
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (found["step"], found["best"], found["seen"]["t"][0].tolist()) == (3, math.inf, [1.0, 1.0])
    other = build()
    for name, one in zip(("model", "optimizer", "scheduler"), other, strict=True):
        one.load_state_dict(found[name])
    step(*made)
    step(*other)
    for (key, mine), theirs in zip(net.state_dict().items(), other[0].state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), key


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


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    path, target = save(str(tmp_path), 10), str(tmp_path / "dcp")

    def fsync(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fsync)
        with pytest.raises(SaveFailed, match=os.strerror(code)):
            to_dcp(path, target)
        with pytest.raises(OSError, match=os.strerror(code)):
            to_torch_save(path, str(tmp_path / "out.pt"))
    assert os.listdir(tmp_path) == ["step-10"]
    to_dcp(path, f"{target}/")
    assert sorted(os.listdir(tmp_path)) == ["dcp", "step-10"]


def test_nothing_damaged_is_exported(tmp_path: Path) -> None:
    path = save(str(tmp_path), 10)
    flip(shard_paths(path)[1], -1)
    with pytest.raises(Damaged):
        to_torch_save(path, str(tmp_path / "out.pt"))
    assert os.listdir(tmp_path) == ["step-10"]
