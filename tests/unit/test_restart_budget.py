"""How often a job may fail: the budget's edge, its window, crash loops, bad nodes, pauses."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.contract.job.spec import Restarts
from elastic.contract.records.job_records import BrokenRecord, JobState, Loss, Phase, WorkerError
from elastic.contract.records.reasons import Code, Text, codes, reason
from elastic.recovery.facts.restart_budget import BAD_NODE_FAILURES, Charge, backoff_s, charge

MANY = Restarts(budget=10, window_s=100.0, same_failure=3)
RULES = Restarts(budget=3, window_s=100.0, same_failure=3, backoff_s=0.5, backoff_max_s=30.0)


def broken(
    fingerprint: str = "signal SIGKILL",
    *,
    node: str = "a",
    step: int | None = 7,
    bug: bool = False,
    charged: bool = True,
    generation: int = 1,
) -> BrokenRecord:
    error = (
        WorkerError(
            node=node, slot=0, rank=0, message="ValueError: planted", step=step, no_state=fingerprint == LACKING
        )
        if bug
        else None
    )
    return BrokenRecord(
        generation=generation, node=node, kind="exit", detail="planted", fingerprint=fingerprint, step=step,
        charged=charged, error=error,
    )  # fmt: skip


def book(
    *failures: tuple[float, BrokenRecord], rules: Restarts = RULES, spare: int | None = 1
) -> tuple[JobState, Text]:
    """The state after `failures`, each at its wall time, and why the job is stopped."""
    state, stopped = JobState(phase=Phase.RUNNING), ""
    for wall_s, record in failures:
        verdict = charge(state, record, rules, wall_s, spare)
        state, stopped = verdict.state, verdict.stopped
    return state, stopped


def test_just_the_budget_is_allowed() -> None:
    state, stopped = book(*((float(i), broken(step=i)) for i in range(3)))
    assert not stopped
    assert (state.phase, state.restarts) == (Phase.RUNNING, 3)


def test_restart_budget_exceeded_by_one_fails_the_job_and_states_the_budget() -> None:
    state, stopped = book(*((float(i), broken(step=i)) for i in range(4)))
    assert stopped == reason(Code.OVER_BUDGET, "planted", count=4, window_s=100.0, budget=3)
    assert (state.phase, state.reason) == (Phase.FAILED, stopped)


def test_a_budget_of_nothing_allows_nothing() -> None:
    _, stopped = book((0.0, broken()), rules=Restarts(budget=0))
    assert stopped


def test_failure_leaves_the_budget_window_at_its_age_limit() -> None:
    four = [(0.0, broken(step=1)), (1.0, broken(step=2)), (2.0, broken(step=3))]
    assert book(*four, (99.9, broken(step=4)))[1]
    state, stopped = book(*four, (100.0, broken(step=4)))
    assert not stopped
    assert [f.wall_s for f in state.failures] == [1.0, 2.0, 100.0]
    assert state.restarts == 4, "the job's whole life is counted all the same"


def test_a_clock_that_goes_back_a_little_forgets_nothing() -> None:
    state, _ = book((50.0, broken(step=1)), (47.0, broken(step=2)))
    assert len(state.failures) == 2


def test_a_large_budget_is_a_budget_too() -> None:
    rules = Restarts(budget=300)
    many = [(float(i), broken(step=i)) for i in range(301)]
    assert not book(*many[:-1], rules=rules)[1]
    assert book(*many, rules=rules)[1]


def test_uncharged_failure_leaves_the_job_state_unchanged() -> None:
    before, _ = book((0.0, broken()))
    verdict = charge(before, broken(charged=False), RULES, 1.0, 1)
    assert verdict.state is before
    assert not verdict.stopped


def test_the_same_exception_at_the_same_step_is_a_crash_loop() -> None:
    loop = [(float(i), broken("ValueError at train.py:7", bug=True)) for i in range(3)]
    assert not book(*loop[:2], rules=Restarts())[1]
    assert book(*loop, rules=Restarts())[1] == reason(Code.CRASH_LOOP, "planted", where="at step 7", count=3)


def test_what_elastic_refuses_ends_the_job_at_the_first_time() -> None:
    record = broken("MisuseRuntimeError at train.py:7", bug=True)
    refused = msgspec.structs.replace(record, error=msgspec.structs.replace(record.error, misuse=True))
    state, stopped = book((0.0, refused))
    assert stopped == reason(Code.MISUSE, "planted")
    assert (state.phase, state.restarts) == (Phase.FAILED, 1)
    assert not book((0.0, msgspec.structs.replace(refused, charged=False)))[1]


def test_the_same_exception_at_other_steps_is_none() -> None:
    assert not book(*((float(i), broken("E", bug=True, step=i)) for i in range(9)), rules=Restarts())[1]


def test_the_same_exception_after_each_single_step_is_one() -> None:
    """What is refused after a commit: each generation would get one step further, for as long as the budget lasts."""
    crawl = [(float(i), broken("E", bug=True, step=i + 1, generation=i + 1)) for i in range(3)]
    assert not book(*crawl[:2])[1]
    assert book(*crawl)[1] == reason(Code.CRASH_LOOP, "planted", where="after each step", count=3)
    walk = [(float(i), broken("E", bug=True, step=2 * i + 1, generation=i + 1)) for i in range(9)]
    assert not book(*walk, rules=Restarts())[1]
    apart = [(float(i), broken("E", bug=True, step=i + 1, generation=9 * i + 1)) for i in range(9)]
    assert not book(*apart, rules=Restarts())[1]


def test_the_same_signal_at_the_same_step_is_none() -> None:
    """Nobody's script is to blame for SIGKILL: the budget alone ends that."""
    assert not book(*((float(i), broken()) for i in range(9)), rules=Restarts())[1]


