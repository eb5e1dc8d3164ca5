"""A request, what answers it, and what it may ask: its body, the values of its query, and their limits."""

from __future__ import annotations

import json
import math
import re
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from elastic.contract.job.field_words import explained
from elasticd.access.accounts import account
from elasticd.access.audit import Audit
from elasticd.access.authority import UNKNOWN, Authority, Peer
from elasticd.agents.cleaner import Cleaner
from elasticd.api.metrics.observations import Requests
from elasticd.api.views.instant import Identity
from elasticd.base.answers import Answer, Json
from elasticd.base.command_answers import Config
from elasticd.base.errors import Refused
from elasticd.base.folders import Folder
from elasticd.base.log import Log
from elasticd.cluster.published_state import PublishedState
from elasticd.node.asks import MAX_BYTES, Asker, User

from .actions import Actions
from .doctor import Doctor
from .httpd import ClientConnection, HttpRequest

ROOT = 0

MAX_DEADLINE_S = 1e9
"""Of a drain. Timers accept no unbounded numbers."""

MAX_REASON_CHARS = 1_000
"""A reason is copied into records, orders and every status of the node."""

MAX_FORGOTTEN = 512
"""Jobs in one request."""

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Service:
    published: PublishedState
    actions: Actions
    identity: Identity
    logs: Callable[[str], Folder]
    config: Callable[[], Config]
    log: Log
    authority: Authority
    audit: Audit
    asker: Asker
    """Asks other nodes' daemons."""
    doctor: Doctor
    cleaner: Cleaner
    requests: Requests = field(default_factory=Requests)
    allow_faults: bool = False


class Handler:
    """A request on the Unix socket, and the way to answer it."""

    def __init__(self, service: Service, connection: ClientConnection, request: HttpRequest) -> None:
        self.service = service
        self._connection = connection
        self._request = request
        self._peer: Peer | None = None

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
        self._connection.begin_stream("application/x-ndjson")

    def stream(self, content: Answer | Json) -> None:
        self._connection.stream(json.dumps(msgspec.to_builtins(content)).encode() + b"\n")

    def end_stream(self) -> None:
        self._connection.end_stream()

    def still_there(self) -> bool:
        return self._connection.still_there()


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


Request = Handler | Captured


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


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(process id, user id, group id) of the process that connected a Unix socket. Raises OSError."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid, gid


def peer_of(sock: socket.socket) -> Peer:
    """The process at the other end of a Unix socket, with the groups that the user database gives its user."""
    try:
        pid, uid, gid = credentials(sock)
    except OSError:
        return UNKNOWN
    if uid == ROOT:  # is an admin anyway: its requests need not wait for a user database that does not answer
        return Peer(uid, gid, "root", frozenset({gid}), pid)
    user = account(uid)
    return Peer(uid, gid, user.user, user.groups | {gid}, pid)


Text = Annotated[str, Meta(min_length=1, max_length=MAX_REASON_CHARS)]


class Reason(msgspec.Struct):
    reason: Text = ""


class Drain(Reason):
    deadline_s: Annotated[float, Meta(ge=0, le=MAX_DEADLINE_S)] = 0.0


class Scale(msgspec.Struct):
    nodes: Text


class Forget(msgspec.Struct):
    jobs: Annotated[list[str], Meta(max_length=MAX_FORGOTTEN)]


class Submit(msgspec.Struct, forbid_unknown_fields=True, rename={"user": "as"}):
    spec: dict[str, Any]
    replace: bool = False
    user: str = ""


B = TypeVar("B", bound=msgspec.Struct)


def read_body(h: Request, kind: type[B]) -> B:
    """The body in its class. Raises Refused (400) with the field, its value and what it takes."""
    body = h.body()
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise Refused(400, explained(error, kind, body)) from None


def seconds(query: Query, name: str) -> float:
    """Seconds; 0 if not given. Raises Refused (400)."""
    try:
        value = float(query.get(name, 0.0))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise Refused(400, f"{name} = {query[name]!r}: seconds, from 0")
    return value


def count(query: Query, name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise Refused(400, f"{name} = {text!r}: a whole number from 0 to 999999999")
    return int(text)


def flag(query: Query, name: str) -> bool:
    if (text := query.get(name, "0")) not in ("0", "1", "false", "true", ""):
        raise Refused(400, f"{name} = {text!r}: 1 or 0")
    return text in ("1", "true", "")
