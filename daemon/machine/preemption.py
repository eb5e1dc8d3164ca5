"""Notices of the cloud that this machine will be taken away: each drains the node before the machine is gone.

Each provider announces it in its metadata service, some time ahead: AWS two minutes, Google and Azure thirty seconds or
more. The jobs leave at a step boundary, so nothing is lost; without the notice the node would be one that died.
Sources: AWS "Spot Instance interruption notices", Google "Preemptible VM instances: handle preemption", Azure
"Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import datetime
import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec

from elasticd.base.entry_points import Guard
from elasticd.base.errors import PluginFailed
from elasticd.base.log import Log
from elasticd.base.safe_text import line
from elasticd.plugins import Notice, NoticeSource, NoticeUnknown

LINK_LOCAL = "http://169.254.169.254"
ASK_EVERY_S = 5.0
"""AWS recommends this interval."""
ANSWER_S = 2.0
"""Time limit of one request: the service is on this machine's own host."""
MAX_BYTES = 65536
TOKEN_S = 300
"""Life of an AWS session token."""
S = TypeVar("S")
RELUCTANT = 12
"""Consecutive failures after which the log says so: one minute."""


class Spot(msgspec.Struct):
    action: str
    time: str


@dataclass
class Aws:
    url: str

    def look(self, now_wall_s: float) -> Notice | None:
        wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
        if (token := _ask(f"{self.url}/latest/api/token", wanted, method="PUT")) is None:
            raise NoticeUnknown("the service gives no session token")
        text = _ask(f"{self.url}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
        if text is None:
            return None
        spot = _read(text, Spot)
        return Notice(
            f"spot interruption: {spot.action} at {spot.time}", _until(spot.time, "%Y-%m-%dT%H:%M:%SZ", now_wall_s)
        )


@dataclass
class Gcp:
    url: str
    NOTICE_S: ClassVar = 30.0

    def look(self, now_wall_s: float) -> Notice | None:
        text = _ask(f"{self.url}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return Notice("preemption", self.NOTICE_S) if text is not None and text.strip().upper() == "TRUE" else None


class ScheduledEvent(msgspec.Struct, rename="pascal"):
    """One of Azure's. It is delivered to all machines of an availability set or scale set, and names those that it is
    for."""

    event_type: Any = ""
    resources: Any = None
    not_before: Any = None


class ScheduledEvents(msgspec.Struct, rename="pascal"):
    events: list[ScheduledEvent] = []


@dataclass
class Azure:
    url: str
    NOTICE_S: ClassVar = 30.0
    _name: str = ""
    """Of this machine, as events name it; empty: not asked yet."""

    def look(self, now_wall_s: float) -> Notice | None:
        text = _ask(f"{self.url}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
        for event in _read(text or "{}", ScheduledEvents).events:
            if event.event_type in ("Preempt", "Terminate") and self._is_for_this_machine(event):
                form = "%a, %d %b %Y %H:%M:%S GMT"
                left_s = _until(event.not_before, form, now_wall_s) if event.not_before else self.NOTICE_S
                return Notice(f"scheduled event {event.event_type}", left_s)
        return None

    def _is_for_this_machine(self, event: ScheduledEvent) -> bool:
        if not isinstance(event.resources, list):
            raise NoticeUnknown(f"a scheduled event without its list of Resources: {event.resources!r}")
        if not self._name:
            url = f"{self.url}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (_ask(url, {"Metadata": "true"}) or "").strip().lower()
        if not self._name:
            raise NoticeUnknown("the service does not say what this machine is called")
        return self._name in (str(resource).lower() for resource in event.resources)


def aws(url: str) -> Aws:
    """The entry point; `url`: "" for the provider's own address. So are the two below."""
    return Aws(url or LINK_LOCAL)


def gcp(url: str) -> Gcp:
    return Gcp(url or "http://metadata.google.internal")


def azure(url: str) -> Azure:
    return Azure(url or LINK_LOCAL)


@dataclass(eq=False)
class PreemptionWatch:
    """Asks for a notice, and calls `drain` once per notice. `drain` returns whether the node is being drained.
    False, as without etcd, has it called again."""

    source: NoticeSource
    drain: Callable[[Notice], bool]
    log: Log

    def __post_init__(self) -> None:
        self._drained = False
        self._failures = 0
        self._guard = Guard("preemption", self.log, NoticeUnknown)

    def look(self) -> float:
        """Returns the pause to the next look."""
        try:
            with self._guard.call():
                notice = self.source.look(time.time())
                if notice is not None:
                    if not math.isfinite(notice.deadline_s):
                        raise ValueError(f"deadline_s = {notice.deadline_s}")
                    notice = Notice(line(notice.reason), max(1.0, notice.deadline_s))
        except (NoticeUnknown, PluginFailed) as error:
            self._failures += 1
            if self._failures == RELUCTANT:
                self.log.warning("preemption.unknown", error=str(error), failures=self._failures)
            return ASK_EVERY_S
        self._failures = 0
        if notice is None:
            self._drained = False  # it has been withdrawn; the drain stays until `elasticctl uncordon`
        elif not self._drained:
            self.log.warning("preemption.notice", reason=notice.reason, deadline_s=round(notice.deadline_s, 1))
            self._drained = self.drain(notice)
        return ASK_EVERY_S


def _ask(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """The answer's text; None for 404. Raises NoticeUnknown."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by the proxy of the environment
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with opener.open(request, timeout=ANSWER_S) as answer:
            return str(answer.read(MAX_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise NoticeUnknown(f"{url}: {error}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # the last: cut off, or no HTTP at all
        raise NoticeUnknown(f"{url}: {error!r}") from None


def _read(text: str, kind: type[S]) -> S:
    """Raises NoticeUnknown."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise NoticeUnknown(f"{error}: {text[:80]!r}") from None


def _until(when: object, form: str, now_wall_s: float) -> float:
    """Seconds until `when`, at least 1. Raises NoticeUnknown."""
    try:
        at = datetime.datetime.strptime(str(when), form).replace(tzinfo=datetime.UTC)
    except ValueError:
        raise NoticeUnknown(f"no time of the form {form}: {when!r}") from None
    return max(1.0, at.timestamp() - now_wall_s)