ABORTED, ENDED = "SIGABRT", "exited"


@pytest.mark.parametrize("fingerprint", [ABORTED, ENDED])
def test_the_same_end_by_itself_at_the_same_step_three_times_in_a_row_is_a_crash_loop(fingerprint: str) -> None:
    ends = [(float(i), broken(fingerprint, node="ab"[i % 2])) for i in range(3)]
    assert book(*ends[:2])[1] == ""
    assert book(*ends)[1] == reason(Code.ENDS_ALIKE, "planted", where="at step 7", count=3)
    assert book(*ends[:2], (2.0, broken(fingerprint, step=8)))[1] == "", "at another step"
    assert book(*ends[:2], (2.0, broken("SIGKILL")))[1] == ""
    assert book(ends[0], (0.5, broken("SIGKILL")), *ends[1:2], rules=MANY)[1] == "", "not in a row"


@pytest.mark.parametrize("fingerprint", ["SIGKILL", "SIGTERM", "SIGBUS", "hang"])
def test_what_comes_from_outside_is_no_crash_loop_though_it_comes_at_the_same_step(fingerprint: str) -> None:
    assert book(*((float(i), broken(fingerprint)) for i in range(5)), rules=MANY)[1] == ""


def test_ends_of_one_node_exclude_it_before_they_stop_the_job() -> None:
    on_one = [(float(i), broken(ABORTED)) for i in range(3)]
    state, stopped = book(*on_one, rules=MANY, spare=1)
    assert (stopped, state.excluded_nodes) == ("", ("a",))
    four = reason(Code.ENDS_ALIKE, "planted", where="at step 7", count=4)
    assert book(*on_one, (3.0, broken(ABORTED, node="b")), rules=MANY, spare=1)[1] == four
    assert codes(book(*on_one, rules=MANY, spare=0)[1]) == {Code.ENDS_ALIKE}, "there is no other node"


def test_crash_loop_of_aborts_names_what_the_library_has_said() -> None:
    lines = (
        "warning: old",
        "  what():  [enforce fail at pair.cc] 352 vs 320",
        "Fatal Python error: Aborted",
        "Thread 1",
    )
    aborted = msgspec.structs.replace(broken(ABORTED), last_lines=lines)
    stopped = book(*((float(i), aborted) for i in range(3)), spare=0)[1]
    assert stopped.because == ("planted", "what():  [enforce fail at pair.cc] 352 vs 320")


