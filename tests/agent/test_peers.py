"""Lines between agents: what proves a death, and what does not."""

from __future__ import annotations

import contextlib
import errno
import queue
import select
import socket
import struct
import time
from collections.abc import Iterator

import pytest
from support.wait import eventually, holds
from support.watching import watching

from elastic.agent.peers import peers as peers_module
from elastic.agent.peers.peers import Peers


@pytest.fixture
def deaths() -> queue.SimpleQueue[tuple[str, str, str]]:
    return queue.SimpleQueue()


@pytest.fixture
def watcher(deaths: queue.SimpleQueue[tuple[str, str, str]]) -> Iterator[Peers]:
    peers = watching("watcher", deaths.put)
    peers.start()
    yield peers
    peers.close()


def other(incarnation: str) -> Peers:
    peers = watching(incarnation)
    peers.start()
    return peers


def test_a_closed_port_is_a_death(watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]]) -> None:
    peer = other("one")
    watcher.watch({("n1", "one"): ("127.0.0.1", peer.port)})
    eventually(lambda: any(line.connected for line in watcher._connections.values()), 5.0)
    peer.close()
    node, incarnation, evidence = deaths.get(timeout=30.0)
    assert (node, incarnation) == ("n1", "one")
    assert "refused" in evidence


def test_another_agent_on_the_port_is_a_death(watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]]) -> None:
    peer = other("two")
    watcher.watch({("n1", "one"): ("127.0.0.1", peer.port)})
    assert deaths.get(timeout=30.0)[:2] == ("n1", "one")
    peer.close()


def test_a_peer_no_longer_watched_may_end(watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]]) -> None:
    peer = other("one")
    watcher.watch({("n1", "one"): ("127.0.0.1", peer.port)})
    eventually(lambda: any(line.connected for line in watcher._connections.values()), 5.0)
    watcher.watch({})
    eventually(lambda: not watcher._connections, 5.0)
    peer.close()
    holds(deaths.empty, 0.3)


def refusing() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return int(gone.getsockname()[1])


def resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(found))


def test_peer_with_one_refusing_address_of_several_is_not_reported_dead(
    watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = other("one")
    resolves_to(monkeypatch, ("127.0.0.1", refusing()), ("127.0.0.1", peer.port))
    watcher.watch({("n1", "one"): ("name", 1)})
    eventually(lambda: any(line.connected for line in watcher._connections.values()), 5.0)
    assert deaths.empty()
    resolves_to(monkeypatch, ("127.0.0.1", refusing()), ("127.0.0.1", peer.port))
    peer.close()
    assert deaths.get(timeout=30.0)[:2] == ("n1", "one")


def test_an_address_that_cannot_be_dialled_is_no_refusal(
    watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolves_to(monkeypatch, ("203.0.113.1", 9))
    monkeypatch.setattr(peers_module, "RETRY_S", 0.01)
    called = fails_at_once(monkeypatch, errno.EADDRNOTAVAIL)
    watcher.watch({("n1", "one"): ("name", 1)})
    eventually(lambda: len(called) >= 5, 5.0)
    assert deaths.empty()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_both_families_are_heard() -> None:
    peer = other("one")
    try:
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, peer.port), timeout=30) as line:
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
    peers = watching("one")
    peers._listener = exhausted = Exhausted(peers._listener)  # type: ignore[assignment]
    peers.start()
    try:
        with socket.create_connection(("127.0.0.1", peers.port), timeout=30) as line:
            eventually(lambda: exhausted.asked, 5.0)
            holds(lambda: exhausted.asked < 5, 0.5)
            exhausted.accept = exhausted.real.accept  # type: ignore[method-assign]
            assert line.recv(64) == b"one"
    finally:
        peers.close()


# ── unreachable peers ─────────────────────────────────────────────────────────────────────────────────────────

Heard = queue.SimpleQueue[tuple[str, str, str]]


@pytest.fixture
def heard() -> Heard:
    return queue.SimpleQueue()


