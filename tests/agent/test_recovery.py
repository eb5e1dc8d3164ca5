"""The promises that carry the product, with real agents, workers and etcd. See docs/guarantees.md."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import Phase
from elastic.contract.records.reasons import Code, codes
from elastic.contract.timeouts import Timeouts

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

STEPS = 150
BATCH = 18  # does not divide by 4: parts of different sizes
SAMPLES = 1000


@functools.cache
def undisturbed(world_nodes: str = "2:2") -> frozenset[str]:
    """Hash of the final weights when nothing fails."""
    with Job(nodes=world_nodes, args={"steps": STEPS, "batch": BATCH, "step-ms": 0}) as job:
        job.wait_phase(Phase.SUCCEEDED)
        return frozenset(job.weights())


def check_samples(job: Job, steps: int = STEPS) -> None:
    """Each sample of each whole epoch went into exactly one committed step."""
    samples = job.samples()
    assert sorted(samples)[:steps] == list(range(1, steps + 1))
    per_epoch = -(-SAMPLES // BATCH)
    for epoch in range(max(1, steps // per_epoch)):
        seen = sorted(
            i for step in range(epoch * per_epoch, (epoch + 1) * per_epoch) for i in samples.get(step + 1, [])
        )
        assert len(seen) == len(set(seen)), f"epoch {epoch}: a sample twice"
        assert steps < (epoch + 1) * per_epoch or seen == list(range(SAMPLES)), f"epoch {epoch}: samples missing"


def check_no_step_back(job: Job) -> None:
    """A surviving process never commits a step that it had committed before."""
    newest: dict[object, int] = {}
    for line in job.commits():
        assert line["step"] > newest.get(line["pid"], 0), line
        newest[line["pid"]] = line["step"]


def test_killed_workers_cost_no_step_and_change_no_bit() -> None:
    """G1, G7, G8: each rank killed once, rank 0 among them; then the weights are those of a run without failures."""
    with Job(args={"steps": STEPS, "batch": BATCH, "step-ms": 3}) as job:
        for count, rank in enumerate((1, 0, 3, 2), start=1):
            job.wait_step(25 * count)
            job.kill_rank(rank)
            eventually(lambda count=count: len(job.incidents()) >= count, 20.0, f"recovery {count}")
        job.wait_phase(Phase.SUCCEEDED)
        assert [i.steps_lost for i in job.incidents()] == [0, 0, 0, 0]
        assert all(i.restored_from == "live" for i in job.incidents())
        check_samples(job)
        check_no_step_back(job)
        assert job.weights() == undisturbed()


def test_two_at_once_and_again_during_recovery() -> None:
    with Job(args={"steps": STEPS, "batch": BATCH, "step-ms": 3}) as job:
        job.wait_step(30)
        job.kill_rank(0)
        job.kill_rank(3)
        eventually(lambda: (g := job.generation()) and g.number >= 2, 20.0, "a new generation")
        job.kill_rank(1)
        job.wait_phase(Phase.SUCCEEDED)
        check_samples(job)
        check_no_step_back(job)
        assert job.weights() == undisturbed()


def test_survivors_that_take_long_to_leave_train_keep_their_processes() -> None:
    """Their sockets are shut by then: it is the script's own time, in a `finally` block."""
    with Job(nodes="1:1", args={"steps": 5000, "step-ms": 3, "leave-s": 5.0}, timeouts=Timeouts(abort_s=1.0)) as job:
        job.wait_step(30)
        job.kill_rank(0)
        eventually(lambda: job.incidents(), 20.0, "recovery")
        [incident] = job.incidents()
        assert [(cause.kind, cause.ranks) for cause in incident.causes] == [("exit", (0,))]
        assert (incident.steps_lost, incident.restored_from) == (0, "live")


def test_all_workers_killed_resume_from_the_checkpoint(tmp_path: Path) -> None:
    """G6: nothing live is left, nor in memory; the job goes on from the newest good checkpoint, and says so."""
    spec = {"checkpoint": {"dir": str(tmp_path), "every_steps": 20}, "snapshots": "off"}
    with Job(args={"steps": STEPS, "batch": BATCH, "step-ms": 40}, spec=spec) as job:
        eventually(lambda: (p := job.progress()) and (p.checkpoint_step or 0) >= 40, 40.0, "a checkpoint at step 40")
        for rank in range(4):
            job.kill_rank(rank)
        eventually(lambda: any("checkpoint" in i.restored_from for i in job.incidents()), 20.0, "a resume")
        job.wait_phase(Phase.SUCCEEDED)
        incident = next(i for i in job.incidents() if "checkpoint" in i.restored_from)
        assert incident.steps_lost is not None
        assert incident.steps_lost < 40
        assert str(tmp_path) in incident.restored_from
        check_samples(job)
        assert job.weights() == undisturbed()


