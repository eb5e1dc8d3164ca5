"""A cluster with one running job, as a daemon sees it: what its API, its screen and its waits are tested with."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from elastic.contract.job.spec import JobSpec
from elastic.contract.origin import Origin
from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import (
    GenerationNode,
    GenerationRecord,
    IncidentRecord,
    JobState,
    MemberRecord,
    Phase,
    ProgressRecord,
    RankRow,
    SpecRecord,
)
from elastic.contract.records.node_records import KnownNode, NodeRecord
from elastic.contract.records.reasons import Code, reason
from elasticd.cluster.cluster import Cluster, Job, Node
from elasticd.cluster.published_state import Contact, Snapshot

SPEC = JobSpec(name="train", script="/t.py", args=("-x",), nodes="1:2")

KILLED = reason(Code.KILLED, signal="SIGKILL")
BROKE = reason(Code.BROKE, KILLED, kind="exit", node="a")


def row(rank: int, node: str, slot: int, step: int = 40, **facts: object) -> RankRow:
    base = {"rank": rank, "node": node, "slot": slot, "pid": 10 + rank, "phase": "computing", "step": step}
    return msgspec.convert(base | {"incarnation": 1} | facts, RankRow)


def progress(step: int = 40, **facts: object) -> ProgressRecord:
    base = {"generation": 2, "world_size": 3, "step": step, "steps_per_s": 9.8765, "loss": 0.25, "wall_s": 998.0}
    return msgspec.convert(base | facts, ProgressRecord)


def job(**facts: object) -> Job:
    places = (
        GenerationNode(node="a", incarnation="i", host="h", slots=(0, 1)),
        GenerationNode(node="b", incarnation="i", host="h", slots=(0,)),
    )
    base = Job(
        name="train",
        spec=SpecRecord(spec=SPEC, submitted_wall_s=900.0, submitted_by="ada"),
        submitted=5,
        state=JobState(phase=Phase.RUNNING, restarts=1),
        members={n: Member(MemberRecord(node=n, incarnation="i", host="h", port=1, slots=2), 1) for n in "ab"},
        generation=GenerationRecord(
            number=2, nodes=places, store_host="h", store_port=1, leader="b", why=BROKE
        ),
        progress=progress(ranks=[msgspec.to_builtins(row(2, "b", 0))]),
        incidents=(
            IncidentRecord(
                generation=2, kind="exit", node="a", ranks=(1,), detail=KILLED, wall_s=990.0,
                timeline_s={"aborted": 0.01, "stepping": 0.144}, steps_lost=0, steps_lost_at_most=0,
                world_size_before=3, world_size_after=3, restored_from="live", origin=Origin.LIVE,
            ),
        ),
    )  # fmt: skip
    return replace(base, **facts)  # type: ignore[arg-type]


def snapshot(*jobs: Job, **facts: object) -> Snapshot:
    record = NodeRecord(
        node="a", hostname="h", address="10.0.0.1", slots=2, gpus=0, version="0.1", pid=1, started_wall_s=5.0
    )  # fmt: skip
    known = {
        name: KnownNode.of(msgspec.structs.replace(record, node=name))
        for name in sorted({"a", *(name for j in jobs for name in j.members)})
    }
    base = Snapshot(
        cluster=Cluster(nodes={"a": Node(record, 1)}, jobs={j.name: j for j in jobs}, revision=9, known=known),
        contact=Contact(True, 99.5, "", "3.5.21"),
        registered=True,
        turned_s=99.9,
    )
    return replace(base, **facts)  # type: ignore[arg-type]
