"""HTTP/1.1 on a listening socket: one request per connection, one thread per request, both limited in number.

h11 parses the input; any input gets an answer with a status. Requests arrive in the thread that accepts, and take a
place and a thread once they are whole: a client that sends slowly, or nothing, keeps no other one out. A deadline
applies to the request as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import http
import json
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

import h11
import msgspec

from elasticd.base.answers import error as error_answer
from elasticd.base.config import host_port
from elasticd.base.errors import CannotStart, Fault, Refused, our_faults
from elasticd.base.log import Log

MAX_HEAD_BYTES = 32 * 1024
MAX_BODY_BYTES = 1024 * 1024
REQUEST_S = 10.0
"""From the connection until the whole request must have arrived."""
ANSWER_S = 30.0
"""How long a client may take to read an answer, or one line of a stream."""
DRAIN_S = 1.0
"""How long further input is read and discarded after an early answer, so that the client can read that answer."""
RETRY_S = 0.2
"""Pause after a failed accept."""
CHUNK_BYTES = 64 * 1024
MAX_ARRIVING = 256
"""Connections whose request has not arrived. Of more, the oldest of the owner with the most is closed."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    """As it was sent: still percent-encoded."""
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By name in lower case; of a repeated one the last."""


class ClientConnection:
    """One accepted connection: its request, then its answer. Methods that send raise OSError if the client is gone or
    does not read."""

    def __init__(self, sock: socket.socket, owner: Hashable) -> None:
        self.sock = sock
        self.owner = owner
        self.end_s = time.monotonic() + REQUEST_S
        self.status = 0
        """HTTP status of the answer, once it has begun; 0 before."""
        self.streams = False
        """The answer is a stream, which may last as long as the job."""
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._head_only = False
        self._reading = self._read()
        self.request: HttpRequest | Refused | OSError | None = None
        """What has been received; why nothing was; None: not all of it has arrived."""

    @property
    def awaits_answer(self) -> bool:
        """Whether an answer may still begin."""
        return self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    def receive(self) -> HttpRequest:
        """The request, once it has arrived. Raises Refused (400, 413, 431, 501), OSError if the client disconnected."""
        self.advance()
        if isinstance(self.request, Exception):
            raise self.request
        assert self.request is not None
        return self.request

    def advance(self) -> bool:
        """Read what has arrived, without waiting. Whether `request` is there."""
        if self.request is None:
            try:
                next(self._reading)
            except StopIteration as end:
                self.request = end.value
            except (Refused, OSError) as error:
                self.request = error
        return self.request is not None

    def _read(self) -> Generator[None, None, HttpRequest]:
        """Returns the request; yields where more has to arrive first."""
        try:
            head = yield from self._event()
            if not isinstance(head, h11.Request):
                raise ConnectionResetError("it was closed without a request")
            self._head_only = head.method == b"HEAD"
            body = yield from self._body()
        except h11.RemoteProtocolError as error:
            raise Refused(error.error_status_hint, f"this is no HTTP request that can be served: {error}") from None
        path, _, query = head.target.decode("ascii", "replace").partition("#")[0].partition("?")
        values = parse_qs(query, keep_blank_values=True)
        query_values = {name: found[-1] for name, found in values.items()}
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        return HttpRequest(head.method.decode(), path, query_values, body, headers)

    def _body(self) -> Generator[None, None, bytes]:
        if self._http.they_are_waiting_for_100_continue:
            go_on = self._http.send(h11.InformationalResponse(status_code=100, headers=[]))
            self.sock.send(go_on or b"")  # a few bytes, into an empty buffer
        parts, length = [], 0
        while isinstance(event := (yield from self._event()), h11.Data):
            length += len(event.data)
            if length > MAX_BODY_BYTES:
                raise Refused(413, f"the request's body may have {MAX_BODY_BYTES} bytes")
            parts.append(bytes(event.data))
        return b"".join(parts)

    def _event(self) -> Generator[None, None, object]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self.sock.setblocking(False)
            try:
                self._http.receive_data(self.sock.recv(CHUNK_BYTES))
            except BlockingIOError:
                yield
        return event

    def answer(self, status: int, kind: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Send the whole answer. `kind` is a media type."""
        self._begin(status, kind, {"Content-Length": str(len(body)), **headers})
        if not self._head_only:
            self._send(h11.Data(data=body))
        self._send(h11.EndOfMessage())

    def answer_json(self, status: int, content: object) -> None:
        raw = json.dumps(msgspec.to_builtins(content), allow_nan=False).encode()
        self.answer(status, "application/json", raw + b"\n")

    def begin_stream(self, kind: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Begin an answer in parts. Without `end_stream` its reader sees a broken stream."""
        self.streams = True
        self._begin(200, kind, headers)

    def stream(self, part: bytes) -> None:
        self._send(h11.Data(data=part))

    def end_stream(self) -> None:
        self._send(h11.EndOfMessage())

    def _begin(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        self.status = status
        sent = [("Content-Type", kind), ("Server", "elasticd"), ("Connection", "close"), *headers.items()]
        self._send(h11.Response(status_code=status, headers=sent, reason=http.HTTPStatus(status).phrase.encode()))

    def _send(self, event: Any) -> None:
        if raw := self._http.send(event):
            self.sock.settimeout(ANSWER_S)
            self.sock.sendall(raw)

    def still_there(self) -> bool:
        """Whether the client of a stream is still connected. A write would not show it while a log is quiet."""
        news = select.poll()
        news.register(self.sock, select.POLLIN | select.POLLRDHUP)
        return not any(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in news.poll(0))

    def close(self) -> None:
        """Let the client read the answer, even while it still sends, then close."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            deadline_s = time.monotonic() + DRAIN_S
            while self._http.their_state is not h11.DONE and (left_s := deadline_s - time.monotonic()) > 0:
                self.sock.settimeout(left_s)
                if not self.sock.recv(CHUNK_BYTES):
                    break
        self.sock.close()


class RequestLimits:
    """Limits on concurrent requests: in all, and per owner (a user, a host)."""

    def __init__(self, total: int, per_owner: int, kept: int = 0, kept_for: Hashable = None) -> None:
        """`kept` of the `total` are reserved for the owner `kept_for`, which has no limit of its own."""
        self._total = total
        self._per_owner = per_owner
        self._kept = kept
        self._kept_for = kept_for
        self._lock = threading.Lock()
        self._taken: Counter[Hashable] = Counter()

    def admit(self, owner: Hashable) -> str:
        """Admit a request: empty on success, to be followed by `free`; else why it is refused."""
        with self._lock:
            taken = self._taken.total()
            if owner != self._kept_for:
                if self._taken[owner] >= self._per_owner:
                    return f"{self._per_owner} requests of yours are being served already"
                taken += max(0, self._kept - self._taken[self._kept_for])
            if taken >= self._total:
                return f"{self._taken.total()} requests are being served already"
            self._taken[owner] += 1
            return ""

    def free(self, owner: Hashable) -> None:
        with self._lock:
            self._taken[owner] -= 1
            if not self._taken[owner]:
                del self._taken[owner]


@dataclass(eq=False)
class Server:
    """Accepts connections on `listener`; `handle` reads the request and answers it, in a thread of its own. `apart`:
    path -> places of its own."""

    listener: socket.socket
    handle: Callable[[ClientConnection], None]
    owner: Callable[[socket.socket], Hashable]
    places: RequestLimits
    log: Log
    apart: Mapping[str, RequestLimits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pause = threading.Event()
        self._arriving: dict[int, ClientConnection] = {}
        """By descriptor, oldest first."""
        self._refused: int | None = None
        """Errno of the failure at accept that is logged already."""

    @property
    def url(self) -> str:
        """Where it listens, as 'http://127.0.0.1:9461'; of TCP only."""
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def serve(self) -> None:
        """Serve until `listener` is closed."""
        while (listens := self.listener.fileno()) >= 0:
            news = select.poll()
            for descriptor in (listens, *self._arriving):
                news.register(descriptor, select.POLLIN)
            now_s, ends = time.monotonic(), [connection.end_s for connection in self._arriving.values()]
            for descriptor, _ in news.poll(max(0.0, min(ends) - now_s) * 1000 + 1 if ends else None):
                if descriptor == listens:
                    self.serve_one()
                else:
                    self._look(descriptor)
            for descriptor in [d for d, c in self._arriving.items() if c.end_s <= time.monotonic()]:
                turn_away(
                    self._arriving.pop(descriptor).sock, f"the request was not complete after {REQUEST_S:g} s", 408
                )
        for connection in self._arriving.values():
            connection.sock.close()

    def serve_one(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            # E.g. out of descriptors: the connection stays in the queue, and accept would fail again at once.
            if error.errno != self._refused:
                self.log.error("api.cannot_accept", why=str(error))
            self._refused = error.errno
            self._pause.wait(RETRY_S)
            return
        self._refused = None
        if len(self._arriving) >= MAX_ARRIVING:
            most = Counter(c.owner for c in self._arriving.values()).most_common(1)[0][0]
            oldest = next(d for d, c in self._arriving.items() if c.owner == most)
            turn_away(self._arriving.pop(oldest).sock, "elasticd is busy, and this request did not arrive")
        self._arriving[sock.fileno()] = ClientConnection(sock, self.owner(sock))
        self._look(sock.fileno())

    def _look(self, descriptor: int) -> None:
        """Start the thread of a request that has arrived."""
        connection = self._arriving.get(descriptor)
        if connection is None or not connection.advance():
            return None
        del self._arriving[descriptor]
        request = connection.request
        if isinstance(request, OSError):
            self.log.debug("api.client_gone", why=str(request))
            return connection.sock.close()
        places = self.apart.get(request.path, self.places) if isinstance(request, HttpRequest) else self.places
        if why := places.admit(connection.owner):
            self.log.warning("api.full", owner=str(connection.owner), why=why)
            return turn_away(connection.sock, f"elasticd is busy: {why}; try again")
        try:
            threading.Thread(target=self._run, args=(connection, places), name="request", daemon=True).start()
        except RuntimeError as error:
            places.free(connection.owner)
            self.log.error("api.no_thread", why=str(error))
            turn_away(connection.sock, f"elasticd can start no thread: {error}; try again")
        return None

    def _run(self, connection: ClientConnection, places: RequestLimits) -> None:
        try:
            self._answer(connection)
        except OSError as error:
            self.log.debug("api.client_gone", why=str(error))
        finally:
            connection.close()
            places.free(connection.owner)

    def _answer(self, connection: ClientConnection) -> None:
        try:
            with our_faults(self.log, "api.failed"):
                self.handle(connection)
        except Refused as refused:
            answer_error(connection, refused.status, str(refused))
        except OSError as error:
            if connection.status:
                raise
            answer_error(connection, 500, f"elasticd cannot answer this: {error}")  # or the client is gone already
        except Fault as fault:
            answer_error(connection, 500, str(fault))


def listen_on(setting: str, address: str, backlog: int) -> socket.socket:
    """A TCP socket that listens on `address`, host:port; `setting` names it in errors. Raises CannotStart."""
    host, port = host_port(setting, address, zero_ok=True)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise CannotStart(f"{setting} = {address!r}: {error.strerror or error}") from error


def host_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "?")


def answer_error(connection: ClientConnection, status: int, message: str) -> None:
    """Send an error in the form of docs/api.md, unless an answer has begun already: then its stream just ends."""
    if connection.awaits_answer:
        connection.answer_json(status, error_answer(status, message))


def turn_away(sock: socket.socket, message: str, status: int = 503) -> None:
    """Answer without a thread and without waiting for the client."""
    body = json.dumps(error_answer(status, message)).encode() + b"\n"
    head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n"
    with sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RD)  # on a Unix socket the client can send no more from here on
        with contextlib.suppress(BlockingIOError):
            for _ in range(MAX_BODY_BYTES // CHUNK_BYTES):
                if not sock.recv(CHUNK_BYTES):  # unread input would reset the connection and drop the answer
                    break
        sock.send(head.encode() + b"Connection: close\r\nRetry-After: 1\r\n\r\n" + body)
