"""What an agent says it does before its workers are at work."""

from __future__ import annotations

import pytest
from support.jobs import changed, generation, place, policy

from elastic.agent.reports.status import doing
from elastic.contract.records.reasons import Code, Text, reason
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.model import Agent, Worker


def agent(*stages: Stage, crashes: int = 0) -> Agent:
    workers = {
        slot: Worker(slot=slot, worker_id=slot + 1, stage=stage, since_s=0.0, deadline_s=0.0, crashes=crashes)
        for slot, stage in enumerate(stages)
    }
    return changed(Agent(policy(slots=2)), workers=workers, generation=generation(3, [place("a", 0, 1)]))


@pytest.mark.parametrize(
    ("seen", "zygote_up", "said"),
    [
        (agent(Stage.STARTING, Stage.STARTING), False, reason(Code.IMPORTS)),
        (agent(Stage.STARTING, Stage.STARTING), True, reason(Code.SETS_UP, slots="0, 1")),
        (agent(Stage.READY, Stage.STARTING), True, reason(Code.SETS_UP, slots="1")),
        (agent(Stage.FORMING, Stage.FORMING), True, reason(Code.FORMS, number=3)),
        (agent(Stage.RUNNING, Stage.RUNNING), True, ""),
        (agent(Stage.RUNNING, Stage.GONE, crashes=3), True, reason(Code.RESTS, slots="1")),
        (agent(Stage.RUNNING, Stage.GONE), True, ""),
    ],
)
def test_doing(seen: Agent, zygote_up: bool, said: Text) -> None:
    assert doing(seen, zygote_up) == said
