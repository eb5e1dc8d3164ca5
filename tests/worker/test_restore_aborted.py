"""A worker that waits for its agent's snapshots can be aborted meanwhile; a late answer is closed and not used."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import pathlib
import resource
import socket
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from elastic.contract.worker import messages
from elastic.contract.worker.beat import PAGE_BYTES
from elastic.util.descriptors import send
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.link.session import GenerationEnded, Session
from elastic.worker.state.handover.restore import Disk, Store
from elastic.worker.state.state import State
from elastic.worker.state.state_source import Saved

GENERATION = 3
FORM = messages.Form(
    generation=GENERATION, rank=0, world_size=1, group_rank=0, group_world_size=1, local_rank=0, local_world_size=1,
    store_host="", store_port=0,
)  # fmt: skip


class Asking:
    """A worker that asks for what is kept, in a thread of its own; the test is the monitor, and the agent."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.agent, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = channel
        self.agent.settimeout(60.0)
        self.session = Session(channel, memoryview(mmap.mmap(-1, PAGE_BYTES)))
        self.store = Store(self.session, Disk(str(folder), "job"), None, FORM)  # type: ignore[arg-type]
        self.result: object = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert messages.from_worker(self.agent.recv(4096)) == messages.RequestSnapshot(generation=GENERATION)

    def _run(self) -> None:
        try:
            self.result = self.store.saved()
        except (GenerationEnded, RuntimeError) as error:
            self.result = error

    def end(self) -> object:
        self.thread.join(60.0)
        assert not self.thread.is_alive(), "it waits on"
        self.store.close()
        return self.result

    def answer(self, generation: int) -> int:
        """With a descriptor, which is returned."""
        descriptor = os.open(os.devnull, os.O_RDONLY)
        self.session._take(messages.InMemorySnapshot(generation=generation, arenas=1), [descriptor])
        return descriptor


@pytest.fixture
def asking(tmp_path: pathlib.Path) -> Iterator[Asking]:
    made = Asking(tmp_path)
    yield made
    made.session._take(messages.AbortGroup(generation=GENERATION, why="the test is over"), [])
    made.end()
    made.agent.close()
    made.channel.close()


def closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError as error:
        return error.errno == errno.EBADF
    os.close(descriptor)
    return False


def test_abort_ends_the_wait_for_a_snapshot_and_closes_a_late_answer(asking: Asking) -> None:
    asking.session._take(messages.AbortGroup(generation=GENERATION, why="n1 is gone"), [])
    told = asking.end()
    assert isinstance(told, GenerationEnded)
    assert str(told) == "n1 is gone"
    assert closed(asking.answer(GENERATION))


def test_an_answer_to_a_generation_before_is_none(asking: Asking) -> None:
    assert closed(asking.answer(GENERATION - 1))
    assert asking.thread.is_alive()
    asking.session._take(messages.InMemorySnapshot(generation=GENERATION), [])
    assert asking.end()[:3] == Saved()[:3]


def test_a_snapshot_that_this_process_has_no_room_for_is_not_taken_for_none(asking: Asking) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sent = os.open(os.devnull, os.O_RDONLY)
    answer = messages.encode(messages.InMemorySnapshot(generation=GENERATION, arenas=1))
    send(asking.agent, answer, [sent])
    lowest_free = os.dup(sent)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        raw, descriptors, _, _ = socket.recv_fds(asking.channel, messages.MAX_MESSAGE_BYTES, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    asking.session._take(messages.to_worker(raw), descriptors)
    os.close(sent)
    told = asking.end()
    assert isinstance(told, RuntimeError)
    assert "too many open files" in str(told)


def test_an_end_before_the_question_is_heard(tmp_path: pathlib.Path, asking: Asking) -> None:
    asking.session._take(messages.AbortGroup(generation=GENERATION, why="at once"), [])
    asking.end()
    again = Store(asking.session, Disk(str(tmp_path), "job"), None, FORM)  # type: ignore[arg-type]
    with pytest.raises(GenerationEnded, match="at once"):
        again.saved()
    again.close()


def test_nothing_keeps_a_state_that_is_built_anew(asking: Asking) -> None:
    """A GPU may not have memory for two."""
    net = torch.nn.Linear(2, 2)
    state = State(model=net)
    gone = weakref.ref(net)
    store = Store(asking.session, None, state, FORM)
    asking.session.on(messages.InMemorySnapshot, store._on_kept)  # as `saved` leaves it
    job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Link())
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None, state=state)
    job.ddp(net)
    store.close()
    del state, net, store
    job.forget()
    gc.collect()
    assert gone() is None
