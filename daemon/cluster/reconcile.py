"""Small decisions of the daemon's loop: agents, GPUs, drains, when a lost node is noted and forgotten. Pure."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping

import msgspec

from elastic.contract.agent_files import AgentStatus
from elastic.contract.records.job_records import JobState, Phase
from elastic.contract.records.node_records import AgentRow, KnownNode, NodeRecord, WorkerRow
from elastic.contract.records.phases import PhaseTrigger, after
from elastic.contract.records.reasons import Code, Reason, Text, codes, reason
from elasticd.base.settings import Settings
from elasticd.machine import addresses

from .cluster import Cluster, Job

FAILED_STARTS = 3
"""After this many consecutive agents that end before they report anything, the node is excluded for the job."""
SET_ASIDE_S = 600.0
"""How long a node stays excluded for a job, for whatever reason, before it is tried again."""
DESERTED_S = 30.0
"""A job without any agent, and without room for one, is waiting after this time: longer than agents need to register
again when etcd has lost its data."""
SILENT_S, ASIDE_S = 60.0, 600.0
"""See `Silent`."""
END_AFTER_S = 10.0
"""Added to the job's own stop grace: how long an agent may outlive its job before SIGTERM, and as long again before
SIGKILL."""


def gpus_for(
    gpus: tuple[int, ...], slots: int, cluster: Cluster, running: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """A GPU for each slot of a new agent, the least used first; those of agents with a gloo job, which mostly does not
    use them, count less. Empty without GPUs. `running`: job -> GPUs of its agent on this node."""
    gloo = {name for name, job in cluster.jobs.items() if job.spec and job.spec.spec.backend == "gloo"}
    used = Counter(gpu for job, indices in running.items() if job not in gloo for gpu in indices)
    visible = Counter(gpu for job, indices in running.items() if job in gloo for gpu in indices)
    picked = []
    for _ in range(slots if gpus else 0):
        picked.append(min(gpus, key=lambda gpu: (used[gpu], visible[gpu], gpu)))
        used[picked[-1]] += 1
    return tuple(picked)


WORKERS_OF_A_JOB = 256
DOING_CHARS = 300
"""Limits for what an agent's status adds to the record of its node. The job's user may write that file, and etcd takes
1.5 MiB: the node must stay registered whatever it says."""


def worker_rows(agents: Mapping[str, AgentStatus | None]) -> tuple[WorkerRow, ...]:
    """Workers of all jobs on this node, by job and slot. Workers without a process yet are left out."""
    rows = [
        WorkerRow(job, row.slot, row.pid, row.incarnation)
        for job, status in agents.items()
        for row in (status.ranks[:WORKERS_OF_A_JOB] if status else ())
        if row.pid and all(0 <= number < 1 << 32 for number in (row.slot, row.pid, row.incarnation))
    ]
    return tuple(sorted(rows, key=lambda row: (row.job, row.slot)))


def agent_rows(agents: Mapping[str, tuple[AgentStatus | None, float]]) -> tuple[AgentRow, ...]:
    """Agents on this node that are not at work yet. `agents`: job -> its agent's status, and when it was started."""
    rows = []
    for job, (status, started_wall_s) in sorted(agents.items()):
        if status is None:
            rows.append(AgentRow(job, reason(Code.AGENT_STARTS), round(started_wall_s)))
        elif not status.etcd_ok and status.phase == "joining" and status.reason:
            waits = reason(Code.AGENT_WAITS, _bounded(status.reason))
            rows.append(AgentRow(job, waits, round(started_wall_s)))
        elif status.doing:
            rows.append(AgentRow(job, _bounded(status.doing), status.doing_since_wall_s))
    return tuple(rows)


def _bounded(text: Text) -> Text:
    """`text`; if it is longer than DOING_CHARS, the beginning of its words."""
    try:
        fits = isinstance(text, Reason) and len(msgspec.json.encode(text)) <= DOING_CHARS
        return text if fits else str(text)[:DOING_CHARS]
    except RecursionError:  # as deep as it could still be read
        return "?"


