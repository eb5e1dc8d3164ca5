"""Notifications to a webhook and to a command: `occurrences` decides what is sent, a thread sends it.

A receiver that is away or slow costs nothing but its own notifications: the loop does not wait for this thread.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticd.api.views.instant import now
from elasticd.base.log import Log
from elasticd.base.masking import masked_text
from elasticd.base.settings import NotifySettings
from elasticd.cluster.published_state import PublishedState

from .occurrences import Memory, Occurrence, as_json, look

LOOK_EVERY_S = 1.0
DEADLINE_S = 10.0
"""Of one attempt as a whole."""
PAUSES_S = 1.0, 4.0, 16.0
"""Before the second, the third and the fourth attempt."""
PENDING = 100
"""So many notifications wait at most; then the oldest are dropped."""
KILLED_S = 1.0
"""From SIGKILL until the command is gone."""
REASON_BYTES = 200
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
"""What a command gets of elasticd's environment: no setting, no credential."""


class NotSent(Exception):
    """A notification was not taken. `again`: another attempt may help."""

    def __init__(self, why: str, again: bool) -> None:
        super().__init__(why)
        self.again = again


class Webhook:
    name = "webhook"

    def __init__(self, url: str) -> None:
        self._url = url
        self._opener = urllib.request.build_opener(_NoRedirect())
        self._late: threading.Thread | None = None

    def send(self, body: bytes) -> None:
        """In a thread of its own: each byte of an answer begins the socket's time-out anew, and a look-up of a name has
        none. At most one such thread is left behind."""
        if self._late and self._late.is_alive():
            raise NotSent("the request before this one still has no whole answer", True)
        refused: list[NotSent] = []
        thread = threading.Thread(target=self._post, args=(body, refused), name="webhook", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # at a limit of threads
            raise NotSent(str(error), True) from None
        thread.join(DEADLINE_S)
        if thread.is_alive():
            self._late = thread
            raise NotSent(f"timed out: no whole answer within {DEADLINE_S:g} s", True)
        if refused:
            raise refused[0]

    def _post(self, body: bytes, refused: list[NotSent]) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "elasticd"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=DEADLINE_S):
                pass
        except urllib.error.HTTPError as error:
            with error:
                may_pass = error.code in (408, 425, 429) or error.code >= 500
                refused.append(NotSent(f"HTTP {error.code} {error.reason}{_response_excerpt(error)}", may_pass))
        except urllib.error.URLError as error:
            refused.append(NotSent(str(error.reason), True))
        except (OSError, http.client.HTTPException, ValueError) as error:
            refused.append(NotSent(f"{type(error).__name__}: {error}", True))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the body, and look like a success."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _response_excerpt(error: urllib.error.HTTPError) -> str:
    """Start of the response body; chat services give the reason for a refusal there."""
    try:
        text = error.read(REASON_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException, ValueError):
        return ""
    return f": {' '.join(text.split())}" if text.strip() else ""


class Command:
    name = "command"

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)

    def send(self, body: bytes) -> None:
        environment = {name: value for name in PASSED_ON if (value := os.environ.get(name)) is not None}
        try:
            # What it prints goes where elasticd's own log goes.
            process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=2, env=environment, cwd="/", start_new_session=True
            )
        except OSError as error:
            raise NotSent(f"{self._argv[0]}: {error.strerror}", False) from None
        try:
            process.communicate(body + b"\n", DEADLINE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(PermissionError):  # it has become another user's
                os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
            raise NotSent(f"{self._argv[0]}: killed after {DEADLINE_S:g} s", False) from None
        if process.returncode:
            how = f"exit code {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
            raise NotSent(f"{self._argv[0]}: {how}", False)


Channel = Webhook | Command
"""`send` raises NotSent."""


def channels(settings: NotifySettings) -> list[Channel]:
    webhooks: list[Channel] = [Webhook(settings.webhook)] if settings.webhook else []
    return [*webhooks, *([Command(settings.command)] if settings.command else [])]


@dataclass(eq=False)
class Notifier:
    """Looks once a second, and sends. `closed`: the daemon ends, and no further attempt is made."""

    settings: NotifySettings
    cluster: str
    node: str
    channels: Sequence[Channel]
    published: PublishedState
    log: Log
    closed: threading.Event
    pauses_s: Sequence[float] = PAUSES_S

    def __post_init__(self) -> None:
        self._lost: Counter[str] = Counter()
        """Of each channel that does not work now: an outage is logged when it begins and when it is over."""
        self._memory = Memory(time.time())
        self._pending: deque[Occurrence] = deque(maxlen=PENDING)

    def turn(self) -> float:
        """Look once, and send one notification, if there is one: so that it looks between two slow ones. Returns the
        pause to the next turn."""
        self._memory, occurrences = look(self._memory, self.published.now, self.node, self.settings, now())
        excess = len(self._pending) + len(occurrences) - PENDING
        self._pending.extend(occurrences)
        if excess > 0:
            self.log.warning("notify.dropped", lost=excess, why=f"more than {PENDING} were waiting")
        if self._pending:
            body = as_json(self._pending.popleft(), self.cluster, self.node)
            for channel in self.channels:
                self._deliver(channel, body)
        return 0.0 if self._pending else LOOK_EVERY_S

    def _deliver(self, channel: Channel, body: Mapping[str, Any]) -> None:
        import tenacity

        lost = self._lost[channel.name]
        pauses_s = () if lost else self.pauses_s
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, NotSent) and error.again),
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(len(pauses_s) + 1), tenacity.stop_when_event_set(self.closed)
            ),
            wait=tenacity.wait_chain(*map(tenacity.wait_fixed, pauses_s)) if pauses_s else tenacity.wait_none(),
            sleep=tenacity.sleep_using_event(self.closed),
            reraise=True,
        )
        try:
            attempts(channel.send, json.dumps(body).encode())
        except NotSent as error:
            if not lost:
                self.log.error("notify.failed", way=channel.name, id=body["id"], error=masked_text(str(error)))
            self._lost[channel.name] += 1
            return
        if lost:
            self.log.info("notify.back", way=channel.name, lost=lost)
        self._lost[channel.name] = 0