def test_crash_loop_is_detected_before_the_first_step() -> None:
    loop = [(float(i), broken("E at setup", bug=True, step=None)) for i in range(3)]
    assert codes(book(*loop, rules=Restarts())[1]) == {Code.CRASH_LOOP}


def test_a_replacement_that_cannot_start_ends_no_job_whose_state_lives() -> None:
    """The data folder is gone, say: survivors wait with their state until it is back."""

    def last(
        *, survives: bool, step: int | None = 0, stepped: bool | None = True, fingerprint: str = "E at setup"
    ) -> Charge:
        state = JobState(phase=Phase.RUNNING)
        for number in range(1, 30):
            record = broken(fingerprint, bug=True, step=step, generation=number)
            verdict = charge(state, record, RULES, float(number), 1, stepped=stepped, survives=survives)
            state = verdict.state
        return verdict

    waits = last(survives=True)
    assert not waits.stopped
    assert (waits.state.phase, waits.state.restarts) == (Phase.RUNNING, 29)
    assert last(survives=False).state.phase is Phase.FAILED, "nobody holds anything"
    assert last(survives=True, step=7).state.phase is Phase.FAILED, "the script's own, at a step"
    assert last(survives=True, stepped=False).state.phase is Phase.FAILED, "nothing is lost"
    assert last(survives=True, fingerprint=LACKING).state.phase is Phase.FAILED, "they live, and hold nothing"


def test_setup_failing_in_each_worker_of_a_node_is_charged_once_per_try() -> None:
    """One after the other, each in a generation of its own; and a job that never gets further is stopped."""
    tries = [
        msgspec.structs.replace(broken("LookupError", step=None, bug=True, generation=number + 1), slots=(number % 3,))
        for number in range(9)
    ]
    state, stopped = book(*((float(i), record) for i, record in enumerate(tries[:6])))
    assert (state.restarts, stopped) == (2, "")
    state, stopped = book(*((float(i), record) for i, record in enumerate(tries[:7])))
    assert state.restarts == 3
    assert stopped == reason(Code.CRASH_LOOP, "planted", where="before the first step", count=3)
    other = msgspec.structs.replace(tries[1], node="b")
    assert book((0.0, tries[0]), (1.0, other))[0].restarts == 2
    later = [msgspec.structs.replace(record, step=4) for record in tries[:3]]
    assert book(*((float(i), record) for i, record in enumerate(later)))[0].restarts == 3


@pytest.mark.parametrize(
    "order",
    [(0, 1, 2, 0, 1, 2), (0, 0, 1, 1, 2, 2), (0, 0, 2, 1, 2, 1), (1, 0, 1, 2, 0, 2)],
)
def test_a_try_of_setup_is_charged_once_whichever_worker_is_quick(order: tuple[int, ...]) -> None:
    planted = broken("LookupError", step=None, bug=True)
    tries = [msgspec.structs.replace(planted, generation=n + 1, slots=(slot,)) for n, slot in enumerate(order)]
    state, stopped = book(*((float(n), record) for n, record in enumerate(tries)))
    assert (state.restarts, stopped, [sorted(f.slots) for f in state.failures]) == (2, "", [[0, 1, 2]] * 2)


def test_workers_whose_setup_fails_in_one_generation_are_one_try() -> None:
    lost = [Loss(node="a", kind="exit", detail="planted", slots=(slot,), ranks=(slot,)) for slot in (0, 2)]
    planted = msgspec.structs.replace(broken("LookupError", step=None, bug=True), slots=(1,), also=tuple(lost))
    again = msgspec.structs.replace(planted, generation=2, slots=(0,), also=(lost[1],))
    state, _ = book((0.0, planted), (1.0, again))
    assert (state.restarts, [f.slots for f in state.failures]) == (2, [(1, 0, 2), (0, 2)])
    killed = msgspec.structs.replace(lost[0], kind="respawn", detail=reason(Code.LATE_ABORT))
    state, _ = book((0.0, msgspec.structs.replace(planted, also=(killed,))))
    assert state.failures[0].slots == (1,)


def test_the_last_error_stays_to_be_shown() -> None:
    state, _ = book((0.0, broken("E", bug=True)), (1.0, broken(step=9)))
    assert state.error is not None
    assert state.error.message == "ValueError: planted"


