"""What status says while a job makes no step, and what an agent keeps of what the others tell it."""

from __future__ import annotations

import types
from typing import Any

import pytest
from msgspec.structs import replace
from support.jobs import changed, generation, member, place, policy, view

from elastic.agent.hangs.standstill import Others, with_stillness
from elastic.contract.job.spec import Hang
from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import BrokenRecord, JobState, MemberRecord, Phase, ProgressRecord
from elastic.contract.records.reasons import Code, reason
from elastic.contract.records.standings import Standing, Stillness
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.hangs.stillness import StillRank
from elastic.recovery.machine.model import Agent, Worker

RULES = Hang(floor_s=2.0, ceiling_s=60.0, factor=10.0)
RECORD = ProgressRecord(generation=1, world_size=2, step=40, steps_per_s=0.0, loss=None, wall_s=1000.0)
AT_S, WALL_S = 500.0, 1000.0
"""The last step in these tests was at AT_S."""


def agent(**facts: Any) -> Agent:
    formed = generation(1, [place("a"), place("b")])
    worker = Worker(slot=0, worker_id=1, stage=Stage.RUNNING, generation=1, step=40)
    made = changed(
        Agent(policy(nodes="2:2")), view=view(member("a"), member("b"), formed=formed), generation=formed,
        workers={0: worker}, step=40, step_s=0.3, stepped_at_s=AT_S, formed_at_s=AT_S - 100.0,
    )  # fmt: skip
    return changed(made, **facts)


def standing(rank: int, doing: str, place_: int, **more: bool) -> Standing:
    return Standing(rank=rank, position=(1, 40, place_), doing=doing, silent_s=3.0, waits=doing == "exchanging", **more)


KNOWN = (StillRank("a", standing(0, "exchanging", 2), AT_S), StillRank("b", standing(1, "computing", 0), AT_S))


def progress_after(made: Agent, after_s: float, known: tuple[StillRank, ...] = KNOWN) -> ProgressRecord:
    return with_stillness(RECORD, made, known, RULES, AT_S + after_s, WALL_S + after_s)


def test_ten_step_times_without_a_step_are_said_with_the_rank_and_the_reason() -> None:
    assert progress_after(agent(), 2.9) == RECORD
    record = progress_after(agent(), 3.1)
    why = reason(Code.DOES_NOT_WAIT, doing="computing", place="step 41", furthest="step 41")
    assert record.still == Stillness(WALL_S, why, rank=1, node="b")


def test_standstill_record_keeps_known_waiting_reason() -> None:
    record = with_stillness(replace(RECORD, waiting_for="as it was"), agent(), KNOWN, RULES, AT_S + 9.0, WALL_S + 9.0)
    assert record.waiting_for == "as it was"
    assert record.still is not None


def test_a_declared_span_is_nothing_that_is_waited_for() -> None:
    quiet = StillRank("b", standing(1, "quiet", 0, quiet=True), AT_S)
    record = progress_after(agent(), 9.0, (KNOWN[0], quiet))
    assert record.still is not None
    assert record.still.declared
    assert record.waiting_for == ""


def test_before_the_first_step_of_a_job_there_is_more_time() -> None:
    fresh = agent(step_s=0.0, stepped_at_s=float("-inf"), formed_at_s=AT_S)
    assert progress_after(fresh, 29.0).still is None
    still = progress_after(fresh, 31.0).still
    assert still is not None
    assert still.since_wall_s == WALL_S


def test_a_generation_that_is_broken_and_not_followed_by_another_is_the_reason() -> None:
    broken = BrokenRecord(generation=1, node="b", kind="exit", detail="killed by SIGKILL")
    still = progress_after(agent(broken=1, broken_record=broken), 9.0).still
    assert still is not None
    assert still.because == reason(Code.NOT_FORMED, "killed by SIGKILL", number=1)


@pytest.mark.parametrize(
    "over",
    [
        {"leaving": "stopped"},
        {"generation": None},
        {"workers": {0: Worker(slot=0, worker_id=1, stage=Stage.DONE, generation=1)}},
    ],
)
def test_a_job_that_is_over_here_does_not_stand_still(over: dict[str, Any]) -> None:
    assert progress_after(agent(**over), 100.0) == RECORD


def test_agent_without_a_rank_repeats_the_standstill_on_record() -> None:
    made = agent(generation=generation(1, [place("b"), place("c")]))
    assert progress_after(made, 100.0) == RECORD
    still = Stillness(since_wall_s=7.0, because="x")
    object.__setattr__(made.etcd.view, "progress", replace(RECORD, still=still))
    assert progress_after(made, 100.0).still == still


def test_standing_from_another_agent_is_timed_from_first_sight() -> None:
    others = Others()
    first, second = standing(1, "exchanging", 2), standing(2, "computing", 0)

    def seen(now_s: float, *standings: Standing) -> list[float]:
        record = MemberRecord(node="b", incarnation="i", host="h", port=1, slots=2, standings=standings)
        job_view = types.SimpleNamespace(has_all_members=True, members={"b": Member(record, 1)})
        looks: Any = types.SimpleNamespace(
            etcd=types.SimpleNamespace(view=job_view), policy=types.SimpleNamespace(node="a")
        )
        return [known.since_s for known in others.known(looks, now_s)]

    assert seen(100.0, first) == [97.0]
    assert seen(105.0, first, second) == [97.0, 102.0]
    assert seen(106.0) == []


def test_a_phase_that_is_over_is_no_standstill() -> None:
    made = agent()
    object.__setattr__(made.etcd.view, "state", JobState(phase=Phase.SUCCEEDED))
    assert progress_after(made, 100.0) == RECORD
