"""A TCP connection of its own for a large transfer along a chain of ranks.

Gloo moves every message through a thread of its own and an epoll loop, which on a host whose cores are all in use
takes 1.5 times as long as blocking calls on a socket (`benchmarks/state.py`). So large transfers between CPUs use a
socket without gloo. The ranks agree on it over the group, which has connected them already: a rank listens on the
address that gloo listens on, and tells its follower the port and a random token; only a connection that presents the
token is used. Where the follower cannot connect, both use the group.

Unlike gloo's, these sockets can be interrupted: `cut` wakes every call that waits for one.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist

from . import sockets
from .p2p import memory_of, receive_bytes, receive_number, send_bytes, send_number

CONNECT_S = 2.0
"""Limit for the connection to be made: the ranks have reached each other on the same addresses already."""

MOST_PENDING = 64
"""Connections without a token, yet, that are held while the follower's is waited for."""

CLOSED_LOOK_S = 1.0
"""Nothing wakes a thread that waits for a listener when another thread closes that: it looks so often."""

NOT_AGAIN_S = 300.0
"""A host that could not be reached is not tried again for so long."""

TOKEN_BYTES = 32
"""As hexadecimal text."""


class Endpoint(msgspec.Struct, frozen=True):
    """What a rank tells its follower."""

    host: str = ""
    """Empty: there is no direct connection."""
    port: int = 0
    token: str = ""


class Work(Protocol):
    """A transfer that was begun, as torch's `Work`."""

    def wait(self) -> object:
        """Return once it is complete. Raises what torch raises once the group is aborted, or DistNetworkError."""


class Transport:
    """One rank's ends of the chain: each over a socket of its own, or over the default group where it has none. `data`:
    a flat, contiguous uint8 tensor, which stays unchanged until `wait`."""

    def __init__(
        self,
        previous: int | None,
        following: int | None,
        incoming: socket.socket | None = None,
        outgoing: socket.socket | None = None,
        sender: ThreadPoolExecutor | None = None,
    ) -> None:
        """`sender`: for a rank that receives and sends, so that it does both at the same time."""
        self._previous, self._following = previous, following
        self._incoming, self._outgoing, self._sender = incoming, outgoing, sender

    def isend(self, data: torch.Tensor) -> Work:
        """To the following rank."""
        if self._outgoing is None:
            return _begun(dist.isend(data, self._following))
        if self._sender is not None:
            return _Begun(self._sender.submit(_send, self._outgoing, data).result)
        _send(self._outgoing, data)
        return _Begun(lambda: None)  # it is done

    def irecv(self, data: torch.Tensor) -> Work:
        """From the previous rank."""
        if self._incoming is None:
            return _begun(dist.irecv(data, self._previous))
        return _Receiving(self._incoming, data)

    def close(self) -> None:
        for sock in (self._incoming, self._outgoing):
            if sock is not None:
                _shut(sock)  # a thread that still sends, after an error here, must end


def _begun(work: dist.Work | None) -> Work:
    assert work is not None  # this rank is in the default group
    return work


class _Begun:
    """A transfer that `wait` ends."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


class _Receiving:
    def __init__(self, sock: socket.socket, data: torch.Tensor) -> None:
        self._sock, self._data = sock, data

    def wait(self) -> None:
        try:
            receive_into(self._sock, memory_of(self._data))
        except OSError as error:
            raise _lost("the previous rank", error) from error


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`. Raises OSError."""
    while view:
        if not (came := sock.recv_into(view, 0, socket.MSG_WAITALL)):
            raise ConnectionError("connection closed")
        view = view[came:]


def _send(sock: socket.socket, data: torch.Tensor) -> None:
    try:
        sock.sendall(memory_of(data), socket.MSG_NOSIGNAL)  # a script may have set SIGPIPE to end the process
    except OSError as error:
        raise _lost("the following rank", error) from error


def _lost(peer: str, error: object) -> dist.DistNetworkError:
    said = f"nothing moved for {_stall_s:g} s" if isinstance(error, BlockingIOError) else error
    return dist.DistNetworkError(f"the transfer of the state to or from {peer} broke: {said}")


# ── connecting ──────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def connected(previous: int | None, following: int | None) -> Iterator[Transport]:
    """The transport of this rank's end; all ranks of the chain enter it, each with its neighbours' ranks. A sender must
    know that all has arrived before it leaves the context: what the kernel still holds is lost with a slow receiver.

    Raises what torch raises once the group is aborted.
    """
    with contextlib.ExitStack() as stack:
        incoming = outgoing = None
        if following is not None:  # before the own connection is made: the whole chain connects at the same time
            listener, endpoint = listen(stack)
            send_bytes(msgspec.json.encode(endpoint), following)
        if previous is not None:
            incoming = _dialled(msgspec.json.decode(receive_bytes(previous), type=Endpoint), stack)
            send_number(incoming is not None, previous)
        if following is not None:
            outgoing = accept(listener, endpoint.token, stack) if receive_number(following) and listener else None
            if listener is not None:
                listener.close()
            send_number(outgoing is not None, following)
        if previous is not None and not receive_number(previous):
            incoming = None
        transport = Transport(previous, following, incoming, outgoing, _sender(stack, incoming, outgoing))
        stack.callback(transport.close)
        yield transport


