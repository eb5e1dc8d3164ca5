"""The daemon's snapshot as the answers of its API. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from elastic.contract.agent_files import AgentStatus
from elastic.contract.records.job_records import IncidentRecord, Phase, ProgressRecord, RankRow
from elastic.contract.records.rank_records import RanksRecord
from elastic.contract.records.reasons import in_words
from elastic.contract.records.standings import FIRST_STEP_S
from elasticd.access import authority
from elasticd.base import answers, masking
from elasticd.cluster.cluster import Job
from elasticd.cluster.published_state import Snapshot
from elasticd.diagnosis import goodput, step_time, verdict, why

from .instant import Identity, Now

SHOWN_REFUSED = 20
"""At most this many refused records are listed."""

OVER_SHOWN = 100
"""Jobs that are over, the newest, in status, page and metrics."""


def status(snapshot: Snapshot, identity: Identity, now: Now, every: bool = False) -> answers.Status:
    """`every`: also the jobs that are over beyond the newest OVER_SHOWN of them."""
    ordered = sorted(snapshot.cluster.jobs.values(), key=lambda j: (j.over, j.submitted))
    over = [] if every else [job for job in ordered if job.over][:-OVER_SHOWN]
    left_out = {job.name for job in over}
    jobs = [job_row(snapshot, job, now) for job in ordered if job.name not in left_out]
    nodes_ = nodes(snapshot, identity.node, now.wall_s)
    problems = list(why.of_cluster(snapshot, nodes_, identity.plain_text, now.wall_s))
    return msgspec.structs.replace(
        _as(answers.Status, identity),
        uptime_s=round(now.monotonic_s - identity.started_s, 1),
        wall_s=now.wall_s,
        etcd=etcd(snapshot, identity, now),
        health="degraded" if problems else "healthy",
        problems=problems,
        nodes=nodes_,
        jobs=jobs,
        jobs_left_out=len(left_out),
    )


def etcd(snapshot: Snapshot, identity: Identity, now: Now) -> answers.EtcdContact:
    contact = snapshot.contact
    age_s = now.monotonic_s - contact.as_of_s
    members = [
        answers.EtcdMember(**each._asdict() | {"database_mb": round(each.database_mb, 1)}) for each in contact.members
    ]
    return answers.EtcdContact(
        connected=contact.connected,
        age_s=round(age_s, 1) if math.isfinite(age_s) else None,
        error=contact.error,
        alarms=list(contact.alarms),
        version=contact.version,
        endpoints=list(identity.endpoints),
        embedded=identity.embedded,
        anonymous=contact.anonymous,
        certificates=list(contact.certificates),
        signed=bool(identity.key_id),
        key_id=identity.key_id,
        refused=dict(sorted(snapshot.cluster.refused.items())[:SHOWN_REFUSED]),
        members=members,
        revision=snapshot.cluster.revision,
    )


def nodes(snapshot: Snapshot, me: str, wall_s: float) -> list[answers.Node]:
    """`me`: the node of this daemon."""
    cluster = snapshot.cluster
    used: dict[str, dict[str, int]] = {}
    for job in cluster.jobs.values():
        # Counted as in the plan, so that "1/2" never appears beside "0 of 2 slots free": a starting agent holds its
        # slots already, one whose job is over holds none.
        members = {name: 0 if job.over else member.record.slots for name, member in job.members.items()}
        for name, slots in {**members, **snapshot.plan.places.get(job.name, {})}.items():
            used.setdefault(name, {})[job.name] = slots
    for there in cluster.nodes.values():
        for left in there.record.jobs:
            used.setdefault(there.name, {}).setdefault(left, 0)
    rows = []
    for name in sorted({*cluster.nodes, *cluster.known}):
        node = cluster.nodes.get(name)
        jobs = used.get(name, {})
        row = answers.Node(node=name, jobs=sorted(jobs), slots_used=sum(jobs.values()))
        record = node.record if node else cluster.known.get(name)
        if record is not None:
            row.address, row.hostname, row.version = record.address, record.hostname, record.version
        if node is None:
            down = "no daemon", "its elasticd does not answer; its agents have not lost their leases"
            row.state, row.reason = down if jobs else why.absence(cluster, name, wall_s)
            row.away_since_wall_s = (cluster.known[name].away_wall_s or None) if name in cluster.known else None
        else:
            row.state, reason = node.state
            row.reason = str(reason)
            row.slots, row.gpus, row.older_agents = node.record.slots, node.record.gpus, node.record.older
            row.up_since_wall_s = node.record.started_wall_s
        row.why = why.of_node(snapshot, row, me, wall_s)
        rows.append(row)
    return rows


def job_row(snapshot: Snapshot, job: Job, now: Now) -> answers.Job:
    spec = job.spec.spec if job.spec else None
    progress = newest_progress(snapshot, job)
    waits = why.waits_for(snapshot, job, progress, now.wall_s)
    logged = progress if progress and (progress.logged or progress.logged_not_finite) else job.progress
    row = msgspec.structs.replace(
        _as(answers.Job, job.state),  # phase, reason, since when, restarts, error
        job=job.name,
        submitted_wall_s=job.spec.submitted_wall_s if job.spec else None,
        submitted_by=job.spec.submitted_by if job.spec else "",
        owner=authority.owner_name(job.spec) if job.spec else "",
        uid=job.spec.uid if job.spec else None,
        nodes=spec.nodes if spec else "",
        spare_nodes=spec.spare_nodes if spec else 0,
        members=len(job.members),
        generation=job.generation.number if job.generation else 0,
        world_size=job.generation.world_size if job.generation else 0,
        step=progress.step if progress else None,
        steps_per_s=_rate(progress, job, now) if progress and (job.members or job.over) else None,
        loss=_number(progress.loss) if progress else None,
        progress_age_s=round(max(0.0, now.wall_s - progress.wall_s), 1) if progress else None,
        checkpoint=_checkpoint(job, progress, now),
        resumed=_resumed(progress),
        snapshot=_snapshot(progress),
        goodput=goodput.row(progress),
        # An agent that is neither rank 0's nor the leader's publishes none: then those of the leader count.
        logged=dict(logged.logged) if logged else {},
        logged_not_finite=dict(logged.logged_not_finite) if logged else {},
        step_time=step_time.row(progress, job.ranks, job.generation.number if job.generation else 0),
        managed=progress.managed if progress else None,
        waiting_for=str(waits),
        queue_position=queue.index(job.name) + 1 if job.name in (queue := snapshot.plan.queue) else None,
        can_never_run=job.name in snapshot.plan.never,
        no_progress=_no_progress(job, progress, now),
        incidents=len(job.incidents),
        last_incident=incident(snapshot, job, job.incidents[-1], now) if job.incidents else None,
    )
    row.health = _health(job, row, _starts(job, row, progress, now))
    row.why = why.of_job(snapshot, job, row, waits, progress.still if progress else None, now.wall_s)
    return row


def job_detail(
    snapshot: Snapshot, job: Job, now: Now, *, own: bool = False, secrets: bool = False
) -> answers.JobDetail:
    """All details of one job; its secrets only if requested. `own`: see `masked`. Without `etcd`."""
    spec: dict[str, Any] | None = msgspec.to_builtins(job.spec.spec) if job.spec else None
    still = goodput.stands_still(newest_progress(snapshot, job))
    return answers.JobDetail(
        **msgspec.structs.asdict(job_row(snapshot, job, now)),
        spec=spec if secrets or spec is None else masking.masked(spec, own=own),
        failures_in_window=len(job.state.failures),
        excluded_nodes=list(job.state.excluded_nodes),
        places=[_as(answers.Place, place) for place in (job.generation.nodes if job.generation else ())],
        why_generation=str(job.generation.why) if job.generation else "",
        member_nodes={
            name: msgspec.structs.replace(_as(answers.Member, m.record), address=f"{m.record.host}:{m.record.port}")
            for name, m in job.members.items()
        },
        ranks=[] if job.over else rank_rows(snapshot, job, still=still, wall_s=now.wall_s),
        rank_time=rank_time(snapshot, job, each=job.over),  # of a job that runs each rank's account is in its row
        agent=_agent(snapshot, job.name),
        recent_incidents=[incident(snapshot, job, i, now) for i in job.incidents[-10:]],
    )  # fmt: skip


def rank_time(snapshot: Snapshot, job: Job, *, each: bool) -> answers.RankTime | None:
    """Where the time of all ranks went, by their own agents' accounts; see `goodput.summed`."""
    if goodput.tells_nothing(progress := newest_progress(snapshot, job)):
        return None
    still = goodput.stands_still(progress)
    return goodput.summed(_accounts(snapshot, job), each=each, still=still)


