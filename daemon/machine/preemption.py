"""Notices of the cloud that this machine will be taken away: each drains the node before the machine is gone.

Each provider announces it in its metadata service, some time ahead: AWS two minutes, Google and Azure thirty seconds or
more. The jobs leave at a step boundary, so nothing is lost; without the notice the node would be one that died.
Sources: AWS "Spot Instance interruption notices", Google "Preemptible VM instances: handle preemption", Azure
"Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import datetime
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elasticd.base.log import Log

ASK_EVERY_S = 5.0
"""AWS recommends this interval."""
ANSWER_S = 2.0
"""Time limit of one request: the service is on this machine's own host."""
MAX_BYTES = 65536
TOKEN_S = 300
"""Life of an AWS session token."""
RELUCTANT = 12
"""Consecutive failures of the metadata service after which the log says so: one minute."""


@dataclass(frozen=True)
class Notice:
    reason: str
    deadline_s: float
    """Seconds from now until the machine goes away."""


class MetadataError(Exception):
    """The metadata service did not answer, or not as documented."""


class MetadataService(Protocol):
    """One provider's metadata service."""

    def look(self, now_wall_s: float) -> Notice | None:
        """The notice for this machine, if there is one. Raises MetadataError."""


def source(provider: str, url: str) -> MetadataService | None:
    """The source for the setting `preemption`; None for "none". `url`: "" for the provider's own address."""
    if provider == "aws":
        return Aws(url or "http://169.254.169.254")
    if provider == "gcp":
        return Gcp(url or "http://metadata.google.internal")
    if provider == "azure":
        return Azure(url or "http://169.254.169.254")
    return None


class Aws:
    def __init__(self, url: str) -> None:
        self._url = url

    def look(self, now_wall_s: float) -> Notice | None:
        token = _ask(
            f"{self._url}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}, method="PUT"
        )
        if token is None:
            raise MetadataError("the service gives no session token")
        text = _ask(f"{self._url}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
        if text is None:
            return None
        action, when = _field(text, "action"), _field(text, "time")
        return Notice(f"spot interruption: {action} at {when}", _until(when, "%Y-%m-%dT%H:%M:%SZ", now_wall_s))


class Gcp:
    NOTICE_S = 30.0

    def __init__(self, url: str) -> None:
        self._url = url

    def look(self, now_wall_s: float) -> Notice | None:
        text = _ask(f"{self._url}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return Notice("preemption", self.NOTICE_S) if text is not None and text.strip().upper() == "TRUE" else None


class Azure:
    NOTICE_S = 30.0

    def __init__(self, url: str) -> None:
        self._url = url
        self._name = ""
        """Of this machine, as events name it; empty: not asked yet."""

    def look(self, now_wall_s: float) -> Notice | None:
        text = _ask(f"{self._url}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
        events = _field(text or "{}", "Events", [])
        for event in events if isinstance(events, list) else []:
            leaves = isinstance(event, dict) and event.get("EventType") in ("Preempt", "Terminate")
            if leaves and self._concerns_this_machine(event.get("Resources")):
                before = str(event.get("NotBefore") or "")
                left_s = _until(before, "%a, %d %b %Y %H:%M:%S GMT", now_wall_s) if before else self.NOTICE_S
                return Notice(f"scheduled event {event['EventType']}", left_s)
        return None

    def _concerns_this_machine(self, resources: object) -> bool:
        """An event is delivered to all machines of an availability set or scale set, and names those that it is for."""
        if not isinstance(resources, list):
            raise MetadataError(f"a scheduled event without its list of Resources: {resources!r}")
        if not self._name:
            url = f"{self._url}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (_ask(url, {"Metadata": "true"}) or "").strip().lower()
        if not self._name:
            raise MetadataError("the service does not say what this machine is called")
        return self._name in (str(resource).lower() for resource in resources)


class PreemptionWatch:
    """The thread that asks the metadata service, and calls `drain` once per notice."""

    def __init__(
        self, source: MetadataService, drain: Callable[[Notice], bool], log: Log, every_s: float = ASK_EVERY_S
    ) -> None:
        """`drain` returns whether the node is being drained. False, as without etcd, has it called again."""
        self._source = source
        self._drain = drain
        self._log = log
        self._every_s = every_s
        self._closed = threading.Event()
        self._drained = False
        self._failures = 0

    def run(self) -> None:
        """Body of the thread."""
        while not self._closed.wait(self._every_s):
            self.look()

    def close(self) -> None:
        self._closed.set()

    def look(self) -> None:
        try:
            notice = self._source.look(time.time())
        except MetadataError as error:
            self._failures += 1
            if self._failures == RELUCTANT:
                self._log.warning("preemption.unknown", error=str(error), failures=self._failures)
            return
        self._failures = 0
        if notice is None:
            self._drained = False  # the provider has withdrawn it; the drain stays until `elasticctl uncordon`
        elif not self._drained:
            self._log.warning("preemption.notice", reason=notice.reason, deadline_s=round(notice.deadline_s, 1))
            self._drained = self._drain(notice)


def _ask(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """The answer's text; None for 404. Raises MetadataError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by the proxy of the environment
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with opener.open(request, timeout=ANSWER_S) as answer:
            return str(answer.read(MAX_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise MetadataError(f"{url}: {error}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # the last: cut off, or no HTTP at all
        raise MetadataError(f"{url}: {error!r}") from None


def _field(text: str, name: str, default: object = "") -> object:
    """A field of a JSON object; `default` if it is absent. Raises MetadataError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise MetadataError(f"no JSON: {text[:80]!r}") from None
    if not isinstance(value, dict):
        raise MetadataError(f"no JSON object: {text[:80]!r}")
    return value.get(name, default)


def _until(when: object, form: str, now_wall_s: float) -> float:
    """Seconds until `when`, at least 1. Raises MetadataError."""
    try:
        at = datetime.datetime.strptime(str(when), form).replace(tzinfo=datetime.UTC)
    except ValueError:
        raise MetadataError(f"no time of the form {form}: {when!r}") from None
    return max(1.0, at.timestamp() - now_wall_s)
