"""A second copy of a rank's snapshots in another node's memory: who has whose, what arrives, what does not."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from support import arenas
from support.wait import eventually

from elastic.checkpoint.format.layout import arena_nbytes
from elastic.checkpoint.memory.arena import Arena
from elastic.contract.worker import messages
from elastic.contract.worker.messages import CopyState
from elastic.contract.worker.tensor_table import ReplicaTensors, TensorInfo
from elastic.worker.comm import direct
from elastic.worker.link.misuse import MisuseError
from elastic.worker.snapshots import buddy
from elastic.worker.snapshots.agent_snapshots import AgentSnapshots, SnapshotPart
from elastic.worker.snapshots.arena_requests import ArenaRequests
from elastic.worker.snapshots.buddy import Buddy, Neighbour, Sender, buddies

SIZE = 3_000_000
"""Elements: more than one slice."""


def at(*places: tuple[int, int, int]) -> list[Neighbour]:
    """(key, node, local rank) of each rank."""
    return [Neighbour(key, node, local, direct.Endpoint()) for key, node, local in places]


def test_each_part_that_is_on_one_node_alone_goes_to_the_same_place_of_the_next() -> None:
    fsdp = at((1, 0, 0), (2, 0, 1), (3, 1, 0), (4, 1, 1), (5, 2, 0), (6, 2, 1))
    assert buddies(fsdp) == {0: 2, 1: 3, 2: 4, 3: 5, 4: 0, 5: 1}


def test_replicas_on_two_nodes_need_none_and_of_those_on_one_the_lowest_sends() -> None:
    hsdp = at((1, 0, 0), (2, 0, 1), (1, 1, 0), (2, 1, 1))
    assert buddies(hsdp) == {}
    within = at((1, 0, 0), (1, 0, 1), (2, 1, 0), (2, 1, 1))
    assert buddies(within) == {0: 2, 2: 0}


def test_without_another_node_or_a_rank_in_that_place_there_is_none() -> None:
    assert buddies(at((1, 0, 0), (2, 0, 1))) == {0: None, 1: None}
    assert buddies(at((1, 0, 0), (2, 0, 1), (3, 1, 0))) == {0: 2, 1: None, 2: 0}


class Agent:
    """Of the node that receives."""

    def __init__(self) -> None:
        self.full = False
        self.asked = 0
        self.arenas: list[Arena] = []
        self.requests = ArenaRequests(self.send, 2, guest=True)

    def send(self, message: messages.Message) -> None:
        assert isinstance(message, messages.NeedArena)
        assert (message.guest, message.optional) == (True, True)
        self.asked += 1
        if self.full:
            self.requests.take(messages.Arena(nbytes=0, request=message.request, guest=True), [])
            return
        if not self.arenas or self.arenas[0].capacity < message.nbytes:
            self.arenas = [Arena.create(message.nbytes) for _ in range(2)]
        for buffer, arena in enumerate(self.arenas):
            offer = messages.Arena(nbytes=arena.capacity, request=message.request, buffer=buffer, guest=True)
            self.requests.take(offer, [os.dup(arena.fd)])


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct.sockets, "listening_at", lambda: [("127.0.0.1", socket.AF_INET)])


@contextlib.contextmanager
def paired(agent: Agent) -> Iterator[tuple[Buddy, threading.Event]]:
    """(that of rank 0, what is set when a copy is settled); rank 1, of another node, has the copies."""
    settled = threading.Event()
    sender, receiver = Buddy(ArenaRequests(agent.send, 2, guest=True), settled.set), Buddy(agent.requests, lambda: None)
    try:
        endpoint = receiver.listen()
        everyone = [Neighbour(7, 0, 0, direct.Endpoint()), Neighbour(8, 1, 0, endpoint)]
        receiver.pair(1, everyone)
        sender.pair(0, everyone)
        yield sender, settled
    finally:
        sender.leave()
        receiver.leave()
    eventually(lambda: "elastic-buddy" not in [thread.name for thread in threading.enumerate()], 10.0, "their end")


def snapshot(step: int) -> Arena:
    table = (TensorInfo("model.w", "F32", (SIZE,), 4 * SIZE),)
    beside = ReplicaTensors((TensorInfo("model.n", "I64", (3,), 24),), (1,))
    made = Arena.create(arena_nbytes(table, beside.table))
    made.layout(table, shard=0, shards=2, beside=beside, part=0, parts=1)
    made.fill([torch.full((SIZE,), float(step)), torch.arange(3)]).finish()
    made.seal(step, 1, {"state": {"step": step}, "positions": [0], "key": 7})
    return made


def copied(sender: Buddy, settled: threading.Event, arena: Arena) -> tuple[CopyState, int]:
    settled.clear()
    sender.send(arena)
    assert settled.wait(30)
    assert not sender.sending
    return sender.copied


@pytest.mark.usefixtures("loopback")
def test_the_two_newest_snapshots_are_in_the_other_nodes_memory() -> None:
    agent = Agent()
    with paired(agent) as (sender, settled):
        assert sender.copied == (CopyState.SENDING, -1)
        for step in (10, 20, 30):
            assert copied(sender, settled, snapshot(step)) == (CopyState.COPIED, step)
    assert sorted(arena.header().step for arena in agent.arenas) == [20, 30]
    newest = max(agent.arenas, key=lambda arena: arena.header().step)
    header = newest.header()
    assert (header.generation, header.shard, header.shards, header.part, header.parts) == (1, 0, 2, 0, 1)
    assert newest.extra() == {"state": {"step": 30}, "positions": [0], "key": 7}
    tensors = newest.tensors()
    assert torch.equal(tensors["model.w"], torch.full((SIZE,), 30.0))
    assert torch.equal(tensors["model.n"], torch.arange(3))


@pytest.mark.usefixtures("loopback")
def test_a_node_without_memory_says_so_and_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()
    agent.full = True
    with paired(agent) as (sender, settled):
        assert copied(sender, settled, snapshot(10)) == (CopyState.NO_MEMORY, -1)
        assert agent.asked == 1
        assert copied(sender, settled, snapshot(20)) == (CopyState.NO_MEMORY, -1)
        assert agent.asked == 1
    monkeypatch.setattr(buddy, "ASK_AGAIN_S", 0.0)
    with paired(agent) as (sender, settled):
        assert copied(sender, settled, snapshot(30)) == (CopyState.NO_MEMORY, -1)
        agent.full = False
        assert copied(sender, settled, snapshot(30)) == (CopyState.COPIED, 30)


@pytest.mark.usefixtures("loopback")
def test_a_copy_that_is_damaged_on_the_way_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()
    with paired(agent) as (sender, settled):
        assert copied(sender, settled, snapshot(10)) == (CopyState.COPIED, 10)
        receive = direct.receive_into

        def flips(sock: socket.socket, view: memoryview) -> None:
            receive(sock, view)
            if len(view) == buddy.SLICE_BYTES:
                view[5] ^= 1

        monkeypatch.setattr(direct, "receive_into", flips)
        assert copied(sender, settled, snapshot(20)) == (CopyState.UNREACHABLE, 10)
        assert [arena.header().step for arena in agent.arenas if arena.header().complete] == [10]
        monkeypatch.setattr(direct, "receive_into", receive)
        assert copied(sender, settled, snapshot(30)) == (CopyState.COPIED, 30)  # over another connection
    assert sorted(arena.header().step for arena in agent.arenas if arena.header().complete) == [10, 30]


@pytest.mark.usefixtures("loopback")
def test_a_generation_that_ends_within_a_copy_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()
    held, go = threading.Event(), threading.Event()
    with paired(agent) as (sender, settled):
        assert copied(sender, settled, snapshot(10)) == (CopyState.COPIED, 10)
        receive = direct.receive_into

        def stands(sock: socket.socket, view: memoryview) -> None:
            if len(view) == buddy.SLICE_BYTES:
                held.set()
                assert go.wait(30)
            receive(sock, view)

        monkeypatch.setattr(direct, "receive_into", stands)
        sender.send(snapshot(20))
        assert held.wait(30)
        assert sender.sending
        sender.leave()
        go.set()
    assert [arena.header().step for arena in agent.arenas if arena.header().complete] == [10]


@pytest.mark.usefixtures("loopback")
def test_a_node_that_is_not_reached_costs_the_copies_and_nothing_else() -> None:
    settled = threading.Event()
    sender = Buddy(ArenaRequests(Agent().send, 2, guest=True), settled.set)
    closed = direct.Endpoint("127.0.0.1", 1, "x" * direct.TOKEN_BYTES)
    sender.pair(0, [Neighbour(7, 0, 0, direct.Endpoint()), Neighbour(8, 1, 0, closed)])
    assert copied(sender, settled, snapshot(10)) == (CopyState.UNREACHABLE, -1)
    sender.leave()
    assert not direct._unreachable, "it is tried again in the next generation"


@pytest.mark.usefixtures("loopback")
def test_a_thread_that_does_not_end_has_the_buffers_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would write into the same memory."""
    agent, held, go = Agent(), threading.Event(), threading.Event()
    receive = direct.receive_into

    def stands(sock: socket.socket, view: memoryview) -> None:
        if len(view) == buddy.SLICE_BYTES:
            held.set()
            assert go.wait(30)
        receive(sock, view)

    monkeypatch.setattr(buddy, "JOIN_S", 0.1)
    settled = threading.Event()
    sender, receiver = Buddy(ArenaRequests(agent.send, 2, guest=True), settled.set), Buddy(agent.requests, lambda: None)
    for generation in range(3):
        everyone = [Neighbour(7, 0, 0, direct.Endpoint()), Neighbour(8, 1, 0, receiver.listen())]
        receiver.pair(1, everyone)
        sender.pair(0, everyone)
        if generation == 0:
            monkeypatch.setattr(direct, "receive_into", stands)
            sender.send(snapshot(10))
            assert held.wait(30)
            monkeypatch.setattr(direct, "receive_into", receive)
        elif generation == 1:
            assert copied(sender, settled, snapshot(20)) == (CopyState.UNREACHABLE, -1)
            go.set()
            monkeypatch.setattr(buddy, "JOIN_S", 10.0)
        else:
            assert copied(sender, settled, snapshot(30)) == (CopyState.COPIED, 30)
        sender.leave()
        receiver.leave()


