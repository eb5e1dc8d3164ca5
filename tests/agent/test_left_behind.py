"""What an agent learns from the status file of the agent before it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import cast

import msgspec
import pytest
import structlog

from elastic.agent import node as starting
from elastic.agent.reports import ledger
from elastic.agent.reports.status import left_behind
from elastic.contract.agent_files import LEFT, AgentConfig, AgentStatus, EtcdAccess
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import ProgressRecord
from elastic.contract.records.rank_records import RanksRecord
from elastic.etcd.client import KV, Etcd, EtcdUnavailable
from elasticd.agents.agents import Agents
from elasticd.agents.retention import AGENT_FILES
from elasticd.base.errors import CannotStart
from elasticd.base.threads import Threads
from elasticd.machine.processes.launch import ServiceProcess, Started

NOTHING = ((0, 0), 0.0)
SUBMITTED_S = 100.0
ACCOUNT = RanksRecord(node="a", generation=3, wall_s=99.0, ranks=())


def write(
    folder: Path,
    step: int = 70,
    step_wall_s: float = 90.0,
    submitted_wall_s: float = SUBMITTED_S,
    *,
    stepped_in: int = 3,
) -> None:
    progress = ProgressRecord(
        generation=3,
        world_size=2,
        step=step,
        steps_per_s=1.0,
        loss=None,
        wall_s=99.0,
        step_wall_s=step_wall_s,
        stepped_in=stepped_in,
    )
    status = AgentStatus(
        pid=1, incarnation="x", job="job", node="a", phase="running", reason="", leader=False, generation=3,
        etcd_ok=True, written_wall_s=99.0, progress=progress, rank_times=ACCOUNT, submitted_wall_s=submitted_wall_s,
    )  # fmt: skip
    (folder / "status.json").write_bytes(msgspec.json.encode(status))


def test_how_far_the_job_was_and_when(tmp_path: Path) -> None:
    write(tmp_path)
    assert left_behind(tmp_path, SUBMITTED_S) == ((3, 70), 90.0)
    assert ledger.left_behind(tmp_path, SUBMITTED_S) == ACCOUNT


def test_a_step_of_the_generation_before_does_not_outrank_those_of_the_one_that_had_formed(tmp_path: Path) -> None:
    """All agents are killed while generation 3 forms, and again after its first step, 47, from a checkpoint of 46: one
    step is lost then, not the 24 of before, which the first incident has told."""
    write(tmp_path, step=70, stepped_in=2)
    reached, _ = left_behind(tmp_path, SUBMITTED_S)
    assert reached == (2, 70)
    assert max(reached, (3, 47)) == (3, 47), "as the leader's progress record has it"


@pytest.mark.parametrize("submitted_wall_s", [50.0, 120.0])
def test_an_earlier_job_of_the_same_name_says_nothing_of_this_one(tmp_path: Path, submitted_wall_s: float) -> None:
    """Whatever the clocks of this node and of the submitter's say."""
    write(tmp_path, submitted_wall_s=submitted_wall_s)
    assert left_behind(tmp_path, SUBMITTED_S) == NOTHING
    assert ledger.left_behind(tmp_path, SUBMITTED_S) is None


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"pid": 1}'])
def test_a_damaged_file_is_no_file(tmp_path: Path, raw: bytes) -> None:
    assert left_behind(tmp_path, 0.0) == NOTHING
    (tmp_path / "status.json").write_bytes(raw)
    assert left_behind(tmp_path, 0.0) == NOTHING


def test_before_the_first_step_there_is_nothing_to_know(tmp_path: Path) -> None:
    write(tmp_path, step=0, step_wall_s=0.0)
    assert left_behind(tmp_path, SUBMITTED_S) == NOTHING


class Refuses:
    """A launcher that starts no process. The test then reads the agent's folder in place of that agent."""

    switches_user = False

    def start(self, service: ServiceProcess) -> Started:
        raise CannotStart("no")


def start(state_dir: Path) -> Path:
    """The folder of an agent, as its daemon leaves it to the agent."""
    log = structlog.get_logger()
    agents = Agents(state_dir, Refuses(), Threads(log), lambda gone: None, log)
    folder = agents.dir("job")
    agents.start(config(folder), "")
    return folder


def config(folder: Path) -> AgentConfig:
    return AgentConfig(
        cluster="c", node="a", job="job", address="127.0.0.1", slots=1, etcd=EtcdAccess(endpoints=("127.0.0.1:1",)),
        agent_dir=str(folder), logs_dir=str(folder),
    )  # fmt: skip


class Slow:
    """An etcd that answers the second time."""

    def __init__(self) -> None:
        self.asked = 0

    def get(self, key: str) -> KV:
        self.asked += 1
        if self.asked == 1:
            raise EtcdUnavailable("down", maybe_done=False)
        return KV(key, b"", 1, 1, 1)


def test_the_daemon_leaves_it_to_the_next_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "AGAIN_S", 0.0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    folder = start(tmp_path)
    write(folder)
    for _ in range(3):  # agents that end before they have a generation take nothing away
        assert start(tmp_path) == folder
        assert not (folder / "status.json").exists(), "it would be taken for the new agent's"
        assert left_behind(folder, SUBMITTED_S) == ((3, 70), 90.0)
        starting.read_spec(cast(Etcd, Slow()), ClusterKeys("c").job("job"), config(folder))
        assert (folder / "status.json").exists()
        assert left_behind(folder, SUBMITTED_S) == ((3, 70), 90.0)
        assert ledger.left_behind(folder, SUBMITTED_S) == ACCOUNT
    write(folder, step=90)
    start(tmp_path)
    assert left_behind(folder, SUBMITTED_S) == ((3, 90), 90.0)
    assert set(os.listdir(folder)) <= AGENT_FILES, "the cleaner knows each file"
    assert LEFT in os.listdir(folder)
