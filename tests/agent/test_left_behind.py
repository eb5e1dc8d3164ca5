"""What an agent learns from the status file of the agent before it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from elastic.agent.status import left_behind
from elastic.contract.agent_files import AgentStatus
from elastic.contract.records import ProgressRecord

NOTHING = ((0, 0), 0.0)


def write(folder: Path, step: int = 70, step_wall_s: float = 90.0) -> None:
    progress = ProgressRecord(
        generation=3, world_size=2, step=step, steps_per_s=1.0, loss=None, wall_s=99.0, step_wall_s=step_wall_s
    )
    status = AgentStatus(
        pid=1, incarnation="x", job="job", node="a", phase="running", reason="", leader=False, generation=3,
        etcd_ok=True, written_wall_s=99.0, progress=progress,
    )  # fmt: skip
    (folder / "status.json").write_bytes(msgspec.json.encode(status))


def test_how_far_the_job_was_and_when(tmp_path: Path) -> None:
    write(tmp_path)
    assert left_behind(tmp_path, submitted_wall_s=50.0) == ((3, 70), 90.0)


def test_an_earlier_job_of_the_same_name_says_nothing_of_this_one(tmp_path: Path) -> None:
    write(tmp_path)
    assert left_behind(tmp_path, submitted_wall_s=95.0) == NOTHING


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"pid": 1}'])
def test_a_damaged_file_is_no_file(tmp_path: Path, raw: bytes) -> None:
    assert left_behind(tmp_path, 0.0) == NOTHING
    (tmp_path / "status.json").write_bytes(raw)
    assert left_behind(tmp_path, 0.0) == NOTHING


def test_before_the_first_step_there_is_nothing_to_know(tmp_path: Path) -> None:
    write(tmp_path, step=0, step_wall_s=0.0)
    assert left_behind(tmp_path, 0.0) == NOTHING
