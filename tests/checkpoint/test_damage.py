"""Damage of every kind is named and set aside, the checkpoint before is taken, and zero is never a silent answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.ckpt import blank, flip, resume, save, shard_paths, state_at

from elastic.checkpoint.format import files
from elastic.checkpoint.format import manifest as m
from elastic.checkpoint.format.errors import Damaged, NoGoodCheckpoint
from elastic.checkpoint.format.files import Files
from elastic.checkpoint.format.names import final_names, tmp_name
from elastic.checkpoint.stored.find import newest_good, peek, unusable_step, verify
from elastic.checkpoint.stored.read import Mismatch, load


def edit_manifest(path: str, old: bytes, new: bytes) -> None:
    """With a right hash: as someone else's program would have written it."""
    file = Path(path, m.MANIFEST)
    body = file.read_bytes().split(b'"body":', 1)[1].rstrip()[:-1].replace(old, new, 1)
    file.write_bytes(b'{"format":2,"xxh3":"' + m.digest(body).encode() + b'","body":' + body + b"}")


DAMAGE: dict[str, tuple[str, Callable[[str], object]]] = {
    "truncated": ("shard-size", lambda path: os.truncate(shard_paths(path)[0], 5000)),
    "emptied": ("shard-size", lambda path: os.truncate(shard_paths(path)[1], 0)),
    "grown": ("shard-size", lambda path: os.truncate(shard_paths(path)[1], 10**6)),
    "bit in a tensor": ("shard-hash", lambda path: flip(shard_paths(path)[1], -3)),
    "bit in the file's header": ("shard-hash", lambda path: flip(shard_paths(path)[0], 20)),
    "shard missing": ("shard-missing", lambda path: os.unlink(shard_paths(path)[1])),
    "shards swapped": ("shard-size", lambda path: shutil.copy(*shard_paths(path))),
    "manifest missing": ("manifest-missing", lambda path: os.unlink(f"{path}/{m.MANIFEST}")),
    "manifest cut short": ("manifest-damaged", lambda path: os.truncate(f"{path}/{m.MANIFEST}", 100)),
    "manifest empty": ("manifest-damaged", lambda path: os.truncate(f"{path}/{m.MANIFEST}", 0)),
    "bit in the manifest": ("manifest-damaged", lambda path: flip(f"{path}/{m.MANIFEST}", 200)),
    "manifest of another step": ("manifest-damaged", lambda path: edit_manifest(path, b'"step":20', b'"step":21')),
}  # fmt: skip


