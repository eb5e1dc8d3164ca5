"""What stays: the newest good ones, every n-th, and never none."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ckpt import filled, flip, on, save, shard_paths, state_at

from elastic.checkpoint.format.files import Files
from elastic.checkpoint.format.names import fetch_prefix, tmp_name
from elastic.checkpoint.saving import orders
from elastic.checkpoint.saving.write import write_shard
from elastic.checkpoint.saving.writer import MAX_PACKET_BYTES, CheckpointWriter
from elastic.checkpoint.stored import remote
from elastic.checkpoint.stored.find import newest_good
from elastic.checkpoint.stored.retention import leftovers, plan, prune

entries = st.lists(st.integers(1, 50), unique=True, max_size=12).map(
    lambda steps: [(step, 1, f"step-{step}") for step in sorted(steps, reverse=True)]
)


@given(entries, st.integers(0, 5), st.sampled_from([0, 2, 10]), st.sets(st.integers(1, 50)))
def test_the_plan(found: list[tuple[int, int, str]], keep: int, every: int, bad_steps: set[int]) -> None:
    def good(path: str) -> bool:
        return int(path.removeprefix("step-")) not in bad_steps

    removed = set(plan(found, keep, every, good))
    sound = [path for _, _, path in found if good(path)]
    assert not removed & set(sound[: max(keep, 1)]), "one of the newest good ones would go"
    assert not any(every and step % every == 0 for step, _, path in found if path in removed)
    if keep and len(sound) >= keep:
        # Beyond the newest good ones nothing stays but what was asked for; unsound newer ones are not ours to judge.
        oldest_kept = sound[keep - 1]
        older = found[[path for _, _, path in found].index(oldest_kept) + 1 :]
        assert removed == {path for step, _, path in older if not (every and step % every == 0)}
    else:
        assert not removed


def test_old_ones_go_and_every_tenth_stays(tmp_path: Path) -> None:
    for step in (10, 13, 16, 20, 23, 26):
        save(str(tmp_path), step)
    removed, failed = prune(str(tmp_path), "job", 2, 10)
    assert [os.path.basename(path) for path in removed] == ["step-13", "step-16"]
    assert not failed
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-20", "step-23", "step-26"]


def test_retention_keeps_the_last_good_checkpoint_when_newer_ones_are_damaged(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        path = save(str(tmp_path), step)
        if step > 10:
            flip(shard_paths(path)[0], -1)
    assert prune(str(tmp_path), "job", 1) == ([], [])
    found = newest_good(str(tmp_path), "job")
    assert found is not None
    assert found.step == 10


def test_the_checkpoint_just_saved_stays_though_one_of_a_later_generation_is_there(tmp_path: Path) -> None:
    """As on a disk of one node, of a job whose generations were counted anew from another node's disk."""
    save(str(tmp_path), 300, generation=7)
    saved = save(str(tmp_path), 310, generation=6)
    prune(str(tmp_path), "job", 1, trusted=saved)
    assert sorted(os.listdir(tmp_path)) == ["step-300", "step-310"]


def test_a_checkpoint_that_is_being_copied_stays_until_the_copy_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that take longer than `keep` checkpoints would all fail, and none would ever arrive."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    copied = threading.Event()

    def slow(path: str, url: str, **_: object) -> str:
        assert copied.wait(60.0)
        return url

    monkeypatch.setattr(remote, "copy_up", slow)
    writer = CheckpointWriter(theirs)

    def order(it: orders.AnyOrder) -> None:
        ours.send(orders.encode(it))
        writer.turn(0.0)

    def commit(step: int) -> list[str]:
        with filled(state_at(step), step) as arena:
            write_shard(arena, str(tmp_path), "job")
        order(
            orders.Commit(directory=str(tmp_path), job="job", step=step, generation=1, shards=1, world_size=1, keep=1)
        )
        assert orders.decode_result(ours.recv(MAX_PACKET_BYTES)).ok
        return sorted(os.listdir(tmp_path))

    with ours, theirs:
        commit(10)
        order(orders.CopyUp(path=str(tmp_path / "step-10"), url="memory://there"))
        assert commit(20) == ["step-10", "step-20"]
        copied.set()
        ours.settimeout(60.0)
        assert orders.decode_result(ours.recv(MAX_PACKET_BYTES)).kind == "CopyUp"
        assert commit(30) == ["step-30"]


def test_retention_removes_crash_leftovers_and_keeps_writes_in_progress(tmp_path: Path) -> None:
    """Of its own job: what another one writes or fetches into the same folder has other numbers."""
    save(str(tmp_path), 20, generation=2)
    kept = (
        tmp_name(30, 2, "job"),
        tmp_name(20, 3, "job"),
        tmp_name(10, 1, "another"),
        fetch_prefix("step-9", "another") + "a_1",
    )
    for name in (
        tmp_name(10, 1, "job"),
        tmp_name(20, 2, "job"),
        tmp_name(90, 1, "job"),
        "step-5.g1.gone",
        fetch_prefix("step-9", "job") + "a_1",
        *kept,
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard-00000-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / "step-15.damaged-shard-hash").mkdir()
    (tmp_path / "mine").mkdir()
    prune(str(tmp_path), "job", 3)
    assert set(os.listdir(tmp_path)) == {"mine", "step-15.damaged-shard-hash", "step-20", *kept}


def test_with_no_checkpoint_yet_nothing_under_way_is_touched() -> None:
    assert leftovers([tmp_name(10, 1, "job"), "step-5.gone"], "job", None) == ["step-5.gone"]


def test_another_jobs_checkpoints_are_not_ours_to_remove(tmp_path: Path) -> None:
    for step in (10, 20):
        save(str(tmp_path), step, job="other")
        save(str(tmp_path), step + 5)
    prune(str(tmp_path), "job", 1)
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-20", "step-25"]


@pytest.mark.parametrize("call", ["rename", "unlink", "rmdir"])
def test_retention_reports_checkpoints_that_cannot_be_removed(call: str, tmp_path: Path) -> None:
    class Refusing(Files):
        pass

    def refuse(self: Files, *paths: str) -> None:
        raise OSError(13, "Permission denied", paths[0])

    setattr(Refusing, call, refuse)
    for step in (10, 20):
        save(str(tmp_path), step)
    with on(Refusing()):
        removed, failed = prune(str(tmp_path), "job", 1)
    assert removed == []
    assert len(failed) == 1
    assert "Permission denied" in failed[0]
    assert prune(str(tmp_path), "job", 1)[1] == []
    assert os.listdir(tmp_path) == ["step-20"]
