"""One line for every job and every node, always: its activity, its reason to wait, or its fault. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from elastic.contract.records.job_records import Phase
from elastic.contract.records.node_records import AgentRow
from elasticd.base import answers
from elasticd.cluster.cluster import Cluster, Job, Node
from elasticd.cluster.published_state import Snapshot
from elasticd.cluster.reconcile import SET_ASIDE_S, agent_rows

from . import step_time

SLOW_NAMED = 2
"""So many slow ranks are named in a job's line."""


def of_job(snapshot: Snapshot, job: Job, row: answers.Job, starting: bool, wall_s: float) -> str:
    """`row`: the rest of its summary, as `views.job_row` makes it; `starting`: as `ProgressRecord.starting`."""
    said = _over(snapshot.cluster, job, wall_s) if job.over else _alive(snapshot, job, row, starting, wall_s)
    contact = snapshot.contact
    if job.over or contact.connected:
        return said
    return f"{said}; etcd unreachable: {contact.error or 'no answer'} (training goes on, a recovery waits for etcd)"


def of_node(snapshot: Snapshot, row: answers.Node, me: str, wall_s: float) -> str:
    """`row`: the rest of its row, as `views.nodes` makes it; `me`: the node of this daemon."""
    name = row.node
    node = snapshot.cluster.nodes.get(name)
    if node is None:
        waits = "; its drain waits for elasticd" if name in snapshot.cluster.drains else ""
        cordon = snapshot.cluster.cordons.get(name)
        waits += f"; cordoned: {cordon.reason}" if cordon else ""
        if not row.jobs:
            return f"{row.state} {row.reason}{waits}"
        return f"elasticd is down on this node; its agents of {', '.join(row.jobs)} keep running{waits}"
    parts = [*_blocked(snapshot.cluster, node, wall_s), *_disputes(snapshot.cluster, name)]
    past = {job.name for job in snapshot.cluster.jobs.values() if job.over or _has_stepped_with(job, name)}
    starting = [agent for agent in _agents_of(snapshot, name, node) if agent.job not in past]
    parts += [_starting(name, wall_s, agent.job, agent.doing, agent.since_wall_s) for agent in starting]
    if name == me and not snapshot.contact.connected:
        parts.append(f"etcd unreachable from here: {snapshot.contact.error or 'no answer'}; what runs here goes on")
    if name == me:
        none = {job: why for job, why in snapshot.trouble.items() if why and job not in snapshot.agents}
        parts += [f"no agent of {job} runs: {why}" for job, why in none.items()]
    used = f"{row.slots_used} of {row.slots} slots used" if row.slots_used else "idle"
    older = [f"the agent of {job} still runs {version}" for job, version in node.record.older.items()]
    return "; ".join([*(parts or [f"ready: {used}"]), *older])


# ── jobs ────────────────────────────────────────────────────────────────────────────────────────────────────


def _over(cluster: Cluster, job: Job, wall_s: float) -> str:
    ended = f"{job.state.phase} {_age(wall_s - job.state.since_wall_s)} ago"
    places = (place.node for place in (job.generation.nodes if job.generation else ()))
    if still := [name for name in places if name in cluster.nodes and job.name in cluster.nodes[name].record.jobs]:
        saves = job.spec is not None and job.spec.spec.checkpoint.dir  # an agent leaves when its writes are on the disk
        ended += f" (agents on {_names(still)} still end{'; the last checkpoint may not be complete' if saves else ''})"
    reason, progress = job.state.reason, job.progress
    stepless = progress is not None and progress.step == progress.resumed_step and not progress.stepped_in
    if job.state.phase is Phase.SUCCEEDED and progress is not None and stepless:
        reason = f"without a step: {progress.resumed_from} has all of them; another checkpoint.dir begins anew"
    return f"{ended}: {reason}" if reason else ended


