"""What a drain of a node would do to the jobs on it. Pure: the assignment computed as if the node were drained."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.contract.records.node_records import DrainRecord

from .assignment import plan
from .cluster import Cluster, Job

MOVES, SHRINKS, STOPS = "moves", "shrinks", "stops"
NAMED = 3
"""How many nodes that keep the state are named."""


@dataclass(frozen=True, slots=True)
class Effect:
    job: str
    effect: str
    """MOVES: other nodes take its place; SHRINKS: it goes on with fewer nodes; STOPS: below its minimum, so it saves a
    checkpoint, if it has a folder for one, and waits. Without one, and if no other node has its state, it goes on until
    the drain's deadline."""
    nodes_after: int
    min_nodes: int
    to: tuple[str, ...] = ()
    """Nodes that would take the place."""
    checkpoints: bool = False
    """Whether it has a folder for checkpoints."""
    kept_on: tuple[str, ...] = ()
    """Nodes of the job that stay, and keep its state in memory."""

    @property
    def text(self) -> str:
        """'train moves to n3'."""
        if self.effect == MOVES:
            return f"{self.job} moves to {', '.join(self.to)}"
        if self.effect == SHRINKS:
            also = f", {', '.join(self.to)} among them" if self.to else ""
            return f"{self.job} goes on with {self.nodes_after} node{'' if self.nodes_after == 1 else 's'}{also}"
        if self.checkpoints:
            how = "stops after a checkpoint"
        elif self.kept_on:
            how = f"stops, with its state in the memory of {', '.join(self.kept_on[:NAMED])}"
        else:
            how = "stays until the deadline of the drain, and its state, without checkpoint.dir, is then lost"
        return f"{self.job} {how}: {self.nodes_after} of at least {self.min_nodes} nodes would be left"


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
        had = tuple(sorted(n for n in job.members if not _leaves(cluster, job, n)))
        found.append(_effect(job, len(staying), len(had), new, tuple(n for n in had if n != node)))
    return sorted(found, key=lambda e: e.effect != STOPS)


def _effect(job: Job, left: int, had: int, new: tuple[str, ...], kept_on: tuple[str, ...]) -> Effect:
    assert job.spec is not None
    spec = job.spec.spec
    kind = STOPS if left < spec.min_nodes else MOVES if new and left >= had else SHRINKS
    return Effect(job.name, kind, left, spec.min_nodes, new, bool(spec.checkpoint.dir), kept_on)


def _leaves(cluster: Cluster, job: Job, node: str) -> bool:
    """Whether the node is about to leave the job for another reason."""
    known, member = cluster.nodes.get(node), job.members.get(node)
    return bool((known and (known.drain or known.record.draining)) or (member and member.record.draining))


def _draining(cluster: Cluster, node: str) -> Cluster:
    record = DrainRecord(reason="as if", deadline_s=0.0, since_wall_s=0.0)
    nodes = {n: replace(known, drain=record) if n == node else known for n, known in cluster.nodes.items()}
    return replace(cluster, nodes=nodes, drains={**cluster.drains, node: record})
