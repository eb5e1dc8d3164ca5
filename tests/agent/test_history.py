"""A job's course: bounded, whole, continued by the next agent, and of no other job."""

from __future__ import annotations

import itertools
import pathlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import changed, generation, place, policy

from elastic.agent.reports.history import EVERY_S, KEPT_POINTS, HistoryFile, added
from elastic.contract.agent_files import History, Point
from elastic.contract.records.job_records import ProgressRecord
from elastic.recovery.machine.model import Agent


def point(wall_s: float, step: int = 1) -> Point:
    return Point(wall_s=wall_s, step=step, loss=0.5, steps_per_s=1.0, world_size=2)


@settings(max_examples=25)
@given(st.lists(st.floats(0.1, 500.0), max_size=60), st.integers(1, 4))
def test_history_is_bounded_in_order_and_keeps_its_first_point(gaps: list[float], doublings: int) -> None:
    history, now_s, dense = History(submitted_wall_s=0.0, every_s=EVERY_S), 0.0, KEPT_POINTS * doublings
    for number in range(dense):
        history = added(history, point(now_s := EVERY_S * number))
    for gap_s in gaps:
        known, history = history, added(history, point(now_s := now_s + gap_s))
        assert len(history.points) <= KEPT_POINTS
        assert len(history.points) >= min(len(known.points), KEPT_POINTS // 2)
    times = [p.wall_s for p in history.points]
    assert times[0] == 0.0
    assert all(b - a >= history.every_s / 2 - 1e-9 for a, b in itertools.pairwise(times))
    assert now_s - times[-1] <= history.every_s + 500.0


def test_a_clock_that_was_set_back_does_not_end_the_course() -> None:
    history = added(History(submitted_wall_s=0.0, every_s=EVERY_S), point(4000.0))
    assert added(history, point(4000.0 - EVERY_S / 2)) is history, "no more points than before"
    for times in range(3):
        history = added(history, point(400.0 + EVERY_S * times))
    assert [p.wall_s for p in history.points] == [4000.0, 400.0, 400.0 + EVERY_S, 400.0 + EVERY_S * 2]


def agent(node: str = "a") -> Agent:
    return changed(Agent(policy(node, nodes="1:2")), generation=generation(2, [place("a"), place("b")]))


def progress(wall_s: float, loss: float | None = 0.5, step: int = 3) -> ProgressRecord:
    return ProgressRecord(generation=2, world_size=2, step=step, steps_per_s=1.5, loss=loss, wall_s=wall_s)


def written(folder: pathlib.Path) -> History:
    return msgspec.json.decode((folder / "history.json").read_bytes(), type=History)


def test_the_next_agent_of_the_job_goes_on_and_another_job_begins_anew(tmp_path: pathlib.Path) -> None:
    HistoryFile(tmp_path, 7.0).note(agent(), progress(100.0), 0.0)
    HistoryFile(tmp_path, 7.0).note(agent(), progress(200.0, float("inf")), 0.0)
    assert [(p.wall_s, p.loss) for p in written(tmp_path).points] == [(100.0, 0.5), (200.0, None)]
    HistoryFile(tmp_path, 8.0).note(agent(), progress(300.0), 0.0)
    assert [p.wall_s for p in written(tmp_path).points] == [300.0]


def test_the_file_is_written_from_time_to_time_and_at_the_end(tmp_path: pathlib.Path) -> None:
    file = HistoryFile(tmp_path, 7.0)
    for number in range(4):
        file.note(agent(), progress(100.0 + 3 * number), 3.0 * number)
    assert len(written(tmp_path).points) == 1
    file.note(agent(), progress(109.5), 9.5, last=True)
    assert len(written(tmp_path).points) == 5


def test_nothing_is_noted_before_the_first_step_or_by_a_node_without_a_rank(tmp_path: pathlib.Path) -> None:
    HistoryFile(tmp_path, 7.0).note(agent(), progress(100.0, step=0), 0.0, last=True)
    HistoryFile(tmp_path, 7.0).note(agent("c"), progress(100.0), 0.0, last=True)
    assert not (tmp_path / "history.json").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"submitted_wall_s":7,"every_s":0}', b"[" * 100_000])
def test_a_damaged_file_is_begun_anew(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "history.json").write_bytes(content)
    HistoryFile(tmp_path, 7.0).note(agent(), progress(100.0), 0.0)
    assert [p.wall_s for p in written(tmp_path).points] == [100.0]


def test_a_disk_that_is_full_ends_nothing(tmp_path: pathlib.Path) -> None:
    HistoryFile(tmp_path / "gone", 7.0).note(agent(), progress(100.0), 0.0)
