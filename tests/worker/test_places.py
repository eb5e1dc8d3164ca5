"""Where a script takes its batches: two places in turn are refused, as a failure would let them change places."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.pairs import Pairs
from torch import nn

from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.state import State

STEPS = 8


def entered() -> tuple[Job, State, Any]:
    """(job, state, a loop over batches)"""
    job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Link())
    state = State(model=nn.Linear(4, 1))
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None, state=state)
    state.begin()
    return job, state, job.batches(Pairs(), state, batch_size=8, steps=STEPS)


def for_and_next(job: Job, state: State, loop: Any) -> None:
    for _ in loop:
        job.commit(state)
        next(loop)
        job.commit(state)


def two_in_turn(job: Job, state: State, loop: Any) -> None:
    """As WGAN's critic and generator."""
    while True:
        for _ in range(3):
            next(loop)
            job.commit(state)
        next(loop)
        job.commit(state)


def inner_loop(job: Job, state: State, loop: Any) -> None:
    for _ in loop:
        job.commit(state)
        for _ in itertools.islice(loop, 2):
            job.commit(state)


@pytest.mark.parametrize("script", [for_and_next, two_in_turn, inner_loop])
def test_two_places_that_take_batches_in_turn_are_refused(script: Callable[..., None]) -> None:
    job, state, loop = entered()
    with pytest.raises(RuntimeError, match=r"test_places\.py:\d+ and test_places\.py:\d+ take batches .* in turn"):
        script(job, state, loop)
    assert state.step < STEPS


def first_alone(job: Job, state: State, loop: Any) -> None:
    next(loop)
    job.commit(state)
    for _ in loop:
        job.commit(state)


def wrapped(job: Job, state: State, loop: Any) -> None:
    def through() -> Iterator[Any]:
        yield from loop

    for _, _ in enumerate(through()):
        job.commit(state)


def by_next(job: Job, state: State, loop: Any) -> None:
    while state.step < STEPS:
        next(loop)
        job.commit(state)


def zipped(job: Job, state: State, loop: Any) -> None:
    for _, _ in zip(loop, job.batches(Pairs(), state, batch_size=8, steps=STEPS), strict=True):
        job.commit(state)


def by_epoch(job: Job, state: State, loop: Any) -> None:
    for _ in range(2):
        for _ in itertools.islice(loop, STEPS // 2):
            job.commit(state)


def bar(items: Any) -> Iterator[Any]:
    """As tqdm's."""
    for item in items:  # noqa: UP028 - a `for` of its own, which other loops use, too
        yield item


def in_a_shared_for(job: Job, state: State, loop: Any) -> None:
    """Python 3.12 specializes the `for` in `bar` for the one kind of iterable, and takes that back for the other."""
    for _ in bar(loop):
        job.commit(state)
        for _ in range(20):
            list(bar([0] * 100 if state.step % 2 else (0 for _ in range(100))))


@pytest.mark.parametrize("script", [first_alone, wrapped, by_next, zipped, by_epoch, in_a_shared_for])
def test_one_place_at_a_time_is_enough(script: Callable[..., None]) -> None:
    job, state, loop = entered()
    script(job, state, loop)
    assert state.step == STEPS


def test_a_loop_whose_batches_are_taken_in_some_steps_only_is_told_to_be_made_anew() -> None:
    job, state, loop = entered()
    other = job.batches(Pairs(), state, batch_size=8, steps=STEPS)
    next(other)
    for _ in range(3):
        next(loop)
        job.commit(state)
    with pytest.raises(RuntimeError, match=r"next\(job\.batches\(…\)\)"):
        next(other)
