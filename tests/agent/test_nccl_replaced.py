"""Recovery on the paths of NCCL, without a GPU: real agents and workers, stand-ins for CUDA and NCCL alone."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support.agents import Job
from support.procs import alive
from support.wait import eventually

from elastic.contract.timeouts import Timeouts

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

SCRIPT = Path(__file__).parents[1] / "support" / "train_fake_nccl.py"


def make(abort_s: float = 20.0, step_ms: int = 8, **spec: Any) -> Job:
    """`abort_s`: long enough for a busy machine, except where the test waits for it."""
    spec |= {"backend": "nccl"}
    timeouts = Timeouts(abort_s=abort_s, beat_s=0.05)
    args = {"steps": 5000, "step-ms": step_ms}
    return Job(nodes="1:1", workers=3, script=SCRIPT, args=args, spec=spec, timeouts=timeouts)


def processes(job: Job) -> dict[int, int]:
    """rank -> process."""
    return {row.rank: row.pid for status in job.statuses().values() for row in status.ranks if row.pid}


def test_an_abort_that_does_not_return_costs_its_process_and_no_step() -> None:
    """Rung 2: the agent waits for `abort_s`, replaces that worker, and all form with those that did abort.

    In the script's own code (`step_ms`) it would have `floor_s` to leave `train`: once it has left, that is over.
    """
    with make(abort_s=3.0, step_ms=100, hang={"floor_s": 100.0}) as job:
        job.wait_step(20)
        before = eventually(lambda: len(found := processes(job)) == 3 and found, 10.0, "three ranks")
        (job.record / "hang").write_text("1")
        job.kill_rank(2)
        eventually(lambda: (job.record / "hang.1").exists(), 10.0, "the abort hangs")
        eventually(lambda: job.incidents(), 30.0, "recovery")
        (incident,) = job.incidents()
        assert (incident.steps_lost, incident.restored_from, incident.world_size_after) == (0, "live", 3)
        assert incident.timeline_s["aborted"] >= 3.0, "it was not waited for"
        assert not alive(before[1])
        job.wait_step(job.steps() + 10)
        again = {line["pid"] for line in job.commits() if line["generation"] == 2}
        assert before[0] in again, "a rank whose abort had succeeded was replaced as well"
        assert len(again) == 3
        assert not {before[1], before[2]} & again


def test_an_error_that_sticks_costs_its_process_and_no_step() -> None:
    """As an illegal access: the script's own, with its name, and no later call of that process would work."""
    with make() as job:
        job.wait_step(20)
        before = eventually(lambda: len(found := processes(job)) == 3 and found, 10.0, "three ranks")
        (job.record / "illegal").write_text("1")
        eventually(lambda: job.incidents(), 30.0, "recovery")
        incident = job.incidents()[0]
        assert (incident.kind, incident.ranks, incident.steps_lost) == ("exit", (1,), 0)
        assert incident.error is not None
        assert "CUDA error: an illegal memory access was encountered" in incident.error.message
        job.wait_step(job.steps() + 10)
        again = {line["pid"] for line in job.commits() if line["generation"] == 2}
        assert set(before.values()) - again == {before[1]}


@pytest.mark.long
def test_stopped_rank_with_nccl_stand_ins_is_detected_and_only_it_is_replaced() -> None:
    """No socket breaks and no process ends: the others wait for it in the optimizer's guard."""
    with make(hang={"floor_s": 1.0}) as job:
        job.wait_step(20)
        before = eventually(lambda: len(found := processes(job)) == 3 and found, 10.0, "three ranks")
        job.kill_rank(1, signal.SIGSTOP)
        eventually(lambda: job.incidents(), 30.0, "recovery")
        incident = job.incidents()[0]
        assert (incident.kind, incident.ranks, incident.steps_lost) == ("hang", (1,), 0)
        job.wait_step(job.steps() + 10)
        again = {line["pid"] for line in job.commits() if line["generation"] == 2}
        assert set(before.values()) - again == {before[1]}


def test_replacement_worker_starts_cuda_while_survivors_abort_the_group() -> None:
    """A context takes longest to make: made only after the aborts, it adds its time to theirs."""
    with make() as job:
        job.wait_step(20)
        before = eventually(lambda: len(found := processes(job)) == 3 and found, 10.0, "three ranks")
        (job.record / "linger").write_text(" ".join(map(str, before.values())))
        job.kill_rank(2)
        eventually(lambda: job.incidents(), 30.0, "recovery")
        found = {path.name: path.read_text() for path in job.record.glob("lingered.*")}
        (job.record / "linger").unlink()
        assert set(found) == {"lingered.0", "lingered.1"}
        job.wait_step(job.steps() + 10)
        (new,) = {line["pid"] for line in job.commits() if line["generation"] == 2} - set(before.values())
        assert set(found.values()) == {str(new)}, "the aborts had returned before it started CUDA"
        assert (job.incidents()[0].world_size_after, job.incidents()[0].steps_lost) == (3, 0)


@pytest.mark.long
def test_where_no_abort_returns_the_newest_snapshot_is_gone_on_from(tmp_path: Path) -> None:
    """The survivors' processes go, and their state with them: what their agent holds of it is the next rung."""
    with make(checkpoint={"dir": str(tmp_path), "every_steps": 10}) as job:
        job.wait_step(25)
        (job.record / "hang").write_text("0 1")
        job.kill_rank(2)
        eventually(lambda: job.incidents(), 30.0, "recovery")
        (incident,) = job.incidents()
        assert sorted(path.name for path in job.record.glob("hang.*")) == ["hang.0", "hang.1"]
        assert incident.restored_from.startswith("snapshot step")
        assert incident.steps_lost is not None
        assert incident.steps_lost <= 10
        job.wait_step(job.steps() + 10)


def test_collective_timeout_ends_one_process_and_not_the_job() -> None:
    """What gloo raises for, NCCL waits on: the last net below all others."""
    with make() as job:
        job.wait_step(25)
        before = eventually(lambda: len(found := processes(job)) == 3 and found, 10.0, "three ranks")
        (job.record / "timed-out").write_text("1")
        eventually(lambda: job.incidents(), 30.0, "recovery")
        incident = job.incidents()[0]
        assert incident.error is not None
        assert "a collective of generation 1 took longer than timeouts.group_s" in incident.error.message
        assert (incident.restored_from, incident.steps_lost) == ("live", 0)
        job.wait_step(job.steps() + 10)
        again = {line["pid"] for line in job.commits() if line["generation"] == 2}
        assert set(before.values()) - again == {before[0]}