def incident(snapshot: Snapshot, job: Job, record: IncidentRecord, now: Now) -> answers.Incident:
    row = _as(answers.Incident, record.in_words())
    if record.open and job.over and not job.members:  # no agent is left that could close it
        row.open, row.ended_wall_s = False, job.state.since_wall_s
    row.job, row.lost = job.name, steps_lost(record)
    row.age_s = round(max(0.0, now.wall_s - record.wall_s), 1)
    row.took_s = round(record.still_s + row.age_s, 4) if row.open else record.took_s
    waits = str(why.waits_for(snapshot, job, newest_progress(snapshot, job), now.wall_s)) if row.open else ""
    row.verdict = verdict.judge(record, _seen(snapshot, job, row.age_s, waits))
    return row


A = TypeVar("A", bound=answers.Answer)


def _as(kind: type[A], record: object) -> A:
    """The answer with those of its fields that a record, or what it is as JSON, has too."""
    return msgspec.convert(in_words(record), kind, from_attributes=True)


def _seen(snapshot: Snapshot, job: Job, age_s: float, waits_for: str) -> verdict.VerdictContext:
    places = job.generation.nodes if job.generation else ()
    names = {*(place.node for place in places), *job.members} & snapshot.cluster.nodes.keys()
    nodes = [snapshot.cluster.nodes[name].record for name in names]
    backend = job.spec.spec.backend if job.spec else ""
    return verdict.VerdictContext(
        phase=job.state.phase,
        age_s=age_s,
        etcd_error="" if snapshot.contact.connected else snapshot.contact.error or "unavailable",
        etcd_alarms=snapshot.contact.alarms,
        waits_for=waits_for,
        gpus=backend != "gloo" and bool(nodes) and all(node.gpus for node in nodes),
        one_host=all(node.address.startswith(("127.", "localhost", "::1")) for node in nodes),
    )