def older_agents(agents: Mapping[str, AgentStatus | None], version: str) -> dict[str, str]:
    """Job -> version of its agent here, of those that run another one than this daemon: since an upgrade."""
    return {
        job: f"elasticd {status.version}"[:DOING_CHARS] if status.version else "an earlier elasticd"
        for job, status in sorted(agents.items())
        if status is not None and status.version != version
    }


def refuses_unsound(settings: Settings) -> bool:
    """Whether an etcd version that loses data is refused: not the embedded one, nor if the whole cluster is this
    machine."""
    etcd = settings.etcd
    return bool(etcd.endpoints) and not etcd.allow_unsound_version and not addresses.only_loopback(settings)


def is_oldest(cluster: Cluster, me: str) -> bool:
    """Whether `me` is the node that registered first: its daemon does the tasks that only one daemon is to do."""
    return cluster.oldest_first[:1] == [me]


class Since:
    """For how long something has been so, as seen by this daemon."""

    def __init__(self) -> None:
        self._first_s: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._first_s

    def keep(self, names: Container[str]) -> None:
        """All others do not hold."""
        self._first_s = {name: first_s for name, first_s in self._first_s.items() if name in names}

    def lasts_s(self, name: str, holds: bool, now_s: float) -> float:
        """`now_s`: monotonic. 0 if it does not hold, or since just now."""
        if not holds:
            self._first_s.pop(name, None)
            return 0.0
        return now_s - self._first_s.setdefault(name, now_s)


class Silent:
    """Which nodes were given to which jobs and have had no agent of them for `SILENT_S`, as seen by this daemon: such a
    node may be gone, whatever its record says. Others are preferred to it for `ASIDE_S`."""

    def __init__(self) -> None:
        self._since = Since()
        self._until_s: dict[tuple[str, str], float] = {}

    def look(
        self, places: Mapping[str, Mapping[str, int]], cluster: Cluster, running: Container[str], me: str, now_s: float
    ) -> set[tuple[str, str]]:
        """(job, node) of each. `places`: job -> node -> workers, the last plan; etcd may have lost a job since."""
        for job, nodes in ((job, nodes) for job, nodes in places.items() if job in cluster.jobs):
            for node in nodes:
                there, current = cluster.nodes.get(node), cluster.jobs.get(job)
                # Not known: etcd has lost its data since the plan was made, and the agents write the job back.
                agent = current is None or node in current.members or bool(there and job in there.record.jobs)
                absent = not (agent or (node == me and job in running))
                if self._since.lasts_s(f"{job} {node}", absent, now_s) >= SILENT_S:
                    self._until_s[job, node] = now_s + ASIDE_S
        self._since.keep({f"{job} {node}" for job, nodes in places.items() for node in nodes})
        self._until_s = {place: until_s for place, until_s in self._until_s.items() if now_s < until_s}
        return set(self._until_s)


def job_state(
    job: Job,
    cluster: Cluster,
    me: str,
    here: bool,
    failed: str,
    wall_s: float,
    aside_s: float = 0.0,
    no_room: Text = "",
    deserted_s: float = 0.0,
    *,
    lacking: bool = False,
) -> JobState | None:
    """The state that this daemon should write for a job, or None.

    `failed`: why no agent starts here; `aside_s`: how long this daemon has seen its node excluded for the job;
    `no_room`: why too few nodes can take the job; `deserted_s`: how long this daemon has seen no agent; `lacking`:
    no agent starts here since this machine is short of something: the job waits for it where no other node is left.
    """
    state = job.state
    if job.over:
        return None
    if state.phase is Phase.STOPPING and not job.members and not here:
        return after(state, PhaseTrigger.LEFT, state.reason, wall_s)
    if job.stop_is_due:
        return msgspec.structs.replace(state, since_wall_s=wall_s)
    if me in state.excluded_nodes and aside_s >= SET_ASIDE_S:
        return pardoned(state, me)
    if failed and not here and me not in state.excluded_nodes and state.phase is not Phase.STOPPING:
        excluded_nodes = tuple(sorted({*state.excluded_nodes, me}))
        if lacking and set(cluster.nodes) <= set(excluded_nodes):
            return None
        hopeless = state.phase is Phase.PENDING and not job.members and set(cluster.nodes) <= set(excluded_nodes)
        no_agent = {**state.no_agent, me: failed}
        without = msgspec.structs.replace(state, excluded_nodes=excluded_nodes, no_agent=no_agent)
        why = reason(Code.NO_AGENT, failed, node=me)
        return after(without, PhaseTrigger.FAILED, why, wall_s) if hopeless else without
    deserted = state.phase is Phase.RUNNING and not job.members and not here and deserted_s >= DESERTED_S
    if deserted and no_room and is_oldest(cluster, me):  # else its leader writes this
        return after(state, PhaseTrigger.BELOW_MIN, reason(Code.DESERTED, no_room), wall_s)
    return None


