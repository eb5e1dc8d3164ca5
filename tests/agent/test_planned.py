"""Drains, standbys, shrinking and bad numbers, with real agents, workers and etcd."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
from support.agents import Job
from support.wait import eventually

from elastic.checkpoint.stored import find
from elastic.contract.agent_files import AgentOrders
from elastic.contract.records.job_records import Phase
from elastic.contract.records.reasons import Code, codes

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]


def order(job: Job, node: str, orders: AgentOrders) -> None:
    (job.folder / node / "orders.json").write_bytes(msgspec.json.encode(orders))


def hang_up(agent: subprocess.Popen[bytes]) -> bool:
    """Tell it that it has new orders; whether it has ended."""
    agent.send_signal(signal.SIGHUP)
    return agent.poll() is not None


def test_a_drained_node_leaves_at_a_boundary() -> None:
    with Job(nodes="1:2", args={"steps": 2000, "step-ms": 8}) as job:
        job.wait_step(30)
        order(job, "n0", AgentOrders(draining="maintenance"))
        # The daemon passes on that the drain was taken back, while the agent is ending already.
        eventually(lambda: hang_up(job.agents["n0"]), 20.0, "it has left")
        assert job.agents["n0"].returncode == 0
        codes = {node: status.exit_code for node, status in job.statuses().items()}
        assert codes == {"n0": 0, "n1": None}, "for a daemon that the kernel does not tell the code"
        eventually(lambda: job.incidents(), 10.0, "the planned change")
        incident = job.incidents()[0]
        assert (incident.kind, incident.world_size_before, incident.world_size_after, incident.steps_lost) == (
            "planned",
            4,
            2,
            0,
        )
        assert incident.steps_lost_at_most == 0, "a rank has stopped between two steps"
        assert "maintenance" in incident.text
        job.wait_step(incident.step + 20)
        # At the boundary nobody was cut off in the middle of a step: every step was committed by all of its world.
        by_step: dict[tuple[int, int], int] = {}
        for line in job.commits():
            by_step[line["step"], line["generation"]] = by_step.get((line["step"], line["generation"]), 0) + 1
        newest = job.steps()
        assert {n for (s, g), n in by_step.items() if g == 1} == {4}
        assert {n for (s, g), n in by_step.items() if g == 2 and s < newest - 2} == {2}
        assert job.state().restarts == 0


@pytest.mark.long
def test_draining_the_last_node_stops_at_a_saved_step(tmp_path: Path) -> None:
    spec = {"checkpoint": {"dir": str(tmp_path), "every_s": 3600.0}}
    with Job(nodes="1:1", args={"steps": 5000, "step-ms": 8}, spec=spec) as job:
        job.wait_step(30)
        order(job, "n0", AgentOrders(draining="the machine is taken back"))
        job.agents["n0"].wait(timeout=30)
        assert max(step for step, _, _ in find.peek(str(tmp_path), "job")) == job.steps()
        job.start_agent("n0")
        (job.folder / "n0" / "orders.json").unlink()
        stopped_at = job.steps()
        job.wait_step(stopped_at + 10)
        again = [line["step"] for line in job.commits() if line["step"] <= stopped_at]
        assert len(again) == 2 * stopped_at, "no step was taken twice"


@pytest.mark.long
def test_draining_the_last_node_without_a_checkpoint_waits(tmp_path: Path) -> None:
    with Job(nodes="1:1", workers=1, args={"steps": 5000, "step-ms": 8}) as job:
        job.wait_step(30)
        order(job, "n0", AgentOrders(draining="the machine is taken back"))
        eventually(lambda: Code.WOULD_BE_LOST in codes(job.statuses()["n0"].reason), 10.0, "the reason in status")
        stepped = job.steps()
        job.wait_step(stepped + 20)


def has_standby(job: Job, formed: int) -> bool:
    """As of a status that knows of generation `formed`: an older one still shows the standby that went into it."""
    status = job.statuses()["n0"]
    return status.generation >= formed and status.standbys == 1


def test_a_standby_takes_the_place_of_the_dead() -> None:
    """With a set-up of some seconds, a death costs what it costs a quick job; the standby is replaced."""
    args = {"steps": 5000, "step-ms": 8, "setup-s": 4}
    with Job(nodes="1:1", args=args, spec={"standby": 1}) as job:
        job.wait_step(30, 60.0)
        for count in (1, 2):
            formed = max([i.generation for i in job.incidents()], default=1)
            eventually(lambda formed=formed: has_standby(job, formed), 20.0, "a standby")
            job.kill_rank(0)
            eventually(lambda count=count: len(job.incidents()) >= count, 20.0, "recovery")
            incident = job.incidents()[-1]
            assert incident.steps_lost == 0
            assert incident.timeline_s["stepping"] < 3.0  # a worker from scratch takes over 4 s


@pytest.mark.long
def test_shrink_goes_on_at_once_and_takes_the_newcomer_in() -> None:
    args = {"steps": 5000, "step-ms": 8, "setup-s": 4}
    with Job(nodes="1:1", workers=3, args=args, spec={"on_loss": "shrink"}) as job:
        job.wait_step(30, 60.0)
        job.kill_rank(2)
        eventually(lambda: job.incidents(), 10.0, "recovery")
        first = job.incidents()[0]
        assert (first.world_size_before, first.world_size_after, first.steps_lost) == (3, 2, 0)
        assert first.timeline_s["stepping"] < 3.0
        eventually(lambda: len(job.incidents()) >= 2, 30.0, "growth")
        grown = job.incidents()[1]
        assert (grown.kind, grown.world_size_before, grown.world_size_after, grown.steps_lost) == ("planned", 2, 3, 0)


def test_bad_numbers_stop_the_job_by_default() -> None:
    with Job(nodes="1:1", args={"steps": 60, "fail": "1:20:nan"}) as job:
        state = eventually(lambda: (s := job.state()).phase.over and s, 40.0, "the end")
        assert state.phase is Phase.FAILED
        assert (state.reason.code, state.reason.values["ranks"]) == (Code.BAD_NUMBERS, "1")
        (incident,) = eventually(job.incidents, 10.0, "it stands among the incidents")
        assert (incident.kind, incident.world_size_after) == ("bad loss", 0)
        assert incident.causes[0].ranks == (1,)  # rank 0 may have had it too, a step later


@pytest.mark.long
def test_bad_numbers_roll_back_to_the_last_good_state(tmp_path: Path) -> None:
    spec = {"on_bad_numbers": "rollback", "checkpoint": {"dir": str(tmp_path), "every_steps": 10}}
    with Job(nodes="1:1", args={"steps": 80, "step-ms": 10, "fail": "1:45:nan"}, spec=spec) as job:
        job.wait_phase(Phase.SUCCEEDED)
        incident = next(i for i in job.incidents() if i.kind == "bad loss")
        assert incident.ranks == (1,)
        assert "snapshot" in incident.restored_from, "all shards are in this node's memory"
        assert incident.steps_lost is not None
        assert 0 < incident.steps_lost <= 30
        assert job.steps() == 80
