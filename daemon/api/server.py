"""The API on a Unix socket, for elasticctl and curl; /metrics and /healthz on loopback. See docs/api.md.

Reads are answered from the newest snapshot and need neither the loop nor etcd. Changes go to etcd in the thread of the
request; `authority` decides whether the user may make them, and `audit` records them. Access to the socket, mode 0660,
allows submitting jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec

from elasticd.access.accounts import account, group_id
from elasticd.access.authority import UNKNOWN, Peer
from elasticd.api.views import views
from elasticd.api.views.instant import now
from elasticd.base.answers import Answer, Json
from elasticd.base.errors import CannotStart, Refused
from elasticd.base.log import Log
from elasticd.cluster.published_state import PublishedState

from .httpd import (
    MAX_ARRIVING,
    ClientConnection,
    HttpRequest,
    RequestLimits,
    Server,
    host_of,
    listen_on,
)
from .request import Service
from .routes import routes

MAX_REQUESTS = 128
"""Concurrent requests, including followed logs."""
MAX_REQUESTS_OF_A_USER = 32
KEPT_FOR_ROOT = 16
"""Part of MAX_REQUESTS: root can always query and stop jobs, whatever the members of the socket's group do."""
MAX_SCRAPES = 16
"""Concurrent requests to /metrics; as many to /healthz."""
MAX_SCRAPES_OF_A_HOST = 8
ROOT = 0


class Handler:
    """One request on the Unix socket, as passed to the functions in `routes`."""

    def __init__(self, service: Service, connection: ClientConnection) -> None:
        self.service = service
        self._connection = connection
        self._request = HttpRequest("", "")
        self._peer: Peer | None = None
        self.streams = False
        """The answer is a stream, which may last as long as the job."""

    def handle(self) -> None:
        self._request = request = self._connection.receive()
        answer, names = routes.find(request.method, request.path)
        routes.respond(self, request.method, request.query, answer, names)
        self.service.log.debug(
            "api.request", method=request.method, path=request.path, uid=_user(self._connection.sock),
            status=self._connection.status,
        )  # fmt: skip

    @property
    def route(self) -> tuple[str, str]:
        """Method and path, with the names of jobs and nodes left out: few values, whatever is requested."""
        return routes.template(self._request.method, self._request.path)

    @property
    def status(self) -> int:
        return self._connection.status

    def body(self) -> dict[str, Any]:
        return json_object(self._request.body)

    def peer(self) -> Peer:
        """The process at the other end of the Unix socket."""
        if self._peer is None:
            self._peer = peer_of(self._connection.sock)
        return self._peer

    def send_json(self, status: int, content: Answer | Json) -> None:
        self._connection.answer_json(status, content)

    def begin_stream(self) -> None:
        self.streams = True
        self._connection.begin_stream("application/x-ndjson")

    def stream(self, content: Answer | Json) -> None:
        self._connection.stream(json.dumps(msgspec.to_builtins(content)).encode() + b"\n")

    def end_stream(self) -> None:
        self._connection.end_stream()

    def still_there(self) -> bool:
        return self._connection.still_there()


def json_object(raw: bytes) -> dict[str, Any]:
    """A request's body; empty is {}. Raises Refused (400)."""
    try:
        content = json.loads(raw or b"{}")
        json.dumps(content, ensure_ascii=False).encode()  # JSON allows "\udce9", which cannot be encoded
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - 40) : error.end + 40]
        raise Refused(400, f"the request's body holds what is no Unicode text: {around!r}") from None
    except ValueError as error:
        raise Refused(400, f"the request's body is not JSON: {error}") from None
    except RecursionError:
        raise Refused(400, "the request's body is nested too deeply") from None
    if not isinstance(content, dict):
        raise Refused(400, "the request's body must be a JSON object")
    return content


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(process id, user id, group id) of the process that connected a Unix socket. Raises OSError."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid, gid


def peer_of(sock: socket.socket) -> Peer:
    """The process at the other end of a Unix socket, with the groups that the user database gives its user."""
    try:
        pid, uid, gid = _credentials(sock)
    except OSError:
        return UNKNOWN
    if uid == ROOT:  # is an admin anyway: its requests need not wait for a user database that does not answer
        return Peer(uid, gid, "root", frozenset({gid}), pid)
    user = account(uid)
    return Peer(uid, gid, user.user, user.groups | {gid}, pid)


def unix_server(path: str, group: str, service: Service) -> Server:
    """Listen on `path`, mode 0660. The caller holds the lock of the state directory. Raises CannotStart."""
    gid = group_id(group) if group else -1
    if gid is None:
        raise CannotStart(f"socket_group = {group!r}: there is no such group")
    listener = socket.socket(socket.AF_UNIX)
    unready = path + "~"  # renamed once it listens: who finds `path` is answered
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if _is_served(path):
            raise CannotStart(f"another process listens on {path}: set `socket` to another path")
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise CannotStart(f"socket = {path!r}: there is a file that is no socket: take it away, or set another")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unready)
        before = os.umask(0o117)
        try:
            listener.bind(unready)
        finally:
            os.umask(before)
        os.chown(unready, -1, gid)
        listener.listen(MAX_REQUESTS)
        os.rename(unready, path)
    except (CannotStart, OSError) as error:
        listener.close()
        if isinstance(error, CannotStart):
            raise
        raise CannotStart(f"cannot listen on {path}: {error.strerror or error}") from error
    places = RequestLimits(MAX_REQUESTS, MAX_REQUESTS_OF_A_USER, KEPT_FOR_ROOT, ROOT)
    return Server(listener, lambda connection: _timed(Handler(service, connection)), _user, places, service.log)


def _timed(handler: Handler) -> None:
    """Handle the request, and count how long that took unless it was answered by a stream."""
    began_s, code = time.monotonic(), 500
    try:
        handler.handle()
        code = handler.status
    except Refused as refused:
        code = refused.status
        raise
    finally:
        if not handler.streams:
            handler.service.requests.api.observe(time.monotonic() - began_s, *handler.route, str(code))


def _user(sock: socket.socket) -> int:
    try:
        return _credentials(sock)[1]
    except OSError:
        return UNKNOWN.uid


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except BlockingIOError:  # its queue is full
            return True
        except OSError:
            return False
    return True


def metrics_server(listen: str, published: PublishedState, exposition: Callable[[], bytes], log: Log) -> Server:
    """Serve /metrics and /healthz. Raises CannotStart."""

    def handle(connection: ClientConnection) -> None:
        path = connection.receive().path
        if path == "/metrics":
            connection.answer(200, "text/plain; version=0.0.4; charset=utf-8", exposition())
        elif path == "/healthz":
            alive, content = views.healthz(published.now, now())
            connection.answer_json(200 if alive else 503, content)
        else:
            connection.answer(404, "text/plain", b"/metrics, /healthz\n")

    listener = listen_on("http.listen", listen, MAX_ARRIVING)
    places, probes = (RequestLimits(MAX_SCRAPES, MAX_SCRAPES_OF_A_HOST) for _ in range(2))
    return Server(listener, handle, host_of, places, log, {"/healthz": probes})
