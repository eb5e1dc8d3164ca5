"""Incident records as they are written: the state machine creates them, this module adds their times of day."""

from __future__ import annotations

import msgspec

from ..contract.records import IncidentRecord
from ..recovery.effects import PutIncident
from ..recovery.model import Agent


def dated(effect: PutIncident, now_s: float, wall_s: float) -> IncidentRecord:
    """The record with its times of day; `now_s` (monotonic) and `wall_s` (time of day) are the present."""
    record, noticed_wall_s = effect.record, wall_s - (now_s - effect.began_s)
    began_wall_s = min(record.wall_s or noticed_wall_s, noticed_wall_s)
    late_s = noticed_wall_s - began_wall_s
    return msgspec.structs.replace(
        record,
        wall_s=began_wall_s,
        timeline_s={phase: round(at_s + late_s, 4) for phase, at_s in record.timeline_s.items()},
        ended_wall_s=None if record.open else wall_s,
    )


def save_failed(agent: Agent, step: int, error: str, wall_s: float) -> IncidentRecord:
    number, world_size = (agent.generation.number, agent.generation.world_size) if agent.generation else (0, 0)
    return IncidentRecord(
        generation=number,
        kind="checkpoint",
        node=agent.policy.node,
        ranks=(),
        detail=f"checkpoint of step {step} failed: {error}",
        wall_s=wall_s,
        step=step,
        ended_wall_s=wall_s,
        steps_lost=0,
        steps_lost_at_most=0,
        world_size_before=world_size,
        world_size_after=world_size,
    )


def exited_late(agent: Agent, slot: int, after_s: float, wall_s: float) -> IncidentRecord:
    """Incident of a process that was killed because it had not exited after its script ended."""
    generation = agent.generation
    number, world_size = (generation.number, generation.world_size) if generation else (0, 0)
    ranks = generation.ranks(agent.policy.node) if generation else {}
    return IncidentRecord(
        generation=number,
        kind="late exit",
        node=agent.policy.node,
        ranks=(ranks[slot],) if slot in ranks else (),
        detail=f"the process of slot {slot} had not ended within {after_s:g} s, and was killed: its script, a thread "
        "or an atexit handler kept it; its log has the stacks",
        wall_s=wall_s,
        ended_wall_s=wall_s,
        steps_lost=0,
        steps_lost_at_most=0,
        world_size_before=world_size,
        world_size_after=world_size,
    )
