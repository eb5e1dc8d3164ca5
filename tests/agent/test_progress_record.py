"""The progress record: an agent whose workers hold no state yet repeats what is on record."""

from __future__ import annotations

import math

import msgspec
import pytest
from support.jobs import changed, generation, member, place, policy, view

from elastic.agent.reports.status import StepRate, progress, rank_rows
from elastic.checkpoint.saving.saver import SaveStatus
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import ProgressRecord, encode
from elastic.contract.worker.beat import PAGE_BYTES, BeatPage
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.facts.view import JobView
from elastic.recovery.machine.model import Agent, Worker

ON_RECORD = ProgressRecord(
    generation=2, world_size=2, step=50, steps_per_s=10.0, loss=0.25, wall_s=1.0, checkpoint_step=40,
    checkpoint_wall_s=0.5, checkpoint_interval="every 20 steps",
)  # fmt: skip


class Reporting:
    """A worker's process whose beat page shows `loss`."""

    pid = 0

    def __init__(self, loss: float) -> None:
        self.page = BeatPage(memoryview(bytearray(PAGE_BYTES)))
        self.page.committed(51, 0.1, loss, 1.0)


class NoPool:
    def __init__(self) -> None:
        self.processes: dict[int, object] = {}


def recorded(
    stage: Stage, *, in_generation: int, step: int, loss: float | None = None, saved: SaveStatus | None = None
) -> ProgressRecord:
    """What the agent of node b, with one worker, writes where ON_RECORD stands."""
    formed = generation(3, [place("a"), place("b")])
    job_view = view(member("b"), formed=formed, saved_step=40, saved_generation=2)
    object.__setattr__(job_view, "progress", ON_RECORD)
    worker = Worker(slot=0, worker_id=1, stage=stage, generation=in_generation, step=step)
    agent = changed(Agent(policy("b", nodes="1:2")), view=job_view, generation=formed, workers={0: worker})
    step_rate, pool = StepRate(), NoPool()
    step_rate.loss = loss
    return progress(agent, pool, step_rate, rank_rows(agent, pool), saved or SaveStatus())  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.READY, Stage.FORMING])
def test_an_agent_that_joined_late_does_not_set_the_record_back(stage: Stage) -> None:
    written = recorded(stage, in_generation=0, step=0)
    assert (written.step, written.loss) == (50, 0.25)
    assert (written.checkpoint_step, written.checkpoint_wall_s) == (40, 0.5)
    assert written.checkpoint_interval == "every 20 steps"


@pytest.mark.parametrize(("own_generation", "step", "shown"), [(1, 100, (2, 40)), (2, 20, (2, 40)), (3, 30, (3, 30))])
def test_the_newest_checkpoint_is_that_of_the_newest_generation(
    own_generation: int, step: int, shown: tuple[int, int]
) -> None:
    """Another leader has saved since this agent did, perhaps after the job went back."""
    own = SaveStatus(step=step, generation=own_generation, wall_s=9.0)
    written = recorded(Stage.RUNNING, in_generation=3, step=52, saved=own)
    assert (written.checkpoint_generation, written.checkpoint_step) == shown
    assert written.checkpoint_wall_s == (9.0 if shown[0] == 3 else 0.5)


def test_progress_record_reports_step_restored_from_checkpoint() -> None:
    assert recorded(Stage.RUNNING, in_generation=3, step=40).step == 40


def test_progress_record_keeps_survivor_step_while_forming() -> None:
    written = recorded(Stage.FORMING, in_generation=3, step=52, loss=0.125)
    assert (written.step, written.loss) == (52, 0.125)


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "shown"), [(0.5, 0.75, 0.5), (math.nan, 0.75, 0.25), (math.inf, 0.75, math.inf)]
)
def test_the_loss_is_that_of_the_lowest_rank_whichever_slot_has_it(
    of_rank_0: float, of_rank_1: float, shown: float
) -> None:
    """As long as that rank has reported none, the last one stays, and no other rank's is shown for it."""
    formed = generation(3, [place("a", 1, 0)])  # slot 1 has survived, and has rank 0
    workers = {
        slot: Worker(slot=slot, worker_id=slot + 7, stage=Stage.RUNNING, generation=3, step=51) for slot in (0, 1)
    }
    agent = changed(
        Agent(policy("a", slots=2)), view=view(member("a"), formed=formed), generation=formed, workers=workers
    )
    step_rate, pool = StepRate(), NoPool()
    step_rate.loss = 0.25
    pool.processes = {7: Reporting(loss=of_rank_1), 8: Reporting(loss=of_rank_0)}
    written = progress(agent, pool, step_rate, rank_rows(agent, pool), SaveStatus())  # type: ignore[arg-type]
    assert (written.step, written.loss) == (51, shown)


def test_a_loss_that_becomes_nan_is_not_shown_as_the_last_finite_one() -> None:
    """On its page a worker that has reported none has NaN, too."""
    step_rate = StepRate()
    step_rate.show(0.5, 7)
    step_rate.show(math.nan, 8)
    assert step_rate.loss == 0.5, "worker 8 has just started"
    step_rate.show(0.25, 8)
    step_rate.show(math.nan, 8)
    assert step_rate.loss is not None
    assert math.isnan(step_rate.loss)


def test_the_view_carries_the_progress_record() -> None:
    keys = ClusterKeys("c").job("job")

    class Stored(msgspec.Struct):
        value: bytes
        create_revision: int = 1
        mod_revision: int = 1

    assert JobView.read(keys, {keys.progress: Stored(encode(ON_RECORD))}, 1).progress == ON_RECORD


@pytest.mark.parametrize(
    ("step", "generation", "then"),
    [
        (0, 0, 8),  # it has just begun: importing and forming are no part of its rate
        (0, 0, 73_328),  # it has joined a job that runs
        (30, 1, 73_328),  # it was left out for a while
        (73_328, 2, 40),  # the job went back to a checkpoint
    ],
)
def test_the_rate_is_of_steps_that_were_made(step: int, generation: int, then: int) -> None:
    step_rate = StepRate()
    for tenth in range(90):
        step_rate.mark(step, generation, tenth / 10)
    rates = []
    for tenth in range(100):
        step_rate.mark(then + tenth // 2, 3, 9.0 + tenth / 10)
        rates.append(step_rate.per_s())
    assert rates[0] == 0.0
    assert max(rates) == pytest.approx(5.0)
    assert rates[-1] == pytest.approx(5.0, rel=0.02)


def test_why_an_agent_leaves_is_not_what_its_job_waits_for() -> None:
    """The job trains elsewhere; "waiting for: left: drained by root" was the leader's last word."""
    formed = generation(3, [place("a"), place("b")])
    agent = changed(Agent(policy("b", nodes="1:2")), view=view(member("b"), formed=formed), generation=formed)
    gone = changed(agent, leaving="drained by root", reason="left: drained by root")
    pool = NoPool()
    assert progress(gone, pool, StepRate(), (), SaveStatus()).waiting_for == ""  # type: ignore[arg-type]
    waits = changed(agent, reason="1 of 2 nodes")
    assert progress(waits, pool, StepRate(), (), SaveStatus()).waiting_for == "1 of 2 nodes"  # type: ignore[arg-type]
