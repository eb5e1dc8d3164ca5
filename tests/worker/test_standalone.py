"""A script that runs alone: there is no status to look at, so what goes wrong is printed to its output."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import torch
from support.ckpt import flip, shard_paths

from elastic.checkpoint.format.errors import NoGoodCheckpoint
from elastic.checkpoint.format.manifest import MANIFEST
from elastic.checkpoint.format.names import tmp_name
from elastic.checkpoint.interval import IntervalRule
from elastic.worker.job.job import Job
from elastic.worker.standalone import run_standalone
from elastic.worker.state.state import State
from elastic.worker.state.state_source import NoStateError


@pytest.fixture(autouse=True)
def nobody_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ELASTIC_JOB", "job")


def setup(job: Job) -> State:
    return State(model=torch.nn.Linear(2, 2))


def train(job: Job, state: State) -> None:
    while state.step < 3:
        job.commit(state)


def test_a_checkpoint_that_fails_is_said_and_training_goes_on(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def spoiled(job: Job, state: Any) -> None:
        (tmp_path / tmp_name(3, 1, "job")).write_text("a file where the folder should be")
        train(job, state)

    state = run_standalone(setup, spoiled, str(tmp_path), IntervalRule(every_steps=100))
    assert state.step == 3
    said = capfd.readouterr().err
    assert said.startswith("elastic: a checkpoint failed: Not a directory: ")
    assert said.endswith("; the one before stays, training goes on\n")
    assert said.count("\n") == 1
    assert "step-3" not in os.listdir(tmp_path)


def test_standalone_success_prints_nothing(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_standalone(setup, train, str(tmp_path), IntervalRule(every_steps=100))
    assert capfd.readouterr().err == ""
    assert os.listdir(tmp_path) == ["step-3"]


@pytest.mark.parametrize("kind", ["manifest", "shard"])
def test_a_folder_of_damaged_checkpoints_is_no_beginning_however_often_it_is_tried(
    kind: str, tmp_path: pathlib.Path
) -> None:
    run_standalone(setup, train, str(tmp_path), IntervalRule(every_steps=100))
    flip(str(tmp_path / "step-3" / MANIFEST) if kind == "manifest" else shard_paths(str(tmp_path / "step-3"))[0], -9)
    for _ in range(2):
        with pytest.raises((NoGoodCheckpoint, NoStateError)):
            run_standalone(setup, train, str(tmp_path), IntervalRule(every_steps=100))


def test_damaged_checkpoints_of_another_job_keep_none_from_beginning(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_standalone(setup, train, str(tmp_path), IntervalRule(every_steps=100))
    flip(str(tmp_path / "step-3" / MANIFEST), -9)
    monkeypatch.setenv("ELASTIC_JOB", "another")
    assert run_standalone(setup, train, str(tmp_path), IntervalRule(every_steps=100)).step == 3


def test_setup_with_a_wrong_return_value_is_refused_with_the_remedy() -> None:
    def wrong(job: Job) -> Any:
        return torch.nn.Linear(2, 2)

    with pytest.raises(TypeError, match=r"setup returned Linear: return elastic\.State"):
        run_standalone(wrong, train, "", IntervalRule())
