"""One line for every job and every node, always, and those on what is wrong with the cluster: what is done, waited for
or broken. The only place that decides which reason is shown, and says it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elastic.contract.records.job_records import Phase, ProgressRecord
from elastic.contract.records.node_records import AgentRow
from elastic.contract.records.reasons import Code, Text, codes, reason
from elastic.contract.records.standings import Stillness
from elasticd.base import answers
from elasticd.base.phrases import age, clock, some
from elasticd.cluster.cluster import Cluster, Job, Node
from elasticd.cluster.published_state import Contact, Snapshot
from elasticd.cluster.reconcile import SET_ASIDE_S, agent_rows
from elasticd.machine import expiring

from . import step_time

SLOW_NAMED = 2
"""So many slow ranks are named in a job's line."""

SILENT_S = 10.0
"""An agent rewrites its status once a second; if it is older than this, the agent is stopped or its disk is full."""

LED_S = 5.0
"""The leader writes its record every two seconds: what is older has an age."""

SHOWN_NODES = 8
"""At most this many nodes have a line each among the problems."""

LARGE_DATABASE_MB = 1600.0
"""Size of etcd's database that is reported: three quarters of its default quota."""

_ALARMS = {
    "NOSPACE": "etcd is out of space (alarm NOSPACE) and takes no writes: training goes on, a failure waits to be "
    "repaired; compact and defragment etcd, or raise its --quota-backend-bytes, then `etcdctl alarm disarm`",
    "CORRUPT": "etcd found its data corrupt (alarm CORRUPT) and takes no writes: replace the member that differs",
}


# ── the cluster ─────────────────────────────────────────────────────────────────────────────────────────────


def of_cluster(
    snapshot: Snapshot, rows: Iterable[answers.Node], plain_text: Iterable[str], wall_s: float
) -> Iterator[str]:
    """What is wrong as this node sees it. `rows`: the nodes, as `views.nodes` makes them; `plain_text`: endpoints of
    etcd that are reached without TLS."""
    if not snapshot.contact.connected:
        yield "etcd cannot be reached: this is the last that was seen of it"
    yield from (_ALARMS.get(alarm, f"etcd has raised the alarm {alarm}") for alarm in snapshot.contact.alarms)
    yield from _of_members(snapshot.contact)
    yield from expiring.problems(snapshot.contact.certificates, wall_s)
    if snapshot.stays_out:
        yield f"this node stays out of the cluster: {snapshot.stays_out}"
    elif not snapshot.registered:
        yield "this node is not registered in the cluster (yet)"
    unread, refused = {} if snapshot.stays_out else snapshot.cluster.foreign, snapshot.cluster.refused
    for what, keys in (("what this elasticd cannot read", unread), ("a record that is refused", refused)):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            yield f"etcd holds {what}: {min(keys)}{more}: {keys[min(keys)]}"
    for agent in snapshot.agents.values():
        if agent.status and (silent_s := wall_s - agent.status.written_wall_s) > SILENT_S:
            yield f"the agent of {agent.job} on this node has said nothing for {silent_s:.0f} s"
        if agent.status and agent.status.why_fresh:
            yield (
                f"workers of {agent.job} start seconds later on this node, as new processes, since the zygote is unfit "
                f"to fork: {agent.status.why_fresh}"
            )
    ill = [f"{row.node}: {row.why}" for row in rows if row.state in ("unhealthy", "no daemon", "lost")]
    yield from ill[:SHOWN_NODES]
    if len(ill) > SHOWN_NODES:
        yield f"{len(ill) - SHOWN_NODES} more nodes are lost, unhealthy or without elasticd: elasticctl nodes"
    if where := ", ".join(plain_text):
        yield f"etcd at {where} is reached in plain text (etcd.insecure): set etcd.ca_file, or trust that network"


def _of_members(contact: Contact) -> Iterator[str]:
    members, good = contact.members, sum(member.ok for member in contact.members)
    well = "are well" if contact.connected else "were well when last asked"
    for member in members:
        if not member.ok:
            yield (
                f"etcd member {member.endpoint} is in trouble: {member.error}; {good} of {len(members)} {well}, "
                f"{len(members) // 2 + 1} are needed"
            )
    for member in members:
        if member.database_mb > LARGE_DATABASE_MB:
            yield (
                f"etcd member {member.endpoint}: its database takes {member.database_mb:.0f} MB of the 2147 that etcd "
                "takes by default; compact and defragment it, or raise its --quota-backend-bytes"
            )


