"""A request, what answers it, and the limits on what it may ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from elasticd.access.audit import Audit
from elasticd.access.authority import Authority, Peer
from elasticd.agents.cleaner import Cleaner
from elasticd.api.metrics.observations import Requests
from elasticd.base.answers import Answer, Json
from elasticd.base.folders import Folder
from elasticd.base.log import Log
from elasticd.cluster.published_state import PublishedState
from elasticd.node.asks import Asker
from elasticd.views.instant import Identity

from .actions import Actions
from .doctor import Doctor

LONGEST_WAIT_S = 60.0

MAX_DEADLINE_S = 1e9
"""Of a drain. Timers accept no unbounded numbers."""

MAX_REASON_CHARS = 1_000
"""A reason is copied into records, orders and every status of the node."""

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Service:
    """The sources of the answers."""

    published: PublishedState
    actions: Actions
    identity: Identity
    logs: Callable[[str], Folder]
    config: Callable[[], Json]
    log: Log
    authority: Authority
    audit: Audit
    asker: Asker
    """Asks other nodes' daemons."""
    doctor: Doctor
    cleaner: Cleaner
    requests: Requests = field(default_factory=Requests)


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
