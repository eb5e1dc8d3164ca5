"""Incidents that break no generation: a checkpoint that could not be written, a process that did not end."""

from __future__ import annotations

from ..contract.records import IncidentRecord
from ..recovery.model import Agent


def save_failed(agent: Agent, step: int, error: str, wall_s: float) -> IncidentRecord:
    number, world_size = (
        (agent.formed.generation.number, agent.formed.generation.world_size) if agent.formed.generation else (0, 0)
    )
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
    generation = agent.formed.generation
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
