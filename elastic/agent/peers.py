"""Lines to other agents: an idle TCP connection each way that tells of a death within milliseconds.

A closed line proves nothing yet. A refused connection to the port that a living agent listens on does, and so does
another agent answering there.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

CONNECT_S = 2.0
RETRY_S = 1.0
HELLO_BYTES = 64

Id = tuple[str, str]
"""(node, incarnation)"""


@dataclass(slots=True)
class _Line:
    id: Id
    address: tuple[str, int]
    sock: socket.socket | None = None
    connected: bool = False
    deadline_s: float = 0.0
    """When to give up connecting, or to try again."""


class Peers:
    """Listens for other agents and watches those it is told to. `on_dead(node, incarnation, evidence)` is called
    from the thread in here."""

    def __init__(self, host: str, incarnation: str, on_dead: Callable[[str, str, str], None]) -> None:
        self._incarnation = incarnation
        self._on_dead = on_dead
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._lock = threading.Lock()
        self._wanted: dict[Id, tuple[str, int]] = {}
        self._lines: dict[Id, _Line] = {}
        self._inbound: set[socket.socket] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="elastic-peers", daemon=True)

    def start(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread.start()

    def watch(self, wanted: Mapping[Id, tuple[str, int]]) -> None:
        """Watch these, and no others. {(node, incarnation): (host, port)}"""
        with self._lock:
            if wanted == self._wanted:
                return
            self._wanted = dict(wanted)
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
        while not self._stopping:
            self._reconcile()
            due = [line.deadline_s for line in self._lines.values() if not line.connected]
            timeout = min(max(0.0, min(due) - time.monotonic()), RETRY_S) if due else None
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
        now_s = time.monotonic()
        for peer, address in wanted.items():
            line = self._lines.setdefault(peer, _Line(peer, address))
            if line.sock is None and now_s >= line.deadline_s:
                self._connect(line)
            elif line.sock is not None and not line.connected and now_s >= line.deadline_s:
                self._drop(line)
                line.deadline_s = now_s + RETRY_S  # no answer proves nothing

    def _connect(self, line: _Line) -> None:
        line.deadline_s = time.monotonic() + CONNECT_S
        try:
            family, kind, proto, _, address = socket.getaddrinfo(*line.address, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, proto)
            sock.setblocking(False)
            code = sock.connect_ex(address)
        except OSError:
            line.deadline_s = time.monotonic() + RETRY_S
            return
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
            line.connected = True
            self._selector.modify(sock, selectors.EVENT_READ, line)
        try:
            hello = sock.recv(HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            hello = b""
        if not hello:
            self._drop(line)
            line.deadline_s = 0.0  # closed: ask at the door at once
        elif hello.decode(errors="replace").strip() != line.id[1]:
            self._dead(line, "another agent answers on its port")

    def _failed(self, line: _Line, code: int) -> None:
        if code == errno.ECONNREFUSED:
            self._dead(line, f"connection to {line.address[0]}:{line.address[1]} refused")
        else:
            line.deadline_s = time.monotonic() + RETRY_S

    def _dead(self, line: _Line, evidence: str) -> None:
        self._drop(line)
        line.deadline_s = float("inf")
        self._on_dead(*line.id, evidence)

    def _drop(self, line: _Line) -> None:
        if line.sock is not None:
            self._selector.unregister(line.sock)
            line.sock.close()
        line.sock, line.connected = None, False

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.send(self._incarnation.encode())
            self._inbound.add(sock)
            self._selector.register(sock, selectors.EVENT_READ, None)

    def _inbound_ready(self, sock: socket.socket) -> None:
        try:
            alive = bool(sock.recv(HELLO_BYTES))
        except BlockingIOError:
            return
        except OSError:
            alive = False
        if not alive:
            self._selector.unregister(sock)
            self._inbound.discard(sock)
            sock.close()
