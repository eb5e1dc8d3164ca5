"""The last checkpoint of a job on a slow disk: the job has not succeeded before that is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.agents import Job
from support.forge import LATE
from support.wait import eventually

from elastic.checkpoint.stored import find
from elastic.contract.records.job_records import Phase
from elastic.contract.records.reasons import Code, reason

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

STEPS = 30
SITE = """
import pathlib, sys, time
if "elastic.checkpoint.saving.writer" in sys.orig_argv:
    from elastic.checkpoint.format.files import Files
    write_at = Files.write_at
    def waits(self, fd, data, at):
        while not pathlib.Path({go!r}).exists():
            time.sleep(0.02)
        write_at(self, fd, data, at)
    Files.write_at = waits
"""
"""As sitecustomize: the disk takes nothing until a file is there."""


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The disk is slow until this is called."""
    path = tmp_path / "go"
    (tmp_path / "sitecustomize.py").write_text(SITE.format(go=str(path)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(LATE, str(tmp_path))  # it is for the writer alone, a new process
    return path.touch


def job(folder: Path, nodes: str) -> Job:
    spec = {"checkpoint": {"dir": str(folder / "saved"), "every_steps": 1000}}
    return Job(nodes=nodes, workers=1, agents=int(nodes[-1]), args={"steps": STEPS}, spec=spec)


def saved(folder: Path) -> list[int]:
    return [step for step, _, _ in find.peek(str(folder / "saved"), "job")]


def waits(job: Job) -> bool:
    phase, progress = job.state().phase, job.progress()
    assert not phase.over, f"{phase} before the last checkpoint is on disk"
    return progress is not None and progress.waiting_for == reason(Code.SAVING)


def test_a_job_has_succeeded_when_its_last_checkpoint_is_committed(tmp_path: Path, go: Callable[[], None]) -> None:
    with job(tmp_path, "1:1") as made:
        eventually(lambda: waits(made), 40.0, "the wait for the last checkpoint in the progress record")
        assert made.steps() == STEPS
        go()
        made.wait_phase(Phase.SUCCEEDED)
        assert saved(tmp_path) == [STEPS]
        assert made.agents["n0"].wait(timeout=30) == 0
        assert made.all_incidents() == []


def test_a_node_lost_while_the_last_checkpoint_is_saved_costs_neither_it_nor_the_end(
    tmp_path: Path, go: Callable[[], None]
) -> None:
    """The other holds the state, and saves it again in a generation of its own."""
    with job(tmp_path, "1:2") as made:
        eventually(lambda: waits(made), 40.0, "the wait for the last checkpoint in the progress record")
        leads = made.generation().leader  # type: ignore[union-attr]
        made.kill_node(leads)
        eventually(lambda: (g := made.generation()) and g.number == 2, 20.0, "a generation of the node that is left")
        go()
        made.wait_phase(Phase.SUCCEEDED)
        assert STEPS in saved(tmp_path)
        assert {(i.kind, i.node, i.steps_lost) for i in made.incidents()} == {("lost", leads, 0)}
