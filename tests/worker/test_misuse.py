"""What elastic refuses, and what the script does with the error."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import elastic
from elastic.contract.worker import messages
from elastic.contract.worker.beat import PAGE_BYTES
from elastic.worker.link import misuse
from elastic.worker.link.misuse import MisuseError, MisuseIgnored, MisuseRuntimeError, MisuseTypeError
from elastic.worker.link.session import GenerationEnded, Session


def setup(job: elastic.Job) -> elastic.State:
    net = torch.nn.Linear(2, 1)
    return elastic.State(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), seen=0)


def turn(state: elastic.State) -> None:
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()


def after_the_commit(job: elastic.Job, state: elastic.State) -> None:
    for _ in job.batches(torch.ones(8, 2), state, batch_size=2):
        turn(state)
        job.commit(state)
        state.seen += 1


def what_cannot_be_kept(job: elastic.Job, state: elastic.State) -> None:
    while state.step < 3:
        turn(state)
        state.optimizer.state["counters"] = object()
        job.commit(state)


@pytest.mark.parametrize("train", [after_the_commit, what_cannot_be_kept])
def test_a_refusal_that_the_script_handles_ends_training_all_the_same(train: object) -> None:
    def handling(job: elastic.Job, state: elastic.State) -> None:
        with contextlib.suppress(Exception):
            train(job, state)  # type: ignore[operator]

    with pytest.raises(MisuseError):
        elastic.run(setup, train)  # type: ignore[arg-type]
    with pytest.raises(MisuseIgnored, match="has caught this error") as caught:
        elastic.run(setup, handling)
    assert isinstance(misuse.found_in(caught.value), MisuseError)


def test_a_loop_that_skips_what_fails_is_left_at_its_next_turn() -> None:
    turns = 0

    def train(job: elastic.Job, state: elastic.State) -> None:
        nonlocal turns
        while state.step < 3:
            turns += 1
            with contextlib.suppress(Exception):
                turn(state)
                state.optimizer.state["counters"] = object()
                job.commit(state)

    with pytest.raises(MisuseIgnored):
        elastic.run(setup, train)
    assert turns == 2


def test_an_argument_that_is_refused_may_be_tried_otherwise() -> None:
    def train(job: elastic.Job, state: elastic.State) -> None:
        with pytest.raises(ValueError):
            job.ddp(state.model, compress="zip")  # type: ignore[arg-type]
        while state.step < 3:
            turn(state)
            job.commit(state)

    assert elastic.run(setup, train).step == 3


def test_an_option_that_no_call_has_is_refused_by_its_name_at_the_call() -> None:
    data, rows = [(torch.ones(2), torch.ones(1))] * 4, []

    def train(job: Any, state: elastic.State) -> None:
        for refused, call in (
            ("job.batches(num_worker=…): no such option; did you mean 'num_workers'?",
             lambda: job.batches(data, state, batch_size=2, num_worker=2)),
            ("job.batches(epoch=…): no such option; did you mean 'epochs'?",
             lambda: job.batches(data, state, batch_size=2, epoch=2)),
            ("job.batches(rank=…): no such option; known: allow_changed, batch_sampler, batch_size, collate, commits, ",
             lambda: job.batches(data, state, batch_size=2, rank=0)),
            ("job.batches(mesh=…): the state is not sharded", lambda: job.batches(data, state, batch_size=2, mesh=1)),
            ("job.steps(commit=…): no such option; did you mean 'commits'?", lambda: job.steps(data, state, commit=2)),
            ("job.steps(on_turn=…): no such option; known: allow_changed, commits, epochs, seed, steps",
             lambda: job.steps(data, state, on_turn=print)),
            ("job.streams(keep_evry=…): no such option; did you mean 'keep_every'?",
             lambda: job.streams(iter, state, count=1, batch_size=1, steps=1, keep_evry=2)),
            ("job.evaluate(workers=…): no such option; did you mean 'num_workers'?",
             lambda: job.evaluate(state, data, dict, batch_size=2, workers=2)),
            ("job.ddp(static_grap=…): no such option; did you mean 'static_graph'?",
             lambda: job.ddp(state.model, static_grap=True)),
        ):  # fmt: skip
            with pytest.raises(MisuseTypeError, match=re.escape(refused)):
                call()
            rows.append(refused)

    with contextlib.suppress(MisuseIgnored):  # each call was refused before it began anything
        elastic.run(setup, train)
    assert len(rows) == 9


def test_the_refusal_behind_an_error_of_the_script_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misuse, "ends_run", "")
    misuse.note(KeyError("x"))
    assert not misuse.ends_run
    outer = KeyError("x")
    outer.__cause__ = MisuseRuntimeError("state.seen was changed")
    misuse.note(outer)
    assert misuse.ends_run == "MisuseRuntimeError: state.seen was changed"


@pytest.fixture
def session() -> Iterator[tuple[Session, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield Session(ours, memoryview(bytearray(PAGE_BYTES))), theirs


def test_a_refusal_waits_a_moment_for_the_end_of_its_generation(session: tuple[Session, socket.socket]) -> None:
    """Another rank's death may be behind it, of which this one has handled the error."""
    worker, _ = session
    assert not worker.ends_within(1, 0.01)
    told = threading.Timer(0.05, lambda: worker._take(messages.AbortGroup(generation=1, why="rank 1 died"), []))
    told.start()
    assert worker.ends_within(1, 10.0)
    told.join()


def test_the_end_of_a_generation_passes_a_loop_that_skips_what_fails(session: tuple[Session, socket.socket]) -> None:
    worker, _ = session
    worker._take(messages.AbortGroup(generation=1, why="rank 1 died"), [])
    with pytest.raises(GenerationEnded), contextlib.suppress(Exception):
        worker.check(1, 5)
