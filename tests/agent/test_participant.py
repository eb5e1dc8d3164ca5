"""A torchrun agent among the others of its run, on an etcd that is wiped: what it saw before decides nothing after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fake_etcd import FakeClient, FakeServer

from elastic.contract.agent_files import EtcdAccess
from elastic.contract.records.job_records import GenerationNode, GenerationRecord, decode, encode
from elastic.etcd.client import EtcdUnavailable
from elastic.torchrun.participant import RendezvousParticipant, _own_address, _own_name
from elastic.torchrun.settings import Conf, TorchrunSettings


class Node:
    """One whose thread and watch move when the test says so."""

    def __init__(self, server: FakeServer) -> None:
        access = EtcdAccess(endpoints=("127.0.0.1:1",))
        settings = TorchrunSettings(
            conf=Conf(lease_ttl=2.0), access=access, run_id="run", min_nodes=1, max_nodes=1, local_addr="127.0.0.1"
        )
        self.server, self.client = server, FakeClient(server)
        self.party = RendezvousParticipant(self.client, settings)  # type: ignore[arg-type]
        self.client.watch(self.party.keys.root, self.party._on_view)
        self.party.join()

    def settle(self) -> None:
        """It sees what there is and does what is due, until that is nothing."""
        before = -1
        while self.server.revision != before:
            before = self.server.revision
            self.client.pump()
            self.party._turn()

    def generation(self) -> GenerationRecord | None:
        kv = self.server.kvs.get(self.party.keys.generation)
        return decode(GenerationRecord, kv.value) if kv else None

    def lease_is_found_lost(self) -> None:
        self.server.advance(self.server.now_s + 1.0)
        assert self.party._key.lease is not None
        assert self.party._key.lease.lost


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(FakeServer())
    yield made
    made.party.close()


def of_another() -> GenerationRecord:
    place = GenerationNode(node="other", incarnation="o", host="127.0.0.1", slots=(0,))
    return GenerationRecord(number=5, nodes=(place,), store_host="h", store_port=1, leader="other", why="theirs")


@pytest.mark.parametrize("registered_again", [False, True])
def test_an_etcd_that_is_back_at_the_same_revision_is_not_written_over(node: Node, registered_again: bool) -> None:
    node.settle()
    first = node.generation()
    assert first is not None
    key = node.party.keys.generation
    decided_on = node.server.kvs[key].mod_revision
    node.party.give_up(first, "a worker failed")
    node.party._turn()
    node.client.pump()  # now the next generation is due
    node.server.wipe()
    while node.server.revision < decided_on - 1:
        node.client.put("/elsewhere", b"")
    node.client.put(key, encode(of_another()))
    assert node.server.kvs[key].mod_revision == decided_on
    if registered_again:  # before the watch has looked
        node.lease_is_found_lost()
    for _ in range(2):
        node.party._turn()
    assert (node.party.keys.member(node.party.node) in node.server.kvs) is registered_again
    assert node.generation() == of_another()


def test_participant_uses_a_fresh_store_for_a_generation_number_reused_after_wipe(node: Node) -> None:
    node.client.pump()
    node.party._turn()
    node.client.pump()
    node.client.lose_answers = True
    with pytest.raises(EtcdUnavailable):
        node.party._turn()
    unheard = node.generation()
    assert unheard is not None
    node.client.lose_answers = False
    node.server.wipe()
    node.lease_is_found_lost()
    node.settle()
    again = node.generation()
    assert again is not None
    assert (again.number, unheard.number) == (1, 1)
    assert again.store_port != unheard.store_port


def test_participant_reports_broken_generation_again_after_etcd_wipe(node: Node) -> None:
    node.settle()
    first = node.generation()
    assert first is not None
    node.party.active = first
    node.server.wipe()
    node.party.give_up(first, "a worker failed")
    node.party._turn()  # refused, as it stands in no such etcd
    node.lease_is_found_lost()
    node.settle()
    followed = node.generation()
    assert followed is not None
    assert followed.number == 2
    assert "a worker failed" in str(followed.why)


def test_a_record_that_cannot_be_read_and_goes_again_leaves_no_trace(node: Node) -> None:
    key = node.party.keys.generation
    for raw, why in ((b'{"protocol": 99}', "protocol 99"), (encode(of_another()).replace(b"theirs", b"\xff"), "utf-8")):
        node.client.put(key, raw)
        node.settle()
        assert why in node.party.fault.lower()  # msgspec 0.22 and 0.23 name the encoding in other letters
    node.client.delete(key)
    node.settle()
    assert node.party.fault == ""
    assert node.generation() is not None


def test_an_etcd_at_a_unix_socket_is_on_this_host() -> None:
    assert _own_address("unix:/run/etcd.sock") == _own_name()
