"""The write path on a real disk: its order, its refusals, and what it leaves."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.ckpt import PIECE, blank, filled, on, resume, save, state_at

from elastic.checkpoint.format import manifest as m
from elastic.checkpoint.format.errors import SaveFailed, ShardsMissing
from elastic.checkpoint.format.files import Files
from elastic.checkpoint.format.names import tmp_name
from elastic.checkpoint.saving.write import commit, shards_missing, write_shard
from elastic.checkpoint.stored.find import newest_generation, newest_good, verify

NOBODY = 65534


def commit_20(directory: str) -> str:
    return commit(directory, "job", step=20, generation=1, shards=2, world_size=2)


def write_20(directory: str, *shards: int) -> None:
    for shard in shards:
        with filled(state_at(20), 20, 1, shard, 2) as arena:
            write_shard(arena, directory, "job", piece_nbytes=PIECE)


@pytest.mark.parametrize("started", [0, 1])
def test_a_save_and_its_check_need_no_threads(started: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of threads the writer ended, with all the orders that it had; some may still be started."""
    real, begun = threading.Thread.start, [0]

    def start(self: threading.Thread) -> None:
        begun[0] += 1
        if begun[0] > started:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with filled(state_at(20), 20) as arena:
        write_shard(arena, str(tmp_path), "job", piece_nbytes=PIECE)
    path = commit(str(tmp_path), "job", step=20, generation=1, shards=1, world_size=1)
    assert begun[0] > started
    begun[0] = 0
    verify(path, "job", hashes=True)
    assert begun[0] > started


def test_a_checkpoint_is_two_files_a_shard_and_a_manifest(tmp_path: Path) -> None:
    path = save(str(tmp_path), 20)
    assert sorted(os.listdir(path)) == [
        "manifest.json",
        "shard-00000-of-00002.json",
        "shard-00000-of-00002.safetensors",
        "shard-00001-of-00002.json",
        "shard-00001-of-00002.safetensors",
    ]
    assert os.listdir(tmp_path) == ["step-20"]
    manifest = verify(path, "job")
    assert manifest.extra == {"step": 20, "shard": 0}
    assert manifest.shards[1].extra == {"step": 20, "shard": 1}


def test_space_is_reserved_before_the_first_byte_and_all_is_synced_before_the_rename(tmp_path: Path) -> None:
    log: list[str] = []

    class Logged(Files):
        def __getattribute__(self, name: str) -> object:
            if not name.startswith("_") and name not in ("read", "names", "size", "identity"):
                log.append(name)
            return super().__getattribute__(name)

    save(str(tmp_path), 20, shards=1, disk=Logged())
    shard = [
        "mkdir",
        "unlink",  # the note of an earlier try
        "create",
        "reserve",
        "write_at",
        "write_at",
        "write_at",
        "write_at",
        "write_at",
        "write_at",
    ]
    assert log[:10] == shard
    assert [call for call in log[10:] if call != "write_at"] == [
        *("truncate", "sync", "close", "sync_dir"),
        *("create", "close", "rename"),  # the note: of no use after a crash
        *("create", "sync", "close", "rename", "sync_dir"),
        *("rename", "sync_dir"),
    ]


