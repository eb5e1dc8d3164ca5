"""The ledger as an agent keeps it: what its stages mean, and how it goes from one agent to the next."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import time

import msgspec
import pytest
from support.jobs import changed, generation, member, place, policy, view

from elastic.agent.reports.ledger import TURNS, LedgerKeeper
from elastic.contract.records.job_records import Phase, ProgressRecord
from elastic.contract.records.ledger import Bucket, Ledger
from elastic.contract.worker.beat import PAGE_BYTES, Beat, BeatPage, Doing
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.model import Agent, Worker
from elastic.recovery.observers.ledger_view import seen


def agent(*stages: Stage, number: int = 2, node: str = "a", group: int = 0, **facts: object) -> Agent:
    """Of node a, with a worker in each of `stages`, whose newest group is `group`; its job has nodes a and b."""
    formed = generation(number, [place("a", 0, 1), place("b", 0, 1)]) if number else None
    workers = {
        slot: Worker(slot=slot, worker_id=slot + 1, stage=stage, formed=group) for slot, stage in enumerate(stages)
    }
    return changed(
        changed(
            Agent(policy(node, nodes="2:2", slots=2)),
            view=view(member("a"), member("b"), formed=formed),
            generation=formed,
            workers=workers,
        ),
        **facts,
    )


@pytest.mark.parametrize(
    ("seen_agent", "bucket"),
    [
        (agent(Stage.STARTING, number=0), Bucket.SETUP),
        (agent(Stage.FORMING, number=1), Bucket.SETUP),
        (agent(Stage.RUNNING, number=1), Bucket.STEPPING),
        (agent(Stage.RUNNING, Stage.STOPPING_AT_STEP), Bucket.STEPPING),
        (agent(Stage.ABORTING, Stage.READY, broken=2), Bucket.ABORT),
        (agent(Stage.READY, Stage.STARTING, broken=2), Bucket.FORM),
        (agent(Stage.FORMING, Stage.STARTING), Bucket.FORM),
        (agent(Stage.DONE, Stage.DONE), Bucket.IDLE),
        (agent(Stage.RUNNING, Stage.DONE), Bucket.STEPPING),
        (agent(Stage.READY, broken=2, below_min=True), Bucket.WAITING),
        (agent(Stage.READY, node="c"), Bucket.FORM),
    ],
)
def test_what_a_job_does_follows_from_the_stages_of_the_workers(seen_agent: Agent, bucket: Bucket) -> None:
    assert seen(seen_agent).bucket is bucket


def test_the_last_steps_are_those_of_the_workers_that_are_done() -> None:
    done = agent(Stage.DONE, step=8)
    last = msgspec.structs.replace(done.local.workers[0], step=10)
    assert seen(changed(done, workers={0: last})).step == 10


def test_an_agent_knows_when_its_process_began() -> None:
    with subprocess.Popen([sys.executable, "-c", READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        began_s = time.time()
        assert child.stdin is not None
        child.stdin.write(b"x")
        told, _ = child.communicate(timeout=60)
    assert float(told) <= began_s + 0.02


READ = "import sys; sys.stdin.read(1); from elastic.agent.reports.ledger import began_wall_s; print(began_wall_s())"


def test_a_formed_group_exchanges_its_state_until_the_workers_run() -> None:
    assert seen(agent(Stage.FORMING, group=2)).bucket is Bucket.SYNC
    assert seen(agent(Stage.RUNNING, group=2)).bucket is Bucket.STEPPING


def test_a_job_without_its_nodes_waits_for_them_and_needs_so_many_ranks() -> None:
    alone = changed(agent(Stage.READY, number=0), view=view(member("a")))
    assert seen(alone).bucket is Bucket.WAITING
    assert seen(alone).ranks == 4
    both = changed(agent(Stage.READY, number=0), view=view(member("b")))
    assert seen(both).bucket is Bucket.SETUP, "this node has not seen its own key yet"


def test_the_ranks_of_a_job_that_is_over_are_idle() -> None:
    over = agent(Stage.RUNNING)
    stopping = view(member("a"), formed=over.formed.generation, phase=Phase.STOPPING)
    assert seen(changed(over, view=stopping)).bucket is Bucket.IDLE


def begun_now(submitted_ago_s: float = 0.0, started_ago_s: float = 0.0) -> tuple[LedgerKeeper, float]:
    """A keeper, and the monotonic instant from which these times count, whatever this process has waited for since."""
    now_s = time.monotonic()
    wall_s = now_s + (time.time() - time.monotonic())
    return LedgerKeeper(wall_s - submitted_ago_s, wall_s - started_ago_s), now_s


def with_ledger(known: Agent, ledger: Ledger, stepped_in: int = 0) -> Agent:
    job_view = view(member("a"), member("b"), formed=known.formed.generation)
    progress = ProgressRecord(
        generation=2, world_size=4, step=9, steps_per_s=1.0, loss=None, wall_s=1.0, ledger=ledger, stepped_in=stepped_in
    )
    object.__setattr__(job_view, "progress", progress)
    return changed(known, view=job_view)


def test_a_keeper_counts_from_the_submission_of_the_job_on() -> None:
    keeper, now_s = begun_now(100, 30)
    keeper.turned(agent(Stage.STARTING, number=0), now_s)
    ledger = keeper.published(agent(Stage.RUNNING))
    assert ledger.ranks_ms == pytest.approx({"waiting": 280_000, "setup": 120_000}, abs=20_000)
    assert ledger.by == "a.1"


def test_a_keeper_continues_the_ledger_of_the_leader_and_not_its_own_as_etcd_shows_it() -> None:
    now_s, runs = time.monotonic(), agent(Stage.RUNNING, step=9)
    until_ms = int(time.time() * 1000)
    theirs = Ledger(until_ms=until_ms, ranks_ms={"stepping": 5_000_000}, wall_ms=1_250_000, step=9, by="b.1")
    keeper = LedgerKeeper(time.time(), 0.0)
    keeper.turned(with_ledger(runs, theirs), now_s + 1)
    keeper.turned(with_ledger(changed(runs, step=10), theirs), now_s + 2)
    ours = keeper.published(runs)
    assert ours.ranks_ms["stepping"] == pytest.approx(5_008_000, abs=500), "two seconds of four ranks"
    old = msgspec.structs.replace(theirs, ranks_ms={}, by="a.1")
    keeper.turned(with_ledger(runs, old), now_s + 3)
    assert keeper.published(runs).ranks_ms["stepping"] >= ours.ranks_ms["stepping"]


def test_steps_that_the_leader_has_seen_sooner_are_no_repetition() -> None:
    """Its record, with step 9, comes before this agent has looked at its own workers again."""
    keeper, now_s = begun_now()
    runs = agent(Stage.RUNNING, step=7, settled=2)
    theirs = Ledger(until_ms=int(time.time() * 1000), step=9, by="b.1")
    for at_s, step in ((0.0, 7), (0.1, 8), (0.2, 10)):
        known = with_ledger(changed(runs, step=step), theirs, stepped_in=2)
        keeper.turned(known if at_s else runs, now_s + 1 + at_s)
    assert "redo" not in keeper.published(runs).ranks_ms


def test_the_time_in_which_no_agent_ran_was_spent_waiting() -> None:
    theirs = Ledger(until_ms=int(time.time() * 1000) - 100_000, step=9, by="b.1")
    keeper, now_s = begun_now(500, 10)
    forming = agent(Stage.FORMING)
    keeper.turned(forming, now_s)
    keeper.turned(with_ledger(forming, theirs), now_s)
    keeper.turned(with_ledger(forming, theirs), now_s)
    assert keeper.published(forming).ranks_ms == pytest.approx({"waiting": 360_000, "form": 40_000}, abs=4_000)


def test_a_keeper_books_the_mean_of_what_its_workers_stood_still_for_a_snapshot() -> None:
    def beat(saving_s: float, stall_s: float) -> Beat:
        page = BeatPage(memoryview(bytearray(PAGE_BYTES)))
        page.clear(0.0)
        page.write(Doing.SAVING, 0.0)
        page.write(Doing.COMPUTING, saving_s)
        page.waited(stall_s=stall_s)
        return page.read()

    keeper, now_s = begun_now()
    keeper.turned(agent(Stage.RUNNING, step=3), now_s)
    keeper.looked({1: beat(0.2, 0.1), 2: beat(0.1, 0.0)})
    keeper.turned(agent(Stage.RUNNING, step=4), now_s + 1)
    booked = keeper.published(agent(Stage.RUNNING)).ranks_ms
    assert (booked.keys(), booked["checkpoint"]) == ({"checkpoint", "stepping"}, 800)
    assert booked["stepping"] == pytest.approx(3200, abs=8)


def test_the_exchange_of_state_begins_when_a_worker_reports_its_group() -> None:
    keeper, now_s = begun_now()
    forming = agent(Stage.FORMING)
    keeper.turned(forming, now_s)
    keeper.turned(agent(Stage.FORMING, group=2), now_s + 1)
    keeper.turned(agent(Stage.FORMING, group=2), now_s + 3)
    booked = keeper.published(forming).ranks_ms
    assert (booked["form"], booked["sync"]) == (pytest.approx(4000, abs=8), pytest.approx(8000, abs=8))


def test_turns_that_are_booked_later_come_out_as_if_booked_at_once() -> None:
    (later, now_s), chance = begun_now(), random.Random(7)
    at_once = copy.deepcopy(later)
    stages = [Stage.RUNNING, Stage.ABORTING, Stage.READY, Stage.FORMING]
    for turn in range(3 * TURNS + 1):
        known = agent(chance.choice(stages), step=turn // 5, broken=chance.choice([0, 2]))
        for keeper in (later, at_once):
            keeper.turned(known, now_s + turn)
        at_once.published(known)
    assert later.published(known) == at_once.published(known)
    rows = [keeper.ranks.record(known, lambda rank: (), {}).ranks for keeper in (later, at_once)]
    assert rows[0] == rows[1]
    assert sum(rows[0][0].ranks_ms.values()) >= 3000 * TURNS - 3000
