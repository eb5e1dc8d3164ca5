"""What this daemon answers to other nodes' daemons (see `asks`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from elasticd.access.authority import Peer
from elasticd.base.answers import Answer, Json
from elasticd.base.errors import Refused
from elasticd.node.asks import MAX_BYTES, User

from .request import Service
from .routes import routes

ANSWERED = re.compile(r"/v1/(doctor/local|config|jobs/[^/]+/(logs|stacks|gradients))")
"""Paths that another node's daemon may ask for: all of them only read."""


class Captured:
    """A request of another node's daemon: the answer is kept, not sent. A stream becomes `{"lines": […]}`."""

    def __init__(self, service: Service, by: User) -> None:
        self.service = service
        self.status = 0
        self.content: Json = {}
        self._by = by
        self._lines: list[Json] = []
        self._nbytes = 0
        self._left_out = 0

    def body(self) -> dict[str, Any]:
        return {}

    def peer(self) -> Peer:
        """The user who asks there. An admin of that node counts as one here: its daemon has signed it."""
        uid = self.service.authority.daemon_uid if self._by.admin else self._by.uid
        return Peer(uid, -1, self._by.name)

    def send_json(self, status: int, content: Answer | Json) -> None:
        self.status, self.content = status, msgspec.to_builtins(content)

    def begin_stream(self) -> None:
        self.status, self.content = 200, {"lines": self._lines}

    def stream(self, content: Answer | Json) -> None:
        """The newest lines are kept if all together are too large."""
        self._lines.append(content := msgspec.to_builtins(content))
        self._nbytes += len(json.dumps(content))
        while self._nbytes > MAX_BYTES // 2 and len(self._lines) > 1:
            self._nbytes -= len(json.dumps(self._lines.pop(0)))
            self._left_out += 1

    def end_stream(self) -> None:
        if self._left_out:
            note = f"{self._left_out} earlier lines are left out: a node answers another one with the newest lines only"
            self._lines.insert(0, {"note": note, "cut": True})

    def still_there(self) -> bool:
        return False


def answer(service: Service, path: str, query: Mapping[str, str], by: User) -> tuple[int, bytes]:
    """Answer GET `path`, asked by user `by` of another node. Raises Refused."""
    if not ANSWERED.fullmatch(path):
        raise Refused(403, f"{path} is not answered to other nodes")
    function, names = routes.find("GET", path)
    captured = Captured(service, by)
    routes.respond(captured, "GET", {**query, "follow": "0", "here": "1"}, function, names)
    return captured.status, json.dumps(captured.content).encode()
