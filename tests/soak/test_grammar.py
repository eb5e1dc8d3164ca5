"""The generator itself: a number always gives the same script, each is Python, and the judge sees every wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

from soak.grammar import LAYERS, LOOPS, PLAIN, Case, Place, Script, draw, refusable
from soak.judge import Incident, Life, Record, Reference, cause, judge, resumed
from soak.render import loop_lines, render


def test_the_same_number_gives_the_same_script_for_ever() -> None:
    assert str(draw(9)) == str(draw(9))
    assert draw(9) != draw(9, seed=2)
    assert draw(9).script == draw(11).script != draw(12).script


def test_every_script_is_python_and_has_a_loop() -> None:
    for number in range(0, 1500, 3):
        text = render(draw(number).script)
        compile(text, f"case {number}", "exec")
        assert len(loop_lines(text)) >= 6, text


def test_the_cases_have_every_element() -> None:
    scripts = [draw(number).script for number in range(300)]
    assert {layer for script in scripts for layer in script.layers} == set(LAYERS)
    for name in PLAIN:
        if name != "layers":
            assert len({getattr(script, name) for script in scripts}) >= 2, name
    assert {script.loop for script in scripts} == set(LOOPS)
    assert {script.size for script in scripts} == {"small", "64mb", "many", "2gb"}
    assert any(refusable(script) for script in scripts)


PRINTS = {rank: {"model.w": "a", "step": "8"} for rank in range(2)}
CASE = Case(
    number=0, seed=1, script=Script(**PLAIN), nodes=1, workers=2, checkpoint="none",
    place=Place(region="loop", rank=1, step=4, at=0.5, linger_s=0.0),
)  # fmt: skip


def _lost(lines: dict[int, list[dict[str, Any]]]) -> int:
    return sum(resume.lost for resume in resumed([Life.of(pid, of) for pid, of in lines.items()]))


def _line(generation: int, **more: object) -> dict[str, Any]:
    return {"generation": generation, **more}


def _record(**changes: Any) -> Record:
    first = [_line(1, entered=0), *(_line(1, step=step) for step in range(1, 5))]
    again = [_line(2, entered=4), *(_line(2, step=step) for step in range(5, 9))]
    whole = Record(
        phase="succeeded", reason="", restarts=1, generations=2,
        incidents=[Incident(kind="exit", steps_lost=0, restored_from="live")],
        lines={10: [*first, *again], 11: [*first, _line(1, struck="line 3", step=4)], 12: again}, finals=PRINTS,
    )  # fmt: skip
    return dataclasses.replace(whole, **changes)


def _said(record: Record | None, reference: Reference | None = None, case: Case = CASE) -> str:
    verdict = judge(case, reference or Reference(finals=PRINTS), record)
    return "" if verdict.right else verdict.said


def test_a_recovery_in_place_is_right() -> None:
    assert _said(_record()) == ""


def test_weights_that_differ_are_wrong() -> None:
    other = {**PRINTS, 1: {"model.w": "b", "step": "8"}}
    assert "rank 1: 1 of 2 parts differ" in _said(_record(finals=other))
    assert "did not get to the end" in _said(_record(finals={0: PRINTS[0]}))


def test_steps_that_were_lost_without_a_word_are_wrong() -> None:
    lines = _record().lines
    back = [_line(2, entered=1), *(_line(2, step=step) for step in range(2, 9))]
    lost = {10: [*lines[10][:5], *back], 11: lines[11], 12: back}
    assert _lost(lost) == 3
    assert "incidents say 0 steps lost, 3 were done again" in _said(_record(lines=lost))
    told = [Incident(kind="exit", steps_lost=3, restored_from="snapshot")]
    assert _said(_record(lines=lost, incidents=told)) == ""


def test_a_step_that_only_the_killed_rank_had_committed_is_not_counted() -> None:
    lines = _record().lines
    ahead = {**lines, 11: [*lines[11][:5], _line(1, step=5), _line(1, struck="line 9", step=5)]}
    assert _lost(ahead) == 0
    alone = {11: ahead[11], 12: lines[12]}
    assert _lost(alone) == 1


def test_steps_that_a_survivor_has_received_and_not_done_itself_count_as_lost() -> None:
    """It is killed later than the rank that sent them, in the middle of its first step."""
    lines = _record().lines
    back = [_line(3, entered=1), *(_line(3, step=step) for step in range(2, 9))]
    sender = [*lines[10][:5], _line(2, entered=4), _line(2, struck="line 3", step=4)]
    assert _lost({10: sender, 11: lines[11], 12: [_line(2, entered=4), *back], 13: back}) == 3


def test_a_beginning_from_nothing_is_wrong_however_it_is_told() -> None:
    back = [_line(2, entered=0), *(_line(2, step=step) for step in range(1, 9))]
    lines = _record().lines
    told = [Incident(kind="exit", steps_lost=4, restored_from="setup")]
    assert "all state was lost" in _said(_record(lines={10: [*lines[10][:5], *back], 11: lines[11]}, incidents=told))


def test_what_a_survivor_must_not_suffer() -> None:
    assert "2 failures charged" in _said(_record(restarts=2))
    assert "3 generations" in _said(_record(generations=3))
    assert "a traceback" in _said(_record(tracebacks=["slot0.log: NoStateError"]))
    lines = _record().lines
    assert "lost its process" in _said(_record(lines={10: lines[10][:5], 11: lines[11], 12: lines[12], 13: lines[12]}))
    assert "0 incidents" in _said(_record(incidents=[]))
    assert "failed" in _said(_record(phase="failed", reason="crash loop"))


def test_a_replacement_that_is_killed_and_one_that_is_left_alone_are_told_apart() -> None:
    lines = _record().lines
    case = dataclasses.replace(CASE, place=dataclasses.replace(CASE.place, again="other"))
    third = [_line(3, entered=6), *(_line(3, step=step) for step in range(7, 9))]
    survivor = [*lines[10][:7], _line(2, struck="line 3", step=6)]
    twice = {10: survivor, 11: lines[11], 12: [*lines[12][:3], *third], 13: third}
    told = 2 * [Incident(kind="exit", steps_lost=0, restored_from="live")]
    assert _said(_record(lines=twice, generations=3, restarts=2, incidents=told), case=case) == ""
    assert "1 of 2 kills struck" in _said(_record(), case=case)
    once = _record(lines=twice, generations=3, restarts=2, incidents=told[:1])
    assert "1 incidents for 2 kills" in _said(once, case=case)
    early = {
        10: [*lines[10][:6], _line(2, struck="line 3", step=4)],
        11: lines[11],
        12: [lines[12][0], *third],
        13: third,
    }
    assert (
        _said(
            dataclasses.replace(once, lines={**early, 12: [lines[12][0], _line(3, entered=4), *third[1:]]}), case=case
        )
        == ""
    )


def test_ranks_that_die_together_may_count_as_one_failure_or_two() -> None:
    case = dataclasses.replace(CASE, place=dataclasses.replace(CASE.place, rank=-1))
    lines = _record().lines
    back = [_line(2, entered=2), *(_line(2, step=step) for step in range(3, 9))]
    all_dead = {10: [*lines[10][:5], _line(1, struck="line 3", step=4)], 11: lines[11], 12: back, 13: back}
    told = [Incident(kind="exit", steps_lost=2, restored_from="snapshot")]
    assert _said(_record(lines=all_dead, incidents=told), case=case) == ""
    assert _said(_record(lines=all_dead, incidents=told, restarts=2), case=case) == ""
    assert "say 0 steps lost, 2" in _said(
        _record(lines=all_dead, incidents=[Incident(kind="exit", steps_lost=0, restored_from="")]), case=case
    )


def test_a_kill_that_did_not_strike_is_wrong() -> None:
    lines = _record().lines
    assert "0 of 1 kills struck" in _said(_record(lines={10: lines[10]}))


def test_an_ordinary_script_must_not_be_refused() -> None:
    error = (
        'File "site-packages/elastic/worker/state.py", line 9, in _part\n'
        "TypeError: the optimizer steps parameters of state.model and is no part of the State: State(…, optimizer=…)"
    )
    assert "an ordinary script" in _said(None, Reference(error=error))
    outside = dataclasses.replace(CASE, script=Script(**{**PLAIN, "optimizer_in": "train"}))
    assert _said(None, Reference(error=error), outside) == ""
    unclear = error.rpartition("\n")[0] + "\nKeyError: 'x'"
    assert "an ordinary script" in _said(None, Reference(error=unclear), outside)


def test_an_undisturbed_run_has_no_incident() -> None:
    nothing = dataclasses.replace(CASE, place=dataclasses.replace(CASE.place, region="none"))
    lines = {10: _record().lines[10]}
    assert _said(_record(lines=lines, restarts=0, incidents=[]), case=nothing) == ""
    hang = [Incident(kind="hang", steps_lost=3, restored_from="setup", detail="no progress for 2.1 s")]
    assert "nothing was killed, but: hang (no progress" in _said(_record(lines=lines, incidents=hang), case=nothing)


def test_the_rank_that_failed_by_itself_says_why_and_not_one_that_lost_it() -> None:
    frame = 'Traceback (most recent call last):\n  File "train.py", line 9, in train\n    optimizer.step()\n'
    refused = f"a warning\n{frame}RuntimeError: SGD steps state.model.w and is not part of the state"
    lost = f"{frame}RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:1\nIt may have crashed.\n"
    assert cause([lost, refused]) == cause(["", refused]) == cause([refused, lost, ""]) == refused
    assert cause(["", lost]) == lost
    assert cause(["", "\n"]) == "no word"
