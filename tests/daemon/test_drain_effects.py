"""What `elasticctl drain --dry-run` says a drain would do."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support.snapshots import SPEC, job, snapshot

from elastic.contract.job.spec import Checkpoint
from elastic.contract.records.job_records import JobState, Phase, SpecRecord
from elastic.contract.records.node_records import DrainRecord, NodeRecord
from elasticd.cluster.cluster import Cluster, Job, Node
from elasticd.cluster.drain_effects import effects


def cluster(*jobs: Job, nodes: str = "abc", slots: int = 4) -> Cluster:
    record = NodeRecord(
        node="a", hostname="h", address="h", slots=slots, gpus=0, version="1", pid=1, started_wall_s=0.0
    )
    known = {n: Node(msgspec.structs.replace(record, node=n), i) for i, n in enumerate(nodes, 1)}
    return replace(snapshot(*jobs).cluster, nodes=known)


def wants(nodes: str, workers: int = 2, folder: str = "") -> Job:
    spec = msgspec.structs.replace(SPEC, nodes=nodes, workers_per_node=workers, checkpoint=Checkpoint(dir=folder))
    return job(spec=SpecRecord(spec=spec, submitted_wall_s=1.0, submitted_by="ada"))


@pytest.mark.parametrize(
    ("nodes", "there", "text"),
    [
        ("2:2", "abc", "train moves to c"),
        ("1:2", "ab", "train goes on with 1 node"),
        ("2:2", "ab", "train stops, with its state in the memory of a: 1 of at least 2 nodes would be left"),
    ],
)
def test_a_drain_moves_shrinks_or_stops_a_job(nodes: str, there: str, text: str) -> None:
    (effect,) = effects(cluster(wants(nodes), nodes=there), "b")
    assert effect.text == text


def test_a_job_with_a_checkpoint_folder_stops_after_a_checkpoint() -> None:
    (effect,) = effects(cluster(wants("2:2", folder="/ck"), nodes="ab"), "b")
    assert effect.text.startswith("train stops after a checkpoint: 1 of at least 2")


def test_a_job_whose_state_no_other_node_has_stays_until_the_deadline() -> None:
    """As its agent does: see tests/chaos/test_leaving.py."""
    alone = replace(wants("1:1"), members={"b": wants("1:1").members["b"]})
    (effect,) = effects(cluster(alone, nodes="b"), "b")
    assert effect.text == (
        "train stays until the deadline of the drain, and its state, without checkpoint.dir, is then lost: "
        "0 of at least 1 nodes would be left"
    )


def test_a_full_or_draining_node_takes_no_place() -> None:
    assert effects(cluster(wants("2:2", workers=2), nodes="abc", slots=2), "b")[0].effect == "moves"
    seen = cluster(wants("2:2"))
    leaving = replace(seen.nodes["c"], drain=DrainRecord(reason="x", deadline_s=0.0, since_wall_s=0.0))
    assert effects(replace(seen, nodes={**seen.nodes, "c": leaving}), "b")[0].effect == "stops"


def test_a_second_drain_counts_the_node_that_leaves_already_as_gone() -> None:
    seen = cluster(wants("1:2"), nodes="ab")
    leaving = replace(seen.nodes["a"], drain=DrainRecord(reason="x", deadline_s=0.0, since_wall_s=0.0))
    assert effects(replace(seen, nodes={**seen.nodes, "a": leaving}), "b")[0].effect == "stops"


def test_jobs_elsewhere_and_jobs_that_are_over_are_not_named() -> None:
    over = replace(wants("2:2"), state=JobState(phase=Phase.FAILED))
    assert effects(cluster(over), "b") == []
    assert effects(cluster(wants("2:2")), "c") == []


def test_jobs_that_stop_come_first() -> None:
    stops, moves = wants("2:2", workers=4), replace(wants("1:2", workers=1), name="small", submitted=1)
    spec = msgspec.structs.replace(moves.spec.spec, name="small") if moves.spec else SPEC
    moves = replace(moves, spec=SpecRecord(spec=spec, submitted_wall_s=1.0, submitted_by="ada"))
    found = effects(cluster(moves, stops, nodes="ab", slots=8), "b")
    assert [effect.effect for effect in found] == ["stops", "shrinks"]