@pytest.mark.long
def test_all_workers_of_one_node_resume_from_its_memory(tmp_path: Path) -> None:
    """Rung 4: the agent still holds every shard of the newest snapshot."""
    spec = {"checkpoint": {"dir": str(tmp_path), "every_steps": 20}}
    with Job(nodes="1:1", args={"steps": STEPS, "batch": BATCH, "step-ms": 5}, spec=spec) as job:
        job.wait_step(50)
        for rank in range(2):
            job.kill_rank(rank)
        eventually(lambda: job.incidents(), 20.0, "a resume")
        assert "snapshot step 40" in job.incidents()[0].restored_from
        job.wait_phase(Phase.SUCCEEDED)
        check_samples(job)


def test_a_lost_node_shrinks_the_world_and_is_taken_back() -> None:
    """G2: a node's process tree is killed; the others go on at once, and take it in again without losing a step."""
    with Job(nodes="1:2", args={"steps": 2500, "batch": BATCH, "step-ms": 8}) as job:
        job.wait_step(30)
        job.kill_node("n1")
        eventually(lambda: job.incidents(), 10.0, "recovery")
        assert (job.incidents()[0].world_size_before, job.incidents()[0].world_size_after) == (4, 2)
        job.start_agent("n1")
        eventually(lambda: len(job.incidents()) >= 2, 30.0, "growth")
        grown = job.incidents()[1]
        assert (grown.kind, grown.world_size_before, grown.world_size_after) == ("planned", 2, 4)
        assert [i.steps_lost for i in job.incidents()] == [0, 0]
        job.wait_step(grown.step + 50)
        check_no_step_back(job)
        check_samples(job, job.steps())


def test_a_bug_stops_the_job_with_its_traceback() -> None:
    """G10: the same exception at the same step, three times."""
    with Job(nodes="1:1", args={"steps": 100, "step-ms": 1, "fail": "1:12:always"}) as job:
        state = eventually(lambda: (s := job.state()).phase.over and s, 40.0, "the end")
        assert state.phase is Phase.FAILED
        assert Code.CRASH_LOOP in codes(state.reason)
        assert "planted at step 12" in str(state.reason)
        assert state.error is not None
        assert state.error.step == 12
        assert state.restarts == 3
        assert 'raise ValueError(f"planted' in state.error.traceback


@pytest.mark.parametrize(
    "kind", ["exit0", "exception", *(pytest.param(k, marks=pytest.mark.long) for k in ("exit3", "abort", "memory"))]
)
def test_an_exit_of_any_kind_costs_no_step(kind: str) -> None:
    with Job(nodes="1:1", args={"steps": 60, "batch": BATCH, "step-ms": 1, "fail": f"1:20:{kind}"}) as job:
        job.wait_phase(Phase.SUCCEEDED)
        incident = job.incidents()[0]
        assert (incident.kind, incident.steps_lost, incident.ranks) == ("exit", 0, (1,))
        check_samples(job, 60)


def test_stopped_worker_is_detected_and_only_it_is_replaced() -> None:
    """G3: SIGSTOP; its stack and that of a rank that waits for it are kept."""
    import signal

    spec = {"hang": {"floor_s": 1.0}}
    with Job(nodes="1:1", args={"steps": STEPS, "batch": BATCH, "step-ms": 3}, spec=spec) as job:
        job.wait_step(40)
        struck = job.kill_rank(1, signal.SIGSTOP)  # waits for a status that has the ranks
        before = {row.pid for status in job.statuses().values() for row in status.ranks}
        eventually(lambda: job.incidents(), 20.0, "recovery")
        incident = job.incidents()[0]
        assert (incident.kind, incident.ranks, incident.steps_lost) == ("hang", (1,), 0)
        assert "stopped" in incident.text
        job.wait_phase(Phase.SUCCEEDED)
        after = {line["pid"] for line in job.commits() if line["generation"] == 2}
        assert before - {struck} <= after
        assert struck not in after
        assert any("hung" in who for who in incident.stacks)
        check_no_step_back(job)


def test_an_endless_loop_is_found() -> None:
    spec = {"hang": {"floor_s": 1.0}}
    args = {"steps": 60, "batch": BATCH, "step-ms": 3, "fail": "0:20:spin"}
    with Job(nodes="1:1", args=args, spec=spec) as job:
        job.wait_phase(Phase.SUCCEEDED)
        incident = job.incidents()[0]
        assert (incident.kind, incident.ranks, incident.steps_lost) == ("hang", (0,), 0)
        assert any("fail" in stack for stack in incident.stacks.values()), incident.stacks
