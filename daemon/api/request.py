"""A request, what answers it, and what it may ask: its body, the values of its query, and their limits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta

from elastic.contract.job.field_words import explained
from elasticd.access.audit import Audit
from elasticd.access.authority import Authority, Peer
from elasticd.agents.cleaner import Cleaner
from elasticd.api.metrics.observations import Requests
from elasticd.api.views.instant import Identity
from elasticd.base.answers import Answer, Json
from elasticd.base.command_answers import Config
from elasticd.base.errors import Refused
from elasticd.base.folders import Folder
from elasticd.base.log import Log
from elasticd.cluster.published_state import PublishedState
from elasticd.node.asks import Asker

from .actions import Actions
from .doctor import Doctor

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


class Request(Protocol):
    """The request at hand, and the way to answer it."""

    @property
    def service(self) -> Service: ...
    def body(self) -> dict[str, Any]: ...
    def peer(self) -> Peer: ...
    def send_json(self, status: int, content: Answer | Json) -> None: ...
    def begin_stream(self) -> None: ...
    def stream(self, content: Answer | Json) -> None: ...
    def end_stream(self) -> None: ...
    def still_there(self) -> bool: ...


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
    return query.get(name, "0") in ("1", "true", "")
