"""The account of each rank: every millisecond is in exactly one bucket, over failures and agents that are replaced."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import changed, generation, member, place, policy, view

from elastic.agent.reports.ledger import RankLedgers, left_behind
from elastic.contract.records.job_records import Phase, RankRow
from elastic.contract.records.ledger import Bucket
from elastic.contract.records.rank_records import RanksRecord, every_s
from elastic.contract.step_parts import StepParts
from elastic.contract.worker.beat import PAGE_BYTES, Beat, BeatPage, Doing
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.model import Agent, Worker
from elastic.recovery.observers.ledger_view import seen
from elasticd.diagnosis import goodput

POLICY = policy(nodes="2:2", slots=2)


def agent(*stages: Stage | None, slots: tuple[int, ...] = (0, 1), number: int = 2, **facts: object) -> Agent:
    """Node a with a worker in each of `stages`, of which `slots` have a rank in the generation."""
    formed = generation(number, [place("a", *slots), place("b", 0, 1)]) if number else None
    workers = {at: Worker(slot=at, worker_id=at + 1, stage=stage) for at, stage in enumerate(stages) if stage}
    picture = view(member("a"), member("b"), formed=formed, phase=facts.pop("phase", Phase.RUNNING))  # type: ignore[arg-type]
    return changed(changed(Agent(POLICY), view=picture, generation=formed, workers=workers), **facts)


def record(ledgers: RankLedgers, known: Agent) -> RanksRecord:
    return ledgers.record(known, lambda rank: (), {})


def played(*turns: tuple[Agent, int]) -> list[dict[str, int]]:
    """Of each slot bucket -> ms, after each of `turns`: what the agent was, and for how many ms."""
    ledgers, now_ms = RankLedgers(0), 0
    for known, lasted_ms in turns:
        ledgers.turned(known, seen(known), now_ms)
        now_ms += lasted_ms
    ledgers.turned(turns[-1][0], seen(turns[-1][0]), now_ms)
    rows = record(ledgers, turns[-1][0]).ranks
    return [{**row.ranks_ms, **({"open": row.open_ms} if row.open_ms else {})} for row in rows]


STAGES = st.sampled_from([None, *Stage])
AGENTS = st.builds(
    agent,
    STAGES,
    STAGES,
    slots=st.sampled_from([(0, 1), (0,), (1,), ()]),
    number=st.integers(0, 3),
    broken=st.integers(0, 3),
    below_min=st.booleans(),
    step=st.integers(0, 9),
    phase=st.sampled_from(Phase),
)
TURNS = st.lists(
    st.tuples(AGENTS, st.integers(-2_000, 90_000), st.floats(0, 3), st.booleans()), min_size=1, max_size=20
)


def page(saving_s: float) -> Beat:
    shown = BeatPage(memoryview(bytearray(PAGE_BYTES)))
    shown.clear(0.0)
    shown.write(Doing.SAVING, 0.0)
    shown.write(Doing.COMPUTING, saving_s)
    return shown.read()


@given(TURNS)
def test_every_millisecond_of_every_rank_is_in_exactly_one_bucket(
    turns: list[tuple[Agent, int, float, bool]],
) -> None:
    """Whatever the agent sees, however its clock goes, however long snapshots take, and if it is replaced."""
    began_ms = now_ms = 1_000_000
    ledgers, before = RankLedgers(began_ms), dict[int, dict[str, int]]()
    stalled_s = 0.0
    for known, passed_ms, stall_s, replaced in turns:
        now_ms += passed_ms
        stalled_s += stall_s
        ledgers.looked({1: page(stalled_s), 2: page(stalled_s / 2)})
        ledgers.turned(known, seen(known), now_ms)
        told = record(ledgers, known)
        assert {row.slot for row in told.ranks} == {0, 1}
        for row in told.ranks:
            assert sum(row.ranks_ms.values()) + row.open_ms == row.until_ms - row.since_ms
            assert row.since_ms == began_ms
            assert set(row.ranks_ms) <= set(Bucket)
            assert all(row.ranks_ms[name] >= spent for name, spent in before.get(row.slot, {}).items())
            shown = goodput.of_ranks({"a": told}, still=False)["a", row.slot]
            assert sum(shown.seconds.values()) + shown.open_seconds == pytest.approx(
                shown.until_wall_s - shown.since_wall_s
            )
        before = {row.slot: row.ranks_ms for row in told.ranks}
        if replaced:
            now_ms = max(now_ms, *(row.until_ms for row in told.ranks))
            ledgers = RankLedgers(now_ms, told)


STEPS = agent(Stage.RUNNING, Stage.RUNNING)
NODES = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.integers(0, 100_000), TURNS), min_size=1
)  # fmt: skip


@given(NODES, st.booleans())
def test_the_accounts_of_all_ranks_of_all_nodes_sum_to_the_time_of_all_ranks(
    nodes: dict[str, tuple[int, list[tuple[Agent, int, float, bool]]]], each: bool
) -> None:
    """Whenever the nodes' agents began and whatever they saw: 100 % of ranks times wall time, to the millisecond."""
    told = {}
    for name, (began_ms, turns) in nodes.items():
        ledgers, now_ms = RankLedgers(began_ms), began_ms
        for known, passed_ms, stall_s, _ in turns:
            now_ms += passed_ms
            ledgers.looked({1: page(stall_s)})
            ledgers.turned(known, seen(known), now_ms)
        now_ms = max(now_ms, began_ms)
        ledgers.turned(STEPS, seen(STEPS), now_ms + 3)  # within a step: nothing of it is in a bucket yet
        ledgers.turned(STEPS, seen(STEPS), now_ms + 7)
        told[name] = msgspec.structs.replace(record(ledgers, turns[-1][0]), node=name)
    lasted_ms = sum(row.until_ms - row.since_ms for one in told.values() for row in one.ranks)
    summed = goodput.summed(told, each=each, still=False)
    assert summed is not None
    in_buckets_ms = sum(round(spent_s * 1000) for spent_s in summed.rank_seconds.values())
    assert in_buckets_ms + round(summed.open_rank_seconds * 1000) == lasted_ms
    assert summed.ranks == 2 * len(nodes)
    assert summed.ranks * summed.wall_s == pytest.approx(lasted_ms / 1000) == summed.rank_wall_s
    assert summed.goodput + sum(summed.badput.values()) == pytest.approx(1)
    assert len(summed.accounts) == (summed.ranks if each else 0)
    for row in summed.accounts:
        lasted_s = row.until_wall_s - row.since_wall_s
        assert sum(row.seconds.values()) + row.open_seconds == pytest.approx(lasted_s)


