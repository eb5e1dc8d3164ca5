"""A sample of gradients that comes too late for its step is requested again, and never without end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from support.snapshots import progress

from elastic.contract.agent_files import GradientSamples, RankSample
from elasticd.api.routes.job_routes import _passed, _shown
from elasticd.api.routes.job_routes import samples as read
from elasticd.base.command_answers import Gradients
from elasticd.base.folders import Folder
from elasticd.ctl.client import Client, Failed
from elasticd.ctl.jobs import debug


class Api:
    """Answers of a daemon: the ranks that have sampled the step of each request, and whether the job is past it."""

    def __init__(self, *answers: tuple[Sequence[int], bool]) -> None:
        self._answers, self.requests = answers, 0

    def post(self, path: str) -> dict[str, Any]:
        self.requests += 1
        return {"step": 100 * self.requests, "steps_per_s": 50.0}

    def get(self, path: str, query: Mapping[str, Any]) -> dict[str, Any]:
        ranks, passed = self._answers[self.requests - 1]
        return {"step": query["step"], "world_size": 2, "ranks": list(ranks), "passed": passed}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "POLL_S", 0.0)


def sampled(*answers: tuple[Sequence[int], bool]) -> tuple[Gradients, int]:
    api = Api(*answers)
    return debug.sampled(cast(Client, api), "train"), api.requests


def test_debug_requests_a_later_step_where_ranks_have_passed_the_first() -> None:
    data, requests = sampled(([0], True), ([0, 1], False))
    assert (data.step, data.ranks, requests) == (200, [0, 1], 2)


def test_debug_requests_three_times_at_most() -> None:
    data, requests = sampled(([], True), ([], True), ([1], True), ([0, 1], False))
    assert (data.step, data.ranks, requests) == (300, [1], 3)
    with pytest.raises(Failed, match="no rank of train has sampled step 300, the job is past it"):
        sampled(([], True), ([], True), ([], True))


def test_the_step_shown_is_the_first_from_the_wanted_one_on_that_all_ranks_have_sampled() -> None:
    rows = [{"step": step, "rank": rank} for step, rank in ((40, 0), (42, 0), (42, 1), (50, 0), (50, 1))]
    assert [_shown(rows, wanted, 2) for wanted in (0, 40, 42, 43, 60)] == [50, 42, 42, 50, 60]
    assert _shown(rows, 60, 0) == 60


@pytest.mark.parametrize(("step", "passed"), [(20, True), (39, False), (40, False), (60, False)])
def test_a_step_is_passed_once_each_sample_of_it_would_be_in_its_file(step: int, passed: bool) -> None:
    assert _passed(step, progress(step=40)) == passed
    assert not _passed(step, None)


def test_samples_of_this_nodes_ranks_are_rows_to_which_those_of_others_are_added(tmp_path: Path) -> None:
    (tmp_path / "train" / "agent").mkdir(parents=True)
    sample = RankSample(rank=0, node="a", slot=0, generation=1, step=7, wall_s=1.0, gradients="", weights="", rows=())
    content = msgspec.json.encode(GradientSamples(submitted_wall_s=3.0, ranks=(sample,)))
    (tmp_path / "train" / "agent" / "gradients.json").write_bytes(content)
    logs = Folder(tmp_path, ("train", "logs"))
    rows = read(logs, 3.0)
    rows += [{"rank": 1}]
    assert [row["rank"] for row in rows] == [0, 1]
    assert read(logs, 4.0) == [], "of an earlier job of this name"