def test_a_copy_replaces_what_is_needed_least() -> None:
    other, old, new, empty = keyed(9, 30), keyed(7, 10), keyed(7, 20), Arena.create(4096)
    assert buddy.least_needed([new, other, old, empty], 7) is empty
    assert buddy.least_needed([new, other, old], 7) is other
    assert buddy.least_needed([new, old], 7) is old


def keyed(key: int, step: int) -> Arena:
    table = (TensorInfo("model.w", "F32", (2,), 8),)
    made = Arena.create(arena_nbytes(table))
    made.layout(table)
    made.fill([torch.ones(2)]).finish()
    made.seal(step, 1, {"key": key})
    return made


def test_a_snapshot_of_the_part_that_the_slot_had_before_is_not_sent_for_the_present_one() -> None:
    own = arenas.Agent()
    assert AgentSnapshots(own, keep_newest=True).put(part(10))
    again = AgentSnapshots(own, keep_newest=True)
    assert again.room_for(own.arenas[0].capacity) is not None
    closed = direct.Endpoint("127.0.0.1", 1, "x" * direct.TOKEN_BYTES)
    again.pair(0, [Neighbour(6, 0, 0, direct.Endpoint()), Neighbour(8, 1, 0, closed)])
    sends = again.buddy.sending
    again.leave()  # before it fails: a test of planted mistakes runs it too, in a process that goes on
    assert not sends


