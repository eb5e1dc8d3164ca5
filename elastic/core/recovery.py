"""What an agent does about everything that can happen to its job: ``step(agent, event, now_s)``. Pure.

An event changes what the agent knows (`knowledge`, `exits`); then what is gets compared with what should be, and the
difference asked for (`announce`, `leaving`, `workers`, `leading`, in this order). At last what the turn adds to an
incident is noted (`reporting`). So no event needs to know what came
before it, and a lost or repeated one does no harm.

Order of effects: as returned, but nothing waits for anything: each is handed to the shell, which reports back by
events. A worker is told a thing once, when its stage changes.
"""

from __future__ import annotations

from .announce import adopt, check_idle, check_suspicion, settle_member
from .effects import Effect, Leave
from .events import Event
from .knowledge import take
from .leading import lead
from .leaving import check_drain, check_end, leave
from .model import Agent
from .reporting import report
from .standbys import settle_standbys
from .turn import Turn
from .workers import settle_worker


def step(agent: Agent, event: Event, now_s: float, jitter: float = 0.5) -> tuple[Agent, tuple[Effect, ...]]:
    """The agent after `event`, and what is to be done. `jitter` in [0, 1) spreads pauses between agents."""
    turn = Turn(agent, now_s, jitter)
    take(turn, event)
    _settle(turn)
    report(turn, agent, event)
    turn.effects.sort(key=lambda effect: isinstance(effect, Leave))  # nothing is done after that
    return turn.agent, tuple(turn.effects)


def _settle(turn: Turn) -> None:
    adopt(turn)
    check_suspicion(turn)
    check_idle(turn)
    check_drain(turn)
    check_end(turn)
    if turn.agent.leaving is not None:
        leave(turn)
        return
    for worker in tuple(turn.agent.workers.values()):
        settle_worker(turn, worker)
    settle_standbys(turn)
    settle_member(turn)
    lead(turn)
