"""A minimal HTTP client on the daemon's Unix socket, for elasticctl, where every millisecond of start-up counts."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

Json = dict[str, Any]

ABSENT = FileNotFoundError, ConnectionRefusedError


class Unreachable(Exception):
    """No daemon answers on the socket. `absent`: none listens there, so one may be starting."""

    def __init__(self, message: str, absent: bool = False) -> None:
        super().__init__(message)
        self.absent = absent


class Failed(Exception):
    """The daemon answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def default_sockets() -> tuple[str, ...]:
    """$ELASTICCTL_SOCKET, else the first that exists of a system service's and the user's own daemon's; all of them if
    none exists."""
    if given := os.environ.get("ELASTICCTL_SOCKET"):
        return (given,)
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    candidates = ("/run/elasticd/elasticd.sock", "/var/lib/elasticd/elasticd.sock", f"{home}/elasticd/elasticd.sock")
    return next(((path,) for path in candidates if os.path.exists(path)), candidates)


class Client:
    def __init__(self, path: str = "", timeout_s: float = 10.0) -> None:
        """`path`: of the socket; '': that of `default_sockets`."""
        self._tried = (path,) if path else default_sockets()
        self._chosen = bool(path)
        self._timeout_s = timeout_s

    @property
    def path(self) -> str:
        return self._tried[0]

    @property
    def tried(self) -> str:
        """The sockets at which a daemon was looked for, in words."""
        *others, last = self._tried
        return f"{', '.join(others)} or {last}" if others else last

    def find_again(self) -> None:
        """Another socket may exist by now."""
        if not self._chosen:
            self._tried = default_sockets()

    def get(self, path: str, query: Mapping[str, object] | None = None, timeout_s: float | None = None) -> Json:
        return self._whole("GET", _with(path, query), None, timeout_s)

    def post(self, path: str, body: Json | None = None, timeout_s: float | None = None) -> Json:
        return self._whole("POST", path, body or {}, timeout_s)

    def delete(self, path: str) -> Json:
        return self._whole("DELETE", path, None)

    def lines(self, path: str, query: Mapping[str, object]) -> Iterator[Json]:
        """A stream of JSON lines, until the daemon ends it. Raises Unreachable if it breaks."""
        with self._send("GET", _with(path, query), None, None) as connection, connection.makefile("rb") as answer:
            try:
                status = _head(answer)
                if status != 200:
                    raise _failed(status, answer.read())
                for line in answer:
                    yield _parsed(line)
            except OSError as error:
                raise Unreachable(f"the connection to elasticd broke: {error}") from error

    def _whole(self, method: str, path: str, body: Json | None, timeout_s: float | None = None) -> Json:
        with self._send(method, path, body, timeout_s or self._timeout_s) as connection:
            try:
                with connection.makefile("rb") as answer:
                    status, raw = _head(answer), answer.read()
            except TimeoutError:
                raise Unreachable(f"elasticd does not answer on {self.path}; see its log") from None
            except OSError as error:
                raise Unreachable(f"the connection to elasticd broke: {error}") from error
        if status >= 400:
            raise _failed(status, raw)
        return _parsed(raw)

    def _send(self, method: str, path: str, body: Json | None, timeout_s: float | None) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        raw = json.dumps(body).encode() if body is not None else b""
        head = f"{method} {path} HTTP/1.0\r\nHost: elasticd\r\nContent-Length: {len(raw)}\r\n\r\n"
        try:
            connection.connect(self.path)
            try:
                connection.sendall(head.encode() + raw)
            except BrokenPipeError:
                pass  # the daemon answered before it had read all: the answer says why
        except OSError as error:
            connection.close()
            raise Unreachable(_why(self.path, error, self.tried), isinstance(error, ABSENT)) from None
        return connection


def name(text: str) -> str:
    """A job's or node's name as part of a path."""
    return quote(text, safe="", errors="surrogatepass")  # the daemon refuses non-UTF-8, like any invalid name


def _with(path: str, query: Mapping[str, object] | None) -> str:
    return f"{path}?{urlencode(query, errors='surrogatepass')}" if query else path


def _head(answer: Any) -> int:
    if not (line := answer.readline()):  # too many requests, or an internal error
        raise Unreachable("elasticd has ended the connection without an answer: its log says why")
    first = line.split()
    if len(first) < 2 or not first[1].isdigit():
        raise Unreachable("the process that listens on the socket is not an elasticd")
    while answer.readline().strip():
        pass
    return int(first[1])


def _parsed(raw: bytes) -> Json:
    try:
        content: Json = json.loads(raw)
    except ValueError:
        raise Unreachable("the connection to elasticd broke in the middle of its answer") from None
    return content


def _failed(status: int, raw: bytes) -> Failed:
    try:
        return Failed(status, json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return Failed(status, raw.decode(errors="replace").strip() or f"HTTP status {status}")


def _why(path: str, error: OSError, tried: str) -> str:
    match error:
        case FileNotFoundError():
            return (
                f"no elasticd on this machine: there is no socket {tried}. Start it (systemctl start elasticd, or "
                f"just: elasticd), or name its socket with --socket or ELASTICCTL_SOCKET. One that was started and has "
                "ended says why in its output"
            )
        case ConnectionRefusedError():
            return (
                f"elasticd is not running: no process listens on {path}. Start it (systemctl start elasticd, or just: "
                "elasticd); its log says why it ended"
            )
        case PermissionError():
            return f"you may not use {path}: be root, or in the socket's group ({_group(path)})"
        case TimeoutError():
            return f"elasticd does not answer on {path}"
    return f"{path}: {error}"


def _group(path: str) -> str:
    import grp

    try:
        return grp.getgrgid(os.stat(path).st_gid).gr_name
    except (OSError, KeyError):
        return "unknown"