def part(step: int) -> SnapshotPart:
    return SnapshotPart(
        step=step,
        commit_generation=1,
        shard=0,
        shards=1,
        table=(TensorInfo("model.w", "F32", (2,), 8),),
        tensors=[torch.ones(2)],
        extra={"key": 7},
        interval="",
        part=0,
        parts=1,
        save=False,
    )


def test_the_next_snapshot_waits_until_the_last_one_is_copied() -> None:
    snapshots = AgentSnapshots(arenas.Agent(), keep_newest=True)
    sender = snapshots.buddy._sender = Sender(snapshots.buddy._wake)
    assert snapshots.put(part(10))
    assert not snapshots.free()
    threading.Timer(0.1, sender._settled, (CopyState.COPIED, 10)).start()
    snapshots.wait(30.0)
    assert snapshots.free()
    assert snapshots.copied() == (CopyState.COPIED, 10)


def test_a_generation_begins_with_a_copy_of_the_newest_snapshot() -> None:
    """Also a new worker in the place of one that has died within its copy; what the buddy has is not sent again."""
    agent, own = Agent(), arenas.Agent()
    assert AgentSnapshots(own, keep_newest=True).put(part(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct.sockets, "listening_at", lambda: [("127.0.0.1", socket.AF_INET)])
        for times in range(2):
            again, receiver = AgentSnapshots(own, keep_newest=True), Buddy(agent.requests, lambda: None)
            with contextlib.ExitStack() as leaving:
                leaving.callback(receiver.leave)
                leaving.callback(again.leave)
                assert again.room_for(own.arenas[0].capacity) is not None
                everyone = [Neighbour(7, 0, 0, direct.Endpoint()), Neighbour(8, 1, 0, receiver.listen())]
                receiver.pair(1, everyone)
                again.pair(0, everyone)
                again.wait(30.0 if again.buddy.sending else 0.0)
                assert again.copied() == (CopyState.COPIED, 10)
            assert agent.asked == times + 1
    assert [arena.header().sequence for arena in agent.arenas if arena.header().complete] == [2]


@pytest.mark.parametrize("where", ["here", "there"])
def test_where_snapshots_are_required_a_node_without_memory_ends_the_job(where: str) -> None:
    agent = arenas.Agent()
    agent.no_memory = where == "here"
    snapshots = AgentSnapshots(agent, keep_newest=True, required=True)
    if where == "there":
        sender = snapshots.buddy._sender = Sender(snapshots.buddy._wake)
        sender.copied = CopyState.NO_MEMORY, -1
    with pytest.raises(MisuseError, match="after its own has no memory" if where == "there" else "its node has no"):
        snapshots.put(part(10))
