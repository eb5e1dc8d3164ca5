"""A disk that stands still for a while: training goes on, and what was taken before everybody died is written."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from support.agents import Job
from support.wait import eventually

from elastic.checkpoint.stored import find
from elastic.contract.records.job_records import Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

EVERY = 20


def saved(folder: pathlib.Path, generation: int) -> list[int]:
    return sorted(step for step, number, _ in find.peek(str(folder), "job") if number == generation)


@contextmanager
def stopped_writer(job: Job) -> Iterator[None]:
    """As on a disk that does not answer: the agent's writer process does nothing meanwhile."""
    agent = psutil.Process(job.agents["n0"].pid)
    (writer,) = [p for p in agent.children() if "elastic.checkpoint.saving.writer" in p.cmdline()]
    os.kill(writer.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(writer.pid, signal.SIGCONT)


@pytest.mark.long
def test_training_goes_on_and_the_last_snapshot_outlives_every_worker(tmp_path: pathlib.Path) -> None:
    spec = {"checkpoint": {"dir": str(tmp_path), "every_steps": EVERY, "keep": 100}}
    with Job(nodes="1:1", args={"steps": 1500, "step-ms": 5}, spec=spec) as job:
        eventually(lambda: saved(tmp_path, 1), 30.0, "the first checkpoint")
        with stopped_writer(job):
            job.wait_step(max(saved(tmp_path, 1)) + 6 * EVERY)  # two buffers, so the third one is skipped at the latest
        eventually(lambda: (p := job.progress()) and p.checkpoint_skipped >= 2, 20.0, "the skipped ones in status")
        assert not job.incidents(), "a checkpoint that is skipped is no incident"
        assert job.progress().checkpoint_interval == f"{EVERY} steps"  # type: ignore[union-attr]

        with stopped_writer(job):
            before = max(saved(tmp_path, 1))
            job.wait_step(before + 4 * EVERY)
            for rank in range(2):
                job.kill_rank(rank)
            eventually(lambda: (g := job.generation()) and g.number == 2, 20.0, "a new generation")
            assert max(saved(tmp_path, 1)) == before
        eventually(lambda: job.incidents(), 30.0, "a resume")
        written = max(saved(tmp_path, 1))
        assert written > before, "the newest snapshot was written though no worker that took it is alive"
        assert f"step {written}" in job.incidents()[0].restored_from
        job.wait_phase(Phase.SUCCEEDED)