@pytest.mark.parametrize("by", ["newest_good", "resume"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_checkpoint_damage_is_named_and_the_previous_checkpoint_is_used(kind: str, by: str, tmp_path: Path) -> None:
    directory = str(tmp_path)
    save(directory, 10)
    reason, damage = DAMAGE[kind]
    damage(save(directory, 20))
    tensors = blank()
    if by == "resume":
        found = resume(directory, "job", lambda info: tensors[info.name])
        assert all(torch.equal(tensors[name], tensor) for name, tensor in state_at(10).items())
    else:
        found = newest_good(directory, "job")
    assert found is not None
    assert found.step == 10
    assert [(a.reason, os.path.basename(a.path)) for a in found.aside] == [(reason, f"step-20.damaged-{reason}")]
    assert sorted(os.listdir(directory)) == ["step-10", f"step-20.damaged-{reason}"]
    again = newest_good(directory, "job")
    assert again is not None
    assert (again.step, again.aside) == (10, ())


@pytest.mark.parametrize("kind", DAMAGE)
def test_when_none_is_good_that_is_an_error_and_stays_one(kind: str, tmp_path: Path) -> None:
    DAMAGE[kind][1](save(str(tmp_path), 20))
    for _ in range(2):  # the second time nothing of a checkpoint's name is left
        with pytest.raises(NoGoodCheckpoint, match=r"(?s)move these away to start from zero:.*step-20"):
            newest_good(str(tmp_path), "job")


def test_every_piece_is_checked(tmp_path: Path) -> None:
    path = save(str(tmp_path), 20)
    for shard in shard_paths(path):
        for at in range(0, os.path.getsize(shard), 1024):
            flip(shard, at)
            with pytest.raises(Damaged) as damage:
                verify(path, "job")
            assert damage.value.reason == "shard-hash"
            flip(shard, at)
    verify(path, "job")


def test_another_jobs_and_another_formats_checkpoints_are_passed_over_and_left_alone(tmp_path: Path) -> None:
    directory = str(tmp_path)
    save(directory, 10)
    save(directory, 20, job="other")
    older = Path(save(directory, 30), m.MANIFEST)
    older.write_bytes(older.read_bytes().replace(b'"format":2', b'"format":1'))
    found = newest_good(directory, "job")
    assert found is not None
    assert found.step == 10
    assert {a.reason for a in found.aside} == {"other-format", "other-job"}
    assert sorted(os.listdir(directory)) == ["step-10", "step-20", "step-30"]
    shutil.rmtree(tmp_path / "step-10")
    with pytest.raises(NoGoodCheckpoint, match="belongs to job 'other'"):
        newest_good(directory, "job")


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    assert newest_good(str(tmp_path), "job") is None
    assert newest_good(str(tmp_path / "not there"), "job") is None
    (tmp_path / tmp_name(7, 1, "job")).mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    assert resume(str(tmp_path), "job", lambda info: None) is None


def test_newest_means_the_later_generation(tmp_path: Path) -> None:
    """After a roll-back the job comes to the same steps again; what it did before is not to be trusted."""
    directory = str(tmp_path)
    for step, generation in [(80, 4), (90, 4), (100, 4), (90, 5)]:
        save(directory, step, generation=generation, tensors=state_at(step * generation))
    assert [(step, generation) for step, generation, _ in peek(directory, "job")] == [
        (90, 5),
        (100, 4),
        (90, 4),
        (80, 4),
    ]
    tensors = blank()
    found = resume(directory, "job", lambda info: tensors[info.name])
    assert found is not None
    assert (found.step, found.manifest.generation, os.path.basename(found.path)) == (90, 5, "step-90.g5")
    assert torch.equal(tensors["weight"], state_at(450)["weight"])


def test_damaged_checkpoint_on_a_read_only_disk_yields_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(str(tmp_path), 10)
    flip(shard_paths(save(str(tmp_path), 20))[0], -1)

    def refuse(old: str, new: str, **folders: int) -> None:
        raise OSError(30, "Read-only file system", old)

    monkeypatch.setattr(os, "rename", refuse)
    for _ in range(2):
        found = newest_good(str(tmp_path), "job")
        assert found is not None
        assert found.step == 10
        assert [a.path for a in found.aside] == [str(tmp_path / "step-20")]


@pytest.mark.parametrize("by", ["newest_good", "resume"])
def test_checkpoint_with_read_errors_is_left_in_place(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(str(tmp_path), 10)
    save(str(tmp_path), 20)
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        if "step-20" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    tensors = blank()
    if by == "resume":
        found = resume(str(tmp_path), "job", lambda info: tensors[info.name])
        assert torch.equal(tensors["weight"], state_at(10)["weight"])
    else:
        found = newest_good(str(tmp_path), "job")
    assert found is not None
    assert found.step == 10
    assert [(a.reason, a.path) for a in found.aside] == [("unreadable", str(tmp_path / "step-20"))]


@pytest.mark.slow
def test_damaged_checkpoints_can_be_set_aside_by_many_processes_at_once(tmp_path: Path) -> None:
    directory = str(tmp_path)
    save(directory, 10)
    for step in (20, 30, 40):
        flip(shard_paths(save(directory, step))[0], -1)
    code = (
        "import sys\n"
        "from elastic.checkpoint.stored.find import newest_good\n"
        "sys.stdin.readline()\n"
        "print(newest_good(sys.argv[1], 'job').step)\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["10\n"] * 6
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert sorted(os.listdir(directory)) == ["step-10", *(f"step-{step}.damaged-shard-hash" for step in (20, 30, 40))]


def test_checkpoint_loads_into_other_strides_and_skips_unwanted_tensors(tmp_path: Path) -> None:
    path = save(str(tmp_path), 10, shards=3)
    weight = torch.zeros(40, 60).t()
    everything = torch.zeros(60, 80)
    found = newest_good(str(tmp_path), "job")
    assert found is not None
    assert found.path == path
    wanted = {"weight": weight, "moment": everything[:, ::2]}
    load(found, lambda info: wanted.get(info.name), threads=3)
    assert torch.equal(weight, state_at(10)["weight"])
    assert torch.equal(everything[:, ::2], state_at(10)["moment"])
    assert not everything[:, 1::2].any()


@pytest.mark.parametrize("wrong", [torch.zeros(60, 41), torch.zeros(60, 40, dtype=torch.float64)])
def test_a_tensor_of_another_kind_is_the_programs_fault(wrong: torch.Tensor, tmp_path: Path) -> None:
    save(str(tmp_path), 10)
    with pytest.raises(Mismatch, match=r"weight is F32 \[60, 40\] in the checkpoint"):
        resume(str(tmp_path), "job", lambda info: wrong if info.name == "weight" else None)
    assert os.listdir(tmp_path) == ["step-10"]


def test_what_other_jobs_leave_in_the_folder_keeps_no_job_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job's name is in the folder's; another user owns it, who may not let this one look into it; or it is
    being removed at this moment."""
    theirs = tmp_path / final_names(40, 7, "theirs")[-1]
    theirs.mkdir()
    Path(f"{theirs}.damaged-manifest-missing").mkdir()
    closed = tmp_path / "step-4000"
    closed.mkdir()

    class Seen(Files):
        def names(self, path: str) -> list[str]:
            return [*super().names(path), *(["step-50"] if path == str(tmp_path) else [])]  # listed, and gone since

        def owner(self, path: str) -> int | None:
            return os.geteuid() + 1 if path == str(closed) else super().owner(path)

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(files, "REAL", Seen())
    assert unusable_step(str(tmp_path), "job") == 0
    (tmp_path / "step-30.damaged-shard-hash").mkdir()
    os.chown(tmp_path / "step-30.damaged-shard-hash", 1000, -1) if os.getuid() == 0 else None
    assert unusable_step(str(tmp_path), "job") == (30 if os.getuid() in (0, 1000) else 0)


def test_a_folder_of_a_scripts_own_is_no_checkpoint_that_is_lost(tmp_path: Path) -> None:
    """Named as one of ours, with nothing of ours in it: it keeps no job from beginning, and stays where it is."""
    own = tmp_path / "step-1000"
    own.mkdir()
    (own / "pytorch_model.bin").write_bytes(b"weights")
    assert unusable_step(str(tmp_path), "job") == 0
    assert newest_good(str(tmp_path), "job") is None
    (own / "pytorch_model.bin").rename(own / "shard-0.safetensors")
    assert unusable_step(str(tmp_path), "job") == 1000
    assert own.exists()
