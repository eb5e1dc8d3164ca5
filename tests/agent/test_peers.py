"""Lines between agents: what proves a death, and what does not."""

from __future__ import annotations

import errno
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
    peers = Peers("watcher", lambda *dead: deaths.put(dead))
    peers.start()
    yield peers
    peers.close()


def other(incarnation: str) -> Peers:
    peers = Peers(incarnation, lambda *_: None)
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


def refusing() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return int(gone.getsockname()[1])


def resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(found))


def test_one_address_of_several_that_refuses_is_no_death(
    watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = other("one")
    resolves_to(monkeypatch, ("127.0.0.1", refusing()), ("127.0.0.1", peer.port))
    watcher.watch({("n1", "one"): ("name", 1)})
    eventually(lambda: any(line.connected for line in watcher._lines.values()), 5.0)
    assert deaths.empty()
    resolves_to(monkeypatch, ("127.0.0.1", refusing()), ("127.0.0.1", peer.port))
    peer.close()
    assert deaths.get(timeout=5.0)[:2] == ("n1", "one")


def test_an_address_that_cannot_be_dialled_is_no_refusal(
    watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolves_to(monkeypatch, ("203.0.113.1", 9))
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.EADDRNOTAVAIL)
    watcher.watch({("n1", "one"): ("name", 1)})
    holds(deaths.empty, 0.3)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_both_families_are_heard() -> None:
    peer = other("one")
    try:
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, peer.port), timeout=5) as line:
                assert line.recv(64) == b"one"
    finally:
        peer.close()


class Exhausted:
    """A listener where there are no descriptors left."""

    def __init__(self, real: socket.socket) -> None:
        self.real, self.asked = real, 0

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        raise OSError(errno.EMFILE, "too many open files")

    def fileno(self) -> int:
        return self.real.fileno()

    def close(self) -> None:
        self.real.close()


def test_no_descriptors_left_is_waited_out() -> None:
    peers = Peers("one", lambda *_: None)
    peers._listener = exhausted = Exhausted(peers._listener)  # type: ignore[assignment]
    peers.start()
    try:
        with socket.create_connection(("127.0.0.1", peers.port), timeout=5) as line:
            eventually(lambda: exhausted.asked, 5.0)
            holds(lambda: exhausted.asked < 5, 0.5)
            exhausted.accept = exhausted.real.accept  # type: ignore[method-assign]
            assert line.recv(64) == b"one"
    finally:
        peers.close()
