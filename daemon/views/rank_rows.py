"""A job's ranks as rows of the API. Pure."""

from __future__ import annotations

import msgspec

from elastic.contract.agent_files import AgentStatus
from elastic.contract.records.job_records import RankRow
from elastic.contract.records.rank_records import RanksRecord
from elasticd.base import answers
from elasticd.cluster.cluster import Job
from elasticd.cluster.published_state import Snapshot
from elasticd.diagnosis import goodput

LED_S = 5.0
"""The leader writes its record every two seconds: one that is older has an age, too."""


def of_job(snapshot: Snapshot, job: Job, *, still: bool, wall_s: float) -> list[answers.Rank]:
    """By rank: from this node's agent, else from the leader's record, with `age_s` if it is old, else from that of the
    rank's own agent, always with `age_s`, else from the node's record. `still`: the job stands still."""
    rows: dict[tuple[str, int], answers.Rank] = {}
    for place in job.generation.nodes if job.generation else ():
        for slot, rank in job.generation.ranks(place.node).items() if job.generation else ():
            rows[place.node, slot] = answers.Rank(rank=rank, node=place.node, slot=slot)
    for name, node in snapshot.cluster.nodes.items():
        for worker in node.record.workers:
            if worker.job == job.name and (row := rows.get((name, worker.slot))):
                row.pid, row.incarnation = worker.pid or None, worker.incarnation
    for name, record in job.ranks.items():
        for each in record.ranks:
            current = job.generation is not None and record.generation == job.generation.number
            if each.row is not None and current and (name, each.slot) in rows:
                age_s = round(max(0.0, wall_s - record.wall_s), 1)
                rows[name, each.slot] = _row(each.row, age_s, node=name)
    local = local_status(snapshot, job)
    led_s = round(wall_s - job.progress.wall_s, 1) if job.progress else 0.0
    reported = [(row, led_s if led_s > LED_S else None) for row in (job.progress.ranks if job.progress else ())]
    reported += [(row, None) for row in (local.ranks if local else ())]
    rows |= {(row.node, row.slot): _row(row, age_s, pid=row.pid or None) for row, age_s in reported}
    for key, time in goodput.of_ranks(job.ranks, own_account(snapshot, job), still=still).items():
        if key in rows:
            rows[key].time = time
    steps = [row.step for row in rows.values() if row.step is not None] if snapshot.contact.connected else []
    for row in rows.values():
        row.behind = max(steps) - row.step if steps and row.step is not None and not row.age_s else None
    return sorted(rows.values(), key=lambda row: (row.rank < 0, row.rank, row.node, row.slot))  # without one: last


def _row(row: RankRow, age_s: float | None, **changed: object) -> answers.Rank:
    return msgspec.convert(msgspec.to_builtins(row) | {"age_s": age_s} | changed, answers.Rank)


def own_account(snapshot: Snapshot, job: Job) -> RanksRecord | None:
    """The account of this node's ranks by the agent that runs here; it is newer than the one in etcd."""
    local = local_status(snapshot, job)
    return local.rank_times if local else None


def local_status(snapshot: Snapshot, job: Job) -> AgentStatus | None:
    """The status of the job's agent on this node; None also while the agent here is of an earlier job of this name."""
    agent = snapshot.agents.get(job.name)
    status = agent.status if agent else None
    submitted_wall_s = job.spec.submitted_wall_s if job.spec else 0.0
    if status and status.submitted_wall_s and submitted_wall_s and status.submitted_wall_s != submitted_wall_s:
        return None
    return status