# ── jobs ────────────────────────────────────────────────────────────────────────────────────────────────────


def waits_for(snapshot: Snapshot, job: Job, progress: ProgressRecord | None, wall_s: float) -> Text:
    """What `job` waits for; '': for nothing, or nothing is known. `progress`: the newest."""
    lacks, queue = snapshot.plan.waiting.get(job.name, ""), snapshot.plan.queue
    if job.over or _lacks_nodes(snapshot, job):
        return "" if job.over else lacks
    if progress and (job.members or job.name in snapshot.agents):  # else it is stale, written by an agent that left
        still = progress.still if job.members else None
        if waits := progress.waiting_for or (_stands(still, wall_s) if still and not still.declared else ""):
            return waits
    if job.name in queue:
        return reason(Code.TURN, lacks, count=queue.index(job.name) + 1, total=len(queue))
    return lacks or (snapshot.trouble.get(job.name, "") if job.name not in snapshot.agents else "")


def _lacks_nodes(snapshot: Snapshot, job: Job) -> bool:
    """Whether a job that has run cannot have the nodes for its minimum, as far as its agents have said that they wait
    for nodes. What broke its generation is in its incident, and is not what it waits for."""
    return job.state.phase is Phase.WAITING and bool(job.members) and job.name in snapshot.plan.waiting


def of_job(snapshot: Snapshot, job: Job, row: answers.Job, waits: Text, still: Stillness | None, wall_s: float) -> str:
    """`row`: the rest of its summary, as `views.job_row` makes it; `waits`: see `waits_for`."""
    if job.over:
        return _over(snapshot.cluster, job, wall_s)
    line, contact = _alive(snapshot, job, row, waits, still, wall_s), snapshot.contact
    if contact.connected:
        return line
    runs = job.state.phase is Phase.RUNNING
    meanwhile = "training goes on, a recovery waits for etcd" if runs else "it waits for etcd, too"
    return f"{line}; etcd unreachable: {contact.error or 'no answer'} ({meanwhile})"


def _over(cluster: Cluster, job: Job, wall_s: float) -> str:
    ended = f"{job.state.phase} {age(wall_s - job.state.since_wall_s)} ago"
    places = (place.node for place in (job.generation.nodes if job.generation else ()))
    if still := [name for name in places if name in cluster.nodes and job.name in cluster.nodes[name].record.jobs]:
        saves = job.spec is not None and job.spec.spec.checkpoint.dir  # an agent leaves when its writes are on the disk
        unsure = "; the last checkpoint may not be complete" if saves else ""
        ended += f" (agents on {some(sorted(still))} still end{unsure})"
    why, progress = job.state.reason, job.progress
    stepless = progress is not None and progress.step == progress.resumed_step and not progress.stepped_in
    if job.state.phase is Phase.SUCCEEDED and progress is not None and stepless:
        why = f"without a step: {progress.resumed_from} has all of them; another checkpoint.dir begins anew"
    return f"{ended}: {why}" if why else ended


