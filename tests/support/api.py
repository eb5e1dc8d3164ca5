"""The daemon's API as any client sees it: HTTP/JSON over its Unix socket."""

from __future__ import annotations

import http.client
import json
import pathlib
import socket
from typing import Any


class ApiError(Exception):
    """The daemon refused, with its words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: pathlib.Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self._path)
        except OSError:
            self.sock.close()
            raise


def call(path: pathlib.Path, method: str, url: str, body: object = None, timeout_s: float = 10.0) -> dict[str, Any]:
    """One request to the socket at `path`. Raises ApiError, OSError when nobody answers."""
    connection = _Connection(path, timeout_s)
    try:
        connection.request(method, url, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        content: dict[str, Any] = json.loads(answer.read())
    finally:
        connection.close()
    if answer.status >= 400:
        raise ApiError(answer.status, content.get("error", {}).get("message", str(content)))
    return content