def steps_lost(record: IncidentRecord) -> str:
    """'0 steps', '0 to 1 steps', '6 steps or more'; 'unknown'."""
    least, most = record.steps_lost, record.steps_lost_at_most
    if least is None:
        return "unknown"
    if most is None:
        return f"{least} step{'' if least == 1 else 's'} or more"
    number = str(least) if least == most else f"{least} to {most}"
    return f"{number} step{'' if number == '1' else 's'}"


def incidents(snapshot: Snapshot, job: str, now: Now) -> list[answers.Incident]:
    """Incidents of one job, or of all jobs (''), oldest first."""
    asked = (j for j in snapshot.cluster.jobs.values() if job in ("", j.name))
    rows = [incident(snapshot, j, i, now) for j in asked for i in j.incidents]
    return sorted(rows, key=lambda row: row.wall_s)


def newest_progress(snapshot: Snapshot, job: Job) -> ProgressRecord | None:
    """The progress in etcd or that of this node's agent, whichever is newer."""
    status_ = local_status(snapshot, job)
    local = status_.progress if status_ else None
    return max(filter(None, (job.progress, local)), key=lambda p: (p.generation, p.step, p.wall_s), default=None)


def healthz(snapshot: Snapshot, now: Now) -> tuple[bool, dict[str, Any]]:
    """Whether the daemon itself is alive: its loop turns. An unreachable etcd is no reason to restart it."""
    age_s = now.monotonic_s - snapshot.turned_s
    alive = age_s < 10.0
    return alive, {"schema": answers.SCHEMA, "alive": alive, "last_turn_s": round(age_s, 2),
                   "etcd_connected": snapshot.contact.connected, "registered": snapshot.registered}  # fmt: skip


def _agent(snapshot: Snapshot, job: str) -> answers.Agent | None:
    agent = snapshot.agents.get(job)
    if agent is None:
        return answers.Agent(trouble=snapshot.trouble[job]) if job in snapshot.trouble else None
    row = _as(answers.Agent, agent.status) if agent.status else answers.Agent(phase="starting")
    row.pid, row.draining, row.trouble = agent.pid, in_words(agent.draining), snapshot.trouble.get(job, "")
    return row


def _resumed(progress: ProgressRecord | None) -> answers.Resumed | None:
    if progress is None or progress.resumed_step is None:
        return None
    complete = progress.step == progress.resumed_step and not progress.stepped_in
    return answers.Resumed(step=progress.resumed_step, source=progress.resumed_from, complete=complete)


def _checkpoint(job: Job, progress: ProgressRecord | None, now: Now) -> answers.Checkpoint | None:
    """What fails, the leader's agent knows; that of this node, whose progress may be newer, does not."""
    error = next((str(p.checkpoint_error) for p in (progress, job.progress) if p and p.checkpoint_error), None)
    if progress is None or not (progress.checkpoint_step or error or progress.checkpoint_interval):
        return None
    at_s = progress.checkpoint_wall_s
    return answers.Checkpoint(
        step=progress.checkpoint_step,
        age_s=round(max(0.0, now.wall_s - at_s), 1) if at_s is not None else None,
        error=error,
        failed=int(bool(error)),
        interval=progress.checkpoint_interval,
        skipped=progress.checkpoint_skipped,
    )


