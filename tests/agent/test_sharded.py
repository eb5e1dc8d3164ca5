"""Sharded state: one rank is replaced in place, its part comes from its node's memory, and all bits are equal."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.checkpoint.stored.export import read_all
from elastic.checkpoint.stored.find import verify
from elastic.contract.records.job_records import MemberRecord, Phase, decode
from elastic.worker.state.handover.restore import whole_table
from elastic.worker.torch_internals.mesh_groups import can_put_back

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

SCRIPT = Path(__file__).parents[1] / "support" / "train_sharded.py"


def make(
    mesh: str,
    die: str = "",
    *,
    steps: int = 60,
    step_ms: float = 20.0,
    clip: int = 1,
    expert: int = 0,
    asleep: int = -1,
    torn: str = "",
    noise: int = -1,
    **spec: Any,
) -> Job:
    job = Job(script=SCRIPT, spec=spec)
    args = {
        "record": job.record,
        "steps": steps,
        "step-ms": step_ms,
        "mesh": mesh,
        "die": die,
        "clip": clip,
        "expert": expert,
        "asleep": asleep,
        "torn": torn,
        "noise": noise,
    }
    given = tuple(str(x) for key, value in args.items() for x in (f"--{key}", value) if value != "")
    job.spec = type(job.spec)(**{**{f: getattr(job.spec, f) for f in job.spec.__struct_fields__}, "args": given})
    return job


@functools.cache
def undisturbed(mesh: str, clip: int = 1, steps: int = 60) -> str:
    with make(mesh, step_ms=0.0, clip=clip, steps=steps) as job:
        job.wait_phase(Phase.SUCCEEDED)
        (weights,) = job.weights()
    return weights


LONG = pytest.mark.long


@pytest.mark.long
def test_a_rank_that_hangs_in_setup_is_named_and_replaced() -> None:
    with make("fsdp", asleep=2, hang={"floor_s": 1.0, "ceiling_s": 4.0}) as job:
        job.wait_phase(Phase.SUCCEEDED)
        (incident,) = job.incidents()
        assert (incident.kind, incident.ranks) == ("hang", (2,))
        assert "starting" in str(incident.detail)
        assert job.weights() == {undisturbed("fsdp")}


@pytest.mark.parametrize("mesh", ["fsdp", pytest.param("hsdp", marks=LONG), pytest.param("tp", marks=LONG)])
def test_a_killed_rank_is_replaced_in_place_and_every_bit_is_equal(mesh: str) -> None:
    with make(mesh) as job:
        job.wait_step(25)
        before = {line["rank"]: line["pid"] for line in job.commits()}
        job.kill_rank(2)
        eventually(lambda: job.incidents(), 30.0, "recovery")
        job.wait_phase(Phase.SUCCEEDED)
        assert job.weights() == {undisturbed(mesh)}
        after = {line["rank"]: line["pid"] for line in job.commits() if line["generation"] == 2}
        assert {rank for rank in before if before[rank] != after[rank]} == {2}
        times = {rank: len((job.record / f"setups.{pid}").read_text().splitlines()) for rank, pid in after.items()}
        assert times == {rank: 2 if not can_put_back() and rank != 2 else 1 for rank in range(4)}
        (incident,) = job.incidents()
        first = min(line["entered"] for line in job.lines() if "entered" in line and line["generation"] == 2)
        committed = max(line["step"] for line in job.commits() if line["generation"] == 1)
        assert incident.steps_lost == committed - first
        assert mesh != "hsdp" or incident.steps_lost == 0


def test_a_step_is_not_torn_between_the_replicas_of_different_parts() -> None:
    """Rank 0 dies between its last reduce-scatter and its last all-reduce: ranks 1 and 3 have all their sums, rank 2
    has not. Without the fence they would apply them, and no replica of the other part had that step."""
    with make("hsdp", die="0:20:last all-reduce", clip=0) as job:
        job.wait_phase(Phase.SUCCEEDED)
        assert list(job.record.glob("died.*"))
        (incident,) = job.incidents()
        assert (incident.steps_lost, incident.origin) == (0, "live")
        assert job.weights() == {undisturbed("hsdp", 0)}


def test_a_death_within_the_fence_leaves_all_at_one_step() -> None:
    """Rank 0 dies just after it; on ranks 1 and 3 it has returned, on rank 2 it raises."""
    with make("hsdp", die="0:20:fence", torn="2:20", clip=0) as job:
        job.wait_phase(Phase.SUCCEEDED)
        assert list(job.record.glob("died.*"))
        (incident,) = job.incidents()
        assert (incident.steps_lost, incident.origin) == (0, "live")
        again = {line["step"] for line in job.commits() if line["generation"] == incident.generation}
        assert min(again) == 22, "rank 2 has made the step that the others had made"
        assert job.weights() == {undisturbed("hsdp", 0)}


@pytest.mark.long
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
def test_deaths_within_a_step(place: str) -> None:
    with make("fsdp", die=f"1:20:{place},3:40:{place}") as job:
        job.wait_phase(Phase.SUCCEEDED)
        assert job.weights() == {undisturbed("fsdp")}
        assert len(list(job.record.glob("died.*"))) == 2


@pytest.mark.long
@pytest.mark.parametrize(("first", "then"), [("fsdp", "tp"), ("tp", "whole"), ("whole", "hsdp"), ("hsdp", "fsdp")])
def test_a_checkpoint_is_read_at_any_other_sharding(first: str, then: str, tmp_path: Path) -> None:
    """By the next job, which has nothing left to do."""
    steps = {"steps": 30, "step_ms": 0.0, "checkpoint": {"dir": str(tmp_path), "every_steps": 10}}
    with make(first, **steps) as job:
        job.wait_phase(Phase.SUCCEEDED)
        (saved,) = job.weights()
    with make(then, **steps, nodes="1", workers_per_node=2) as job:
        job.wait_phase(Phase.SUCCEEDED)
        assert job.weights() == {saved}
        assert {line["entered"] for line in job.lines() if "entered" in line} == {30}


def worlds(job: Job) -> dict[int, int]:
    """generation -> world size."""
    return {line["generation"]: line["world_size"] for line in job.commits()}


@pytest.mark.long
def test_a_lost_node_costs_the_steps_since_the_checkpoint_and_no_bit(tmp_path: Path) -> None:
    """Its parts are read from disk; the other node has those of the same step in memory, or reads its own, too."""
    with make("fsdp", checkpoint={"dir": str(tmp_path), "every_steps": 10}) as job:
        job.wait_step(25)
        job.kill_node("n1")
        job.start_agent("n1")
        job.wait_phase(Phase.SUCCEEDED)
        assert job.weights() == {undisturbed("fsdp")}
        (incident,) = job.incidents()
        assert incident.steps_lost is not None
        assert incident.steps_lost < 15
        assert exported(str(tmp_path / "step-60")) == undisturbed("fsdp")


def test_a_lost_node_costs_the_steps_since_the_snapshot_where_another_node_has_a_copy() -> None:
    """There is no checkpoint at all: its parts come out of the other node's memory, to a spare node."""
    with make("fsdp", step_ms=100.0) as job:
        job.wait_step(1)
        job.start_agent("n2")
        eventually(lambda: len(ready(job, "n2")) == 2, 30.0, "a spare node is ready")
        job.wait_step(20)
        job.kill_node("n1")
        job.wait_phase(Phase.SUCCEEDED)
        assert job.weights() == {undisturbed("fsdp")}
        (incident,) = job.incidents()
        assert incident.origin == "snapshot"
        assert incident.steps_lost is not None
        assert incident.steps_lost < 30


