"""The judge is judged: each rule of the recorded history is broken once, and must be seen to be."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable

import pytest
from support.history import SAMPLES, Commit, History, check

from elastic.core.sharding import Order, Plan, share

STEPS, BATCH, WORLD = 12, 8, 3


def commit(step: int, generation: int, rank: int, world: int, process: str, at_s: float) -> Commit:
    whole = Plan(SAMPLES, BATCH).at(step)
    ids = tuple(Order(SAMPLES, 0, whole.epoch).take(*share(whole.start, whole.stop, rank, world)))
    return Commit(step, generation, rank, world, ids, at_s, 0.0, process)


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
        content = {"step": STEPS, "world": WORLD, "sha256": "abc"}
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
    "a committed step done again": (lambda cs: [*cs, commit(6, 2, 1, WORLD, "n1.1", 16.5)], "done again"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_history_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    change, what = BROKEN[name]
    with pytest.raises(AssertionError, match=what):
        check(history(tmp_path, change(good())), steps=STEPS, batch=BATCH)


def test_replicas_that_differ_are_refused(tmp_path: pathlib.Path) -> None:
    seen = history(tmp_path, good())
    (tmp_path / "final.1.json").write_text(json.dumps({"step": STEPS, "world": WORLD, "sha256": "xyz"}))
    with pytest.raises(AssertionError, match="replicas differ"):
        check(seen, steps=STEPS, batch=BATCH)


def test_a_fault_that_did_not_strike_is_seen(tmp_path: pathlib.Path) -> None:
    with pytest.raises(AssertionError, match="did not strike"):
        history(tmp_path, good()).struck("kill")


def test_a_torn_last_line_is_left_out(tmp_path: pathlib.Path) -> None:
    seen = history(tmp_path, good())
    with (tmp_path / "commits.n0.0.jsonl").open("a") as out:
        out.write('{"step": 12, "gener')
    assert len(seen.read().commits) == len(good())
