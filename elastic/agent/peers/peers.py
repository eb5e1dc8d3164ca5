"""Connections to other agents: an idle TCP connection each way that reveals a death within milliseconds, and a network
partition within seconds.

A closed connection proves nothing yet. A refused connection to the port that a living agent listens on proves its
death (until the agent answers again: a firewall may refuse as well, so a peer that is still watched is dialled again),
and so does another agent answering on that port. Silence proves no death: after a connection has timed out and several
attempts in a row got no answer, the peer is unreachable from here, until a connection to it has held for a while again.
The peer's kernel answers, so neither a frozen process nor a busy host is taken for a partition.

Both sides say who they are. Connections that do not, and those of agents that this one does not watch itself, are
limited, so that another program on the network cannot take all of the agent's descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import structlog

from elastic.recovery.facts.membership import watch_list
from elastic.recovery.machine.events import PeerDead, PeerEvent, PeerReachable, PeerUnreachable
from elastic.recovery.machine.model import Agent

from .listening import listen
from .resolver import Address, Found, Resolver, numeric

CONNECTIONS_PER_S = 100
"""In a large job, about so many agents per second update their connections after a change: not all at once."""


_incarnation = operator.attrgetter("incarnation")


class PeerMonitor:
    """Used by the agent's loop only."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._due_s = float("inf")

    def after_turn(self, before: Agent, agent: Agent, has_all_members: bool, now_s: float) -> None:
        """Called after each event, and so on every beat. has_all_members: the agent's view has all of the job's."""
        if (
            agent.formed.generation != before.formed.generation
            or agent.etcd.view.members != before.etcd.view.members
            or agent.peers.dead != before.peers.dead
            or agent.peers.unreachable != before.peers.unreachable
        ):
            spread_s = (
                0.0
                if has_all_members or agent.formed.generation is None
                else len(agent.formed.generation.nodes) / CONNECTIONS_PER_S
            )
            self._due_s = min(self._due_s, now_s + random.uniform(0.0, spread_s))
        if now_s >= self._due_s:
            self._due_s = float("inf")
            self._lay(agent)

    def _lay(self, agent: Agent) -> None:
        complaints = {node for node, _ in agent.peers.unreachable}
        formed = agent.formed.generation
        seen = watch_list(agent.etcd.view, agent.peers.dead, formed, agent.policy.node, complaints)
        # All of them may take this node for the leader, while it drains and takes another one for it.
        known = lambda: frozenset(map(_incarnation, formed.nodes)) if formed else frozenset()  # noqa: E731
        self._peers.watch({m.id: (m.record.host, m.record.port) for m in seen}, known)


