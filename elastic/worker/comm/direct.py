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
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist

from . import sockets
from .p2p import exchange, receive_bytes, send_bytes

CONNECT_S = 2.0
"""Limit for the connection to be made: the ranks have reached each other on the same addresses already."""

STALL_S = 600
"""A transfer that moves no byte for so long has failed. Agents notice a lost rank much earlier, and abort the group."""

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


class Transport(Protocol):
    """One rank's ends of the chain. `data`: a flat, contiguous uint8 tensor, which stays unchanged until `wait`."""

    def isend(self, data: torch.Tensor) -> Work:
        """To the following rank."""

    def irecv(self, data: torch.Tensor) -> Work:
        """From the previous rank."""


class OverGroup:
    """Over the default group."""

    def __init__(self, previous: int | None, following: int | None) -> None:
        self._previous, self._following = previous, following

    def isend(self, data: torch.Tensor) -> Work:
        return _begun(dist.isend(data, self._following))

    def irecv(self, data: torch.Tensor) -> Work:
        return _begun(dist.irecv(data, self._previous))


def _begun(work: dist.Work | None) -> Work:
    assert work is not None  # this rank is in the default group
    return work


class OverSockets:
    """Over sockets of its own; an end that has none uses the group."""

    def __init__(self, incoming: socket.socket | None, outgoing: socket.socket | None, group: OverGroup) -> None:
        self._incoming, self._outgoing, self._group = incoming, outgoing, group
        # A rank that receives and sends does both at the same time. One that only sends has nothing else to do.
        self._sender = ThreadPoolExecutor(1, "elastic-send") if incoming and outgoing else None

    def isend(self, data: torch.Tensor) -> Work:
        if self._outgoing is None:
            return self._group.isend(data)
        if self._sender is not None:
            return _Sending(self._sender.submit(_send, self._outgoing, data))
        _send(self._outgoing, data)
        return _DONE

    def irecv(self, data: torch.Tensor) -> Work:
        return self._group.irecv(data) if self._incoming is None else _Receiving(self._incoming, data)

    def close(self) -> None:
        for sock in (self._incoming, self._outgoing):
            if sock is not None:
                _shut(sock)  # a thread that still sends, after an error here, must end
        if self._sender is not None:
            self._sender.shutdown(wait=True)


class _Done:
    def wait(self) -> None:
        return


_DONE = _Done()


class _Sending:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _Receiving:
    def __init__(self, sock: socket.socket, data: torch.Tensor) -> None:
        self._sock, self._data = sock, data

    def wait(self) -> None:
        view = _bytes(self._data)
        while view:
            try:
                came = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise _lost("the previous rank", error) from error
            if not came:
                raise _lost("the previous rank", "connection closed")
            view = view[came:]


def _send(sock: socket.socket, data: torch.Tensor) -> None:
    try:
        sock.sendall(_bytes(data))
    except OSError as error:
        raise _lost("the following rank", error) from error


def _bytes(data: torch.Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]


def _lost(peer: str, error: object) -> dist.DistNetworkError:
    said = f"nothing moved for {STALL_S} s" if isinstance(error, BlockingIOError) else error
    return dist.DistNetworkError(f"the transfer of the state to or from {peer} broke: {said}")


@contextlib.contextmanager
def connected(previous: int | None, following: int | None) -> Iterator[Transport]:
    """The transport of this rank's end; all ranks of the chain enter it, each with its neighbours' ranks.

    Raises DistNetworkError, and what torch raises once the group is aborted.
    """
    with contextlib.ExitStack() as stack:
        group = OverGroup(previous, following)
        incoming = outgoing = None
        if previous is not None:
            incoming = _dial(msgspec.json.decode(receive_bytes(previous), type=Endpoint), stack)
        if following is not None:
            listener, endpoint = _listen(stack)
            send_bytes(msgspec.json.encode(endpoint), following)
        if previous is not None:
            exchange(torch.tensor([int(incoming is not None)]), target=previous)
        if following is not None:
            dialled = torch.zeros(1, dtype=torch.int64)
            exchange(dialled, source=following)
            if dialled and listener is not None:
                outgoing = _accept(listener, endpoint, stack)
        transport = OverSockets(incoming, outgoing, group)
        stack.callback(transport.close)
        yield transport


def _listen(stack: contextlib.ExitStack) -> tuple[socket.socket | None, Endpoint]:
    for host, family in sockets.listening_at():
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
            stack.enter_context(_registered(listener))
            listener.bind((host, 0))
            listener.listen(4)
        except OSError:
            continue
        return listener, Endpoint(host, listener.getsockname()[1], secrets.token_hex(TOKEN_BYTES // 2))
    return None, Endpoint()


def _accept(listener: socket.socket, endpoint: Endpoint, stack: contextlib.ExitStack) -> socket.socket:
    """The connection of the follower, which has said that it has made one. Raises DistNetworkError."""
    deadline_s = time.monotonic() + CONNECT_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            sock, _ = listener.accept()
        except OSError as error:
            raise _lost("the following rank", error) from error
        if _presents(sock, endpoint.token, left_s):
            stack.enter_context(_registered(sock))
            _prepare(sock)
            return sock
        sock.close()
    raise _lost("the following rank", f"no connection with the token came within {CONNECT_S:g} s")


def _presents(sock: socket.socket, token: str, within_s: float) -> bool:
    sock.settimeout(min(within_s, CONNECT_S / 4))  # another's connection must not use up all of the time
    came = b""
    try:
        while len(came) < TOKEN_BYTES and (more := sock.recv(TOKEN_BYTES - len(came))):
            came += more
    except OSError:
        return False
    return hmac.compare_digest(came, token.encode())


def _dial(endpoint: Endpoint, stack: contextlib.ExitStack) -> socket.socket | None:
    if not endpoint.host:
        return None
    try:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout=CONNECT_S)
    except OSError:
        return None
    stack.enter_context(_registered(sock))
    try:
        sock.sendall(endpoint.token.encode())
    except OSError:
        return None
    _prepare(sock)
    return sock


def _prepare(sock: socket.socket) -> None:
    """Blocking calls, each within STALL_S: a time-out of Python's own would add a call of poll to each."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_S, 0))


# ── interrupting ────────────────────────────────────────────────────────────────────────────────────────────

_OPEN: set[socket.socket] = set()
_LOCK = threading.Lock()


@contextlib.contextmanager
def _registered(sock: socket.socket) -> Iterator[None]:
    with _LOCK:
        _OPEN.add(sock)
    try:
        yield
    finally:
        with _LOCK:
            _OPEN.discard(sock)
        sock.close()


def cut() -> None:
    """Wake every call that waits for one of these sockets; it raises. From any thread."""
    with _LOCK:
        for sock in _OPEN:
            _shut(sock)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