def test_two_ranks_of_one_node_are_in_different_buckets() -> None:
    """The survivor leaves its group while the other one is started."""
    assert played(
        (agent(Stage.RUNNING, Stage.RUNNING), 100),
        (agent(Stage.ABORTING, Stage.STARTING, broken=2), 7),
        (agent(Stage.READY, Stage.STARTING, broken=2), 900),
        (agent(Stage.RUNNING, Stage.RUNNING, number=3), 50),
    ) == [{"detect": 100, "abort": 7, "form": 900, "open": 50}, {"detect": 100, "form": 907, "open": 50}]


def test_a_slot_without_a_rank_waits_for_one_and_is_idle_when_the_job_is_over() -> None:
    alone = agent(Stage.RUNNING, Stage.READY, slots=(0,), step=1)
    over = agent(Stage.RUNNING, Stage.READY, slots=(0,), phase=Phase.STOPPING)
    assert played((alone, 100), (over, 40)) == [{"idle": 140}, {"waiting": 100, "idle": 40}]


def test_the_exchange_of_state_of_one_rank_begins_when_its_own_group_stands() -> None:
    ledgers, forming = RankLedgers(0), agent(Stage.FORMING, Stage.FORMING)
    ledgers.turned(forming, seen(forming), 0)
    stands = msgspec.structs.replace(forming.local.workers[0], formed=2)
    forming = changed(forming, workers={**forming.local.workers, 0: stands})
    ledgers.turned(forming, seen(forming), 10)
    ledgers.turned(forming, seen(forming), 50)
    assert [row.ranks_ms for row in record(ledgers, forming).ranks] == [{"form": 10, "sync": 40}, {"form": 50}]


def test_an_agent_continues_the_account_of_its_predecessor_on_the_node(tmp_path: Path) -> None:
    first, runs = RankLedgers(1000), agent(Stage.RUNNING, Stage.RUNNING, step=3)
    first.turned(runs, seen(runs), 1000)
    first.turned(changed(runs, step=4), seen(changed(runs, step=4)), 1400)
    first.turned(changed(runs, step=4), seen(changed(runs, step=4)), 1500)
    told = record(first, runs)
    status = {"pid": 1, "incarnation": "", "job": "job", "node": "a", "phase": "", "reason": "", "leader": True,
              "generation": 1, "etcd_ok": True, "written_wall_s": 1.0, "submitted_wall_s": 0.5}  # fmt: skip
    assert left_behind(tmp_path, 0.5) is None
    (tmp_path / "status.json").write_text(json.dumps(status | {"rank_times": msgspec.to_builtins(told)}))
    before = left_behind(tmp_path, 0.5)
    assert before == told
    assert left_behind(tmp_path, 1.5) is None, "of an earlier job of the same name"
    second = RankLedgers(2500, before)
    second.turned(
        agent(Stage.STARTING, Stage.STARTING, broken=2), seen(agent(Stage.STARTING, Stage.STARTING, broken=2)), 2500
    )
    second.turned(
        agent(Stage.STARTING, Stage.STARTING, broken=2), seen(agent(Stage.STARTING, Stage.STARTING, broken=2)), 2600
    )
    row = record(second, runs).ranks[0]
    assert row.ranks_ms == {"stepping": 400, "detect": 100, "waiting": 1000, "form": 100}
    assert (row.since_ms, row.until_ms) == (1000, 2600)


def test_records_are_written_as_often_as_all_watchers_together_can_bear_and_sooner_with_news() -> None:
    assert (every_s(2), every_s(100), every_s(1000)) == (10.0, 10.0, 1000.0)
    ledgers, runs = RankLedgers(0), changed(agent(Stage.RUNNING, Stage.RUNNING), connected=True)
    asked = [
        (100.0, False),
        (105.0, False),
        (105.0, True),
        (106.0, True),
        (108.0, True),
        (117.0, False),
        (118.5, False),
    ]
    due = [ledgers.due(runs, now_s, last=False, news=news) for now_s, news in asked]
    assert due == [True, False, True, False, True, False, True]
    assert ledgers.due(runs, 119.0, last=True, news=False)
    assert not ledgers.due(agent(number=0), 200.0, last=True, news=False)


def test_the_account_carries_what_each_rank_does_for_screens_of_other_nodes() -> None:
    parts = StepParts(step_s=0.1, data_s=0, compute_s=None, collectives_s=None, optimizer_s=None, snapshot_s=0)
    row = RankRow(rank=0, node="a", slot=0, pid=7, phase="computing", step=4, incarnation=1, parts=parts)
    ledgers, known = RankLedgers(0), agent(Stage.RUNNING)
    ledgers.turned(known, seen(known), 5)
    (first, second) = ledgers.record(known, lambda rank: (), {}, (row,)).ranks
    assert first.row == msgspec.structs.replace(row, parts=None)
    assert second.row is None