def _alive(snapshot: Snapshot, job: Job, row: answers.Job, waits: Text, still: Stillness | None, wall_s: float) -> str:
    cluster, state, incident = snapshot.cluster, job.state, row.last_incident
    if state.phase is Phase.STOPPING:  # also while its user writes what cannot be used
        why = f" ({state.reason})" if state.reason else ""
        return f"stopping{why}: the workers on {some(sorted(job.members)) or 'no node'} end"
    unusable, prefix = {**cluster.foreign, **cluster.refused}, f"/jobs/{job.name}/"
    if bad := min((key for key in unusable if prefix in key), default=""):
        return f"a record of it in etcd cannot be used: {bad}: {unusable[bad]}"
    if job.spec is None:
        return "waiting for its agents to write its description back to etcd"
    starting = list(_starts(snapshot, job, wall_s))
    waiting = f"waiting for: {waits}" if Code.NEVER not in codes(waits) else str(waits)
    parts = []
    if _lacks_nodes(snapshot, job):
        parts.append(waiting)
    elif still and job.members:
        parts.append(_stands(still, wall_s))
    elif incident and incident.open:
        held = f"; waits for {incident.verdict.held_by}" if incident.verdict.held_by else ""
        parts.append(f"recovering for {age(incident.age_s)} from {incident.verdict.cls}: {incident.verdict.what}{held}")
    elif waits and not (starting and Code.WORKERS_START in codes(waits)):
        parts.append(waiting)
    elif state.phase in (Phase.PENDING, Phase.WAITING) and state.reason:
        parts.append(f"waiting: {state.reason}")
    disputes = [text for name in job.members for text in _disputes(cluster, name, only=job.name)]
    if not parts and (not starting or _has_stepped(job)):
        slow = row.step_time.slow_ranks[:SLOW_NAMED] if row.step_time else ()
        parts.append(_runs(row) if job.generation else _unplaced(snapshot, job, wall_s))
        parts += map(step_time.slow_text, slow)
    parts += starting + disputes
    parts += [f"{name} is excluded {_excluded(job, name, wall_s)}" for name in state.excluded_nodes]
    if row.checkpoint and row.checkpoint.error:
        parts.append(f"the newest checkpoint failed: {row.checkpoint.error}")
    return "; ".join(dict.fromkeys(parts))


def _runs(row: answers.Job) -> str:
    if not row.step and row.managed is False:
        return f"running: {_ranks(row)} of a script that has not called elastic.run: its steps are not known"
    if not row.step:
        return f"running: no step yet, {_ranks(row)}"
    rate = f", {row.steps_per_s:.3g} steps/s" if row.steps_per_s else ""
    most = row.nodes.rpartition(":")[2]
    fewer = f", on {row.members} of at most {most} nodes" if most.isdigit() and row.members < int(most) else ""
    old_s = row.progress_age_s or 0.0
    old = f" as of {age(old_s)} ago" if old_s > LED_S else ""
    return f"running: step {row.step}{old}{rate}{fewer}"


def _ranks(row: answers.Job) -> str:
    return f"{row.world_size} rank{'' if row.world_size == 1 else 's'}"


def _unplaced(snapshot: Snapshot, job: Job, wall_s: float) -> str:
    if job.members:
        return f"waiting for the first generation: agents are there on {some(sorted(job.members))}"
    placed = snapshot.plan.places.get(job.name, {})
    if not placed:
        return "waiting for a node"
    return f"waiting for {some(sorted(placed))} to start an agent, for {age(wall_s - job.state.since_wall_s)}"


def _starts(snapshot: Snapshot, job: Job, wall_s: float) -> Iterator[str]:
    for name, node in sorted(snapshot.cluster.nodes.items()):
        for agent in _agents_of(snapshot, name, node):
            if agent.job == job.name and not _has_stepped_with(job, name):
                yield _starting(name, wall_s, agent, _silent_s(snapshot, job, name, wall_s))


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
    return _has_stepped(job) and _has_place(job, node)


def _has_place(job: Job, node: str) -> bool:
    member, generation = job.members.get(node), job.generation
    return bool(member and generation and generation.node_of(node, member.record.incarnation) is not None)


def _silent_s(snapshot: Snapshot, job: Job, node: str, wall_s: float) -> float:
    """For how long the agent of `job` on `node` has said nothing, so that what it said last need not be true: by the
    age of its status here; elsewhere for some seconds after the others found it gone, by when its lease has run out or
    it is heard after all. 0: it is not known."""
    here = snapshot.agents.get(job.name)
    if here and here.status and here.status.node == node:
        return silent_s if (silent_s := wall_s - here.status.written_wall_s) > SILENT_S else 0.0
    lost = (i for i in job.incidents if i.open and any(c.node == node and c.kind == "lost" for c in i.causes))
    found_s = max((wall_s - i.wall_s for i in lost), default=0.0)
    again = node in job.members and not _has_place(job, node)
    return 0.0 if again or found_s > SILENT_S else found_s


def _starting(who: str, wall_s: float, agent: AgentRow, silent_s: float) -> str:
    if silent_s and agent.since_wall_s <= wall_s - silent_s:
        return f"{who} is silent for {age(silent_s)}, last said: {agent.doing}"
    return f"{who} is {agent.doing} for {age(wall_s - agent.since_wall_s)}"


