"""The phases of a job, and the table of all their transitions: (phase, trigger) -> phase.

Agents and daemons write the phase under a compare-and-swap, and look it up here. A pair that is not in the table
raises. `docs/states.md` is generated from the table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from .job_records import JobState, Phase
from .reasons import Text


class UnknownTransition(Exception):
    """The table has no such row."""


class PhaseTrigger(enum.StrEnum):
    """Why a job's phase changes."""

    PUBLISHED = "generation published"
    BELOW_MIN = "fewer nodes than its minimum, and no step"
    STEPS_ON = "steps on with the nodes it had"
    COMPLETED = "all ranks have completed"
    FAILED = "failed for good"
    WITHDRAWN = "training was complete, and the rest of its script failed, or does what elastic refuses"
    STOP = "told to stop"
    LEFT = "last agent gone"
    CLOSED = "run closed (torchrun)"


_GOES_ON = (Phase.PENDING, Phase.RUNNING, Phase.WAITING)

PHASES: Mapping[tuple[Phase, PhaseTrigger], Phase] = MappingProxyType(
    {
        **{(phase, PhaseTrigger.PUBLISHED): Phase.RUNNING for phase in _GOES_ON},
        (Phase.RUNNING, PhaseTrigger.BELOW_MIN): Phase.WAITING,
        (Phase.WAITING, PhaseTrigger.STEPS_ON): Phase.RUNNING,
        # A job whose state etcd has lost counts as pending until an agent restores it.
        **{(phase, PhaseTrigger.COMPLETED): Phase.SUCCEEDED for phase in _GOES_ON},
        **{(phase, PhaseTrigger.FAILED): Phase.FAILED for phase in _GOES_ON},
        (Phase.SUCCEEDED, PhaseTrigger.WITHDRAWN): Phase.FAILED,
        **{(phase, PhaseTrigger.STOP): Phase.STOPPING for phase in _GOES_ON},
        (Phase.STOPPING, PhaseTrigger.LEFT): Phase.STOPPED,
        **{(phase, PhaseTrigger.CLOSED): Phase.STOPPED for phase in Phase},
    }
)


def following(phase: Phase, trigger: PhaseTrigger) -> Phase:
    """The phase that follows. Raises UnknownTransition."""
    try:
        return PHASES[phase, trigger]
    except KeyError:
        raise UnknownTransition(f"a job that is {phase.value}: {trigger.value}") from None


def allows(phase: Phase, trigger: PhaseTrigger) -> bool:
    return (phase, trigger) in PHASES


def after(state: JobState, trigger: PhaseTrigger, reason: Text, wall_s: float) -> JobState:
    """The state that follows; `wall_s`: now. Raises UnknownTransition."""
    phase = following(state.phase, trigger)
    return msgspec.structs.replace(state, phase=phase, reason=reason, since_wall_s=wall_s)
