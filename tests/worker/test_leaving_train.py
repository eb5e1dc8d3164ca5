"""How the agent learns that a script leaves `train`, and may take its time: its group is not touched any more."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.wait import eventually

from elastic.contract.worker.beat import PAGE_BYTES, Doing
from elastic.worker.link.session import GenerationEnded, Session
from elastic.worker.torch_internals import torch_private

GENERATION = 3


class Group:
    def abort(self, why: str) -> None:
        pass


@pytest.fixture
def session() -> Iterator[Session]:
    agent, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with agent, channel:
        yield Session(channel, memoryview(mmap.mmap(-1, PAGE_BYTES)))


def left(session: Session) -> bool:
    """As its agent sees it after the next look of the monitor thread."""
    session._look(time.monotonic())
    return session.page.read().left_s > 0.0


def test_a_rank_in_a_collective_has_left_it_when_no_frame_shows_one(session: Session) -> None:
    there, raised, over = threading.Event(), threading.Event(), threading.Event()
    places: dict[str, Any] = {"wait": lambda event: event.wait(30.0)}
    exec(compile("def all_reduce(event): wait(event)", "/lib/torch/distributed/distributed_c10d.py", "exec"), places)

    def trains() -> None:
        session.holds(Group(), GENERATION)
        session.page.place(GENERATION, 0)
        session.beat(Doing.EXCHANGING)
        there.set()
        places["all_reduce"](raised)
        over.wait(30.0)  # what the script does in its `finally`

    thread = threading.Thread(target=trains)
    thread.start()
    try:
        assert there.wait(30.0)
        session._abort(GENERATION, "a rank has died")
        assert not left(session), "the collective has not returned"
        raised.set()
        eventually(lambda: left(session), 30.0, "it has left")
        session.page.place(GENERATION + 1, 0)
        assert not left(session), "in the next generation it has not"
    finally:
        raised.set()
        over.set()
        thread.join(30.0)


def test_a_rank_in_the_scripts_code_has_left_when_elastic_has_raised_there(session: Session) -> None:
    session.holds(Group(), GENERATION)
    session.page.place(GENERATION, 0)
    session.beat(Doing.COMPUTING)
    session._abort(GENERATION, "a rank has died")
    assert not left(session)
    with pytest.raises(GenerationEnded):
        session.check(GENERATION, 7)
    assert left(session)


def test_what_elastic_does_after_the_script_is_no_time_of_the_scripts(session: Session) -> None:
    """An abort that hangs then has `abort_s`, not the time that a `finally` block may take."""
    session.holds(Group(), GENERATION)
    session.page.place(GENERATION, 0)
    session.beat(Doing.EXCHANGING)
    session._abort(GENERATION, "a rank has died")
    with pytest.raises(GenerationEnded):
        session.check(GENERATION, 7)
    assert left(session)
    session.holds(None, 0)
    assert not left(session)


class LeftMeanwhile(Group):
    """The main thread leaves `train` before the monitor thread's abort has returned."""

    session: Session

    def abort(self, why: str) -> None:
        self.session.holds(None, 0)


def test_a_script_that_has_left_before_the_abort_returned_has_left_once(session: Session) -> None:
    group = LeftMeanwhile()
    group.session = session
    session.holds(group, GENERATION)
    session.page.place(GENERATION, 0)
    session.beat(Doing.EXCHANGING)
    session._abort(GENERATION, "a rank has died")
    assert not left(session), "what runs is elastic's own code: an abort that hangs now has `abort_s`"


class Slow(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index > 1:
            time.sleep(600.0)
        return index


def test_loader_processes_that_load_what_is_not_wanted_any_more_are_not_waited_for() -> None:
    iterator = iter(torch.utils.data.DataLoader(Slow(), batch_size=1, num_workers=2))
    assert next(iterator).item() == 0
    began_s = time.monotonic()
    torch_private.shut_down_workers(iterator)
    assert time.monotonic() - began_s < 3.0, "torch waits 5 s for each"
    assert not any(process.is_alive() for process in iterator._workers)  # type: ignore[attr-defined]
