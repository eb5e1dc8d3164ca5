"""Lines between agents: what proves a death, and what does not."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest
from support.wait import eventually, holds

from elastic.agent.peers import Peers


@pytest.fixture
def deaths() -> queue.SimpleQueue[tuple[str, str, str]]:
    return queue.SimpleQueue()


@pytest.fixture
def watcher(deaths: queue.SimpleQueue[tuple[str, str, str]]) -> Iterator[Peers]:
    peers = Peers("127.0.0.1", "watcher", lambda *dead: deaths.put(dead))
    peers.start()
    yield peers
    peers.close()


def other(incarnation: str) -> Peers:
    peers = Peers("127.0.0.1", incarnation, lambda *_: None)
    peers.start()
    return peers


def test_a_closed_port_is_a_death(watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]]) -> None:
    peer = other("one")
    watcher.watch({("n1", "one"): ("127.0.0.1", peer.port)})
    eventually(lambda: any(line.connected for line in watcher._lines.values()), 5.0)
    peer.close()
    node, incarnation, evidence = deaths.get(timeout=5.0)
    assert (node, incarnation) == ("n1", "one")
    assert "refused" in evidence


def test_another_agent_on_the_port_is_a_death(watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]]) -> None:
    peer = other("two")
    watcher.watch({("n1", "one"): ("127.0.0.1", peer.port)})
    assert deaths.get(timeout=5.0)[:2] == ("n1", "one")
    peer.close()


def test_silence_is_not_a_death(watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]]) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        watcher.watch({("n1", "one"): silent.getsockname()})
        holds(deaths.empty, 0.5)


def test_a_peer_no_longer_watched_may_end(watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]]) -> None:
    peer = other("one")
    watcher.watch({("n1", "one"): ("127.0.0.1", peer.port)})
    eventually(lambda: any(line.connected for line in watcher._lines.values()), 5.0)
    watcher.watch({})
    eventually(lambda: not watcher._lines, 5.0)
    peer.close()
    holds(deaths.empty, 0.3)
