"""Assignment of nodes to jobs. Pure, and the same on every node: each computes the whole plan from the same view of
etcd and carries out its own part, so that no two nodes take the same place.

    1. Running work stays: a node with a live member, or with a running agent, keeps its place in that job.
    2. Jobs are served in the order of submission; those that have agents and lack nodes for their minimum come first.
       A job below its maximum and spare nodes takes the oldest nodes that accept work, are not excluded for it, run
       jobs of its user, and have enough free slots. With backend auto all have GPUs, or none has: ranks with NCCL and
       ranks without do not form one group.
       Draining and excluded nodes do not count: their replacements come before they leave.
    3. A job that never formed takes no node before it can have its minimum: it is queued, and holds back no other job.
       Once it has waited for RESERVED_AFTER_S, and is the first of those that have, nodes for its minimum are reserved
       for it, the freest first, so that smaller jobs do not overtake it for ever. A job that the cluster's nodes could
       not hold if they were empty reserves nothing.
    4. A job with more members than its maximum gives up the youngest (it was scaled down), and its excluded
       nodes, if it has its minimum without them.

A job in a final phase, or about to stop, gets no new node. A job without a spec is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.contract.job.spec import JobSpec
from elastic.contract.job.spec_values import MAX_WORKERS_PER_NODE
from elastic.contract.records.job_records import Phase
from elastic.contract.records.node_records import KnownNode, NodeRecord
from elastic.contract.records.reasons import Code, Reason, Text, listed, reason

from .cluster import Cluster, Job, Node

RESERVED_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """Job -> node -> workers there."""

    places: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    surplus: Mapping[str, Mapping[str, Reason]] = field(default_factory=dict)
    """Job -> node -> why it should leave the job."""
    waiting: Mapping[str, Text] = field(default_factory=dict)
    """Job -> why it has fewer nodes than its minimum."""
    queue: tuple[str, ...] = ()
    """Jobs that have no node and wait for their minimum, the oldest first."""
    never: frozenset[str] = frozenset()
    """Jobs that wait for more than the cluster's nodes could hold if they were empty."""

    def of(self, node: str) -> dict[str, int]:
        """Job -> workers, of one node."""
        return {job: nodes[node] for job, nodes in self.places.items() if node in nodes}

    def leaving(self, node: str) -> dict[str, Reason]:
        """Job -> why, of one node."""
        return {job: nodes[node] for job, nodes in self.surplus.items() if node in nodes}


def plan(
    cluster: Cluster,
    running: Mapping[str, int],
    me: str,
    wall_s: float = 0.0,
    silent: Collection[tuple[str, str]] = (),
) -> Assignment:
    """`running`: job -> workers of the agents on node `me`, which may not be members yet. `wall_s`: now; reservations
    follow from it, so that daemons whose clocks differ reserve at different times, and never overbook. `silent`: see
    `reconcile.Silent`: daemons see that at about the same time, and a node too many leaves again."""
    used = _Used()
    places: dict[str, dict[str, int]] = {}
    surplus: dict[str, dict[str, Reason]] = {}
    staying: dict[str, list[str]] = {}
    for job in cluster.jobs.values():
        if job.over:
            continue
        places[job.name] = _standing(cluster, job, running, me)
        staying[job.name] = [n for n in places[job.name] if not _leaving(cluster, job, n)]
        for node, slots in places[job.name].items():
            used.add(job, node, slots)
    waiting, queue, never = dict[str, Text](), list[Job](), set[str]()
    remembered = _remembered(cluster)
    alive = [job for job in cluster.by_age() if not job.over]
    for job in sorted(alive, key=lambda job: not _is_incomplete(job, staying[job.name])):
        has, spec = places[job.name], job.wanted
        if job.state.phase is not Phase.STOPPING:
            room = _most(spec) - len(staying[job.name])
            new = _candidates(cluster, job, has, used, silent)[:room] if room > 0 else []
            if len(staying[job.name]) + len(new) < spec.min_nodes and (not has or job.generation is None):
                new = []
                if not _could_run(remembered, _on_gpus(cluster, job, {}), job):
                    never.add(job.name)
                elif not has:
                    queue.append(job)
                    if wall_s - job.state.since_wall_s >= RESERVED_AFTER_S and not used.held:
                        _reserve(cluster, job, used)
            for each in new:
                has[each.name] = job.slots_on(each.record.slots)
                used.add(job, each.name, has[each.name])
        if extra := _surplus(job, staying[job.name], list(has)):
            surplus[job.name] = extra
        if len(has) < spec.min_nodes:
            waiting[job.name] = _why(cluster, job, has, used, job.name in never)
    by_age = tuple(job.name for job in sorted(queue, key=lambda job: job.submitted))
    return Assignment(places, surplus, waiting, by_age, frozenset(never))


