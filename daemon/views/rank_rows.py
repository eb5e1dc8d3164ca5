"""A job's ranks as rows of the API. Pure; docs/api.md defines the fields."""

from __future__ import annotations

from typing import Any

import msgspec

from elastic.contract.agent_files import AgentStatus
from elastic.contract.records.rank_records import RanksRecord
from elasticd.cluster.cluster import Job
from elasticd.cluster.published_state import Snapshot
from elasticd.diagnosis import goodput

Json = dict[str, Any]

LED_S = 5.0
"""The leader writes its record every two seconds: one that is older has an age, too."""


def of_job(snapshot: Snapshot, job: Job, *, still: bool, wall_s: float) -> list[Json]:
    """By rank: from this node's agent, else from the leader's record, with `age_s` if it is old, else from that of the
    rank's own agent, always with `age_s`, else from the node's record. `still`: the job stands still."""
    rows: dict[tuple[str, int], Json] = {}
    for place in job.generation.nodes if job.generation else ():
        for slot, rank in job.generation.ranks(place.node).items() if job.generation else ():
            rows[place.node, slot] = {"rank": rank, "node": place.node, "slot": slot, "pid": None, "phase": "",
                                      "step": None, "incarnation": None, "rss_mb": None, "step_s": None}  # fmt: skip
    for name, node in snapshot.cluster.nodes.items():
        for worker in node.record.workers:
            if worker.job == job.name and (row := rows.get((name, worker.slot))):
                row |= {"pid": worker.pid or None, "incarnation": worker.incarnation}
    for name, record in job.ranks.items():
        for each in record.ranks:
            current = job.generation is not None and record.generation == job.generation.number
            if each.row is not None and current and (name, each.slot) in rows:
                age_s = round(max(0.0, wall_s - record.wall_s), 1)
                rows[name, each.slot] |= msgspec.to_builtins(each.row) | {"node": name, "age_s": age_s}
    local = local_status(snapshot, job)
    led_s = round(wall_s - job.progress.wall_s, 1) if job.progress else 0.0
    said = [(row, led_s if led_s > LED_S else None) for row in (job.progress.ranks if job.progress else ())]
    said += [(row, None) for row in (local.ranks if local else ())]
    found = rows | {
        (row.node, row.slot): msgspec.to_builtins(row) | {"pid": row.pid or None, "age_s": age_s} for row, age_s in said
    }
    times = goodput.of_ranks(job.ranks, own_account(snapshot, job), still=still)
    shown = [{"age_s": None} | row | {"time": times.get(key)} for key, row in found.items()]
    return sorted(shown, key=lambda row: (row["rank"] < 0, row["rank"], row["node"], row["slot"]))  # without one: last


def own_account(snapshot: Snapshot, job: Job) -> RanksRecord | None:
    """The account of this node's ranks by the agent that runs here; it is newer than the one in etcd."""
    local = local_status(snapshot, job)
    return local.rank_times if local else None


def local_status(snapshot: Snapshot, job: Job) -> AgentStatus | None:
    """The status of the job's agent on this node; None also while the agent here is of an earlier job of this name."""
    agent = snapshot.agents.get(job.name)
    said = agent.status if agent else None
    submitted_wall_s = job.spec.submitted_wall_s if job.spec else 0.0
    if said and said.submitted_wall_s and submitted_wall_s and said.submitted_wall_s != submitted_wall_s:
        return None
    return said
