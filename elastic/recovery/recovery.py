"""An agent's reaction to every event of its job: ``step(agent, event, now_s)``. Pure.

An event changes the agent's state (`knowledge`, `exits`). Then the actual state is compared with the desired one, and
effects are requested for the difference (`announce`, `leaving`, `failure_counts`, `workers`, `leading`).
Last, the incident is updated (`reporting`). So no event depends on the ones before it, and a lost or repeated event
does no harm.

Effects are executed in the order in which they are returned, but none waits for another: the effect runner reports
results as events. A worker is told something once, when its stage changes.
"""

from __future__ import annotations

from elastic.contract.records.job_records import Phase
from elastic.recovery.machine.effects import Effect, Leave, PutState
from elastic.recovery.machine.events import Event
from elastic.recovery.machine.model import Agent
from elastic.recovery.machine.turn import Turn
from elastic.recovery.reporting import report
from elastic.recovery.workers.announce import adopt, check_idle, check_suspicion, settle_member
from elastic.recovery.workers.bad_numbers import correct_reason
from elastic.recovery.workers.leaving import check_drain, check_end, leave
from elastic.recovery.workers.workers import settle_standbys, settle_worker

from .failure_counts import count_failures
from .knowledge import apply
from .leading import lead


def step(
    agent: Agent, event: Event, now_s: float, jitter: float = 0.5, wall_s: float = 0.0
) -> tuple[Agent, tuple[Effect, ...]]:
    """The agent after `event`, and the effects to execute. `jitter` in [0, 1) spreads pauses between agents;
    `wall_s`, the time of day, dates what users read."""
    turn = Turn(agent, now_s, jitter, wall_s)
    apply(turn, event)
    _settle(turn)
    report(turn, agent, event)
    turn.effects.sort(key=_place)
    return turn.agent, tuple(turn.effects)


def _place(effect: Effect) -> int:
    """No effect may follow `Leave`, and the end of the job is written after its incidents."""
    ends = isinstance(effect, PutState) and effect.state.phase is Phase.SUCCEEDED
    return 2 if isinstance(effect, Leave) else int(ends)


def _settle(turn: Turn) -> None:
    adopt(turn)
    check_suspicion(turn)
    check_idle(turn)
    check_drain(turn)
    check_end(turn)
    count_failures(turn)
    correct_reason(turn)
    if turn.drain.leaving is not None:
        leave(turn)
        return
    for worker in tuple(turn.local.workers.values()):
        settle_worker(turn, worker)
    settle_standbys(turn)
    settle_member(turn)
    lead(turn)
