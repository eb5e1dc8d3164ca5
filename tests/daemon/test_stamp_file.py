"""What a daemon remembers of the records in etcd is there after a restart and a loss of power, and stays small."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from elastic.contract.keys import ClusterKeys
from elastic.etcd.client import KV, ClusterSigner, Put
from elastic.etcd.stamps import NewestRead, Stamps
from elasticd.node import stamp_file
from elasticd.node.stamp_file import StampFile

KEYS = ClusterKeys("main")
JOB = KEYS.job("a")


def started(folder: Path) -> tuple[Stamps, StampFile]:
    stamps = Stamps(KEYS)
    return stamps, StampFile(folder, stamps, structlog.get_logger())


def test_what_was_read_is_remembered_by_the_next_daemon(tmp_path: Path) -> None:
    stamps, file = started(tmp_path)
    stamps.take(JOB.spec, 5, "first")
    stamps.take(KEYS.drain("n"), 6)
    file.save()
    stamps.end(KEYS.drain("n"), 7)
    file.save()
    later, _ = started(tmp_path)
    assert later.of(KEYS.drain("n")).gone
    assert later.of(KEYS.drain("n")).stamp == 7
    assert later.of(JOB.spec) == NewestRead(5, False, "first")
    assert sorted(later.all_entries()) == sorted(stamps.all_entries())


def test_what_no_daemon_acts_on_is_saved_along_with_the_rest(tmp_path: Path) -> None:
    stamps, file = started(tmp_path)
    stamps.take(JOB.progress, 5)
    file.save()
    assert not (tmp_path / stamp_file.NAME).exists()
    stamps.take(JOB.state, 6)
    file.save()
    assert started(tmp_path)[0].of(JOB.progress).stamp == 5
    stamps.take(JOB.progress, 8)
    file.save(all_of_it=True)
    assert started(tmp_path)[0].of(JOB.progress).stamp == 8


def test_a_file_cut_off_anywhere_keeps_what_is_before(tmp_path: Path) -> None:
    stamps, file = started(tmp_path)
    for number in (1, 2, 3):
        stamps.take(KEYS.drain(f"n{number}"), number)
        file.save()
    path = tmp_path / stamp_file.NAME
    whole = path.read_bytes()
    for nbytes in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:nbytes])
        cut, again = started(tmp_path)
        assert cut.of(KEYS.drain("n1")).stamp == 1
        cut.take(KEYS.drain("n9"), 9)
        again.save()
        assert started(tmp_path)[0].of(KEYS.drain("n9")).stamp == 9


def test_the_file_has_at_most_twice_the_lines_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp_file, "SPARE_LINES", 10)
    stamps, file = started(tmp_path)
    for number in range(200):
        stamps.take(JOB.state, number)
        stamps.take(KEYS.drain("n"), number)
        file.save()
        assert len((tmp_path / stamp_file.NAME).read_bytes().splitlines()) <= 2 * 2 + 10
    assert started(tmp_path)[0].of(JOB.state).stamp == 199


def test_a_full_disk_is_reported_and_made_up_for(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    stamps, file = started(folder)
    stamps.take(JOB.state, 1)
    file.save()
    assert "No such file" in file.error
    folder.mkdir()
    file.save()
    assert (file.error, started(folder)[0].of(JOB.state).stamp) == ("", 1)


def test_a_disk_that_stays_full_costs_no_more_memory_than_there_are_keys(tmp_path: Path) -> None:
    stamps, file = started(tmp_path / "absent")
    for number in range(1, 100):
        stamps.take(JOB.state, number)
        stamps.take(JOB.progress, number)
        file.save()
    assert len(file._failed) == 2
    (tmp_path / "absent").mkdir()
    file.save()
    assert started(tmp_path / "absent")[0].of(JOB.progress).stamp == 99


def test_a_node_whose_clock_was_ahead_is_believed_after_it_has_lost_its_power(tmp_path: Path) -> None:
    """The newest stamp of its record was not in the file yet."""
    key, clock_ns = KEYS.node("n"), 3600 * 10**9
    other = ClusterSigner(KEYS.root, bytes(32), lambda: 10**9)

    def signed(daemon: ClusterSigner) -> KV:
        (put,) = daemon.sealed([Put(key, b"{}", 1)])
        assert isinstance(put, Put)
        kv = KV(key, put.value, 1, 1, 1)
        daemon.opened(kv)
        return other.opened(kv)

    before = ClusterSigner(KEYS.root, bytes(32), lambda: clock_ns)
    file = StampFile(tmp_path, before.stamps, structlog.get_logger())
    signed(before)
    file.save(all_of_it=True)
    clock_ns += int((stamp_file.SAVE_S - 1) * 1e9)
    signed(before)
    file.save()
    other.deleted([key])
    clock_ns = 2 * 10**9  # and the clock has been set
    after = ClusterSigner(KEYS.root, bytes(32), lambda: clock_ns)
    StampFile(tmp_path, after.stamps, structlog.get_logger())
    after.follow(key, stamp_file.SAVE_S)
    assert signed(after).stamp
