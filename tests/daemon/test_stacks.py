"""The stacks of a job's workers: of all at once, and of no more than there can be, whatever an agent's file says."""

from __future__ import annotations

import os
import threading

import msgspec

from elastic.contract.agent_files import AgentStatus
from elasticd.api.routes import job_routes as stacks
from elasticd.cluster.published_state import LocalAgent


def agent(*pids: int) -> LocalAgent:
    ranks = [
        {"rank": rank, "node": "a", "slot": rank, "pid": pid, "phase": "running", "step": 0, "incarnation": 0}
        for rank, pid in enumerate(pids)
    ]
    status = {"pid": 1, "incarnation": "i", "job": "j", "node": "a", "phase": "running", "reason": "", "leader": False}
    status |= {"generation": 1, "etcd_ok": True, "written_wall_s": 9.0, "ranks": ranks}
    return LocalAgent("j", os.getpid(), 1, msgspec.convert(status, AgentStatus), None)


def test_a_dump_that_takes_its_time_holds_up_no_other() -> None:
    both = threading.Barrier(2)

    def dump(pid: int) -> str:
        both.wait(60.0)
        return "a stack"

    rows = stacks.of_workers(agent(os.getpid(), os.getpid()), None, dump)
    assert [(row.rank, row.stack) for row in rows] == [(0, "a stack"), (1, "a stack")]


def test_a_file_that_names_workers_without_end() -> None:
    dumped: list[int] = []
    hostile = agent(*[2**63 - 1, -1, 0], *[os.getpid()] * 10_000)
    rows = stacks.of_workers(hostile, None, lambda pid: str(dumped.append(pid)))
    assert len(rows) == stacks.MOST_WORKERS
    assert len(dumped) == stacks.MOST_WORKERS - 3
    assert "is no worker of this job" in rows[0].stack


def test_one_rank_alone_and_no_agent() -> None:
    rows = stacks.of_workers(agent(os.getpid(), os.getpid()), 1, lambda pid: "a stack")
    assert [row.rank for row in rows] == [1]
    assert stacks.of_workers(None, None, lambda pid: "a stack") == []
