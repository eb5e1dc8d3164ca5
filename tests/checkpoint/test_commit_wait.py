"""How long a commit waits for shards of other nodes: not while its own are written, anew at each that comes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ckpt import filled, state_at

from elastic.checkpoint.format import manifest as m
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.saving import orders, write
from elastic.checkpoint.saving import writer as module
from elastic.checkpoint.saving.client import MAX_PACKET_BYTES
from elastic.checkpoint.saving.writer import CheckpointWriter

WAIT_S = 60.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Desk:
    """A writer in this process. Its clock goes on only while it writes (`write_s` a shard) and where the test says."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.clock, self.write_s = str(directory), Clock(), 0.0
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs = theirs
        self.writer = CheckpointWriter(theirs, clock=self.clock)

        def slow(*args: Any, **more: Any) -> m.Shard:
            self.clock.now_s += self.write_s
            return write.write_shard(*args, **more)

        monkeypatch.setattr(module, "write_shard", slow)

    def write(self, shard: int, shards: int, step: int = 20) -> None:
        with filled(state_at(20), step, 1, shard, shards) as arena:
            self.order(orders.Write(directory=self.directory, job="job", step=step, generation=1), arena)

    def commit(self, shards: int) -> None:
        self.order(
            orders.Commit(
                directory=self.directory,
                job="job",
                step=20,
                generation=1,
                shards=shards,
                world_size=shards,
                wait_s=WAIT_S,
            )
        )

    def order(self, order: orders.AnyOrder, arena: Arena | None = None) -> None:
        socket.send_fds(self.ours, [orders.encode(order)], [arena.fd] if arena else [])
        self.writer.turn(0.0)

    def later(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.writer.turn(0.0)

    def committed(self) -> list[str]:
        """The errors of the commits that have ended since the last call; empty texts for those that succeeded."""
        self.ours.setblocking(False)
        found = []
        while True:
            try:
                found.append(orders.decode_result(self.ours.recv(MAX_PACKET_BYTES)))
            except BlockingIOError:
                return [result.error for result in found if result.kind == "Commit"]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    made = Desk(tmp_path, monkeypatch)
    yield made
    made.ours.close()
    made.theirs.close()


def other_node(desk: Desk, shard: int, shards: int) -> None:
    with filled(state_at(20), 20, 1, shard, shards) as arena:
        write.write_shard(arena, desk.directory, "job")


def test_the_shards_of_this_node_may_take_longer_than_the_wait_for_others(desk: Desk) -> None:
    desk.write_s = 40.0
    desk.write(0, 5)
    desk.commit(5)
    for shard in (1, 2, 3):
        desk.write(shard, 5)
    assert desk.committed() == [], "the writer had no time to look for others"
    desk.later(WAIT_S - 1)
    assert desk.committed() == []
    other_node(desk, 4, 5)
    desk.later(0.0)
    assert desk.committed() == [""]


def test_each_shard_that_arrives_starts_the_wait_anew(desk: Desk) -> None:
    desk.commit(3)
    for shard in (0, 1, 2):
        desk.later(WAIT_S - 1)
        assert desk.committed() == []
        other_node(desk, shard, 3)
        desk.later(0.0)
    assert desk.committed() == [""]


def test_a_shard_that_never_comes_fails_the_commit_though_later_saves_are_written(desk: Desk) -> None:
    desk.commit(2)
    other_node(desk, 0, 2)
    desk.write_s = WAIT_S / 2
    desk.write(0, 2, step=30)
    assert desk.committed() == []
    desk.write(0, 2, step=40)
    desk.write(0, 2, step=50)
    assert desk.committed() == ["step 20: 1 of 2 shards were not written: 1"]
