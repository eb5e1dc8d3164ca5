"""Generations that break before their first step, by a failed collective: they are paid for, and come ever slower."""

from __future__ import annotations

import msgspec

from elastic.contract.job.spec import Restarts
from elastic.contract.records.job_records import BrokenRecord, JobState, Phase
from elastic.contract.records.reasons import Code, codes, reason
from elastic.recovery.facts.restart_budget import COMM, STORE, charge, failed_formations_in_a_row

RULES = Restarts(budget=4)


def broken(generation: int, kind: str = COMM, charged: bool = True, step: int = 0) -> BrokenRecord:
    return BrokenRecord(generation=generation, node="n1", kind=kind, detail=f"{kind}!", charged=charged, step=step)


def booked(*records: BrokenRecord, other_nodes: int = 3) -> JobState:
    state = JobState(phase=Phase.RUNNING)
    for record in records:
        state = charge(state, record, RULES, 100.0, other_nodes).state
    return state


def test_futile_generations_count_only_in_a_row() -> None:
    assert failed_formations_in_a_row(JobState(), None) == 0
    assert failed_formations_in_a_row(JobState(), broken(1, kind="exit")) == 0
    assert failed_formations_in_a_row(booked(broken(1)), broken(2, charged=False)) == 0  # it had made steps
    assert failed_formations_in_a_row(JobState(), broken(1)) == 1
    assert failed_formations_in_a_row(booked(broken(1), broken(2)), broken(3)) == 3
    assert (
        failed_formations_in_a_row(booked(broken(1), broken(2), broken(3)), broken(3)) == 3
    )  # charged, and still there
    assert failed_formations_in_a_row(booked(broken(1), broken(3, kind="exit")), broken(4)) == 1
    assert failed_formations_in_a_row(booked(broken(1)), broken(9)) == 1  # those between made steps
    assert failed_formations_in_a_row(booked(broken(1), broken(3)), broken(5)) == 3  # etcd lost its data in between


def test_node_reporting_a_failed_collective_is_not_excluded_for_it() -> None:
    assert booked(*(broken(i) for i in range(1, 5))).excluded_nodes == ()
    assert booked(*(broken(i, kind="hang") for i in range(1, 5))).excluded_nodes == ("n1",)


def test_futile_generations_exhaust_the_budget_with_the_error_text() -> None:
    verdict = charge(booked(*(broken(i) for i in range(1, 5))), broken(5), RULES, 100.0, 3)
    assert verdict.state.phase is Phase.FAILED
    assert verdict.stopped == reason(Code.OVER_BUDGET, "comm!", count=5, window_s=RULES.window_s, budget=RULES.budget)


def test_a_job_that_has_stepped_outlives_its_network() -> None:
    state = booked(*(broken(i, step=40) for i in range(1, 50)))
    assert state.phase is Phase.RUNNING
    assert failed_formations_in_a_row(state, broken(50, step=40)) == 50, "it is tried ever slower"
    others = booked(*(broken(i, kind="exit") for i in range(1, 5)), *(broken(i, step=40) for i in range(5, 50)))
    assert others.phase is Phase.RUNNING, "what the network did is not counted with the rest"


def test_an_attack_on_the_store_is_no_fault_of_a_node_nor_of_a_job_that_has_stepped() -> None:
    state = booked(*(broken(i, kind=STORE, step=40) for i in range(1, 50)))
    assert (state.phase, state.excluded_nodes) == (Phase.RUNNING, ())
    assert failed_formations_in_a_row(state, broken(50, kind=STORE, step=40)) == 50, "it is tried ever slower"
    verdict = charge(booked(*(broken(i, kind=STORE) for i in range(1, 5))), broken(5, kind=STORE), RULES, 100.0, 3)
    assert codes(verdict.stopped) == {Code.OVER_BUDGET}, "one that has never stepped ends by its budget"


def test_uncharged_futile_generation_leaves_the_state_unchanged() -> None:
    same = charge(JobState(), msgspec.structs.replace(broken(1), charged=False), RULES, 100.0, 3)
    assert same.state == JobState()
