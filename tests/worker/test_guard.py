"""The optimizer guard on a GPU that is not there: what it calls, in which order, and that no broken sum gets through.

`tests/gpu` repeats the last of these on a real one.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Sequence

import pytest
import torch

from elastic.contract.worker.beat import PAGE_BYTES
from elastic.contract.worker.messages import AbortGroup
from elastic.worker.job.job import Job
from elastic.worker.link.agent_link import AgentLink
from elastic.worker.link.link import Link
from elastic.worker.link.session import GenerationEnded, Session
from elastic.worker.state.state import State


class FakeLink(Link):
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.aborted = False

    def applying(self) -> None:
        self.log.append("asked")
        if self.aborted:
            raise GenerationEnded("a rank died")


class FakeStream:
    def __init__(self, log: list[str], device: torch.device) -> None:
        self.log = log
        self.device = device

    def synchronize(self) -> None:
        self.log.append(f"waited for {self.device}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(log, device))
    return log


def make(log: list[str], device: str = "cuda:1", world_size: int = 2) -> Job:
    job = Job(name="j", device=torch.device(device), local_rank=1, link=FakeLink(log))
    job.enter(rank=0, world_size=world_size, generation=1, checkpoint_scheduler=None)
    return job


def test_the_sums_are_waited_for_before_the_flag_is_looked_at(log: list[str]) -> None:
    """All that is queued: the sums, and what the script exchanges between its backward and the step."""
    job = make(log)
    job.guard()()
    assert log == ["waited for cuda:1", "asked"]


def test_a_commit_without_any_optimizer_is_guarded_too(log: list[str]) -> None:
    """Gradients applied by hand, with no hook to see it."""
    model = torch.nn.Linear(1, 1)
    job, state = make(log), State(model=model)
    state.begin()
    job._link.aborted = True  # type: ignore[attr-defined]
    with pytest.raises(GenerationEnded):
        job.commit(state)
    assert log == ["waited for cuda:1", "asked"]
    assert state.step == 0


@pytest.mark.parametrize(("device", "world_size"), [("cpu", 2), ("cuda:0", 1)])
def test_where_nothing_can_be_cut_short_nothing_is_waited_for(log: list[str], device: str, world_size: int) -> None:
    job = make(log, device, world_size)
    job.guard()()
    assert log == ["asked"]


class Card:
    """A device that runs what is queued, in order, in a thread: the sum of a step's gradients, where they lie.

    An abort ends the kernel that waits for its peers with anything in its buffers; what is queued behind it runs on.
    """

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        self._gradients = gradients
        self.peers_came = threading.Event()
        self.aborted = threading.Event()
        self.reduced = threading.Event()
        self.whole = False

    def all_reduce(self) -> None:
        while not (came := self.peers_came.wait(0.0001)) and not self.aborted.is_set():
            pass
        for gradient in self._gradients:
            flat = gradient.view(-1)
            flat[: len(flat) if came else len(flat) // 2] *= 2  # the peer has the same; or half of its chunks arrived
        self.whole = came
        self.reduced.set()


class CardsStream:
    card: Card

    def synchronize(self) -> None:
        assert self.card.reduced.wait(60.0)


class Training:
    """A model whose step is a function of its weights and of the step's number alone, as a worker trains it: with its
    own session, link and job; a generation for each step."""

    def __init__(self) -> None:
        self.agent, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.session = Session(channel, memoryview(bytearray(PAGE_BYTES)))
        self.link = AgentLink(self.session, backward_waits=False)
        self.job = Job(name="j", device=torch.device("cuda:0"), local_rank=0, link=self.link)
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        self.state = State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
        self.state.watch_optimizers(self.job.guard())
        self.generation = 0

    def close(self) -> None:
        self.agent.close()
        self.session._channel.close()

    def abort(self, why: str) -> None:
        """The session's group is this one."""
        CardsStream.card.aborted.set()

    def step(self, chance: random.Random | None) -> tuple[str, str]:
        """(how it ended, what the card came to); with `chance` an abort and the peers race."""
        parameters = list(self.state.model.parameters())
        draw = torch.Generator().manual_seed(self.state.step)
        for parameter in parameters:
            parameter.grad = parameter.detach() * 0.1 + torch.randn(parameter.shape, generator=draw)
        card = CardsStream.card = Card([p.grad for p in parameters if p.grad is not None])
        self.generation += 1
        self.link.enter(self.generation, self.state.step)
        self.job.enter(rank=0, world_size=2, generation=self.generation, checkpoint_scheduler=None)
        self.session.holds(self, self.generation)

        def aborted() -> None:
            threading.Event().wait(chance.random() * 0.002 if chance else 0.0)
            self.session._take(AbortGroup(generation=self.generation, why="a rank died"), [])  # as its monitor does

        def peers() -> None:
            threading.Event().wait(chance.random() * 0.002 if chance else 0.0)
            card.peers_came.set()

        threads = [threading.Thread(target=act) for act in (card.all_reduce, peers, *([aborted] if chance else []))]
        for thread in threads:
            thread.start()
        try:
            self.state.optimizer.step()
            self.state.committed(self.generation)
            ended = "applied"
        except GenerationEnded:
            assert self.state.clean(), "a state that no optimizer touched is no source for the others"
            ended = "left"
        for thread in threads:
            thread.join()
        self.session.holds(None, 0)
        return ended, "whole" if card.whole else "garbage"

    def bits(self) -> bytes:
        return b"".join(tensor.numpy().tobytes() for _, tensor in self.state.tensors())


STEPS = 150


def test_guard_keeps_weights_bit_identical_to_an_undisturbed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborts race with sums, some hundred times: what an abort cut short is taken again, and never applied."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: CardsStream())
    undisturbed = Training()
    bits = [undisturbed.bits()]
    for _ in range(STEPS):
        assert undisturbed.step(None) == ("applied", "whole")
        bits.append(undisturbed.bits())
    assert len(set(bits)) == STEPS + 1
    training, chance = Training(), random.Random(5)
    ends = []
    while training.state.step < STEPS:
        ends.append(training.step(chance))
        assert training.bits() == bits[training.state.step], f"after step {training.state.step}: {ends[-1]}"
    for made in (undisturbed, training):
        made.close()
    assert ends.count(("applied", "whole")) == STEPS
    assert ("left", "garbage") in ends  # there were broken sums to hold back
    assert ("left", "whole") in ends  # and some that the flag came before
