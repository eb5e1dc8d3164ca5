"""What a drain of a node would do to the jobs on it. Pure: the assignment computed as if the node were drained."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.contract.node_records import DrainRecord

from .assignment import plan
from .cluster import Cluster, Job

MOVES, SHRINKS, STOPS = "moves", "shrinks", "stops"


@dataclass(frozen=True, slots=True)
class Effect:
    job: str
    effect: str
    """MOVES: other nodes take its place; SHRINKS: it goes on with fewer nodes; STOPS: below its minimum, so it saves a
    checkpoint, if it has a folder for one, and waits."""
    nodes_after: int
    min_nodes: int
    to: tuple[str, ...] = ()
    """Nodes that would take the place."""
    checkpoints: bool = False
    """Whether it has a folder for checkpoints."""

    @property
    def text(self) -> str:
        """'train moves to n3'."""
        if self.effect == MOVES:
            return f"{self.job} moves to {', '.join(self.to)}"
        if self.effect == SHRINKS:
            also = f", {', '.join(self.to)} among them" if self.to else ""
            return f"{self.job} goes on with {self.nodes_after} node{'' if self.nodes_after == 1 else 's'}{also}"
        kept = "after a checkpoint" if self.checkpoints else "and has no checkpoint.dir: its state is lost"
        return f"{self.job} stops {kept}: {self.nodes_after} of at least {self.min_nodes} nodes would be left"


def effects(cluster: Cluster, node: str) -> list[Effect]:
    """One Effect per job that runs on `node`, those that would stop first."""
    before = plan(cluster, {}, node)
    after = plan(_draining(cluster, node), {}, node)
    found = []
    for job in cluster.by_age():
        if job.over or node not in job.members or job.spec is None:
            continue
        staying = [n for n in after.places.get(job.name, {}) if n != node and not _leaves(cluster, job, n)]
        new = tuple(n for n in staying if n not in before.places.get(job.name, {}))
        found.append(_effect(job, len(staying), len([n for n in job.members if not _leaves(cluster, job, n)]), new))
    return sorted(found, key=lambda e: e.effect != STOPS)


def _effect(job: Job, left: int, had: int, new: tuple[str, ...]) -> Effect:
    assert job.spec is not None
    spec = job.spec.spec
    kind = STOPS if left < spec.min_nodes else MOVES if new and left >= had else SHRINKS
    return Effect(job.name, kind, left, spec.min_nodes, new, bool(spec.checkpoint.dir))


def _leaves(cluster: Cluster, job: Job, node: str) -> bool:
    """Whether the node is about to leave the job for another reason."""
    known, member = cluster.nodes.get(node), job.members.get(node)
    return bool((known and (known.drain or known.record.draining)) or (member and member.record.draining))


def _draining(cluster: Cluster, node: str) -> Cluster:
    record = DrainRecord(reason="as if", deadline_s=0.0, since_wall_s=0.0)
    nodes = {n: replace(known, drain=record) if n == node else known for n, known in cluster.nodes.items()}
    return replace(cluster, nodes=nodes, drains={**cluster.drains, node: record})
