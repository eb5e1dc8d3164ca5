"""The stages of a worker, and the table of all its transitions: (stage, trigger) -> stage.

Every change of a worker's stage is looked up here; a pair that is not in the table is an error of the caller and
raises. `docs/states.md` is generated from the table. A managed worker keeps its process across generations: its stages
are those of that process. A plain worker has no process in `ready` and `done`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from elastic.contract.records.phases import UnknownTransition


class Stage(enum.StrEnum):
    """The stage of a worker, as far as its agent has learnt."""

    STARTING = "starting"  # forked; imports and setup
    READY = "ready"  # holds process (and perhaps state), no group
    FORMING = "forming"  # told to form `generation`
    RUNNING = "running"  # has the state, `train` runs
    STOPPING_AT_STEP = "stopping_at_step"  # told to leave at a step
    ABORTING = "aborting"  # told to abort its process group, or to end
    KILLED = "killed"  # a signal to end was sent, exit not yet seen
    DONE = "done"  # `train` has returned on all ranks
    GONE = "gone"  # no process; a new one is due at `deadline_s`


IN_GROUP = frozenset({Stage.FORMING, Stage.RUNNING, Stage.STOPPING_AT_STEP, Stage.DONE})
HOLDS = IN_GROUP | {Stage.ABORTING, Stage.READY}
"""Stages of a worker that has the job's state."""


class Trigger(enum.StrEnum):
    """Why a worker's stage changes: what its agent does to it, what it reports, or its exit."""

    # By the agent.
    FORK = "process forked"
    FORK_PLAIN = "plain process forked with its rank"
    FORM = "told to form"
    STOP_AT_STEP = "told to stop at a step"
    ABORT = "told to abort its group"
    FINISH = "told that the job has succeeded"
    KILL = "signalled to end"
    GENERATION_OVER = "generation over, plain process had ended"
    PROMOTE = "a standby takes its place"
    # Reported by the worker.
    MANAGED = "script calls elastic.run"
    SET_UP = "setup done"
    SYNCED = "state received"
    TRAINED = "train returned"
    GROUP_CLOSED = "group closed"
    FAILED = "script failed"
    # Its process has ended.
    EXITED = "process exited"
    EXITED_PLAIN = "plain process exited"
    COMPLETED_PLAIN = "plain process exited with code 0"


def _rows(trigger: Trigger, to: Stage, *sources: Stage) -> dict[tuple[Stage, Trigger], Stage]:
    return {(stage, trigger): to for stage in sources}


_WITH_PROCESS = tuple(stage for stage in Stage if stage is not Stage.GONE)

TABLE: Mapping[tuple[Stage, Trigger], Stage] = MappingProxyType(
    {
        **_rows(Trigger.FORK, Stage.STARTING, Stage.GONE),
        **_rows(Trigger.FORK_PLAIN, Stage.RUNNING, Stage.READY),
        **_rows(Trigger.FORM, Stage.FORMING, Stage.READY),
        **_rows(Trigger.STOP_AT_STEP, Stage.STOPPING_AT_STEP, Stage.RUNNING),
        **_rows(Trigger.ABORT, Stage.ABORTING, *IN_GROUP),
        **_rows(Trigger.FINISH, Stage.ABORTING, Stage.DONE),
        **_rows(Trigger.KILL, Stage.KILLED, Stage.STARTING, Stage.READY, Stage.ABORTING, *IN_GROUP),
        **_rows(Trigger.GENERATION_OVER, Stage.READY, Stage.DONE),
        **_rows(Trigger.PROMOTE, Stage.READY, Stage.GONE, Stage.STARTING, Stage.KILLED),
        # A plain worker turns out to be managed: in `running` it is in its setup; in the others it has no process.
        **_rows(Trigger.MANAGED, Stage.STARTING, Stage.RUNNING),
        **_rows(Trigger.MANAGED, Stage.GONE, Stage.READY, Stage.DONE),
        **_rows(Trigger.SET_UP, Stage.READY, Stage.STARTING),
        **_rows(Trigger.SYNCED, Stage.RUNNING, Stage.FORMING),
        **_rows(Trigger.TRAINED, Stage.DONE, Stage.FORMING, Stage.RUNNING, Stage.STOPPING_AT_STEP),
        **_rows(Trigger.GROUP_CLOSED, Stage.READY, Stage.ABORTING, *IN_GROUP),
        **_rows(Trigger.FAILED, Stage.KILLED, Stage.STARTING, Stage.READY, *IN_GROUP),
        **_rows(Trigger.EXITED, Stage.GONE, *_WITH_PROCESS),
        **_rows(Trigger.EXITED_PLAIN, Stage.READY, Stage.RUNNING, Stage.KILLED),
        **_rows(Trigger.COMPLETED_PLAIN, Stage.DONE, Stage.RUNNING),
    }
)


def after(stage: Stage, trigger: Trigger) -> Stage:
    """The stage that follows. Raises UnknownTransition."""
    try:
        return TABLE[stage, trigger]
    except KeyError:
        raise UnknownTransition(f"a worker that is {stage.value}: {trigger.value}") from None