def test_node_with_more_failures_than_all_others_together_is_excluded() -> None:
    rules = Restarts()
    few = [(float(i), broken(step=i)) for i in range(BAD_NODE_FAILURES)]
    assert book(*few[:-1], rules=rules)[0].excluded_nodes == ()
    assert book(*few, rules=rules)[0].excluded_nodes == ("a",)


def test_nodes_with_equal_failures_are_not_excluded() -> None:
    each = [(float(i), broken(node=node, step=i)) for i in range(BAD_NODE_FAILURES) for node in "ab"]
    assert book(*each, rules=Restarts())[0].excluded_nodes == ()


def test_excluded_node_returns_when_no_node_can_be_spared() -> None:
    bad, _ = book(*((float(i), broken(step=i)) for i in range(BAD_NODE_FAILURES)), rules=Restarts())
    assert bad.excluded_nodes == ("a",)
    assert charge(bad, broken(step=50), Restarts(), 9.0, 0).state.excluded_nodes == ()


@pytest.mark.parametrize("spare", [0, 1, None])
def test_node_excluded_by_its_daemon_stays_excluded_on_failures_elsewhere(spare: int | None) -> None:
    aside = JobState(phase=Phase.RUNNING, excluded_nodes=("d",), no_agent={"d": "no torch"})
    for count in range(1, BAD_NODE_FAILURES + 3):
        aside = charge(aside, broken(step=count), Restarts(), float(count), spare).state
        assert "d" in aside.excluded_nodes
        assert ("a" in aside.excluded_nodes) == (spare == 1 and count >= BAD_NODE_FAILURES)


def test_excluded_node_returns_when_its_failures_leave_the_window() -> None:
    bad, _ = book(*((float(i), broken(step=i)) for i in range(BAD_NODE_FAILURES)), rules=Restarts(window_s=100.0))
    aside = msgspec.structs.replace(bad, excluded_nodes=("a", "d"), no_agent={"d": "no torch"})
    after = charge(aside, broken(node="b"), Restarts(window_s=100.0), 500.0, 1).state
    assert after.excluded_nodes == ("d",)


def test_a_failure_outside_any_generation_sets_no_node_aside_and_takes_none_back() -> None:
    """How many nodes can be spared is not known then."""
    assert book(*((float(i), broken(step=i)) for i in range(BAD_NODE_FAILURES)), spare=None)[0].excluded_nodes == ()
    bad, _ = book(*((float(i), broken(step=i)) for i in range(BAD_NODE_FAILURES)), rules=Restarts())
    after = charge(bad, broken(node="b"), Restarts(), 9.0, None).state
    assert after.excluded_nodes == ("a",)
    again = charge(after, broken(node="b"), Restarts(), 10.0, 1).state
    assert again.excluded_nodes == ("a",)


@given(st.lists(st.tuples(st.floats(0.0, 1000.0), st.sampled_from("abc"), st.integers(0, 3)), max_size=60))
def test_the_books_are_right_whatever_happens(events: list[tuple[float, str, int]]) -> None:
    rules = Restarts(budget=1000, window_s=100.0, same_failure=1000)
    state = JobState()
    for count, (wall_s, node, step) in enumerate(events, 1):
        state = charge(state, broken(node=node, step=step), rules, wall_s, 1).state
        assert state.restarts == count
        assert all(abs(wall_s - f.wall_s) < 100.0 for f in state.failures)
        assert (state.failures[-1].node, state.failures[-1].step) == (node, step)
        for bad in state.excluded_nodes:
            theirs = sum(f.node == bad for f in state.failures)
            assert theirs >= BAD_NODE_FAILURES
            assert 2 * theirs > len(state.failures)


@pytest.mark.parametrize(
    ("failures", "at_most_s"), [(0, 0.0), (1, 0.0), (2, 0.5), (3, 1.0), (4, 2.0), (8, 30.0), (10_000, 30.0)]
)
def test_the_first_is_tried_at_once_and_then_pauses_double_up_to_a_limit(failures: int, at_most_s: float) -> None:
    assert backoff_s(failures, RULES, 1.0) == at_most_s
    assert backoff_s(failures, RULES, 0.0) == at_most_s / 2


