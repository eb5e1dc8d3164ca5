"""Whether another node reaches this one at a port of `ports`, and how fast: measured for `elasticctl doctor`.

The node where doctor was called listens; the others connect. Each that connects gets one byte when it is its turn,
sends zeros for a moment, and is told how many arrived: one after another, so that they do not share the link. Nothing
that arrives is kept.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Mapping

from elasticd.base.answers import Finding
from elasticd.base.config import host_port

from .doctor import ERROR, WARNING

CONNECT_S = 3.0
SEND_S = 0.25
MOST_BYTES = 512 << 20
TURN_S = 1.0
"""Longest wait for a single send or receive of a turn."""
WAIT_S = 6.0
"""Longest wait for the turn; a node that does not get it is not measured."""
MEASURED = 16
"""Nodes that get a turn."""
FEWEST_BYTES = 64 << 10
"""Fewer give no rate."""
SLOW_MBIT_S = 900.0
"""Below 1 Gbit/s a link is slow for training, whatever the others do."""
SLOW_SHARE = 0.3
"""Of the median of the nodes: a link below it is slow by comparison."""

_COUNT = struct.Struct("!Qd")
"""Bytes received, seconds from the first to the last."""


@contextlib.contextmanager
def listener(address: str, ports: tuple[int, int]) -> Iterator[str]:
    """host:port of a socket at which others are measured, until the block is left; '' if there can be none. Its port
    is one of `ports`, which a firewall lets through; (0, 0): any."""
    server = _server(address, ports)
    if server is None:  # a finding of its own
        yield ""
        return

    def accept() -> None:
        measured = 0
        while True:
            try:
                connection = server.accept()[0]
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                if measured < MEASURED:
                    measured += _receive(connection)

    thread = threading.Thread(target=accept, name="doctor", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at a limit of threads: a finding, too
        server.close()
        yield ""
        return
    host = f"[{address}]" if ":" in address else address
    try:
        yield f"{host}:{server.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        server.close()
        thread.join(1.0)


def _receive(connection: socket.socket) -> bool:
    """One turn. Whether anything was sent. Raises OSError."""
    connection.settimeout(TURN_S)
    connection.sendall(b"1")
    buffer, count = bytearray(1 << 20), 0
    began_s = ended_s = time.monotonic()
    while count < 2 * MOST_BYTES and ended_s - began_s < 4 * SEND_S:
        got = connection.recv_into(buffer)
        if not got:
            break
        began_s = began_s if count else time.monotonic()
        ended_s = time.monotonic()
        count += got
    connection.sendall(_COUNT.pack(count, ended_s - began_s))
    return count > 0


def _server(address: str, ports: tuple[int, int]) -> socket.socket | None:
    for port in range(ports[0], ports[1] + 1):
        try:
            family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((address, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return None
    return None


def try_it(connect: str, known: set[str]) -> tuple[str, float | None]:
    """(why this node cannot connect to host:port, Mbit/s on the way there). Only addresses of nodes are tried; None:
    not measured."""
    if not connect:
        return "", None
    try:
        host, port = host_port("connect", connect)
        if host not in known:
            return f"{host} is no node's address", None
        connection = socket.create_connection((host, port), CONNECT_S)
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error), None
    with connection:
        try:
            return "", _send(connection)
        except OSError:
            return "", None  # it connects; its turn did not come, or an earlier version listens there


def _send(connection: socket.socket) -> float | None:
    connection.settimeout(WAIT_S)
    if not connection.recv(1):
        return None
    connection.settimeout(TURN_S)
    zeros, count, end_s = memoryview(bytes(1 << 20)), 0, time.monotonic() + SEND_S
    while count < MOST_BYTES and time.monotonic() < end_s:
        count += connection.send(zeros)
    connection.shutdown(socket.SHUT_WR)
    raw = b""
    while len(raw) < _COUNT.size:
        if not (more := connection.recv(_COUNT.size - len(raw))):
            return None
        raw += more
    arrived, took_s = _COUNT.unpack(raw)
    if arrived < FEWEST_BYTES or took_s <= 0:
        return None
    return float(round(arrived * 8e-6 / took_s, 1))


# ── judgements: pure ────────────────────────────────────────────────────────────────────────────────────────


def judge(me: str, listening: str, unreached: Mapping[str, str], rates: Mapping[str, float]) -> Iterator[Finding]:
    """`unreached`: node -> why it cannot connect here, '' if it can; `rates`: node -> Mbit/s, where measured."""
    typical = statistics.median(rates.values()) if rates else 0.0
    for node, why in sorted(unreached.items()):
        if why:
            yield Finding(check="reach", level=ERROR, node=node,
                          text=f"it cannot connect to {me} at {listening}: {why}",
                          fix="let the nodes reach each other on all ports: firewall, `address`, routes")  # fmt: skip
        elif listening:
            yield _rate(node, f"it reaches {me} at {listening}", rates.get(node), typical)


def _rate(node: str, reaches: str, mbit_s: float | None, typical: float) -> Finding:
    if mbit_s is None:
        return Finding(check="reach", node=node, text=f"{reaches}; bandwidth not measured")
    text = f"{reaches} with {_in_words(mbit_s)}"
    if mbit_s < SLOW_SHARE * typical:
        return Finding(
            check="reach", level=WARNING, node=node, text=f"{text}; the median of the nodes is {_in_words(typical)}",
            fix="see its link: speed and duplex (ethtool), cable, MTU, other traffic; `interface` may name a "
            "management network",
        )  # fmt: skip
    if mbit_s < SLOW_MBIT_S:
        return Finding(
            check="reach", level=WARNING, node=node,
            text=f"{text}: the exchange of gradients may take most of a step",
            fix="set `interface` or `address` to the fast network, if there is one",
        )  # fmt: skip
    return Finding(check="reach", node=node, text=text)


def _in_words(mbit_s: float) -> str:
    return f"{mbit_s / 1000:.1f} Gbit/s" if mbit_s >= 1000 else f"{mbit_s:.0f} Mbit/s"
