"""The agent's answer to a request for buffers may come when nobody waits for it any more: both were frozen, say."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest
import torch
from support.arenas import Agent

from elastic.checkpoint.format.errors import ArenaError
from elastic.checkpoint.memory.arena import Arena
from elastic.contract.worker import messages
from elastic.contract.worker.tensor_table import TensorInfo
from elastic.worker.snapshots.agent_snapshots import AgentSnapshots, SnapshotPart

SIZE = 1 << 18


def part(step: int, count: int) -> SnapshotPart:
    names = [f"w{number}" for number in range(count)]
    return SnapshotPart(
        step=step, commit_generation=1, shard=0, shards=1, extra={}, interval="",
        table=tuple(TensorInfo(name, "F32", (SIZE,), SIZE * 4) for name in names),
        tensors=[torch.full((SIZE,), float(step)) for _ in names],
    )  # fmt: skip


def test_buffers_that_were_asked_for_when_the_state_was_smaller_are_not_taken(agent: Agent) -> None:
    backend = AgentSnapshots(agent)  # type: ignore[arg-type]
    late = [Arena.create(4096, warm=False) for _ in range(2)]
    agent._handlers[messages.Arena](messages.Arena(nbytes=4096), [os.dup(arena.fd) for arena in late])
    assert backend.put(part(3, 2))
    backend.settle()
    (filled,) = agent.filled
    assert agent.arenas[filled.buffer].header().step == 3
    for arena in late:
        arena.close()


def test_after_a_request_that_failed_each_buffer_is_taken_for_the_one_it_is(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the answer to it is still there when the next one is asked for."""
    backend = AgentSnapshots(agent)  # type: ignore[arg-type]
    take, offered = agent._handlers[messages.Arena], list[int]()

    def offer(message: messages.Arena, descriptors: list[int]) -> None:
        offered.extend(descriptors)
        take(message, descriptors)

    agent.on(messages.Arena, offer)
    agent.arenas = [Arena.create(16 * SIZE, warm=False) for _ in range(2)]  # its process has memory
    with monkeypatch.context() as scarce:
        scarce.setattr("elastic.checkpoint.memory.arena.Arena._mapped", no_memory)
        assert not backend.put(part(3, 1))
    *looked_at, last = offered
    for descriptor in looked_at:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert os.fstat(last).st_ino == os.fstat(agent.arenas[1].fd).st_ino, "nothing has looked at it yet"
    for step in (4, 5):
        assert backend.put(part(step, 1))
        backend.settle()
        assert agent.arenas[agent.filled[-1].buffer].header().step == step
    assert offered[-2:] == [arena.fd for arena in backend._buffers.arenas]


def no_memory(fd: int, warm: bool) -> NoReturn:
    raise ArenaError("no shared memory")


class AskedMeanwhile(Agent):
    """The monitor thread notes a request while the main thread looks whether there is one."""

    asked = False

    @property
    def save_wanted(self) -> bool:
        before, self.asked = self.asked, True
        return before

    @save_wanted.setter
    def save_wanted(self, asked: bool) -> None:
        self.asked = asked


def test_a_checkpoint_that_is_asked_for_at_that_moment_is_not_forgotten() -> None:
    backend = AgentSnapshots(AskedMeanwhile())  # type: ignore[arg-type]
    assert not backend.wanted()
    assert backend.wanted()
