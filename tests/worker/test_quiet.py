"""How long a script may be quiet: below the time-out of the group in which the others wait for it."""

from __future__ import annotations

import pytest
import torch

from elastic.contract.timeouts import QUIET_S, Timeouts
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.state import State


class FakeLink(Link):
    def __init__(self) -> None:
        self.said: list[float] = []

    def quiet(self, limit_s: float) -> None:
        self.said.append(limit_s)


def make(world_size: int, group_s: float) -> tuple[Job, FakeLink]:
    link = FakeLink()
    job = Job(name="j", device=torch.device("cpu"), local_rank=0, link=link)
    job.enter(rank=0, world_size=world_size, generation=1, checkpoint_scheduler=None, group_s=group_s)
    return job, link


class Settles:
    """A scheduler with a copy under way."""

    def __init__(self, link: FakeLink) -> None:
        self.link = link
        self.settled_in: list[list[float]] = []

    def exchanges_at(self, step: int) -> bool:
        return False

    def after(self, state: State, *, keep: bool, digest: int) -> bool:
        return False

    def settle(self) -> None:
        self.settled_in.append(list(self.link.said))


def test_a_snapshot_that_was_begun_is_completed_first() -> None:
    """It would not count before the next optimizer step, which is long to come; and nobody is to miss a beat for it."""
    job, link = make(1, 600.0)
    scheduler = Settles(link)
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=scheduler)
    with job.quiet("evaluation", limit_s=100.0):
        assert scheduler.settled_in == [[100.0]]
    assert len(scheduler.settled_in) == 1


def test_nested_quiet_span_does_not_end_the_outer_one() -> None:
    job, link = make(2, 600.0)
    with job.quiet("evaluation", limit_s=500.0):
        with job.quiet("one of its parts", limit_s=20.0):
            assert link.said == [500.0, 20.0]
        assert link.said[2] == pytest.approx(500.0, abs=5.0)
    assert link.said[3:] == [0.0]


def test_the_defaults_go_together() -> None:
    job, link = make(2, Timeouts().group_s)
    with job.quiet("evaluation"):
        assert link.said == [QUIET_S]
    assert link.said == [QUIET_S, 0.0]


def test_longer_than_the_group_waits_is_refused() -> None:
    job, link = make(2, 600.0)
    refused = pytest.raises(ValueError, match=r"quiet\('evaluation', limit_s=600\): must be below timeouts.group_s")
    with refused, job.quiet("evaluation", limit_s=600.0):
        pass
    assert link.said == []
    with job.quiet("evaluation", limit_s=599.0):
        pass


def test_quiet_limit_is_not_capped_at_world_size_one() -> None:
    job, link = make(1, 600.0)
    with job.quiet("evaluation", limit_s=5000.0):
        pass
    assert link.said == [5000.0, 0.0]
