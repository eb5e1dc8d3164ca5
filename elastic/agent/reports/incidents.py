"""Incidents that break no generation: a checkpoint that could not be written, or that the job goes on without; a
process that did not end."""

from __future__ import annotations

import msgspec

from elastic.agent.workers.process import Exited
from elastic.agent.workers.worker_error import last_lines
from elastic.contract.records.job_records import IncidentRecord, Phase, WorkerError
from elastic.contract.records.reasons import Code, Reason, Text, reason
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.model import Agent, FormedState


def has_failed(formed: FormedState, generation: int) -> bool:
    """Whether the job has left this generation for a failure, as far as this agent has seen."""
    newest = formed.generation
    unplanned = newest is not None and newest.number > generation and newest.at_step is None
    return unplanned or formed.broken >= generation


def cut_short(agent: Agent, generation: int) -> bool:
    """Whether no more of a checkpoint of this generation comes: the job has left it for a failure, or was ended."""
    phase = agent.etcd.view.state.phase
    return has_failed(agent.formed, generation) or phase in (Phase.STOPPING, Phase.STOPPED, Phase.FAILED)


def apart(agent: Agent, folder: str) -> Reason | None:
    """Why no checkpoint of all nodes is possible: with `folder`, the id of this node's checkpoint folder, another node
    sees another one. None: none is known to."""
    places = agent.formed.generation.nodes if folder and agent.formed.generation else ()
    members, me = agent.etcd.view.members, agent.policy.node
    others = [p.node for p in places if p.node in members and members[p.node].record.folder not in ("", folder)]
    if not others:
        return None
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    nodes = f"{' and '.join(sorted((me, others[0])))}{more}"
    return reason(Code.FOLDER_APART, folder=agent.policy.spec.checkpoint.dir, nodes=nodes)


def save_failed(agent: Agent, step: int, error: Text, wall_s: float) -> IncidentRecord:
    return _over_at_once(agent, "checkpoint", reason(Code.CHECKPOINT_FAILED, error, step=step), wall_s, step=step)


def stray_checkpoints(before: Agent, agent: Agent, saved_generation: int, wall_s: float) -> IncidentRecord | None:
    """Incident of a node that takes up the job late, with checkpoints of its own (`saved_generation`: of the newest)
    that are newer by their numbers than what the job goes on from: it had begun without them. None: there are
    none."""
    formed, me = agent.formed.generation, (agent.policy.node, agent.policy.incarnation)
    if formed is None or saved_generation < formed.number or formed.node_of(*me) is None:
        return None
    if before.formed.generation is not None and before.formed.generation.node_of(*me) is not None:
        return None  # told when it came
    folder, node = agent.policy.spec.checkpoint.dir, agent.policy.node
    detail = reason(Code.STRAY_CHECKPOINT, folder=folder, node=node, saved=saved_generation, now=formed.number)
    return _over_at_once(agent, "checkpoint", detail, wall_s)


def late_exit(
    agent: Agent, slot: int, ended: Exited, cause: Text, error: WorkerError | None, wall_s: float
) -> IncidentRecord | None:
    """Incident of a process that was killed because it had not exited after its script ended, or that has failed after
    training was complete: the job has succeeded, but the rest of the script has not run. None: it is neither."""
    worker = agent.local.workers.get(slot)
    told = worker is not None and worker.worker_id == ended.worker_id and worker.stage is Stage.ABORTING
    if ended.late_s and not ended.code:  # else its script has failed, and is told of already
        return _late_exit(agent, slot, reason(Code.LATE_EXIT, slot=slot, limit_s=ended.late_s), wall_s)
    over = agent.etcd.view.state.phase is Phase.SUCCEEDED
    if agent.policy.managed and told and over and (ended.code or ended.signal):
        record = _late_exit(agent, slot, reason(Code.FAILED_LATE, cause, slot=slot), wall_s)
        lines = last_lines(ended.log_file) if ended.signal else ()
        return msgspec.structs.replace(record, error=error, last_lines=lines)
    return None


def _late_exit(agent: Agent, slot: int, detail: Reason, wall_s: float) -> IncidentRecord:
    generation = agent.formed.generation
    ranks = generation.ranks(agent.policy.node) if generation else {}
    return _over_at_once(agent, "late exit", detail, wall_s, ranks=(ranks[slot],) if slot in ranks else ())


def _over_at_once(
    agent: Agent, kind: str, detail: Reason, wall_s: float, *, ranks: tuple[int, ...] = (), step: int | None = None
) -> IncidentRecord:
    generation = agent.formed.generation
    number, world_size = (generation.number, generation.world_size) if generation else (0, 0)
    return IncidentRecord(
        generation=number,
        kind=kind,
        node=agent.policy.node,
        ranks=ranks,
        detail=detail,
        wall_s=wall_s,
        step=step,
        ended_wall_s=wall_s,
        steps_lost=0,
        steps_lost_at_most=0,
        world_size_before=world_size,
        world_size_after=world_size,
    )