def _alive(snapshot: Snapshot, job: Job, row: answers.Job, waits_for_start: bool, wall_s: float) -> str:
    cluster = snapshot.cluster
    if job.state.phase is Phase.STOPPING:  # also while its user writes what cannot be used
        reason = f" ({job.state.reason})" if job.state.reason else ""
        return f"stopping{reason}: the workers on {_names(job.members) or 'no node'} end"
    prefix = f"/jobs/{job.name}/"
    if bad := min((key for keys in (cluster.foreign, cluster.refused) for key in keys if prefix in key), default=""):
        return f"a record of it in etcd cannot be used: {bad}: {cluster.refused.get(bad) or cluster.foreign[bad]}"
    if job.spec is None:
        return "waiting for its agents to write its description back to etcd"
    parts = []
    starting = list(_starts(snapshot, job, wall_s))
    if lacks := lacking(snapshot, job):
        parts.append(f"waiting for: {lacks}")
    elif still := row.no_progress:
        parts.append(_still(still))
    elif (last := row.last_incident) and last.open:
        held = f"; waits for {last.verdict.held_by}" if last.verdict.held_by else ""
        parts.append(f"recovering for {_age(last.age_s)} from {last.verdict.cls}: {last.verdict.what}{held}")
    elif row.waiting_for and not (waits_for_start and starting):
        parts.append(f"{'' if row.can_never_run else 'waiting for: '}{row.waiting_for}")
    elif job.state.phase in (Phase.PENDING, Phase.WAITING) and job.state.reason:
        parts.append(f"waiting: {job.state.reason}")
    disputes = [text for name in job.members for text in _disputes(cluster, name, only=job.name)]
    if not parts and (not starting or _has_stepped(job)):
        parts.append(_runs(row) if job.generation else _unplaced(snapshot, job, wall_s))
        parts += [
            step_time.slow_text(slow) for slow in (row.step_time.slow_ranks[:SLOW_NAMED] if row.step_time else ())
        ]
    parts += starting + disputes
    parts += [f"{name} is excluded {_excluded(job, name, wall_s)}" for name in job.state.excluded_nodes]
    if row.checkpoint and row.checkpoint.error:
        parts.append(f"the newest checkpoint failed: {row.checkpoint.error}")
    return "; ".join(dict.fromkeys(parts))


def lacking(snapshot: Snapshot, job: Job) -> str:
    """Why a job that has run cannot have the nodes for its minimum; '': it can, or its agents have not said yet that
    they wait for nodes. What broke its generation is in its incident, and is not what it waits for."""
    return snapshot.plan.waiting.get(job.name, "") if job.state.phase is Phase.WAITING and job.members else ""


def _runs(row: answers.Job) -> str:
    if not row.step and row.managed is False:
        return f"running: {_ranks(row)} of a script that has not called elastic.run: its steps are not known"
    if not row.step:
        return f"running: no step yet, {_ranks(row)}"
    rate = f", {row.steps_per_s:.3g} steps/s" if row.steps_per_s else ""
    most = row.nodes.rpartition(":")[2]
    fewer = f", on {row.members} of at most {most} nodes" if most.isdigit() and row.members < int(most) else ""
    return f"running: step {row.step}{rate}{fewer}"


def _ranks(row: answers.Job) -> str:
    return f"{row.world_size} rank{'' if row.world_size == 1 else 's'}"


def _unplaced(snapshot: Snapshot, job: Job, wall_s: float) -> str:
    if job.members:
        return f"waiting for the first generation: agents are there on {_names(job.members)}"
    placed = snapshot.plan.places.get(job.name, {})
    if not placed:
        return "waiting for a node"
    return f"waiting for {_names(placed)} to start an agent, for {_age(wall_s - job.state.since_wall_s)}"


def _starts(snapshot: Snapshot, job: Job, wall_s: float) -> Iterator[str]:
    for name, node in sorted(snapshot.cluster.nodes.items()):
        for agent in _agents_of(snapshot, name, node):
            if agent.job == job.name and not _has_stepped_with(job, name):
                yield _starting(name, wall_s, "", agent.doing, agent.since_wall_s)


def _agents_of(snapshot: Snapshot, name: str, node: Node) -> Iterator[AgentRow]:
    """The agents on a node that are not at work yet. The record of a node is up to 5 s old: what an agent beside this
    daemon says itself is newer."""
    for row in node.record.agents:
        here = snapshot.agents.get(row.job)
        if here and here.status and here.status.node == name:
            yield from agent_rows({row.job: (here.status, row.since_wall_s)})
        else:
            yield row


def _has_stepped(job: Job) -> bool:
    """Whether the job's generation has committed a step."""
    return job.generation is not None and job.progress is not None and job.progress.stepped_in >= job.generation.number