def ready(job: Job, node: str) -> tuple[int, ...]:
    """Slots of its workers that wait for a place."""
    kv = job.etcd.get(job.keys.member(node))
    return decode(MemberRecord, kv.value).ready if kv else ()


def exported(path: str) -> str:
    """Hash of the whole weights and moments in a checkpoint of boxes, as plain torch reads them."""
    shards = [(shard.extra, shard.tensors) for shard in verify(path, None).shards]
    names = list(dict.fromkeys(info.name for info in whole_table(shards) if info.name.startswith("model.")))
    state = read_all(path)["state"]
    found = hashlib.sha256()
    for number, name in enumerate(names):
        kept = sorted(key for key in state if key.startswith(f"optimizer.state.{number}."))
        for key in (name, *kept):
            found.update(state[key].numpy().tobytes())
    return found.hexdigest()


@pytest.mark.long
def test_the_world_shrinks_and_grows_and_each_rank_loads_its_new_boxes(tmp_path: Path) -> None:
    """Shrinking by a death, growing by plan: that costs no step."""
    with make("fsdp", steps=150, nodes="1:2", checkpoint={"dir": str(tmp_path), "every_steps": 10}) as job:
        job.wait_step(25)
        job.kill_node("n1")
        eventually(lambda: 2 in worlds(job).values(), 40.0, "a world of two")
        job.start_agent("n1")
        eventually(lambda: list(worlds(job).values()).count(4) > 1, 40.0, "a world of four again")
        last = max(worlds(job))
        first = min(line["entered"] for line in job.lines() if "entered" in line and line["generation"] == last)
        before = max(line["step"] for line in job.commits() if line["generation"] < last)
        assert first == before + 1, "growing by plan cost steps"  # the commit that it stops at does not return
        job.wait_phase(Phase.SUCCEEDED)
        assert len(job.weights()) == 1


@pytest.mark.long
def test_a_standby_takes_the_place_of_the_dead_rank() -> None:
    with make("hsdp", standby=1) as job:
        job.wait_step(25)
        job.kill_rank(1)
        eventually(lambda: job.incidents(), 30.0, "recovery")
        job.wait_phase(Phase.SUCCEEDED)
        assert job.weights() == {undisturbed("hsdp")}
        assert job.incidents()[0].steps_lost == 0


def test_other_weights_under_one_name_are_refused_before_a_checkpoint_lacks_them(tmp_path: Path) -> None:
    with make("fsdp", expert=1, checkpoint={"dir": str(tmp_path), "every_steps": 1}) as job:
        state = eventually(lambda: job.state() if job.state().phase.over else None, 60.0, "the end")
        assert state.phase is Phase.FAILED
        assert "state.model.expert.weight is not the same on rank 1 as on rank 0" in str(state.reason)
        assert not list(tmp_path.glob("step-*"))


def test_replicas_that_nothing_keeps_alike_are_refused() -> None:
    """Sharded over a mesh of one rank each: every rank trains the whole for itself, and one would get another's."""
    with make("alone") as job:
        state = eventually(lambda: job.state() if job.state().phase.over else None, 60.0, "the end")
        assert state.phase is Phase.FAILED
        assert "state.model.embed.weight, state.model.blocks.0" in str(state.reason)


def test_replicas_that_drift_apart_though_they_exchange_gradients_are_named_once() -> None:
    with make("hsdp", noise=2) as job:
        job.wait_phase(Phase.SUCCEEDED)
        logs = "".join(path.read_text() for path in job.folder.glob("n*/logs/*.log"))
        assert logs.count("state.model.head.weight differs between the ranks after step 1 (rank 2 from rank 0)") == 1
        assert logs.count("though its gradients are exchanged") == 1