@given(st.integers(0, 200), st.floats(0.0, 1.0, exclude_max=True))
def test_pauses_never_shrink_as_failures_grow(failures: int, jitter: float) -> None:
    assert 0.0 <= backoff_s(failures, RULES, jitter) <= backoff_s(failures + 1, RULES, jitter) <= RULES.backoff_max_s


LACKING = "NoStateError at source.py:75"


def test_a_worker_that_finds_no_state_after_a_failure_is_not_charged_again() -> None:
    """The failure before it has left nothing to go on from, and is paid for."""
    before, _ = book((0.0, broken(generation=4)), rules=Restarts(budget=1))
    verdict = charge(before, broken(LACKING, generation=5, node="b", bug=True), Restarts(budget=1), 1.0, 1)
    assert not verdict.stopped
    assert (verdict.state.restarts, verdict.state.failures) == (1, before.failures)
    assert verdict.state.error is not None, "it is shown all the same"


def test_a_worker_that_finds_no_state_after_numbers_were_left_out_is_not_charged_again() -> None:
    before, _ = book((0.0, broken(generation=4)), rules=Restarts(budget=1))
    lacking = broken(LACKING, generation=40, node="b", bug=True)
    assert charge(before, lacking, Restarts(budget=1), 1.0, 1, before=4).state.restarts == 1
    assert charge(before, lacking, Restarts(budget=1), 1.0, 1, before=5).state.restarts == 2


def test_a_state_that_stays_away_is_charged() -> None:
    """Only the first generation after a failure is its consequence: else a job would look for its state for ever."""
    lacking = [(float(n), broken(LACKING, generation=n, bug=True)) for n in range(5, 9)]
    failures = [(0.0, broken(generation=4)), *lacking]
    assert [book(*failures[:n], rules=Restarts())[0].restarts for n in range(1, 6)] == [1, 1, 2, 3, 4]


def test_no_state_to_go_on_from_is_charged_where_nothing_was_charged_before() -> None:
    lacking = broken(LACKING, generation=5, bug=True)
    assert book((0.0, lacking))[0].restarts == 1
    assert book((0.0, broken(generation=4, charged=False)), (1.0, lacking))[0].restarts == 1
    assert book((0.0, broken(generation=3)), (1.0, lacking))[0].restarts == 2, "generation 4 had state"


def test_missing_state_is_charged_to_the_budget_and_not_as_crash_loop() -> None:
    rules = Restarts(budget=10, same_failure=3)
    lacking = [(float(i), broken(LACKING, step=0, bug=True)) for i in range(11)]
    assert book(*lacking[:10], rules=rules)[1] == ""
    assert codes(book(*lacking, rules=rules)[1]) == {Code.OVER_BUDGET}


@pytest.mark.parametrize(
    ("exception", "facts", "at_once"),
    [
        ("ModuleNotFoundError", {"stepped": None}, True),
        ("ModuleNotFoundError", {"stepped": False}, True),
        ("ModuleNotFoundError", {"stepped": True}, False),  # of a newcomer's environment: the others have the state
        ("TypeError", {"stepped": False}, True),
        ("TypeError", {"stepped": None}, False),  # a plain script may have trained for hours
        ("RuntimeError", {"stepped": False}, False),  # torch raises it for everything
        ("FileNotFoundError", {"stepped": False}, False),  # a file system may be mounted late
        ("", {"stepped": False}, False),
    ],
)
def test_a_mistake_in_the_program_that_shows_before_the_first_step_is_not_tried_again(
    exception: str, facts: dict[str, bool | None], at_once: bool
) -> None:
    record = broken("x at train.py:1", step=0, bug=True)
    assert record.error is not None
    record = msgspec.structs.replace(record, error=msgspec.structs.replace(record.error, exception=exception))
    verdict = charge(JobState(phase=Phase.RUNNING), record, RULES, 1.0, 0, **facts)
    assert (codes(verdict.stopped) == {Code.FAILS_AT_ONCE}) is at_once
    again = charge(JobState(phase=Phase.RUNNING, restarts=1), record, RULES, 1.0, 0, **facts)
    assert not again.stopped, "something else has failed before: this may follow from it"
