"""The agent's sockets are on the node's address only, and in the range of ports that a firewall opens."""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta

import pytest
from support.etcd_server import free_ports
from support.watching import watching
from torch._C._distributed_c10d import TCPStore

from elastic.agent.peers import store
from elastic.agent.peers.listening import listen
from elastic.agent.peers.store import Stores
from elastic.contract.records.reasons import Code, reason
from elastic.util import processes

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
"""Two addresses of this host, as those of two networks."""


def answers(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(60)
        return probe.connect_ex((host, port)) == 0


def test_a_store_is_reached_by_the_nodes_address_only() -> None:
    stores = Stores(HERE, HERE)
    try:
        host, port = stores.open(1)
        assert (answers(HERE, port), answers(ELSEWHERE, port)) == (True, False)
        client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        client.set("k", "v")
        assert client.get("k") == b"v"
    finally:
        stores.close()


def test_a_store_that_makes_its_process_grow_beyond_the_limit_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [1000]
    monkeypatch.setattr(store, "own_nbytes", lambda: memory[0])
    stores = Stores(HERE, HERE)
    _, first = stores.open(1)
    memory[0] += 100
    _, second = stores.open(2)
    memory[0] += store.LIMIT_NBYTES
    assert (stores.overfull(2, 4), answers(HERE, first), answers(HERE, second)) == (None, True, True), "many addresses"
    memory[0] += store.LIMIT_PER_PAIR_NBYTES + 1
    said = stores.overfull(2, 1)
    assert said == reason(Code.STORE_GREW, mib=256, most=256)
    assert (answers(HERE, first), answers(HERE, second)) == (False, False)
    assert stores.overfull(2, 1) == said, "until the generation is known to be broken"
    _, third = stores.open(3)
    assert (stores.overfull(3, 1), stores.overfull(2, 1), answers(HERE, third)) == (None, said, True), "a measure anew"
    stores.close()


def test_a_store_is_not_measured_while_no_descriptor_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent that hosts it ended there at once, with the worker that held the state."""

    def full(path: str) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    stores = Stores(HERE, HERE)
    _, port = stores.open(1)
    monkeypatch.setattr(processes, "kernel_file", full)
    assert (stores.overfull(1, 4), answers(HERE, port)) == (None, True)
    stores.close()


def test_own_memory_is_counted_without_what_is_shared() -> None:
    before = store.own_nbytes()
    kept = bytearray(b"x" * 64 * 2**20)
    grown = store.own_nbytes() - before
    assert 60 * 2**20 < grown < 100 * 2**20, len(kept)


def test_other_agents_reach_the_agent_by_the_nodes_address_only() -> None:
    peers = watching("one", listener=listen(HERE))
    try:
        assert (answers(HERE, peers.port), answers(ELSEWHERE, peers.port)) == (True, False)
    finally:
        peers.start()
        peers.close()


@pytest.mark.parametrize("address", ["203.0.113.1", "localhost", ""])
def test_an_address_that_this_host_does_not_have_means_every_address(address: str) -> None:
    with listen(address) as made:
        port = made.getsockname()[1]
        assert answers(HERE, port)
        assert answers(ELSEWHERE, port)


def test_ports_are_taken_from_the_range_until_none_is_free() -> None:
    (first,) = free_ports(1)
    held = [listen(HERE, (first, first + 2)) for _ in range(3)]
    try:
        outside = listen(HERE, (first, first + 2))
        held.append(outside)
        taken = [made.getsockname()[1] for made in held]
        assert sum(first <= port <= first + 2 for port in taken) >= 2, "one may have been taken by another program"
        assert not first <= taken[-1] <= first + 2
    finally:
        for made in held:
            made.close()