def pardoned(state: JobState, node: str) -> JobState:
    """The job may use the node again. What has failed there is forgotten: else the next failure excludes it again."""
    return msgspec.structs.replace(
        state,
        excluded_nodes=tuple(n for n in state.excluded_nodes if n != node),
        failures=tuple(failure for failure in state.failures if failure.node != node),
        no_agent={n: why for n, why in state.no_agent.items() if n != node},
    )


def of_an_earlier_job(job: Job, said: AgentStatus | None) -> bool:
    """Whether the agent here, by its status, is of an earlier job of this name. Such an agent may have missed the end
    of its job, and rejects the new job's records, which have another signature: the old workers would never end,
    and the new job would have no agent on this node. An agent of a later job is left alone: etcd was restored from a
    backup."""
    return said is not None and job.spec is not None and 0.0 < said.submitted_wall_s < job.spec.submitted_wall_s


def signal_for(
    job: Job, overdue_s: float, told: bool, said: AgentStatus | None = None, late_s: float = 0.0
) -> signal.Signals | None:
    """The signal for an agent that outlives its job, if it is due. `said`: its status. An agent of an earlier job that
    already ends its workers may do so because that job has succeeded: they have the time of one that has, as have those
    of a job of which one worker failed after training. `late_s`: for
    how long the deadline of the node's drain has passed; an agent then ends its workers by itself, unless it is frozen:
    SIGTERM would not reach it."""
    spec = job.spec.spec if job.spec else None
    late = of_an_earlier_job(job, said) or Code.FAILED_LATE in codes(job.state.reason)
    exits = job.state.phase is Phase.SUCCEEDED or (late and said is not None and said.phase == "finishing")
    ends_s = max(spec.stop_grace_s, spec.exit_timeout_s if exits else 0.0) if spec else 0.0
    grace_s = ends_s + END_AFTER_S
    if overdue_s > 2 * grace_s or late_s > grace_s:
        return signal.SIGKILL
    return signal.SIGTERM if overdue_s > grace_s and not told else None


LOST_AFTER_S = 10.0
"""A node whose record is missing for this long is noted: longer than daemons need to register again after an outage of
etcd."""
LEFT_KEPT_S = 7 * 86400.0
"""How long a node that left in order is listed."""


def inventory(
    cluster: Cluster, me: str, own: NodeRecord | None, missing_s: Callable[[str], float], wall_s: float
) -> Iterator[tuple[str, KnownNode | None]]:
    """What the inventory of the cluster's nodes should say: (node, its row as it should be; None: none).

    Each daemon writes the row of its own node when it joins and when its facts change, and once more when it is stopped
    in order. The daemon of the oldest node notes since when a node is away. A row stays until its node is back or a
    user forgets it; that of a node which left in order goes by itself, so that machines which come and go under ever
    new names leave none behind. `own`: the record of this node as it is in etcd, if it is.
    `missing_s`: for how many seconds this daemon has missed the record of a node."""
    if own is not None and cluster.known.get(me) != KnownNode.of(own):
        yield me, KnownNode.of(own)
    if not is_oldest(cluster, me):
        return
    for name, row in cluster.absent.items():
        away_s = missing_s(name)
        if not row.away_wall_s and away_s >= LOST_AFTER_S:
            yield name, msgspec.structs.replace(row, away_wall_s=wall_s - away_s)
        elif row.left and wall_s - row.away_wall_s > LEFT_KEPT_S:
            yield name, None
