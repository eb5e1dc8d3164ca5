"""The judge is judged: each rule of the recorded history is broken once, each field of an incident lies once, and both
must be seen to be."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.history import SAMPLES, History, check
from support.incidents import check_injections

from elastic.testing import Commit, Injection
from elastic.worker.data.sharding import BatchPlan, SampleOrder, rank_range

STEPS, BATCH, WORLD = 12, 8, 3


def commit(step: int, generation: int, rank: int, world_size: int, process: str, at_s: float) -> Commit:
    whole = BatchPlan(SAMPLES, BATCH).at(step)
    ids = tuple(SampleOrder(SAMPLES, 0, whole.epoch).take(*rank_range(whole.start, whole.stop, rank, world_size)))
    return Commit(step, generation, rank, world_size, at_s, process, ids)


def good() -> list[Commit]:
    """Rank 2 dies after step 5, one survivor having committed step 6 already."""
    commits = [commit(s, 1, r, WORLD, f"n{r}.{r}", s + r / 10) for s in range(6) for r in range(WORLD)]
    commits.append(commit(6, 1, 0, WORLD, "n0.0", 6.0))
    newcomer = {0: "n0.0", 1: "n1.1", 2: "n2.99"}
    commits += [commit(s, 2, r, WORLD, newcomer[r], 10 + s + r / 10) for s in range(7, STEPS) for r in range(WORLD)]
    return commits


def history(folder: pathlib.Path, commits: list[Commit]) -> History:
    for one in commits:
        raw = {k: v for k, v in dataclasses.asdict(one).items() if k != "process"}
        with (folder / f"commits.{one.process}.jsonl").open("a") as out:
            out.write(json.dumps(raw) + "\n")
    for rank in range(WORLD):
        content = {"step": STEPS, "world_size": WORLD, "sha256": "abc"}
        (folder / f"final.{rank}.json").write_text(json.dumps(content))
    return History(folder).read()


def test_a_good_history_passes(tmp_path: pathlib.Path) -> None:
    seen = history(tmp_path, good())
    check(seen, steps=STEPS, batch=BATCH)
    assert seen.step() == STEPS
    assert seen.generations() == [1, 2]
    assert seen.back_s(6.5, 1) == pytest.approx(10 + 7 + 0.2 - 6.5)


def replaced(index: int, **fields: object) -> Callable[[list[Commit]], list[Commit]]:
    def change(commits: list[Commit]) -> list[Commit]:
        commits[index] = dataclasses.replace(commits[index], **fields)  # type: ignore[arg-type]
        return commits

    return change


BROKEN: dict[str, tuple[Callable[[list[Commit]], list[Commit]], str]] = {
    "a step never committed": (lambda cs: [c for c in cs if c.step != 3], "steps missing"),
    "samples of another step": (replaced(4, ids=(1, 2, 3)), "wrong samples"),
    "two sizes of one generation": (lambda cs: [*cs, commit(11, 2, 1, 2, "n9.9", 40.0)], "two sizes"),
    "one rank held twice": (lambda cs: [*cs, commit(11, 2, 1, WORLD, "n9.9", 40.0)], "a rank twice"),
    "a step back": (lambda cs: [*cs, commit(4, 2, 0, WORLD, "n0.0", 50.0)], "step went back"),
    "a step left out": (lambda cs: [c for c in cs if (c.step, c.rank) != (9, 1)], "a step left out"),
    "an old world still at work": (lambda cs: [*cs, commit(6, 1, 2, WORLD, "n2.2", 30.0)], "was at work already"),
    "another rank for a process": (
        lambda cs: [
            dataclasses.replace(c, process={1: "n2.99", 2: "n1.1"}.get(c.rank, c.process)) if c.generation == 2 else c
            for c in cs
        ],
        "n1.1: rank 1, then 2",
    ),
    "a committed step done again": (lambda cs: [*cs, commit(6, 2, 1, WORLD, "n1.1", 16.5)], "done again"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_history_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    change, what = BROKEN[name]
    with pytest.raises(AssertionError, match=what):
        check(history(tmp_path, change(good())), steps=STEPS, batch=BATCH)


def test_replicas_that_differ_are_refused(tmp_path: pathlib.Path) -> None:
    seen = history(tmp_path, good())
    (tmp_path / "final.1.json").write_text(json.dumps({"step": STEPS, "world_size": WORLD, "sha256": "xyz"}))
    with pytest.raises(AssertionError, match="replicas differ"):
        check(seen, steps=STEPS, batch=BATCH)


def test_a_torn_last_line_is_left_out(tmp_path: pathlib.Path) -> None:
    seen = history(tmp_path, good())
    with (tmp_path / "commits.n0.0.jsonl").open("a") as out:
        out.write('{"step": 12, "gener')
    assert len(seen.read().commits) == len(good())


def wall_s(at_s: float) -> float:
    return time.time() - time.monotonic() + at_s


KILLED = Injection("exit", pids=(2,), struck_s=6.3, words=("SIGKILL",))


def incident_row() -> dict[str, Any]:
    """What is true of `good`."""
    return {
        "generation": 2, "kind": "exit", "node": "n2", "ranks": [2], "detail": "killed by SIGKILL", "open": False,
        "wall_s": wall_s(6.4), "ended_wall_s": wall_s(17.1), "timeline_s": {"stepping": 10.7}, "step": 7,
        "causes": [{"generation": 1, "node": "n2", "kind": "exit", "ranks": [2]}], "steps_lost": 0,
        "steps_lost_at_most": 0, "world_size_before": 3, "world_size_after": 3, "restored_from": "live",
    }  # fmt: skip


def test_an_incident_that_is_true_passes(tmp_path: pathlib.Path) -> None:
    check_injections(history(tmp_path, good()), [incident_row()], [KILLED])


def test_a_commit_that_returns_at_the_abort_may_have_been_made_before(tmp_path: pathlib.Path) -> None:
    """It compares the replicas, and hangs in that until the group is aborted."""
    late = [dataclasses.replace(c, at_s=9.0) if (c.step, c.rank) in ((6, 0), (5, 1)) else c for c in good()]
    stood = {"wall_s": wall_s(8.9), "still_s": 2.6, "timeline_s": {}}
    check_injections(history(tmp_path, late), [incident_row() | stood], [KILLED])
    with pytest.raises(AssertionError, match="it stood from"):
        check_injections(history(tmp_path, late), [incident_row() | stood | {"still_s": 7.0}], [KILLED])


@pytest.mark.parametrize(("boundary_s", "stands"), [(4.0, True), (3.0, False), (15.9, True), (17.0, False)])
def test_a_planned_change_is_counted_from_the_last_commit_before_it(
    boundary_s: float, stands: bool, tmp_path: pathlib.Path
) -> None:
    """On a busy machine a rank writes its own down late, after another one has left the group."""
    at = [(1, s, float(s)) for s in range(6)] + [(2, s, 10.0 + s) for s in range(6, STEPS)]
    commits = [commit(s, g, r, WORLD, f"n{r}.{r}", at_s + r / 10) for g, s, at_s in at for r in range(WORLD)]
    planned = {
        "kind": "planned", "node": "", "ranks": [], "detail": "n2 leaves", "causes": [], "step": 6, "timeline_s": {},
        "wall_s": wall_s(boundary_s), "ended_wall_s": wall_s(max(16.1, boundary_s)),
    }  # fmt: skip
    seen = history(tmp_path, commits)
    with contextlib.nullcontext() if stands else pytest.raises(AssertionError, match="it stood from"):
        check_injections(seen, [incident_row() | planned], [Injection("planned")])


LIES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "another kind": (lambda: {"kind": "comm"}, "not exit"),
    "another node": (lambda: {"node": "n1"}, "n1, not"),
    "another rank": (lambda: {"ranks": [1]}, r"ranks \[1\], not \[2\]"),
    "one rank too many": (lambda: {"ranks": [1, 2]}, "ranks"),
    "no evidence": (lambda: {"detail": "a collective failed"}, "is not the evidence"),
    "begun before the strike": (lambda: {"wall_s": wall_s(5.0)}, "after the strike"),
    "begun long after the strike": (lambda: {"wall_s": wall_s(12.0)}, "after the strike"),
    "ended before a step": (lambda: {"ended_wall_s": wall_s(15.0), "timeline_s": {}}, "it stepped again at"),
    "ended long after a step": (lambda: {"ended_wall_s": wall_s(25.0)}, "it stepped again at"),
    "without steps before there were none": (lambda: {"still_s": 6.0}, "it stood from"),
    "not over": (lambda: {"open": True}, "is not over"),
    "no end": (lambda: {"ended_wall_s": None}, "when it ended"),
    "a step lost": (lambda: {"steps_lost": 1, "steps_lost_at_most": 1}, "1 steps lost it says, 0"),
    "nothing known": (lambda: {"steps_lost": None}, "it is known how far"),
    "another step": (lambda: {"step": 5}, "step 7 was the newest"),
    "another world before": (lambda: {"world_size_before": 2}, "of worlds"),
    "another world after": (lambda: {"world_size_after": 2}, "of worlds"),
    "a phase after the end": (lambda: {"timeline_s": {"stepping": 12.0}}, "it lasted"),
    "an innocent is named": (
        lambda: {"causes": [{"generation": 1, "node": "n0", "kind": "hang", "ranks": [0]}]}, "nothing befell",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_an_incident_that_lies_is_refused(lie: str, tmp_path: pathlib.Path) -> None:
    change, what = LIES[lie]
    with pytest.raises(AssertionError, match=what):
        check_injections(history(tmp_path, good()), [{**incident_row(), **change()}], [KILLED])


def test_steps_that_were_done_again_in_silence_are_seen(tmp_path: pathlib.Path) -> None:
    commits = [commit(6, 2, r, WORLD, f"n{r}.{r + 50}", 16.0 + r / 10) for r in range(WORLD)]
    with pytest.raises(AssertionError, match="at most 0 steps lost it says, 1 were done again"):
        check_injections(history(tmp_path, [*good(), *commits]), [incident_row()], [KILLED])


@pytest.mark.parametrize("count", [0, 2])
def test_history_check_requires_one_incident_per_fault(count: int, tmp_path: pathlib.Path) -> None:
    with pytest.raises(AssertionError, match=f"{count} incidents, not 1"):
        check_injections(history(tmp_path, good()), [incident_row()] * count, [KILLED])