def _most(spec: JobSpec) -> int:
    return spec.max_nodes + spec.spare_nodes


def _is_incomplete(job: Job, staying: list[str]) -> bool:
    """Whether it has agents, and too few: it is completed before a new job is begun."""
    return bool(staying and job.spec and len(staying) < job.wanted.min_nodes)


def _could_run(nodes: Sequence[KnownNode | NodeRecord], on_gpus: bool, job: Job) -> bool:
    """Whether `nodes` could hold the job's minimum if they were empty and took work."""
    spec, fit = job.wanted, 0
    for node in nodes:
        wanted = job.slots_on(node.slots)
        fit += wanted <= node.slots and (wanted <= node.gpus if on_gpus else not (_wants_gpus(job) and node.gpus))
    return fit >= spec.min_nodes


def _remembered(cluster: Cluster) -> list[KnownNode | NodeRecord]:
    """All nodes, lost ones included."""
    return [*(node.record for node in cluster.nodes.values()), *cluster.absent.values()]


def _reserve(cluster: Cluster, job: Job, used: _Used) -> None:
    """Hold nodes for its minimum: those on which the most of the slots that it needs are free, then the oldest."""

    def lacks(node: Node) -> int:
        return max(0, job.slots_on(node.record.slots) - used.free(node))

    large = _candidates(cluster, job, {}, _Used())
    for node in sorted(large, key=lacks)[: job.wanted.min_nodes]:  # stable: then the oldest
        used.hold(job, node)


class _Used:
    """Slots occupied by workers, by node; and how many of these workers use a GPU."""

    def __init__(self) -> None:
        self._slots: Counter[str] = Counter()
        self._gpus: Counter[str] = Counter()
        self.held: dict[str, str] = {}
        """Node -> the job that it is reserved for."""

    def hold(self, job: Job, node: Node) -> None:
        self.held[node.name] = job.name
        self.add(job, node.name, job.slots_on(node.record.slots))

    def add(self, job: Job, node: str, slots: int) -> None:
        self._slots[node] += slots
        if _wants_gpus(job):
            self._gpus[node] += slots

    def free(self, node: Node) -> int:
        return max(0, node.record.slots - self._slots[node.name])

    def free_gpus(self, node: Node) -> int:
        return node.record.gpus - self._gpus[node.name]

    def fits(self, job: Job, node: Node, on_gpus: bool) -> bool:
        """`on_gpus`: whether the job's workers use GPUs."""
        wanted = job.slots_on(node.record.slots)
        if wanted > self.free(node):
            return False
        if on_gpus:
            return wanted <= self.free_gpus(node)
        return not (_wants_gpus(job) and node.record.gpus)


def _wants_gpus(job: Job) -> bool:
    """Whether the job's workers use one GPU each on nodes that have GPUs."""
    return job.spec is None or job.wanted.backend != "gloo"


def _on_gpus(cluster: Cluster, job: Job, has: Mapping[str, int]) -> bool:
    """Whether each of the job's workers is to have a GPU of its own: NCCL refuses two ranks on one.

    With backend auto as on the nodes that the job has; else if any node of the cluster has GPUs, even if none is free:
    a job that waits says why, one that trains on a CPU does not.
    """
    if job.wanted.backend != "auto":
        return job.wanted.backend == "nccl"
    nodes = [cluster.nodes[name] for name in has if name in cluster.nodes][:1] or list(cluster.nodes.values())
    return any(node.record.gpus for node in nodes)


def _standing(cluster: Cluster, job: Job, running: Mapping[str, int], me: str) -> dict[str, int]:
    """Nodes of the job's agents, oldest member first; this node last while its agent is not a member yet."""
    members = sorted(job.members.items(), key=lambda item: item[1].create_revision)
    standing = {node: _taken(cluster, job, node, member.record.slots) for node, member in members}
    if job.name in running:
        standing[me] = running[job.name]
    return standing


def _taken(cluster: Cluster, job: Job, node: str, slots: int) -> int:
    """`slots` of a member record, within what an agent there can have: the job's user can write any number."""
    row = cluster.nodes.get(node)
    there = row.record.slots if row else MAX_WORKERS_PER_NODE
    return max(1, min(slots, there, job.slots_on(there) if job.spec else there))