def _snapshot(progress: ProgressRecord | None) -> answers.InMemorySnapshot | None:
    if progress is None or not (progress.snapshot_mb or progress.snapshot_interval):
        return None
    return answers.InMemorySnapshot(
        step=progress.snapshot_step,
        memory_mb=progress.snapshot_mb,
        interval=str(progress.snapshot_interval),
        lost_node_costs=str(progress.snapshot_copies),
    )


def _no_progress(job: Job, progress: ProgressRecord | None, now: Now) -> answers.NoProgress | None:
    still = progress.still if progress and not job.over and job.members else None
    if still is None:
        return None
    return msgspec.structs.replace(
        _as(answers.NoProgress, still), for_s=round(max(0.0, now.wall_s - still.since_wall_s), 1)
    )


def _rate(progress: ProgressRecord, job: Job, now: Now) -> float:
    """Of the last 10 s: 0 once the newest step is older than three step times and a second, for the mean of its window
    would fade for seconds. Its age is that in the record, and by how much the record is late."""
    step_s = max((row.step_s for row in progress.ranks), default=0.0) or 1.0 / max(progress.steps_per_s, 0.1)
    age_s = max(progress.wall_s, now.wall_s - why.LED_S) - progress.step_wall_s
    lasts = job.over or not progress.step_wall_s or age_s <= max(1.0, 3 * step_s)
    return round(progress.steps_per_s, 3) if lasts else 0.0


def _starts(job: Job, row: answers.Job, progress: ProgressRecord | None, now: Now) -> bool:
    """Whether nothing is waited for but what every start waits for: agents, `setup`, the first group."""
    if progress is None or progress.stepped_in or row.waiting_for != str(progress.waiting_for):
        return False
    failed = job.state.error or (row.last_incident and row.last_incident.open)
    return not failed and now.wall_s - job.state.since_wall_s < FIRST_STEP_S


def _health(job: Job, row: answers.Job, starts: bool) -> str:
    phase = job.state.phase
    if phase is Phase.FAILED:
        return "failed"
    if job.over:
        return "healthy"
    waits = bool(row.waiting_for) and not starts and not (phase is Phase.PENDING and row.queue_position)
    troubled = phase is Phase.WAITING or waits or bool(row.checkpoint and row.checkpoint.error)
    troubled = troubled or bool(row.no_progress and not row.no_progress.declared)
    return "degraded" if troubled else "healthy"


def _number(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def rank_rows(snapshot: Snapshot, job: Job, *, still: bool, wall_s: float) -> list[answers.Rank]:
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
                rows[name, each.slot] = _rank(each.row, age_s, node=name)
    local = local_status(snapshot, job)
    led_s = round(wall_s - job.progress.wall_s, 1) if job.progress else 0.0
    reported = [(row, led_s if led_s > why.LED_S else None) for row in (job.progress.ranks if job.progress else ())]
    reported += [(row, None) for row in (local.ranks if local else ())]
    rows |= {(row.node, row.slot): _rank(row, age_s, pid=row.pid or None) for row, age_s in reported}
    for key, time in goodput.of_ranks(_accounts(snapshot, job), still=still).items():
        if key in rows:
            rows[key].time = time
    steps = [row.step for row in rows.values() if row.step is not None] if snapshot.contact.connected else []
    for row in rows.values():
        row.behind = max(steps) - row.step if steps and row.step is not None and not row.age_s else None
    return sorted(rows.values(), key=lambda row: (row.rank < 0, row.rank, row.node, row.slot))  # without one: last


def _rank(row: RankRow, age_s: float | None, **changed: object) -> answers.Rank:
    return msgspec.structs.replace(_as(answers.Rank, row), age_s=age_s, **changed)


def _accounts(snapshot: Snapshot, job: Job) -> Mapping[str, RanksRecord]:
    """By node; that of this node's ranks by the agent that runs here is newer than the one in etcd."""
    local = local_status(snapshot, job)
    own = local.rank_times if local else None
    return {**job.ranks, own.node: own} if own else job.ranks


def local_status(snapshot: Snapshot, job: Job) -> AgentStatus | None:
    """The status of the job's agent on this node; None also while the agent here is of an earlier job of this name."""
    agent = snapshot.agents.get(job.name)
    status = agent.status if agent else None
    submitted_wall_s = job.spec.submitted_wall_s if job.spec else 0.0
    if status and status.submitted_wall_s and submitted_wall_s and status.submitted_wall_s != submitted_wall_s:
        return None
    return status
