"""`job.rank` is never a number that is not true: in `setup` under an agent the ranks are not given yet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.checkpoint.interval import IntervalRule
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.link.misuse import MisuseError
from elastic.worker.standalone import run_standalone
from elastic.worker.state.state import State


def test_before_and_between_generations_there_is_no_rank() -> None:
    job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Link())
    for _ in range(2):
        with pytest.raises(MisuseError, match=r"job\.rank in setup\(\): .* job\.local_rank == 0"):
            _ = job.rank
        with pytest.raises(MisuseError, match=r"job\.world_size in setup\(\)"):
            _ = job.world_size
        assert repr(job) == f"<Job job: rank ? of ?, generation {job.generation}>"
        job.enter(rank=1, world_size=3, generation=1, checkpoint_scheduler=None)
        assert (job.rank, job.world_size) == (1, 3)
        job.forget()  # the state is lost on all ranks, and `setup` runs again
    assert not hasattr(job, "ranks")


def test_without_an_agent_they_are_known_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    seen = []

    def setup(job: Job) -> State:
        seen.append((job.rank, job.world_size))
        return State(model=nn.Linear(1, 1))

    run_standalone(setup, lambda job, state: job.commit(state), "", IntervalRule(every_steps=0))
    assert seen == [(0, 1)]
