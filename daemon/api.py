"""HTTP/JSON on a Unix socket, for elasticctl and curl; /metrics and /healthz on loopback. See docs/api.md.

Reads are answered from the newest snapshot and need neither the loop nor etcd. Changes go to etcd in the thread of
the request. Who may open the socket may run code as this daemon's user: its mode is 0660.
"""

from __future__ import annotations

import contextlib
import grp
import http.server
import json
import os
import pwd
import select
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from . import routes, views
from .board import Board
from .config import host_port
from .errors import CannotStart, Refused
from .routes import Service
from .views import SCHEMA, Json

MAX_BODY_BYTES = 1024 * 1024
MAX_REQUESTS = 64
"""At one time; followed logs among them."""
RETRY_S = 0.2
"""Pause before the next try to take a request where the last one failed."""
IDLE_S = 30.0
"""How long a request may take to arrive."""


class Handler(http.server.BaseHTTPRequestHandler):
    service: Service  # set by `serve`
    timeout = IDLE_S
    server_version = "elasticd"
    _raw = b""

    def do_GET(self) -> None:
        self._route("GET")

    def do_POST(self) -> None:
        self._route("POST")

    def do_DELETE(self) -> None:
        self._route("DELETE")

    def _route(self, method: str) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        try:
            # Read in any case: a client must not be cut off while it still sends.
            self._raw = self._receive()
            answer, names = routes.find(method, url.path)
            answer(self, query, **{name: unquote(value) for name, value in names.items()})
        except Refused as refused:
            error = {"status": refused.status, "message": str(refused)}
            self.send_json(refused.status, {"schema": SCHEMA, "error": error})
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True  # the client has gone

    # ── answering ───────────────────────────────────────────────────────────────────────────────────────────

    def send_json(self, status: int, content: Json) -> None:
        body = json.dumps(content, allow_nan=False).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self) -> None:
        """Lines of JSON until the connection is closed."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Connection", "close")
        self.end_headers()

    def stream(self, content: Json) -> None:
        self.wfile.write(json.dumps(content).encode() + b"\n")
        self.wfile.flush()

    def _receive(self) -> bytes:
        text = self.headers.get("Content-Length") or "0"
        length = int(text) if text.isdigit() else MAX_BODY_BYTES + 1
        if length > MAX_BODY_BYTES:
            raise Refused(413, f"the request's body may have {MAX_BODY_BYTES} bytes")
        return self.rfile.read(length)

    def body(self) -> dict[str, Any]:
        raw = self._raw
        try:
            content = json.loads(raw or b"{}")
            json.dumps(content, ensure_ascii=False).encode()  # "\udce9" is JSON, and can be written nowhere
        except UnicodeEncodeError as error:
            around = error.object[max(0, error.start - 40) : error.end + 40]
            raise Refused(400, f"the request's body holds what is no Unicode text: {around!r}") from None
        except ValueError as error:
            raise Refused(400, f"the request's body is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise Refused(400, "the request's body must be a JSON object")
        return content

    def peer(self) -> str:
        """Name of the user at the other end of the Unix socket."""
        try:
            raw = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return pwd.getpwuid(struct.unpack("3i", raw)[1]).pw_name
        except (OSError, KeyError):
            return "unknown"

    def still_there(self) -> bool:
        """Whether the client of a stream is still connected: with a quiet log nobody would find out by writing."""
        news = select.poll()
        news.register(self.connection, select.POLLIN | select.POLLRDHUP)
        return not any(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in news.poll(0))

    def address_string(self) -> str:
        return "local"

    def log_message(self, format: str, *args: Any) -> None:
        self.service.log.debug("api.request", request=format % args)


# ── serving ─────────────────────────────────────────────────────────────────────────────────────────────────


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = MAX_REQUESTS

    def __init__(self, path: str, handler: type[Handler]) -> None:
        self._log = handler.service.log
        self._room = threading.BoundedSemaphore(MAX_REQUESTS)
        self._pause = threading.Event()
        self._deaf: int | None = None
        """The error that keeps us from taking requests, once it has been said."""
        super().__init__(path, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(timeout=IDLE_S):
            self._log.warning("api.full", requests=MAX_REQUESTS)
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no room for another thread
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        self._log.error("api.failed", exc_info=True)  # this request only: its client sees the connection end

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            connection, _ = super().get_request()
        except OSError as error:
            # Out of descriptors, say: who knocks stays in the queue, and would be looked at without end.
            if error.errno != self._deaf:
                self._log.error("api.cannot_accept", why=str(error))
            self._deaf = error.errno
            self._pause.wait(RETRY_S)
            raise
        self._deaf = None
        return connection, ("local", 0)


class MetricsServer(http.server.ThreadingHTTPServer):
    daemon_threads = True


def unix_server(path: str, group: str, service: Service) -> UnixServer:
    """Listen on `path`, mode 0660. The caller holds the lock of the state directory. Raises CannotStart."""
    handler = type("BoundHandler", (Handler,), {"service": service})
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if _somebody_listens(path):
            raise CannotStart(f"another process listens on {path}: set `socket` to another path")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        before = os.umask(0o117)
        try:
            server = UnixServer(path, handler)
        finally:
            os.umask(before)
        if group:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
    except KeyError:
        raise CannotStart(f"socket_group = {group!r}: there is no such group") from None
    except OSError as error:
        raise CannotStart(f"cannot listen on {path}: {error.strerror or error}") from error
    return server


def _somebody_listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def metrics_server(listen: str, board: Board, exposition: Callable[[], bytes]) -> MetricsServer:
    """Serve /metrics and /healthz. Raises CannotStart."""

    class Metrics(http.server.BaseHTTPRequestHandler):
        timeout = IDLE_S

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, "text/plain; version=0.0.4; charset=utf-8", exposition())
            elif self.path == "/healthz":
                alive, content = views.healthz(board.now, routes.now())
                self._send(200 if alive else 503, "application/json", json.dumps(content).encode() + b"\n")
            else:
                self._send(404, "text/plain", b"/metrics, /healthz\n")

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass  # a scrape every few seconds is no news

    host, port = host_port("http.listen", listen, zero_ok=True)
    try:
        return MetricsServer((host, port), Metrics)
    except OSError as error:
        raise CannotStart(f"http.listen = {listen!r}: {error.strerror or error}") from error