def _sender(
    stack: contextlib.ExitStack, incoming: socket.socket | None, outgoing: socket.socket | None
) -> ThreadPoolExecutor | None:
    """A thread for a rank that receives and sends. None: not needed, or none can be started."""
    if incoming is None or outgoing is None:
        return None
    sender = stack.enter_context(ThreadPoolExecutor(1, "elastic-send"))
    try:
        sender.submit(int).result()
    except RuntimeError:  # no more threads
        return None
    return sender


def listen(stack: contextlib.ExitStack) -> tuple[socket.socket | None, Endpoint]:
    """(a socket that listens where gloo does, what the peer must know of it); (None, an empty one): there is none."""
    for host, family in sockets.listening_at():
        try:
            listener = stack.enter_context(_registered(socket.socket(family, socket.SOCK_STREAM)))
            listener.bind((host, 0))
            listener.listen(MOST_PENDING)
        except OSError:  # a link-local address needs its interface, which is not known here
            continue
        return listener, Endpoint(host, listener.getsockname()[1], secrets.token_hex(TOKEN_BYTES // 2))
    return None, Endpoint()


def accept(
    listener: socket.socket, token: str, stack: contextlib.ExitStack, limit_s: float = CONNECT_S
) -> socket.socket | None:
    """The connection that presents the token; None: none does in time, or the listener is cut or closed. Others, which
    say nothing or something else, do not delay it."""
    deadline_s = time.monotonic() + limit_s
    with contextlib.ExitStack() as pending, selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, b"")
        while (left_s := deadline_s - time.monotonic()) > 0 and listener.fileno() >= 0:
            for key, _ in selector.select(min(left_s, CLOSED_LOOK_S)):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock.fileno() < 0:
                    continue  # one that was dropped in this round
                try:
                    if sock is listener:
                        accepted = pending.enter_context(_registered(sock.accept()[0]))
                        accepted.setblocking(False)
                        selector.register(accepted, selectors.EVENT_READ, b"")
                        if len(waiting := list(selector.get_map().values())) > MOST_PENDING:
                            _drop(selector, waiting[1].fileobj)  # the oldest: the first is the listener
                        continue
                    more = sock.recv(TOKEN_BYTES - len(key.data))
                except BlockingIOError:
                    continue
                except OSError:
                    if sock is listener:
                        return None
                    more = b""
                came = key.data + more
                if len(came) == TOKEN_BYTES and hmac.compare_digest(came, token.encode()):
                    stack.enter_context(pending.pop_all())
                    _prepare(sock)
                    return sock
                if more and len(came) < TOKEN_BYTES:
                    selector.modify(sock, selectors.EVENT_READ, came)
                else:
                    _drop(selector, sock)
    return None


def _drop(selector: selectors.BaseSelector, sock: object) -> None:
    assert isinstance(sock, socket.socket)
    selector.unregister(sock)
    sock.close()


_unreachable: dict[str, float] = {}
"""Host -> until when it is not tried."""


def _dialled(endpoint: Endpoint, stack: contextlib.ExitStack) -> socket.socket | None:
    """`dial`; None: it cannot be reached, and is not tried again for a while."""
    if not endpoint.host or time.monotonic() < _unreachable.get(endpoint.host, 0.0):
        return None
    try:
        return dial(endpoint, stack)
    except OSError:
        _unreachable[endpoint.host] = time.monotonic() + NOT_AGAIN_S
        return None


def dial(endpoint: Endpoint, stack: contextlib.ExitStack) -> socket.socket:
    """A connection to `endpoint`, which has presented its token. Raises OSError."""
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    sock = stack.enter_context(_registered(socket.socket(family, socket.SOCK_STREAM)))
    sock.settimeout(CONNECT_S)
    _connect(sock, endpoint)
    sock.sendall(endpoint.token.encode(), socket.MSG_NOSIGNAL)
    _prepare(sock)
    return sock


def _connect(sock: socket.socket, endpoint: Endpoint) -> None:
    sock.connect((endpoint.host, endpoint.port))


def _prepare(sock: socket.socket) -> None:
    """Blocking calls, each within the group's time-out: one of Python's own would add a call of poll to each."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit_of(sock, _stall_s)


def limit_of(sock: socket.socket, stall_s: float) -> None:
    """A call that moves no byte for so long raises."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(stall_s), 0))


_stall_s = 600.0


def limit(timeout_s: float) -> None:
    """A transfer that moves no byte for `timeout_s`, the time-out of the group, has failed. Agents notice a lost rank
    much earlier, and abort the group."""
    global _stall_s
    _stall_s = max(1.0, timeout_s)


# ── interrupting ────────────────────────────────────────────────────────────────────────────────────────────

_OPEN: set[socket.socket] = set()
_LOCK = threading.RLock()


@contextlib.contextmanager
def _registered(sock: socket.socket) -> Iterator[socket.socket]:
    with _LOCK:
        _OPEN.add(sock)
    try:
        yield sock
    finally:
        with _LOCK:
            _OPEN.discard(sock)
        sock.close()


def cut() -> None:
    """Wake every call that waits for one of these sockets; it raises. From any thread."""
    with _LOCK:
        for sock in [*_OPEN]:  # the garbage collector may close one meanwhile, in this thread
            _shut(sock)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
