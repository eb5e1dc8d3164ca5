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
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from elastic.recovery.facts.membership import watch_list
from elastic.recovery.machine.model import Agent

from .listening import listen
from .resolver import Address, Found, Resolver, numeric

LINES_PER_S = 100
"""In a large job, about so many agents per second update their connections after a change: not all at once."""


class PeerMonitor:
    """Used by the agent's loop only."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._due_s = float("inf")

    def turned(self, before: Agent, agent: Agent, whole: bool, now_s: float) -> None:
        """Called after each event, and so on every beat. whole: the agent's view has all members of the job."""
        if (
            agent.formed.generation is not before.formed.generation
            or agent.etcd.view.members is not before.etcd.view.members
            or agent.peers.dead != before.peers.dead
            or agent.peers.unreachable != before.peers.unreachable
        ):
            spread_s = (
                0.0 if whole or agent.formed.generation is None else len(agent.formed.generation.nodes) / LINES_PER_S
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
        known = frozenset(place.incarnation for place in formed.nodes) if formed else frozenset()
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
STRANGERS = 256
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


@dataclass(slots=True)
class _Line:
    id: Id
    address: Address
    known: Found = field(default_factory=list)
    """Addresses of the host from the last look-up, which may be older than the connection: detecting a death must not
    wait for a name server."""
    fresh: bool = False
    """Whether they have not been dialled since that look-up."""
    sock: socket.socket | None = None
    connected: bool = False
    deadline_s: float = 0.0
    """When to give up connecting, or to try again (inf: when its host's name is resolved); if connected: when an
    unreachable peer counts as reachable again."""
    untried: list[Any] = field(default_factory=list)
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


def _unheard(node: str, incarnation: str, evidence: str) -> None:
    pass


class Peers:
    """Listens for other agents (None: on every address, at any port), and monitors those passed to `watch`.

    `on_dead(node, incarnation, evidence)` and `on_reach(node, incarnation, evidence)` are called from a thread of this
    object. The evidence of `on_reach` is '' when the peer is reachable again, or no longer watched; else it says why
    the peer is unreachable.
    """

    def __init__(
        self,
        incarnation: str,
        on_dead: Callable[[str, str, str], None],
        on_reach: Callable[[str, str, str], None] = _unheard,
        listener: socket.socket | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._on_dead = on_dead
        self._on_reach = on_reach
        self._listener = listener or listen("")
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._lock = threading.Lock()
        self._lookups = Resolver(self._wake)
        self._wanted: dict[Id, Address] = {}
        self._lines: dict[Id, _Line] = {}
        self._refusers: set[Id] = set()
        """Peers reported dead after a refusal, without an answer since: if watched again, an answer is reported."""
        self._inbound: dict[socket.socket, str] = {}
        """Incoming connections, oldest first -> incarnation of the dialler; '' until its hello has come."""
        self._silent: dict[socket.socket, float] = {}
        """Those without a hello, oldest first -> when they are closed."""
        self._known: frozenset[str] = frozenset()
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

    def watch(self, wanted: Mapping[Id, Address], known: frozenset[str] = frozenset()) -> None:
        """Watch exactly these peers: {(node, incarnation): (host, port)}. `known`: incarnations of agents whose own
        connections are held beside theirs, however many."""
        with self._lock:
            self._known = known.union(incarnation for _, incarnation in wanted)
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
                due = [line.deadline_s for line in self._lines.values() if not line.connected or line.doubted]
                due += [*self._silent.values()][:1]
                due_s = min([*due, float("inf") if self._deaf_until_s is None else self._deaf_until_s])
            timeout = min(max(0.0, due_s - time.monotonic()), RETRY_S) if due_s < float("inf") else None
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Line):
                    self._ready(key.data)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._inbound_ready(key.fileobj)
        for line in tuple(self._lines.values()):
            self._drop(line)
        for sock in (*self._inbound, self._listener, self._wake_read, self._wake_write):
            sock.close()
        self._selector.close()

    def _reconcile(self) -> None:
        with self._lock:
            wanted = dict(self._wanted)
        for line in tuple(self._lines.values()):
            if line.id not in wanted:
                self._drop(line)
                del self._lines[line.id]
                if line.unreachable:
                    self._on_reach(*line.id, "")  # no longer watched: withdraw the report
        now_s = time.monotonic()
        if self._deaf_until_s is not None and now_s >= self._deaf_until_s:
            self._deaf_until_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        for sock in [sock for sock, end_s in self._silent.items() if now_s >= end_s]:
            self._turn_away(sock)
        for peer, address in wanted.items():
            line = self._lines.setdefault(peer, _Line(peer, address, refused_us=peer in self._refusers))
            if now_s < line.deadline_s:
                continue
            if line.sock is None:
                self._connect(line)
            elif line.connected:
                if line.doubted:
                    self._reached(line)
            elif _answered(line.sock):
                self._ready(line)  # this thread is late, not the answer
            else:
                self._drop(line)
                self._failed(line, errno.ETIMEDOUT)

    def _connect(self, line: _Line) -> None:
        """Dial the host's addresses, starting with the first."""
        if not line.fresh:
            if found := numeric(line.address):
                line.known = found
            else:
                self._lookups.ask(line.address)
        if not line.known:
            line.deadline_s = float("inf")
            return
        line.untried, line.fresh = list(line.known), False
        line.refused, line.silent = None, False
        self._dial(line)

    def _looked_up(self, address: Address, found: Found) -> None:
        for line in self._lines.values():
            if line.address != address:
                continue
            if not line.known:  # it waits for this look-up
                line.deadline_s = 0.0 if found else time.monotonic() + RETRY_S
            if found:
                line.known, line.fresh = found, line.sock is None

    def _dial(self, line: _Line) -> None:
        line.deadline_s = time.monotonic() + line.patience_s
        family, kind, proto, _, address = line.untried.pop(0)
        try:
            sock = socket.socket(family, kind, proto)
        except OSError as error:  # no descriptors left, or address family not supported here
            self._failed(line, error.errno or errno.EIO)
            return
        sock.setblocking(False)
        _keep_alive(sock, *OUT_KEEPALIVE)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._failed(line, code)
            return
        line.sock = sock
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, line)

    def _ready(self, line: _Line) -> None:
        sock = line.sock
        if sock is None:
            return
        if not line.connected:
            if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._drop(line)
                self._failed(line, code)
                return
            line.connected, line.connected_at_s = True, time.monotonic()
            line.deadline_s = float("inf")  # a peer that was unreachable: until its hello arrives
            line.misses = line.resets = 0
            self._selector.modify(sock, selectors.EVENT_READ, line)
            with contextlib.suppress(OSError):  # read below, as the end of the connection
                sock.send(self._incarnation.encode())
        try:
            hello = sock.recv(HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            hello = b""
        if not hello:
            self._drop(line)  # closed, or silent for too long
            now_s = time.monotonic()
            line.brief = line.brief + 1 if now_s - line.connected_at_s < RETRY_S else 0
            line.deadline_s = now_s + line.pause_s
        elif hello.decode(errors="replace").strip() != line.id[1]:
            self._dead(line, "another agent answers on its port")
        else:
            line.deadline_s = time.monotonic() + line.hold_s
            self._changed = self._changed or line.doubted

    def _failed(self, line: _Line, code: int) -> None:
        self._changed = True
        if code not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # these: family not available on this host
            line.refused = line.refused is not False and code == errno.ECONNREFUSED
            line.silent = line.silent or code in SILENT
        if line.untried:
            self._dial(line)
            return
        if line.refused:
            self._dead(line, f"connection to {line.address[0]}:{line.address[1]} refused")
            line.refused_us, line.deadline_s = True, time.monotonic() + RETRY_S
            self._refusers.add(line.id)
            return
        if code == errno.ECONNRESET and not line.silent and line.resets < RESETS:
            line.resets += 1
            line.deadline_s = time.monotonic() + RESET_S
            return
        if line.silent:
            line.misses += 1
        if line.silent and line.misses < len(DIALS_S):
            return  # retried when this attempt's time-out is over: an immediate error must not shorten it
        line.deadline_s = time.monotonic() + RETRY_S
        if line.silent and not line.unreachable:
            self._lost(line)

    def _lost(self, line: _Line) -> None:
        if time.monotonic() - line.reached_at_s > FORGET_S:
            line.falls = 0
        line.unreachable = True
        line.falls += 1
        evidence = f"no answer from {line.address[0]}:{line.address[1]}"
        log.warning("peer.unreachable", node=line.id[0], evidence=evidence)
        self._on_reach(*line.id, evidence)

    def _reached(self, line: _Line) -> None:
        line.unreachable = line.refused_us = False
        self._refusers.discard(line.id)
        line.reached_at_s = time.monotonic()
        log.info("peer.reachable", node=line.id[0])
        self._on_reach(*line.id, "")

    def _dead(self, line: _Line, evidence: str) -> None:
        self._drop(line)
        line.deadline_s, line.unreachable = float("inf"), False
        self._on_dead(*line.id, evidence)

    def _drop(self, line: _Line) -> None:
        self._changed = True
        if line.sock is not None:
            self._selector.unregister(line.sock)
            line.sock.close()
        line.sock, line.connected = None, False

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
        if len(self._inbound) <= STRANGERS:
            return
        for sock in tuple(self._silent):
            self._inbound_ready(sock)  # its hello may have come, and this thread be late
        strangers = [sock for sock, hello in self._inbound.items() if hello not in self._known]
        for sock in strangers[: max(0, len(strangers) - STRANGERS)]:
            self._turn_away(sock)

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
            self._turn_away(sock)
        elif self._silent.pop(sock, None) is not None:
            self._inbound[sock] = hello.decode(errors="replace").strip()

    def _turn_away(self, sock: socket.socket) -> None:
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
