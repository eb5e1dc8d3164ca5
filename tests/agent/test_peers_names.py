"""Peers that are called by name: a name server that does not answer holds up no notice of a death."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.wait import eventually, holds
from support.watching import watching

from elastic.agent.peers import peers as peers_module
from elastic.agent.peers import resolver as lookups_module
from elastic.agent.peers.peers import Peers
from elastic.agent.peers.resolver import Resolver

Deaths = queue.SimpleQueue[tuple[str, str, str]]


class Names:
    """A name server in place of the system's: every name is 127.0.0.1, and while `away` nobody gets an answer."""

    def __init__(self) -> None:
        self.here = threading.Event()
        self.here.set()
        self.known = True
        self.asked: list[str] = []
        self._real = socket.getaddrinfo

    def getaddrinfo(self, host: str, port: int, *, flags: int = 0, **more: Any) -> list[Any]:
        with contextlib.suppress(socket.gaierror):
            return list(self._real(host, port, flags=flags | socket.AI_NUMERICHOST, **more))
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        self.asked.append(host)
        assert self.here.wait(20.0)
        if not self.known:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return list(self._real("127.0.0.1", port, **more))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    server = Names()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.here.set()  # the threads that ask end before the next test
    eventually(lambda: not any(t.name == "elastic-lookup" for t in threading.enumerate()), 5.0)


@pytest.fixture
def deaths() -> Deaths:
    return queue.SimpleQueue()


@pytest.fixture
def watcher(deaths: Deaths, names: Names) -> Iterator[Peers]:
    peers = watching("watcher", deaths.put)
    peers.start()
    yield peers
    names.here.set()
    peers.close()


def listening(incarnation: str) -> Peers:
    peers = watching(incarnation)
    peers.start()
    return peers


def stands(watcher: Peers, node: str) -> None:
    eventually(lambda: any(line.connected for line in watcher._connections.values() if line.id[0] == node), 5.0)


def test_a_death_is_seen_while_the_name_of_another_is_looked_up(watcher: Peers, deaths: Deaths, names: Names) -> None:
    peer = listening("one")
    watcher.watch({("n1", "one"): ("127.0.0.1", peer.port)})
    stands(watcher, "n1")
    names.here.clear()
    watcher.watch({("n1", "one"): ("127.0.0.1", peer.port), ("n2", "two"): ("slow.example", 9)})
    eventually(lambda: names.asked, 5.0)
    peer.close()
    node, _, evidence = deaths.get(timeout=30.0)
    assert node == "n1"
    assert "refused" in evidence


def test_peer_death_by_host_name_is_reported_without_waiting_for_dns(
    watcher: Peers, deaths: Deaths, names: Names
) -> None:
    peer = listening("one")
    watcher.watch({("n1", "one"): ("one.example", peer.port)})
    stands(watcher, "n1")
    names.here.clear()
    peer.close()
    node, _, evidence = deaths.get(timeout=30.0)
    assert node == "n1"
    assert evidence == f"connection to one.example:{peer.port} refused"


def test_a_name_that_is_not_known_yet_is_asked_for_again(
    watcher: Peers, deaths: Deaths, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "RETRY_S", 0.05)
    names.known = False
    peer = listening("one")
    watcher.watch({("n1", "one"): ("one.example", peer.port)})
    eventually(lambda: len(names.asked) > 2, 5.0)
    assert deaths.empty()
    names.known = True
    stands(watcher, "n1")
    peer.close()


def test_a_name_that_leads_elsewhere_by_now_is_followed(
    watcher: Peers, deaths: Deaths, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line's old address does not answer any more, and under the new one nobody has the port."""
    monkeypatch.setattr(peers_module, "DIALS_S", (0.1, 0.1, 0.1, 5.0))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    watcher.watch({("n1", "one"): ("127.0.0.1", port)})  # only to see that it would be a death
    assert deaths.get(timeout=30.0)[0] == "n1"
    watcher.watch({})
    eventually(lambda: not watcher._connections, 5.0)
    silent = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.113.1", port))]
    real = socket.socket.connect_ex

    def connect_ex(sock: socket.socket, address: Any) -> int:
        return 115 if address[0] == "203.0.113.1" else real(sock, address)  # EINPROGRESS, for ever

    monkeypatch.setattr(socket.socket, "connect_ex", connect_ex)
    line = peers_module._PeerConnection(("n2", "two"), ("two.example", port), known=silent)
    watcher._connections[line.id] = line
    watcher.watch({line.id: line.address})
    assert deaths.get(timeout=30.0)[0] == "n2"


def test_so_many_are_asked_at_a_time_and_each_once(names: Names) -> None:
    names.here.clear()
    woken = threading.Semaphore(0)
    lookups = Resolver(woken.release)
    count = 2 * lookups_module.MOST_AT_ONCE
    for number in range(count):
        for _ in range(2):
            lookups.ask((f"n{number}.example", 1))
    eventually(lambda: len(names.asked) == lookups_module.MOST_AT_ONCE, 5.0)
    holds(lambda: len(names.asked) == lookups_module.MOST_AT_ONCE, 0.1)
    names.here.set()
    found: set[tuple[str, int]] = set()
    while len(found) < count:
        assert woken.acquire(timeout=30.0)
        found |= {address for address, there in lookups.answers() if there}
    assert sorted(names.asked) == sorted(host for host, _ in found)


def test_without_a_thread_to_spare_a_name_is_not_known_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    lookups = Resolver(lambda: None)
    for _ in range(2):  # it can be asked again
        lookups.ask(("n.example", 1))
        assert lookups.answers() == [(("n.example", 1), [])]
