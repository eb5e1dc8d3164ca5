"""The API on a Unix socket, for elasticctl and curl; what other nodes' daemons are answered (see `asks`); /metrics and
/healthz on loopback. See docs/api.md.

Reads are answered from the newest snapshot and need neither the loop nor etcd. Changes go to etcd in the thread of the
request; `authority` decides whether the user may make them, and `audit` records them. Access to the socket, mode 0660,
allows submitting jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Mapping
from functools import partial

from elasticd.access.accounts import group_id
from elasticd.access.authority import UNKNOWN
from elasticd.api.views import views
from elasticd.api.views.instant import now
from elasticd.base.errors import CannotStart, Refused
from elasticd.base.log import Log
from elasticd.cluster.published_state import PublishedState
from elasticd.node.asks import User

from .httpd import MAX_ARRIVING, ClientConnection, HttpRequest, RequestLimits, Server, host_of, listen_on
from .request import ROOT, Captured, Handler, Service, credentials
from .routes import routes

MAX_REQUESTS = 128
"""Concurrent requests, including followed logs."""
MAX_REQUESTS_OF_A_USER = 32
KEPT_FOR_ROOT = 16
"""Part of MAX_REQUESTS: root can always query and stop jobs, whatever the members of the socket's group do."""
MAX_SCRAPES = 16
"""Concurrent requests to /metrics; as many to /healthz."""
MAX_SCRAPES_OF_A_HOST = 8

ANSWERED = re.compile(r"/v1/(doctor/local|config|jobs/[^/]+/(logs|stacks|gradients))")
"""Paths that another node's daemon may ask for: all of them only read."""


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
    return Server(listener, partial(_respond, service), _user, places, service.log)


def _respond(service: Service, connection: ClientConnection) -> None:
    """Answer one request, and count how long that took unless it was answered by a stream."""
    began_s, code, request = time.monotonic(), 500, HttpRequest("", "")
    try:
        request = connection.receive()
        method, path = request.method, request.path
        routes.respond(Handler(service, connection, request), method, path, request.query)
        code = connection.status
        service.log.debug("api.request", method=method, path=path, uid=_user(connection.sock), status=code)
    except Refused as refused:
        code = refused.status
        raise
    finally:
        if not connection.streams:
            route = routes.template(request.method, request.path)
            service.requests.api.observe(time.monotonic() - began_s, *route, str(code))


def _user(sock: socket.socket) -> int:
    try:
        return credentials(sock)[1]
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


def answer_node(service: Service, path: str, query: Mapping[str, str], by: User) -> tuple[int, bytes]:
    """Answer GET `path`, asked by user `by` of another node. Raises Refused."""
    if not ANSWERED.fullmatch(path):
        raise Refused(403, f"{path} is not answered to other nodes")
    captured = Captured(service, by)
    routes.respond(captured, "GET", path, {**query, "follow": "0", "here": "1"})
    return captured.status, json.dumps(captured.content).encode()