def _stands(still: Stillness, wall_s: float) -> str:
    where = f", probably rank {still.rank} on {still.node}" if still.rank is not None else ""
    since = f"{clock(still.since_wall_s)} ({age(wall_s - still.since_wall_s)})"
    return f"no progress since {since}{where}: {still.because}"


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
    return f"until about {clock(max(end_s, wall_s))}, because workers of {job.name} failed there {times}"


# ── nodes ───────────────────────────────────────────────────────────────────────────────────────────────────


def of_node(snapshot: Snapshot, row: answers.Node, me: str, wall_s: float) -> str:
    """`row`: the rest of its row, as `views.nodes` makes it; `me`: the node of this daemon."""
    name = row.node
    node = snapshot.cluster.nodes.get(name)
    if node is None:
        drains = name in snapshot.cluster.drains and row.state != "off"  # then it has ended
        waits = "; its drain waits for elasticd" if drains else ""
        cordon = snapshot.cluster.cordons.get(name)
        waits += f"; cordoned: {cordon.reason}" if cordon else ""
        if not row.jobs:
            return f"{row.state} {row.reason}{waits}"
        return f"elasticd does not answer there; its agents of {', '.join(row.jobs)} have not lost their leases{waits}"
    parts = [*_blocked(snapshot.cluster, node, wall_s), *_disputes(snapshot.cluster, name)]
    jobs = [job for job in snapshot.cluster.jobs.values() if not job.over]
    past = {job.name for job in snapshot.cluster.jobs.values() if job.over or _has_stepped_with(job, name)}
    silent_s = {job.name: found_s for job in jobs if (found_s := _silent_s(snapshot, job, name, wall_s))}
    starting = [agent for agent in _agents_of(snapshot, name, node) if agent.job not in past]
    parts += [_starting(agent.job, wall_s, agent, silent_s.pop(agent.job, 0.0)) for agent in starting]
    parts += [f"the agent of {job} is silent for {age(found_s)}" for job, found_s in silent_s.items()]
    if name == me and not snapshot.contact.connected:
        parts.append(f"etcd unreachable from here: {snapshot.contact.error or 'no answer'}; what runs here goes on")
    if name == me:
        none = {job: why for job, why in snapshot.trouble.items() if why and job not in snapshot.agents}
        parts += [f"no agent of {job} runs: {why}" for job, why in none.items()]
    used = f"{row.slots_used} of {row.slots} slots used" if row.slots_used else "idle"
    older = [f"the agent of {job} still runs {version}" for job, version in node.record.older.items()]
    return "; ".join([*(parts or [f"ready: {used}"]), *older])


def _blocked(cluster: Cluster, node: Node, wall_s: float) -> Iterator[str]:
    """Why it takes no work, in part or at all."""
    if node.drain or node.record.draining:
        since = f" for {age(wall_s - node.drain.since_wall_s)}" if node.drain else ""
        jobs = ", ".join(cluster.jobs_on(node.name))
        none = "nothing runs here any more" if cluster.is_empty(node.name) else "its elasticd has yet to see that"
        left = f"; {jobs} still here" if jobs else f"; {none}"
        yield f"draining{since}: {node.drain.reason if node.drain else node.record.draining}{left}"
    if not node.record.healthy:
        yield f"takes no work: {node.record.reason or 'unhealthy'}"
    if node.cordon:
        yield f"cordoned for {age(wall_s - node.cordon.since_wall_s)}: {node.cordon.reason}"
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
            yield f"{f'{node} is ' if only else ''}unreachable by {some(sorted(by))}{'' if only else f' ({job.name})'}"


def absence(cluster: Cluster, name: str, wall_s: float) -> tuple[str, str]:
    """(state, reason) of a node without a record and without agents, as the inventory has it."""
    row = cluster.known[name]
    form = "%H:%M:%S" if wall_s - row.away_wall_s < 43200.0 else "%m-%d %H:%M:%S"  # of what is older than half a day
    since = f"since {clock(row.away_wall_s, form)}" if row.away_wall_s else "just now"
    if not row.left:
        return "lost", f"{since}: its machine, its network or its elasticd is down"
    drain = cluster.drains.get(name)
    return "off", f"{since}: {drain.reason if drain else 'its elasticd was stopped'}"