def _leaving(cluster: Cluster, job: Job, node: str) -> bool:
    """Whether the job is about to lose this node, so that it needs another one."""
    return cluster.is_draining(job, node) or node in job.state.excluded_nodes


def _surplus(job: Job, staying: list[str], planned: list[str]) -> dict[str, Reason]:
    """Node -> why it should leave: beyond the job's maximum, those outside its generation, then the youngest; and
    excluded ones."""
    inside = [place.node for place in job.generation.nodes] if job.generation else []
    order = sorted(staying, key=lambda n: inside.index(n) if n in inside else len(inside))  # stable sort: then by age
    extra = order[_most(job.wanted) :]
    aside = [n for n in planned if n in job.state.excluded_nodes]
    if len(planned) - len(aside) < job.wanted.min_nodes:
        aside = []
    return dict.fromkeys(extra, reason(Code.SURPLUS, nodes=job.wanted.nodes)) | {
        n: reason(Code.EXCLUDED, job.state.no_agent.get(n) or reason(Code.FAILS_MORE), node=n) for n in aside
    }


def _candidates(
    cluster: Cluster, job: Job, has: Mapping[str, int], used: _Used, silent: Collection[tuple[str, str]] = ()
) -> list[Node]:
    on_gpus = _on_gpus(cluster, job, has)
    others = sorted(cluster.nodes.values(), key=lambda n: ((job.name, n.name) in silent, n.create_revision))
    return [n for n in others if n.name not in has and next(_against(job, n, used, on_gpus), None) is None]


def _why(cluster: Cluster, job: Job, has: Mapping[str, int], used: _Used, never: bool) -> Text:
    """Why each node that the job does not have is not assigned to it."""
    spec, on_gpus = job.wanted, _on_gpus(cluster, job, has)
    if never:
        short = reason(Code.NEVER, needs=_size(spec), capacity=_capacity(cluster, on_gpus))
    else:
        short = reason(Code.TOO_FEW, count=len(has), least=spec.min_nodes)
    others = [node for name, node in sorted(cluster.nodes.items()) if name not in has]
    why_not = [next(_against(job, node, used, on_gpus), None) for node in others]
    gone = [reason(Code.NODE_IS, node=name, state="off" if n.left else "lost") for name, n in cluster.absent.items()]
    return listed(short, *filter(None, why_not), *gone)


def _against(job: Job, node: Node, used: _Used, on_gpus: bool) -> Iterator[Reason]:
    """What speaks against `node` for `job`, the most general first."""
    name, needs, free = node.name, job.slots_on(node.record.slots), used.free(node)
    if node.why_not:
        yield reason(Code.NODE_IS, node=name, state=node.why_not)
    if name in job.state.excluded_nodes:
        yield reason(Code.EXCLUDED, node=name)
    if job.name in node.record.refuses:
        yield reason(Code.REFUSES, node.record.refuses[job.name], node=name)
    if needs > free and (other := used.held.get(name, job.name)) != job.name:
        yield reason(Code.RESERVED, node=name, other=other)
    if needs > free:
        yield reason(Code.NO_SLOTS, node=name, free=free, total=node.record.slots, needs=needs)
    if not used.fits(job, node, on_gpus):
        yield _lacks_gpus(node, needs, used.free_gpus(node), job.wanted.backend)


def _size(spec: JobSpec) -> str:
    """'16 workers on 2 nodes', its minimum."""
    nodes = f"{spec.min_nodes} node{'' if spec.min_nodes == 1 else 's'}"
    each = spec.workers_per_node
    return nodes if isinstance(each, str) else f"{spec.min_nodes * each} workers on {nodes}"


def _capacity(cluster: Cluster, on_gpus: bool) -> str:
    nodes = _remembered(cluster)
    total = sum(node.gpus if on_gpus else node.slots for node in nodes)
    return f"{total} {'GPUs' if on_gpus else 'slots'} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"


def _lacks_gpus(node: Node, needs: int, free: int, backend: str) -> Reason:
    gpus, slots = node.record.gpus, node.record.slots
    if not gpus:
        who = "the job asks for backend nccl" if backend == "nccl" else "other nodes have"
        return reason(Code.HAS_NO_GPU, node=node.name, who=who)
    if free >= needs:
        return reason(Code.OTHERS_ON_CPUS, node=node.name)
    fix = f"set slots = {gpus} on {node.name}" if slots > gpus else "wait"
    return reason(Code.NO_GPUS, node=node.name, free=max(0, free), total=gpus, needs=needs, fix=fix)
