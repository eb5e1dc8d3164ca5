"""What an agent says its job waits for, while no rank of it is missing here."""

from __future__ import annotations

import time

import pytest
from support.jobs import changed, generation, place, policy

from elastic.agent.reports.status import SLOW_S, StepRate, progress
from elastic.agent.workers.pool import Pool
from elastic.checkpoint.saving.saver import SaveStatus
from elastic.contract.records.job_records import ProgressRecord
from elastic.contract.records.reasons import Code, Text, reason
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.model import Agent, Worker


class NoPool:
    def __init__(self) -> None:
        self.processes: dict[int, object] = {}


def waits_for(stage: Stage, since_s: float) -> ProgressRecord:
    worker = Worker(slot=0, worker_id=1, stage=stage, generation=2, since_s=time.monotonic() - since_s)
    agent = changed(Agent(policy(nodes="1:2")), generation=generation(2, [place("a"), place("b")]), workers={0: worker})
    pool: Pool = NoPool()  # type: ignore[assignment]
    return progress(agent, pool, StepRate(), (), SaveStatus())


@pytest.mark.parametrize(
    ("stage", "since_s", "why"),
    [
        (Stage.RUNNING, 100.0, ""),
        (Stage.FORMING, SLOW_S / 2, ""),
        (Stage.FORMING, SLOW_S * 2, reason(Code.RANKS_START, "because", number=2)),
        (Stage.STARTING, 0.0, reason(Code.WORKERS_START, slots="0", node="a")),
    ],
)
def test_waits_for_names_what_the_stage_waits_for(stage: Stage, since_s: float, why: Text) -> None:
    assert waits_for(stage, since_s).waiting_for == why