@pytest.fixture
def looker(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    monkeypatch.setattr(peers_module, "DIALS_S", (0.05, 0.05, 0.1, 0.1))
    monkeypatch.setattr(peers_module, "RETRY_S", 0.1)
    monkeypatch.setattr(peers_module, "CONNECT_S", 0.2)
    monkeypatch.setattr(peers_module, "HOLD_S", 0.2)
    peers = watching("looker", lambda dead: heard.put(("dead", *dead[1:])), heard.put)
    peers.start()
    yield peers
    peers.close()


class Deaf:
    """A port whose queue is full: the kernel drops every further call, as a cut does. `hear` ends that."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.address = self.server.getsockname()
        self._fill = [socket.socket() for _ in range(4)]
        for sock in self._fill:
            sock.setblocking(False)
            sock.connect_ex(self.address)
        self.taken: list[socket.socket] = []

    def hear(self, hello: bytes) -> None:
        """Take all calls, those that fill the queue first, until one of them stays."""
        for sock in self._fill:
            sock.close()
        self.server.settimeout(30)
        while True:
            line, _ = self.server.accept()
            self.taken.append(line)
            with contextlib.suppress(OSError):
                line.send(hello)
            if not self._ends(line):
                return

    def _ends(self, line: socket.socket) -> bool:
        while select.select([line], [], [], 0.15)[0]:
            try:
                if not line.recv(64):
                    return True
            except OSError:
                return True
        return False

    def close(self) -> None:
        for sock in (self.server, *self._fill, *self.taken):
            sock.close()


@pytest.fixture
def deaf() -> Iterator[Deaf]:
    server = Deaf()
    yield server
    server.close()


def test_peer_that_never_answers_is_reported_unreachable_once(looker: Peers, heard: Heard, deaf: Deaf) -> None:
    looker.watch({("n1", "one"): deaf.address})
    node, incarnation, evidence = heard.get(timeout=30.0)
    assert (node, incarnation) == ("n1", "one")
    assert "no answer from 127.0.0.1" in evidence
    eventually(lambda: looker._connections["n1", "one"].misses >= len(peers_module.DIALS_S) + 3, 5.0)
    assert heard.empty(), "said once"


def test_silence_is_not_a_death(looker: Peers, heard: Heard, deaf: Deaf) -> None:
    looker.watch({("n1", "one"): deaf.address})
    eventually(
        lambda: looker._connections and looker._connections["n1", "one"].misses >= len(peers_module.DIALS_S) + 3, 5.0
    )
    assert heard.get(timeout=30.0)[0] == "n1"
    assert heard.empty(), "no death"


def test_peer_is_reported_reachable_once_a_connection_holds(looker: Peers, heard: Heard, deaf: Deaf) -> None:
    looker.watch({("n1", "one"): deaf.address})
    assert heard.get(timeout=30.0)[2]
    deaf.hear(b"one")
    assert heard.get(timeout=30.0) == ("n1", "one", "")


def test_a_line_that_does_not_hold_is_not_enough(
    looker: Peers, heard: Heard, deaf: Deaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "HOLD_S", 30.0)
    looker.watch({("n1", "one"): deaf.address})
    assert heard.get(timeout=30.0)[2]
    deaf.hear(b"one")
    line = looker._connections["n1", "one"]
    eventually(lambda: line.connected and line.deadline_s < float("inf"), 5.0)
    deaf.taken[-1].close()
    deaf.hear(b"one")
    eventually(lambda: line.connected and line.deadline_s < float("inf"), 5.0)
    assert line.unreachable
    assert heard.empty()


def test_a_line_without_a_hello_is_not_enough(looker: Peers, heard: Heard, deaf: Deaf) -> None:
    """The kernel over there answers, the agent does not: as before."""
    looker.watch({("n1", "one"): deaf.address})
    assert heard.get(timeout=30.0)[2]
    deaf.hear(b"")
    line = looker._connections["n1", "one"]
    eventually(lambda: line.connected, 5.0)
    assert line.deadline_s == float("inf"), "it waits for the hello"
    assert line.unreachable
    assert heard.empty()


def test_a_frozen_process_can_be_reached(looker: Peers, heard: Heard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        looker.watch({("n1", "one"): frozen.getsockname()})
        eventually(lambda: any(line.connected for line in looker._connections.values()), 5.0)
        (line,) = looker._connections.values()
        assert line.deadline_s == float("inf"), "nothing is expected of it by any time"
        assert heard.empty()


def test_peer_connection_hold_time_doubles_after_each_loss_up_to_a_limit() -> None:
    line = peers_module._PeerConnection(("n1", "one"), ("h", 1))
    holds_s = []
    for fall in range(1, 7):
        line.falls = fall
        holds_s.append(line.hold_s)
    assert holds_s == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def fails_at_once(monkeypatch: pytest.MonkeyPatch, code: int) -> list[object]:
    """Every call does, with `code`; returns the growing list of those called."""
    called: list[object] = []

    def connect_ex(_: socket.socket, address: object) -> int:
        called.append(address)
        return code

    monkeypatch.setattr(socket.socket, "connect_ex", connect_ex)
    return called


def test_an_error_at_once_does_not_shorten_the_calls(
    looker: Peers, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A route that is away for a moment fails every call at once."""
    monkeypatch.setattr(peers_module, "DIALS_S", (30.0, 30.0))
    called = fails_at_once(monkeypatch, errno.EHOSTUNREACH)
    looker.watch({("n1", "one"): ("203.0.113.1", 9)})
    eventually(lambda: called, 5.0)
    holds(lambda: len(called) == 1 and heard.empty(), 0.4)


def test_peer_is_reported_unreachable_only_after_several_failed_connects(
    looker: Peers, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packet may be lost."""
    monkeypatch.setattr(peers_module, "RETRY_S", 30.0)
    called = fails_at_once(monkeypatch, errno.ENETUNREACH)
    looker.watch({("n1", "one"): ("203.0.113.1", 9)})
    assert heard.get(timeout=30.0)[2]
    assert len(called) == 4


@pytest.mark.parametrize("code", [errno.EADDRNOTAVAIL, errno.EMFILE, errno.EPERM])
def test_trouble_of_our_own_is_no_silence(
    looker: Peers, heard: Heard, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    called = fails_at_once(monkeypatch, code)
    looker.watch({("n1", "one"): ("203.0.113.1", 9)})
    eventually(lambda: len(called) > 5, 5.0)
    assert heard.empty()


def test_unreachable_peer_is_cleared_when_no_longer_watched(looker: Peers, heard: Heard, deaf: Deaf) -> None:
    """Nobody would ever take the complaint back."""
    looker.watch({("n1", "one"): deaf.address})
    assert heard.get(timeout=30.0)[2]
    looker.watch({})
    assert heard.get(timeout=30.0) == ("n1", "one", "")


def test_unreachable_peer_is_reported_dead_when_it_refuses(looker: Peers, heard: Heard, deaf: Deaf) -> None:
    looker.watch({("n1", "one"): deaf.address})
    assert heard.get(timeout=30.0)[2]
    deaf.close()
    assert heard.get(timeout=30.0)[:2] == ("dead", "one")
    looker.watch({})
    holds(heard.empty, 0.3)


@pytest.mark.parametrize("left", [False, True], ids=["watched", "left and taken up again"])
def test_peer_reported_dead_is_connected_to_again_while_watched(looker: Peers, heard: Heard, left: bool) -> None:
    """A fire wall refuses too. When it no longer does, the peer is reported reachable."""
    with socket.socket() as peer:
        peer.bind(("127.0.0.1", 0))
        looker.watch({("n1", "one"): peer.getsockname()})
        for _ in range(2):
            assert heard.get(timeout=30.0)[:2] == ("dead", "one")
        if left:
            looker.watch({})
            eventually(lambda: not looker._connections, 5.0)
        peer.listen()
        looker.watch({("n1", "one"): peer.getsockname()})
        line, _ = peer.accept()
        with line:
            line.send(b"one")
            eventually(lambda: heard.get(timeout=30.0) == ("n1", "one", ""), 5.0)
            holds(heard.empty, 0.3)


def test_peer_connect_answered_in_time_counts_when_handled_late(heard: Heard) -> None:
    """A busy host: the call was answered in time, only not looked at. And calls that were not answered before it do not
    count any more."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        peers = watching("late", on_reach=heard.put)
        peers._wanted = {("n1", "one"): there.getsockname()}
        peers._reconcile()
        line = peers._connections["n1", "one"]
        assert line.sock is not None
        select.select([], [line.sock], [], 5.0)
        line.deadline_s, line.misses = time.monotonic() - 1.0, 3
        peers._reconcile()
        assert line.connected
        assert not line.misses
        for sock in (line.sock, peers._listener, peers._wake_read, peers._wake_write, peers._selector):
            sock.close()


def test_a_call_that_is_reset_is_made_again_soon(heard: Heard) -> None:
    """As when it gets to an agent that is just being killed, and is looked at only then: its death is not to be known
    a second later for it."""
    peers = watching("late", heard.put)
    with socket.create_server(("127.0.0.1", 0)) as there:
        peers._wanted = {("n1", "one"): there.getsockname()}
        peers._reconcile()
        line = peers._connections["n1", "one"]
        taken, _ = there.accept()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        taken.close()
    assert line.sock is not None
    eventually(lambda: line.sock in select.select([line.sock], [], [], 0.0)[0], 5.0)
    began_s = time.monotonic()
    peers._ready(line)
    assert line.resets == 1
    assert line.deadline_s < began_s + peers_module.RETRY_S / 2
    peers.start()
    assert heard.get(timeout=30.0)[:2] == ("n1", "one")
    peers.close()


def test_peer_that_resets_every_connection_is_retried_after_a_pause() -> None:
    peers = watching("late")
    line = peers_module._PeerConnection(("n1", "one"), ("127.0.0.1", 1))
    for _ in range(peers_module.RESETS):
        peers._failed(line, errno.ECONNRESET)
        assert line.deadline_s < time.monotonic() + peers_module.RETRY_S / 2
    peers._failed(line, errno.ECONNRESET)
    assert line.deadline_s > time.monotonic() + peers_module.RETRY_S / 2
    peers.start()
    peers.close()


def test_a_peer_that_closes_every_connection_is_retried_after_a_pause(
    watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that has no room for strangers does."""
    monkeypatch.setattr(peers_module, "RETRY_S", 600.0)
    monkeypatch.setattr(peers_module, "RESETS", 3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30.0)
        watcher.watch({("n1", "one"): ("127.0.0.1", server.getsockname()[1])})
        for _ in range(1 + 3):
            line, _ = server.accept()
            line.sendall(b"one")
            line.close()
        server.settimeout(0.5)
        with pytest.raises(TimeoutError):
            server.accept()
        assert deaths.empty()


def test_an_agent_that_says_no_hello_is_heard_for_long_enough_to_count_as_reachable() -> None:
    """One of a version before the hello: it redials, and must hold for up to HOLD_MAX_S."""
    assert peers_module.HELLO_S >= 2 * peers_module.HOLD_MAX_S


def dial(port: int, hello: bytes = b"") -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port), timeout=30)
    assert line.recv(64)
    line.sendall(hello)
    return line


def is_closed(line: socket.socket) -> bool:
    line.settimeout(0.0)
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        return not line.recv(64)
    return False


def test_a_connection_that_does_not_say_whose_it_is_is_closed(watcher: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "HELLO_S", 0.2)
    peer = other("one")
    peer.watch({("n0", "watcher"): ("127.0.0.1", watcher.port)})
    silent, named = dial(watcher.port), dial(watcher.port, b"two")
    try:
        eventually(lambda: is_closed(silent), 5.0)
        eventually(lambda: not watcher._silent, 5.0)
        assert sorted(watcher._inbound.values()) == ["one", "two"]
    finally:
        for line in (silent, named):
            line.close()
        peer.close()


@pytest.mark.parametrize("hello", [b"", b"two"], ids=["silent", "named"])
def test_connections_of_strangers_are_limited_and_displace_no_watched_peer(
    watcher: Peers, deaths: queue.SimpleQueue[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch, hello: bytes
) -> None:
    monkeypatch.setattr(peers_module, "MAX_UNKNOWN", 4)
    peer = other("one")
    peer.watch({("n0", "watcher"): ("127.0.0.1", watcher.port)})
    watcher.watch({("n1", "one"): ("127.0.0.1", peer.port)})
    eventually(lambda: "one" in watcher._inbound.values(), 5.0)
    (friend,) = [sock for sock, said in watcher._inbound.items() if said == "one"]
    lines = [dial(watcher.port, hello) for _ in range(12)]
    try:
        eventually(lambda: sum(map(is_closed, lines[:8])) == 8, 5.0)
        assert not any(map(is_closed, lines[8:]))
        assert watcher._inbound[friend] == "one"
        assert deaths.empty()
    finally:
        for line in lines:
            line.close()
        peer.close()


def test_no_place_of_the_generation_is_a_stranger(watcher: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first node of a large job drains, all others connect to it, and it watches few of them."""
    monkeypatch.setattr(peers_module, "MAX_UNKNOWN", 4)
    places = [f"one-{i}" for i in range(12)]
    watcher.watch({}, lambda: frozenset(places))
    lines = [dial(watcher.port, place.encode()) for place in places]
    strangers = [dial(watcher.port, b"two") for _ in range(6)]
    try:
        eventually(lambda: sum(map(is_closed, strangers[:2])) == 2, 5.0)
        eventually(lambda: sorted(watcher._inbound.values()) == sorted([*places, *["two"] * 4]), 5.0)
        assert not any(map(is_closed, [*lines, *strangers[2:]]))
    finally:
        for line in (*lines, *strangers):
            line.close()
