"""Client of the writer process, used by the agent or a standalone script."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Collection

import msgspec

from elastic.checkpoint.format.errors import CheckpointError
from elastic.checkpoint.memory.arena import Arena

from . import orders, writer
from .writer import MAX_PACKET_BYTES

MAX_WAITING = 32
MAX_COPIES = 4
"""Remote copies in flight at a time: a hanging copy must leave room for local writes."""
_KILL_S = 2.0
_NICER = 5


class Busy(CheckpointError):
    """Too many orders are in flight."""


class WriterProcess:
    """Starts the writer when first needed and again after it died; orders lost with it are returned as failed.

    `submit` and `results` never block. `fileno()` is for a selector: readable when there are results, and the same
    across restarts. Start and use it in a thread that lives as long as the process: the writer dies with the thread
    that started it.
    """

    def __init__(self) -> None:
        self._poller = select.epoll()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._next = 1
        self._waiting: dict[int, orders.Answered] = {}
        self._ready: list[orders.Result] = []
        """Results read from the socket of a writer that died; the wake pipe signals them."""
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poller.register(self._wake_r, select.EPOLLIN)

    def fileno(self) -> int:
        return self._poller.fileno()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def under_way(self) -> Collection[orders.Answered]:
        """The orders without a result yet."""
        return self._waiting.values()

    def activity(self) -> tuple[object, ...]:
        """Another value whenever an order has come or was answered, or the process has read or written bytes."""
        moved: list[str] = []
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/io") as file:
            moved = file.readlines()[:2]  # rchar, wchar
        return self._next, len(self._waiting), *moved

    def start(self) -> None:
        """Start the process now rather than on the first order. Raises OSError."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                fd = theirs.fileno()
                words = (writer.__name__, str(fd), "--parent", str(os.getpid()), "--nice", str(_NICER))
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", *words], pass_fds=(fd,), stdin=subprocess.DEVNULL
                )
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        self._poller.register(ours.fileno(), select.EPOLLIN)
        self._channel = ours

    def submit(self, order: orders.AnyOrder, arena: Arena | None = None) -> int:
        """Send an order and return its id. `arena` goes with Write. Raises Busy; OSError if no process starts."""
        if len(self._waiting) >= MAX_WAITING:
            raise Busy(f"{len(self._waiting)} orders are under way")
        copies = sum(isinstance(waiting, orders.CopyUp) for waiting in self._waiting.values())
        if isinstance(order, orders.CopyUp) and copies >= MAX_COPIES:
            raise Busy(f"{copies} copies before this one are still under way")
        if isinstance(order, orders.Forget) and self._process is None:
            return 0
        self.start()
        order = msgspec.structs.replace(order, id=self._next)
        raw = orders.encode(order)
        if len(raw) > MAX_PACKET_BYTES:
            raise ValueError(f"an order of {len(raw)} bytes; at most {MAX_PACKET_BYTES}")
        self._next += 1
        try:
            self._send(raw, arena)
        except (BrokenPipeError, ConnectionResetError):
            # The writer died since the last order: keep its results for `results`, and start another one.
            self._ready += self._drain()
            if self._ready:
                os.write(self._wake_w, b"!")
            self.start()
            self._send(raw, arena)
        if not isinstance(order, orders.Forget):
            self._waiting[order.id] = order
        return order.id

    def _send(self, raw: bytes, arena: Arena | None) -> None:
        assert self._channel is not None
        try:
            socket.send_fds(self._channel, [raw], [arena.fd] if arena is not None else [])
        except BlockingIOError:
            raise Busy("the writer is behind") from None

    def results(self) -> list[orders.Result]:
        """The results received since the last call."""
        if self._ready:
            os.read(self._wake_r, 64)
        results, self._ready = self._ready, []
        return results + self._drain()

    def _drain(self) -> list[orders.Result]:
        results: list[orders.Result] = []
        while self._channel is not None:
            try:
                raw = self._channel.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # it died with an order unread; the results it had sent come first, then the end
            if not raw:
                return results + self._died()
            result = orders.decode_result(raw)
            if self._waiting.pop(result.id, None) is not None:
                results.append(result)
        return results

    def close(self, timeout_s: float = 5.0) -> None:
        """End the process: it finishes its current order, or is killed after `timeout_s`. Safe to call twice."""
        if self._channel is not None:
            self._poller.unregister(self._channel.fileno())
            self._channel.close()
            self._channel = None
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _kill(self._process)
            self._process = None
        if not self._poller.closed:
            self._poller.close()
            os.close(self._wake_r)
            os.close(self._wake_w)
        self._waiting.clear()

    def _died(self) -> list[orders.Result]:
        """The writer died: its unanswered orders have failed. The next order starts another writer."""
        assert self._channel is not None
        assert self._process is not None
        self._poller.unregister(self._channel.fileno())
        self._channel.close()
        self._channel = None
        code = _kill(self._process)
        self._process = None
        waiting, self._waiting = self._waiting, {}
        return [
            orders.Result(
                id=order.id,
                kind=type(order).__name__,
                step=-1 if isinstance(order, orders.CopyUp) else order.step,
                generation=-1 if isinstance(order, orders.CopyUp) else order.generation,
                error=f"the writer process died (exit code {code})",
            )
            for order in waiting.values()
        ]


def _kill(process: subprocess.Popen[bytes]) -> int | None:
    """Kill it, and return its exit code. None: it hangs in the kernel, on a dead disk, and ends when the kernel lets
    it."""
    process.kill()
    try:
        return process.wait(_KILL_S)
    except subprocess.TimeoutExpired:
        return None