def test_a_file_system_without_o_direct_gets_plain_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open, real_pwrite = os.open, os.pwrite
    refused = []

    def refuse_open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            refused.append("open")
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    def refuse_write(fd: int, data: memoryview, at: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append("write")
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_pwrite(fd, data[: len(data) // 2 + 1], at)  # and it writes less than asked

    monkeypatch.setattr(os, "open", refuse_open)
    verify(save(str(tmp_path), 20), "job")
    monkeypatch.setattr(os, "open", real_open)
    monkeypatch.setattr(os, "pwrite", refuse_write)
    verify(save(str(tmp_path), 30), "job")
    assert set(refused) == {"open", "write"}


def test_threads_write_the_same_bytes(tmp_path: Path) -> None:
    with filled(state_at(20), 20) as arena:
        one = write_shard(arena, str(tmp_path / "one"), "job", threads=1, piece_nbytes=PIECE)
        four = write_shard(arena, str(tmp_path / "four"), "job", threads=4, piece_nbytes=PIECE)
        assert one == four
        name = f"{tmp_name(20, 1, 'job')}/{one.file}"
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "four" / name).read_bytes() == bytes(arena.view())


def test_a_checkpoint_is_committed_once_its_last_shard_is_there(tmp_path: Path) -> None:
    directory = str(tmp_path)
    assert shards_missing(directory, "job", 20, 1, 2) == (0, 1)
    write_20(directory, 0)
    assert shards_missing(directory, "job", 20, 1, 2) == (1,)
    with pytest.raises(ShardsMissing, match="step 20: 1 of 2 shards were not written: 1"):
        commit_20(directory)
    assert newest_good(directory, "job") is None
    write_20(directory, 1)
    commit_20(directory)
    assert (tmp_path / "step-20").is_dir()


def test_committing_twice_is_harmless(tmp_path: Path) -> None:
    write_20(str(tmp_path), 0, 1)
    assert commit_20(str(tmp_path)) == commit_20(str(tmp_path)) == str(tmp_path / "step-20")


def test_two_leaders_commit_at_once(tmp_path: Path) -> None:
    class Slow(Files):
        """The other leader commits just before our rename."""

        def rename(self, old: str, new: str) -> None:
            if new.endswith("step-20"):
                with on(Files()):
                    commit_20(str(tmp_path))
            super().rename(old, new)

    write_20(str(tmp_path), 0, 1)
    with on(Slow()):
        path = commit_20(str(tmp_path))
    assert path == str(tmp_path / "step-20")
    verify(path, "job")


@pytest.mark.parametrize("call", ["read", "create", "sync_dir", "rename"])
def test_another_leader_is_faster_at_any_moment(tmp_path: Path, call: str) -> None:
    """What is gone from under the slower one is the very checkpoint that it wanted."""
    write_20(str(tmp_path), 0, 1)
    faster: list[str] = []

    class Slower(Files):
        def __getattribute__(self, name: str) -> object:
            if name == call and not faster:
                faster.append("")
                faster[0] = commit_20(str(tmp_path))
            return super().__getattribute__(name)

    with on(Slower()):
        slower = commit_20(str(tmp_path))
    assert slower == faster[0] == str(tmp_path / "step-20")
    assert os.listdir(tmp_path) == ["step-20"]


def test_shards_of_two_cuts_never_become_a_checkpoint(tmp_path: Path) -> None:
    write_20(str(tmp_path), 0)
    with filled({"moment": torch.ones(2), "weight": torch.ones(2)}, 20, 1, 1, 2) as arena:
        write_shard(arena, str(tmp_path), "job")
    with pytest.raises(SaveFailed, match="a tensor is listed twice"):
        commit_20(str(tmp_path))


def test_shards_of_two_jobs_in_one_folder_never_become_a_checkpoint(tmp_path: Path) -> None:
    """Both are in generation 1 and reach step 20. Each has written another shard when the first leader looks."""
    directory = str(tmp_path)
    with filled(state_at(20), 20, 1, 0, 2) as arena:
        write_shard(arena, directory, "job", piece_nbytes=PIECE)
    with filled(state_at(21), 20, 1, 1, 2) as arena:
        write_shard(arena, directory, "another", piece_nbytes=PIECE)
    assert shards_missing(directory, "job", 20, 1, 2) == (1,)
    with pytest.raises(ShardsMissing):
        commit_20(directory)


def test_a_note_of_another_job_is_refused(tmp_path: Path) -> None:
    write_20(str(tmp_path), 0, 1)
    with filled(state_at(20), 20, 1, 1, 2) as arena:
        write_shard(arena, str(tmp_path), "another", piece_nbytes=PIECE)
    name = m.shard_note(1, 2)
    os.replace(tmp_path / tmp_name(20, 1, "another") / name, tmp_path / tmp_name(20, 1, "job") / name)
    with pytest.raises(SaveFailed, match="shard 1 of 2: it belongs to job 'another', not 'job'"):
        commit_20(str(tmp_path))


@pytest.mark.parametrize("jobs", [("a", "b"), ("a", "b", "c")])
def test_jobs_in_one_folder_keep_their_checkpoints_of_the_same_step(jobs: tuple[str, ...], tmp_path: Path) -> None:
    paths = [save(str(tmp_path), 20, job=job, tensors=state_at(number)) for number, job in enumerate(jobs)]
    assert [verify(path).job for path in paths] == list(jobs)
    for job, path in zip(jobs, paths, strict=True):
        found = newest_good(str(tmp_path), job)
        assert found is not None
        assert found.path == path
        assert commit(str(tmp_path), job, step=20, generation=1, shards=2, world_size=2) == path


def test_another_job_takes_the_name_just_before_the_rename(tmp_path: Path) -> None:
    class Slow(Files):
        def rename(self, old: str, new: str) -> None:
            if new.endswith("step-20"):
                save(str(tmp_path), 20, job="another")
            super().rename(old, new)

    write_20(str(tmp_path), 0, 1)
    with on(Slow()):
        path = commit_20(str(tmp_path))
    assert verify(path).job == "job"
    assert verify(str(tmp_path / "step-20")).job == "another"


def test_a_shard_of_an_earlier_run_never_completes_a_checkpoint(tmp_path: Path) -> None:
    """A run ended within its first checkpoint. Nothing is committed, and the next run reaches the same step."""
    directory = str(tmp_path)
    write_20(directory, 1)
    number = 1 + newest_generation(directory, "job")
    for shard in (0, 1):
        assert shards_missing(directory, "job", 20, number, 2) == tuple(range(shard, 2))
        with filled(state_at(20), 20, number, shard, 2) as arena:
            write_shard(arena, directory, "job", piece_nbytes=PIECE)
    assert commit(directory, "job", step=20, generation=number, shards=2, world_size=2) == str(tmp_path / "step-20")


def test_a_shard_written_again_is_missing_until_it_is_complete(tmp_path: Path) -> None:
    class Looks(Files):
        def write_at(self, fd: int, data: memoryview, at: int) -> None:
            missing.append(shards_missing(str(tmp_path), "job", 20, 1, 2))
            super().write_at(fd, data, at)

    missing: list[tuple[int, ...]] = []
    write_20(str(tmp_path), 0, 1)
    with on(Looks()):
        write_20(str(tmp_path), 1)
    assert set(missing) == {(1,)}
    assert shards_missing(str(tmp_path), "job", 20, 1, 2) == ()


def test_a_damaged_note_is_not_believed(tmp_path: Path) -> None:
    write_20(str(tmp_path), 0, 1)
    note = tmp_path / tmp_name(20, 1, "job") / m.shard_note(1, 2)
    note.write_bytes(note.read_bytes().replace(b'"step":20', b'"step":21'))
    with pytest.raises(SaveFailed, match="shard 1 of 2: the note's hash"):
        commit_20(str(tmp_path))


def test_an_arena_that_is_filled_again_meanwhile_is_never_taken(tmp_path: Path) -> None:
    class Meanwhile(Files):
        def truncate(self, fd: int, nbytes: int) -> None:
            arena.fill(list(state_at(21).values()))
            arena.seal(20, 1)
            super().truncate(fd, nbytes)

    with filled(state_at(20), 20) as arena, on(Meanwhile()), pytest.raises(SaveFailed, match="filled again"):
        write_shard(arena, str(tmp_path), "job")
    assert os.listdir(tmp_path / tmp_name(20, 1, "job")) == []


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with filled(state_at(20), 20) as arena, pytest.raises(NotADirectoryError):
        write_shard(arena, str(blocked / "checkpoints"), "job")


def test_permission_denied() -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # not below tmp_path, which nobody else may look into
        save(folder, 10)
        os.chmod(folder, 0o555)
        try:
            if user == 0:
                os.seteuid(NOBODY)  # root may write anywhere
            with filled(state_at(20), 20) as arena, pytest.raises(PermissionError, match=r"step-20\.g1\.j\w+\.tmp"):
                write_shard(arena, folder, "job")
        finally:
            os.seteuid(user)
            os.chmod(folder, 0o700)
        found = newest_good(folder, "job")
        assert found is not None
        assert found.step == 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(mount)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_costs_that_checkpoint_and_gives_its_room_back(small_disk: Path) -> None:
    save(str(small_disk), 10)
    with pytest.raises(OSError, match="No space left") as error:
        save(str(small_disk), 20, tensors={"large": torch.ones(40000)}, shards=1)
    assert error.value.errno == errno.ENOSPC
    tensors = blank()
    found = resume(str(small_disk), "job", lambda info: tensors[info.name])
    assert found is not None
    assert found.step == 10
    save(str(small_disk), 30)  # the failed one has left its room


def test_a_read_only_disk(small_disk: Path) -> None:
    save(str(small_disk), 10)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        save(str(small_disk), 20)
    found = newest_good(str(small_disk), "job")
    assert found is not None
    assert found.step == 10


def test_three_thousand_tensors_take_a_handful_of_descriptors(tmp_path: Path) -> None:
    tensors = {f"layer.{i}.weight": torch.full((i % 7, 3), float(i)) for i in range(3000)}
    back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 1024), hard))
    try:
        save(str(tmp_path), 20, tensors=tensors, shards=4)
        found = resume(str(tmp_path), "job", lambda info: back[info.name])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found is not None
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
