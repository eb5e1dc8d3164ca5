"""The optimizer guard on a GPU that is not there: what it calls, in which order, and that no broken sum gets through.

`tests/gpu` repeats the last of these on a real one.
"""

from __future__ import annotations

import random
import threading
from typing import Any, ClassVar

import pytest
import torch

from elastic.worker import job as job_module
from elastic.worker.job import Job
from elastic.worker.session import ToldToLeave


class FakeLink:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.let_go = False

    def applying(self) -> None:
        self.log.append("asked")
        if self.let_go:
            raise ToldToLeave("a rank died")

    def entered(self) -> None:
        pass

    def contributed(self) -> None:
        pass


class FakeStream:
    def __init__(self, log: list[str], device: torch.device) -> None:
        self.log = log
        self.device = device

    def synchronize(self) -> None:
        self.log.append(f"waited for {self.device}")


class FakeEvent:
    """As torch.cuda.Event: without a stream it would be recorded on the current device's."""

    log: ClassVar[list[str]] = []

    def record(self, stream: FakeStream) -> None:
        self.log.append(f"marked {stream.device}")

    def synchronize(self) -> None:
        self.log.append("waited for the mark")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(FakeEvent, "log", log)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(log, device))
    return log


def make(log: list[str], device: str = "cuda:1", world: int = 2) -> Job:
    job = Job(name="j", device=torch.device(device), local_rank=1, link=FakeLink(log))  # type: ignore[arg-type]
    job.enter(rank=0, world=world, generation=1, keeper=None)
    return job


def test_the_sums_are_waited_for_before_the_flag_is_looked_at(log: list[str]) -> None:
    job = make(log)
    job._received()
    job.guard()()
    assert log == ["marked cuda:1", "waited for the mark", "asked"]


def test_without_the_projects_ddp_all_that_is_queued_is_waited_for(log: list[str]) -> None:
    job = make(log)
    job.guard()()
    assert log == ["waited for cuda:1", "asked"]


@pytest.mark.parametrize(("device", "world"), [("cpu", 2), ("cuda:0", 1)])
def test_where_nothing_can_be_cut_short_nothing_is_waited_for(log: list[str], device: str, world: int) -> None:
    job = make(log, device, world)
    job.guard()()
    assert log == ["asked"]


def test_a_mark_of_the_generation_before_is_forgotten(log: list[str]) -> None:
    job = make(log)
    job._received()
    job.enter(rank=0, world=2, generation=2, keeper=None)
    job.guard()()
    assert log == ["marked cuda:1", "waited for cuda:1", "asked"]


def test_the_projects_ddp_marks_where_the_sums_are(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of each backward; else the guard would wait for all that is queued."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(job_module.ddp, "wrap", lambda model, **options: given.update(options))
    job = make(log)
    job.ddp(torch.nn.Linear(1, 1))
    given["on_received"]()
    job.guard()()
    assert log == ["marked cuda:1", "waited for the mark", "asked"]


class Card:
    """A device that runs what is queued, in order, in a thread; an abort ends the kernel that waits for its peers."""

    def __init__(self) -> None:
        self.peers_came = threading.Event()
        self.aborted = threading.Event()
        self.reduced = threading.Event()
        self.sum = "nothing"

    def all_reduce(self) -> None:
        while not (came := self.peers_came.wait(0.0001)) and not self.aborted.is_set():
            pass
        self.sum = "whole" if came else "garbage"
        self.reduced.set()


class CardsEvent:
    card: Card

    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        assert self.card.reduced.wait(10.0)


def one_step(job: Job, link: FakeLink, pauses: random.Random) -> tuple[str, str]:
    """(what the optimizer was given, what the card came to); an abort and the peers race."""
    card = Card()
    CardsEvent.card = card
    link.let_go = False

    def let_go() -> None:
        threading.Event().wait(pauses.random() * 0.002)
        link.let_go = True  # as the session does: the flag, then the abort
        card.aborted.set()

    def peers() -> None:
        threading.Event().wait(pauses.random() * 0.002)
        card.peers_came.set()

    threads = [threading.Thread(target=act) for act in (card.all_reduce, let_go, peers)]
    for thread in threads:
        thread.start()
    job._received()
    try:
        job.guard()()
        applied = card.sum
    except ToldToLeave:
        applied = "nothing"
    for thread in threads:
        thread.join()
    return applied, card.sum


def test_no_sum_that_was_cut_short_is_ever_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", CardsEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    link = FakeLink([])
    job = Job(name="j", device=torch.device("cuda:0"), local_rank=0, link=link)  # type: ignore[arg-type]
    job.enter(rank=0, world=2, generation=1, keeper=None)
    pauses = random.Random(5)
    came = [one_step(job, link, pauses) for _ in range(400)]
    assert ("garbage", "garbage") not in came
    assert ("whole", "whole") in came  # the guard lets whole sums through
    assert ("nothing", "garbage") in came  # and there were broken ones to hold back