def _has_stepped_with(job: Job, node: str) -> bool:
    """Whether the agent on `node` has a place in the job's generation, which has committed a step: it is not starting,
    whatever its node's record still says."""
    member, generation = job.members.get(node), job.generation
    if member is None or generation is None or not _has_stepped(job):
        return False
    return generation.node_of(node, member.record.incarnation) is not None


def _starting(node: str, wall_s: float, job: str, doing: str, since_wall_s: float) -> str:
    where = f"{job} is" if job else f"{node} is"
    return f"{where} {doing} for {_age(wall_s - since_wall_s)}"


def _still(still: answers.NoProgress) -> str:
    where = f", probably rank {still.rank} on {still.node}" if still.rank is not None else ""
    since = _clock(still.since_wall_s)
    return f"no progress since {since} ({_age(still.for_s)}){where}: {still.because}"


def _excluded(job: Job, node: str, wall_s: float) -> str:
    """Its daemon takes it back SET_ASIDE_S after it has seen the exclusion, which follows the last failure there."""
    until = f"for at most {SET_ASIDE_S / 60:.0f} min"
    if node in job.state.no_agent:
        return f"{until}, because {job.name} cannot be started there: {job.state.no_agent[node]}"
    failures = [failure for failure in job.state.failures if failure.node == node]
    if not failures:
        return f"{until}, because workers of {job.name} failed there"
    end_s = max(failure.wall_s for failure in failures) + SET_ASIDE_S
    times = "once" if len(failures) == 1 else f"{len(failures)} times"
    return f"until about {_clock(max(end_s, wall_s))}, because workers of {job.name} failed there {times}"


# ── nodes ───────────────────────────────────────────────────────────────────────────────────────────────────


def _blocked(cluster: Cluster, node: Node, wall_s: float) -> Iterator[str]:
    """Why it takes no work, in part or at all."""
    if draining := node.drain or node.record.draining:
        reason = node.drain.reason if node.drain else node.record.draining
        since = f" for {_age(wall_s - node.drain.since_wall_s)}" if node.drain else ""
        jobs = ", ".join(cluster.jobs_on(node.name))
        none = "nothing runs here any more" if cluster.is_empty(node.name) else "its elasticd has yet to see that"
        left = f"; {jobs} still here" if jobs else f"; {none}"
        assert draining
        yield f"draining{since}: {reason}{left}"
    if not node.record.healthy:
        yield f"takes no work: {node.record.reason or 'unhealthy'}"
    if node.cordon:
        yield f"cordoned for {_age(wall_s - node.cordon.since_wall_s)}: {node.cordon.reason}"
    for job in cluster.jobs.values():
        if node.name in job.state.excluded_nodes and not job.over:
            yield f"excluded for {job.name} {_excluded(job, node.name, wall_s)}"


def _disputes(cluster: Cluster, node: str, only: str = "") -> Iterator[str]:
    """Which agents cannot reach the one on `node`."""
    for job in cluster.jobs.values():
        if job.over or (only and job.name != only):
            continue
        by = [name for name, member in job.members.items() if node in member.record.unreachable]
        if by:
            yield f"{f'{node} is ' if only else ''}unreachable by {_names(by)}{'' if only else f' ({job.name})'}"


# ── words ───────────────────────────────────────────────────────────────────────────────────────────────────


def _names(names: Any) -> str:
    found = sorted(names)
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")


def absence(cluster: Cluster, name: str, wall_s: float) -> tuple[str, str]:
    """(state, reason) of a node without a record and without agents, as the inventory has it."""
    known = cluster.known[name]
    since = f"since {_when(known.away_wall_s, wall_s)}" if known.away_wall_s else "just now"
    if not known.left:
        return "lost", f"{since}: its machine, its network or its elasticd is down"
    drain = cluster.drains.get(name)
    return "off", f"{since}: {drain.reason if drain else 'its elasticd was stopped'}"


def _when(then_wall_s: float, wall_s: float) -> str:
    """'14:02:33'; '11-27 14:02:33' of what is older than half a day."""
    clock = _clock(then_wall_s)
    if wall_s - then_wall_s < 43200.0 or not clock[0].isdigit():
        return clock
    return f"{time.strftime('%m-%d', time.localtime(then_wall_s))} {clock}"


def _clock(wall_s: float) -> str:
    """The local time of day; a record may hold any number."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(wall_s))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def _age(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
