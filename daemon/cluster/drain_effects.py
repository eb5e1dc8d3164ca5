"""What a drain of a node would do to the jobs on it. Pure: the assignment computed as if the node were drained."""

from __future__ import annotations

from dataclasses import replace

from elastic.contract.records.node_records import DrainRecord
from elasticd.base.command_answers import DrainEffect

from .assignment import plan
from .cluster import Cluster, Job

MOVES, SHRINKS, STOPS = "moves", "shrinks", "stops"
NAMED = 3
"""How many nodes that keep the state are named."""


def effects(cluster: Cluster, node: str) -> list[DrainEffect]:
    """One for each job that runs on `node`, those that would stop first."""
    before = plan(cluster, {}, node)
    after = plan(_draining(cluster, node), {}, node)
    rows = []
    for job in cluster.by_age():
        if job.over or node not in job.members or job.spec is None:
            continue
        staying = [n for n in after.places.get(job.name, {}) if n != node and not cluster.is_draining(job, n)]
        new = tuple(n for n in staying if n not in before.places.get(job.name, {}))
        had = tuple(sorted(n for n in job.members if not cluster.is_draining(job, n)))
        rows.append(_effect(job, len(staying), len(had), new, tuple(n for n in had if n != node)))
    return sorted(rows, key=lambda e: e.effect != STOPS)


def _effect(job: Job, left: int, had: int, new: tuple[str, ...], kept_on: tuple[str, ...]) -> DrainEffect:
    spec = job.wanted
    kind = STOPS if left < spec.min_nodes else MOVES if new and left >= had else SHRINKS
    effect = DrainEffect(job.name, kind, left, spec.min_nodes, list(new), bool(spec.checkpoint.dir), list(kept_on))
    effect.text = _text(effect)
    return effect


def _text(effect: DrainEffect) -> str:
    """'train moves to n3'."""
    if effect.effect == MOVES:
        return f"{effect.job} moves to {', '.join(effect.to)}"
    if effect.effect == SHRINKS:
        also = f", {', '.join(effect.to)} among them" if effect.to else ""
        return f"{effect.job} goes on with {effect.nodes_after} node{'' if effect.nodes_after == 1 else 's'}{also}"
    if effect.checkpoints:
        how = "stops after a checkpoint"
    elif effect.kept_on:
        how = f"stops, with its state in the memory of {', '.join(effect.kept_on[:NAMED])}"
    else:
        how = "stays until the deadline of the drain, and its state, without checkpoint.dir, is then lost"
    return f"{effect.job} {how}: {effect.nodes_after} of at least {effect.min_nodes} nodes would be left"


def _draining(cluster: Cluster, node: str) -> Cluster:
    record = DrainRecord(reason="as if", deadline_s=0.0, since_wall_s=0.0)
    nodes = {n: replace(known, drain=record) if n == node else known for n, known in cluster.nodes.items()}
    return replace(cluster, nodes=nodes, drains={**cluster.drains, node: record})