DIALS_S = (0.4, 0.4, 0.6, 1.0)
"""Time-out of each connection attempt; when all of these in a row got no answer, the peer is unreachable. One packet an
attempt: with one in twenty lost each way, less than one series in ten thousand fails."""
CONNECT_S = 2.0
"""The same for the attempts after those, with RETRY_S between them."""
RETRY_S = 1.0
RESET_S, RESETS = 0.02, 25
"""An attempt that was reset, as by a process that is just exiting, is repeated after this long, up to this often."""
HOLD_S, HOLD_MAX_S = 5.0, 60.0
"""How long a connection must hold until its peer counts as reachable again: doubled after each further loss."""
FORGET_S = 300.0
"""The earlier losses of a peer that has been reachable for this long are forgotten."""
HELLO_BYTES = 64
HELLO_S = 2 * HOLD_MAX_S
"""An incoming connection that has not said whose it is within this time is closed. A dialler says it at once; one of an
earlier version never does, and its connection must hold for HOLD_MAX_S to find this agent reachable."""
MAX_UNKNOWN = 256
"""So many incoming connections are held of others than the watched peers and the nodes of the generation; then the
oldest are closed. An agent whose connection is closed dials again."""
OUT_KEEPALIVE = (1, 1, 2)
"""Outgoing connections: idle seconds, seconds between probes, probes. Silence breaks one after two to three seconds."""
IN_KEEPALIVE = (30, 10, 3)
"""The same for incoming connections: that of a host that lost power is dropped after a minute."""
SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors of a connection, or an attempt, that gets no answer."""

log = structlog.get_logger()

Id = tuple[str, str]
"""(node, incarnation)"""


class _PeerConnection(msgspec.Struct):
    id: Id
    address: Address
    known: Found = []
    """Addresses of the host from the last look-up, which may be older than the connection: detecting a death must not
    wait for a name server."""
    fresh: bool = False
    """Whether they have not been dialled since that look-up."""
    sock: socket.socket | None = None
    connected: bool = False
    deadline_s: float = 0.0
    """When to give up connecting, or to try again (inf: when its host's name is resolved); if connected: when an
    unreachable peer counts as reachable again."""
    untried: list[Any] = []
    """Addresses of the host still to dial, as getaddrinfo returns them."""
    refused: bool | None = None
    """Whether all addresses dialled so far have refused; None: none could be dialled."""
    silent: bool = False
    """Whether an address dialled so far did not answer."""
    misses: int = 0
    """Attempts in a row that got no answer."""
    resets: int = 0
    """Attempts in a row that were reset."""
    brief: int = 0
    """Connections in a row that the peer closed within RETRY_S."""
    connected_at_s: float = 0.0
    unreachable: bool = False
    refused_us: bool = False
    """See `Peers._refusers`."""
    falls: int = 0
    """How often the peer has become unreachable."""
    reached_at_s: float = 0.0
    """When the peer last became reachable again."""

    @property
    def patience_s(self) -> float:
        return DIALS_S[self.misses] if self.misses < len(DIALS_S) else CONNECT_S

    @property
    def hold_s(self) -> float:
        return float(min(HOLD_S * 2 ** max(0, self.falls - 1), HOLD_MAX_S))

    @property
    def pause_s(self) -> float:
        """Until the next attempt after the peer has closed a connection. None at first, as it may have died; one that
        closes each has no room."""
        if self.brief <= 1:
            return 0.0
        return RESET_S if self.brief <= RESETS else RETRY_S

    @property
    def doubted(self) -> bool:
        return self.unreachable or self.refused_us


class Peers:
    """Listens for other agents (None: on every address, at any port), and monitors those passed to `watch`.

    `post` is called from a thread of this object: with PeerReachable also of a peer that is no longer watched.
    """

    def __init__(
        self,
        incarnation: str,
        post: Callable[[PeerEvent], None],
        listener: socket.socket | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._post = post
        self._listener = listener or listen("")
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._lock = threading.Lock()
        self._lookups = Resolver(self._wake)
        self._wanted: dict[Id, Address] = {}
        self._connections: dict[Id, _PeerConnection] = {}
        self._refusers: set[Id] = set()
        """Peers reported dead after a refusal, without an answer since: if watched again, an answer is reported."""
        self._inbound: dict[socket.socket, str] = {}
        """Incoming connections, oldest first -> incarnation of the dialler; '' until its hello has come."""
        self._silent: dict[socket.socket, float] = {}
        """Those without a hello, oldest first -> when they are closed."""
        self._known: Callable[[], frozenset[str]] = frozenset
        """Incarnations of the watched peers, and of others that may connect."""
        self._deaf_until_s: float | None = None
        """Set when no descriptors were left for incoming connections: none is accepted until then."""
        self._changed = True
        """Whether `_reconcile` has work: it iterates over all connections, a thousand on the leader."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="elastic-peers", daemon=True)

    def start(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread.start()

    def watch(self, wanted: Mapping[Id, Address], known: Callable[[], frozenset[str]] = frozenset) -> None:
        """Watch exactly these peers: {(node, incarnation): (host, port)}. `known`: incarnations of agents whose own
        connections are held beside theirs, however many; asked for when there are many."""
        with self._lock:
            self._known = functools.cache(lambda: known().union(incarnation for _, incarnation in wanted))
            if wanted == self._wanted:
                return
            self._wanted = dict(wanted)
        self._changed = True
        self._wake()

    def close(self) -> None:
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        due_s = 0.0
        while not self._stopping:
            for address, found in self._lookups.answers():
                self._looked_up(address, found)
                self._changed = True
            if self._changed or time.monotonic() >= due_s:
                self._changed = False
                self._reconcile()
                due = [peer.deadline_s for peer in self._connections.values() if not peer.connected or peer.doubted]
                due += [*self._silent.values()][:1]
                due_s = min([*due, float("inf") if self._deaf_until_s is None else self._deaf_until_s])
            timeout = min(max(0.0, due_s - time.monotonic()), RETRY_S) if due_s < float("inf") else None
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _PeerConnection):
                    self._ready(key.data)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._inbound_ready(key.fileobj)
        for peer in tuple(self._connections.values()):
            self._drop(peer)
        for sock in (*self._inbound, self._listener, self._wake_read, self._wake_write):
            sock.close()
        self._selector.close()

    def _reconcile(self) -> None:
        with self._lock:
            wanted = dict(self._wanted)
        for peer in tuple(self._connections.values()):
            if peer.id not in wanted:
                self._drop(peer)
                del self._connections[peer.id]
                if peer.unreachable:
                    self._post(PeerReachable(*peer.id))  # no longer watched: withdraw the report
        now_s = time.monotonic()
        if self._deaf_until_s is not None and now_s >= self._deaf_until_s:
            self._deaf_until_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        for sock in [sock for sock, end_s in self._silent.items() if now_s >= end_s]:
            self._reject(sock)
        for peer_id, address in wanted.items():
            new = _PeerConnection(peer_id, address, refused_us=peer_id in self._refusers)
            peer = self._connections.setdefault(peer_id, new)
            if now_s < peer.deadline_s:
                continue
            if peer.sock is None:
                self._connect(peer)
            elif peer.connected:
                if peer.doubted:
                    self._reached(peer)
            elif _answered(peer.sock):
                self._ready(peer)  # this thread is late, not the answer
            else:
                self._drop(peer)
                self._failed(peer, errno.ETIMEDOUT)

    def _connect(self, peer: _PeerConnection) -> None:
        """Dial the host's addresses, starting with the first."""
        if not peer.fresh:
            if found := numeric(peer.address):
                peer.known = found
            else:
                self._lookups.ask(peer.address)
        if not peer.known:
            peer.deadline_s = float("inf")
            return
        peer.untried, peer.fresh = list(peer.known), False
        peer.refused, peer.silent = None, False
        self._dial(peer)

    def _looked_up(self, address: Address, found: Found) -> None:
        for peer in self._connections.values():
            if peer.address != address:
                continue
            if not peer.known:  # it waits for this look-up
                peer.deadline_s = 0.0 if found else time.monotonic() + RETRY_S
            if found:
                peer.known, peer.fresh = found, peer.sock is None

    def _dial(self, peer: _PeerConnection) -> None:
        peer.deadline_s = time.monotonic() + peer.patience_s
        family, kind, proto, _, address = peer.untried.pop(0)
        try:
            sock = socket.socket(family, kind, proto)
        except OSError as error:  # no descriptors left, or address family not supported here
            self._failed(peer, error.errno or errno.EIO)
            return
        sock.setblocking(False)
        _keep_alive(sock, *OUT_KEEPALIVE)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._failed(peer, code)
            return
        peer.sock = sock
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def _ready(self, peer: _PeerConnection) -> None:
        sock = peer.sock
        if sock is None:
            return
        if not peer.connected:
            if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._drop(peer)
                self._failed(peer, code)
                return
            peer.connected, peer.connected_at_s = True, time.monotonic()
            peer.deadline_s = float("inf")  # a peer that was unreachable: until its hello arrives
            peer.misses = peer.resets = 0
            self._selector.modify(sock, selectors.EVENT_READ, peer)
            with contextlib.suppress(OSError):  # read below, as the end of the connection
                sock.send(self._incarnation.encode())
        try:
            hello = sock.recv(HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            hello = b""
        if not hello:
            self._drop(peer)  # closed, or silent for too long
            now_s = time.monotonic()
            peer.brief = peer.brief + 1 if now_s - peer.connected_at_s < RETRY_S else 0
            peer.deadline_s = now_s + peer.pause_s
        elif hello.decode(errors="replace").strip() != peer.id[1]:
            self._dead(peer, "another agent answers on its port")
        else:
            peer.deadline_s = time.monotonic() + peer.hold_s
            self._changed = self._changed or peer.doubted

    def _failed(self, peer: _PeerConnection, code: int) -> None:
        self._changed = True
        if code not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # these: family not available on this host
            peer.refused = peer.refused is not False and code == errno.ECONNREFUSED
            peer.silent = peer.silent or code in SILENT
        if peer.untried:
            self._dial(peer)
            return
        if peer.refused:
            self._dead(peer, f"connection to {peer.address[0]}:{peer.address[1]} refused")
            peer.refused_us, peer.deadline_s = True, time.monotonic() + RETRY_S
            self._refusers.add(peer.id)
            return
        if code == errno.ECONNRESET and not peer.silent and peer.resets < RESETS:
            peer.resets += 1
            peer.deadline_s = time.monotonic() + RESET_S
            return
        if peer.silent:
            peer.misses += 1
        if peer.silent and peer.misses < len(DIALS_S):
            return  # retried when this attempt's time-out is over: an immediate error must not shorten it
        peer.deadline_s = time.monotonic() + RETRY_S
        if peer.silent and not peer.unreachable:
            self._lost(peer)

    def _lost(self, peer: _PeerConnection) -> None:
        if time.monotonic() - peer.reached_at_s > FORGET_S:
            peer.falls = 0
        peer.unreachable = True
        peer.falls += 1
        evidence = f"no answer from {peer.address[0]}:{peer.address[1]}"
        log.warning("peer.unreachable", node=peer.id[0], evidence=evidence)
        self._post(PeerUnreachable(*peer.id, evidence))

    def _reached(self, peer: _PeerConnection) -> None:
        peer.unreachable = peer.refused_us = False
        self._refusers.discard(peer.id)
        peer.reached_at_s = time.monotonic()
        log.info("peer.reachable", node=peer.id[0])
        self._post(PeerReachable(*peer.id))

    def _dead(self, peer: _PeerConnection, evidence: str) -> None:
        self._drop(peer)
        peer.deadline_s, peer.unreachable = float("inf"), False
        self._post(PeerDead(*peer.id, evidence))

    def _drop(self, peer: _PeerConnection) -> None:
        self._changed = True
        if peer.sock is not None:
            self._selector.unregister(peer.sock)
            peer.sock.close()
        peer.sock, peer.connected = None, False

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                # The connection stays in the backlog and keeps the listener readable: do not poll it for a while.
                log.warning("peers.cannot_accept", error=str(error))
                self._selector.unregister(self._listener)
                self._deaf_until_s = time.monotonic() + RETRY_S
                self._changed = True
            return
        try:
            sock.setblocking(False)
            _keep_alive(sock, *IN_KEEPALIVE)
            sock.send(self._incarnation.encode())
            self._selector.register(sock, selectors.EVENT_READ, None)
        except OSError:
            sock.close()
        else:
            self._inbound[sock], self._silent[sock] = "", time.monotonic() + HELLO_S
            self._changed = self._changed or len(self._silent) == 1
            self._make_room()

    def _make_room(self) -> None:
        if len(self._inbound) <= MAX_UNKNOWN:
            return
        for sock in tuple(self._silent):
            self._inbound_ready(sock)  # its hello may have come, and this thread be late
        known = self._known()
        strangers = [sock for sock, hello in self._inbound.items() if hello not in known]
        for sock in strangers[: max(0, len(strangers) - MAX_UNKNOWN)]:
            self._reject(sock)

    def _inbound_ready(self, sock: socket.socket) -> None:
        if sock not in self._inbound:
            return  # turned away, in the same round of events
        try:
            hello = sock.recv(HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            hello = b""
        if not hello:
            self._reject(sock)
        elif self._silent.pop(sock, None) is not None:
            self._inbound[sock] = hello.decode(errors="replace").strip()

    def _reject(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._inbound.pop(sock, None)
        self._silent.pop(sock, None)
        sock.close()


def _keep_alive(sock: socket.socket, idle_s: int, probe_s: int, probes: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def _answered(sock: socket.socket) -> bool:
    """Whether the connection was accepted: its events may not have been processed yet."""
    try:
        sock.getpeername()
    except OSError:
        return False
    return True
