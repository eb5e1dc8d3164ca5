"""The page over HTTP: documents, and one stream of server-sent events for each page that is open. Read-only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

from elasticd.api.actions import checked, job_of
from elasticd.api.httpd import MAX_ARRIVING, ClientConnection, HttpRequest, RequestLimits, Server, host_of, listen_on
from elasticd.api.routes import event_routes, job_routes
from elasticd.api.views import views
from elasticd.api.views.instant import Identity, now
from elasticd.base import masking
from elasticd.base.errors import Refused
from elasticd.base.folders import Folder
from elasticd.base.log import Log
from elasticd.base.settings import PageSettings
from elasticd.cluster.published_state import PublishedState, Snapshot

from . import access, live

EVERY_S = 1.0
"""A stream looks for changes this often."""
LEAST_S = 0.8
"""Or a little sooner, with the daemon's newest state."""
STREAM_S = 600.0
"""Then a stream ends; the browser opens another one."""
QUIET_S = 15.0
"""A stream without news sends a comment this often, so that proxies keep it open."""
FRESH_S = 0.5
"""Readers of the same page share a fragment that is not older."""
KEPT = 64
"""Fragments that are kept for that."""
MAX_REQUESTS, MAX_REQUESTS_OF_A_HOST = 48, 32
MAX_STREAMS, MAX_STREAMS_OF_A_HOST = 32, 16
"""Fewer than requests: pages are served while all streams are taken."""

HEADERS = {
    "Content-Security-Policy": live.POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would keep a stream back
}
HTML = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True)
class PageSource:
    """What the page is made of: as the API shows it to a user who is neither owner nor admin."""

    published: PublishedState
    identity: Identity
    logs: Callable[[str], Folder]

    def fragment(self, job: str) -> str:
        """`job` empty: the cluster's. Raises Refused (404)."""
        snapshot, instant = self.published.now, now()
        events = event_routes.listed(snapshot.cluster, job, "", 0.0, live.LAST_EVENTS)
        if not job:
            status = views.status(snapshot, self.identity, instant)
            status.jobs = [masking.job(row) for row in status.jobs]
            return live.cluster(status, events)
        current = job_of(snapshot, job)
        return live.job(
            masking.job(views.job_detail(snapshot, current, instant)),
            [masking.incident(row) for row in views.incidents(snapshot, job, instant)],
            job_routes.history(self.logs(job), current.spec),
            events,
            instant.wall_s,
        )


class Page:
    def __init__(self, source: PageSource, token: access.Token, log: Log) -> None:
        self._source = source
        self._token = token
        self._log = log
        self._streams = RequestLimits(MAX_STREAMS, MAX_STREAMS_OF_A_HOST)
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, str]] = {}

    def handle(self, connection: ClientConnection) -> None:
        try:
            request = connection.receive()
            access.check(request.headers, self._token())
            self._answer(connection, request)
        except Refused as refused:
            if not connection.awaits_answer:
                raise
            self._log.debug("page.refused", status=refused.status, why=str(refused))
            asks = {"WWW-Authenticate": 'Basic realm="elasticd", charset="UTF-8"'} if refused.status == 401 else {}
            body = live.refusal(str(refused)).encode("utf-8", "replace")
            connection.answer(refused.status, HTML, body, {**HEADERS, **asks})

    def _answer(self, connection: ClientConnection, request: HttpRequest) -> None:
        if request.method not in ("GET", "HEAD"):
            raise Refused(405, "the page can only be read")
        if request.path == "/events":
            job = request.query.get("job", "")
            if request.method != "GET":
                raise Refused(405, "a stream can only be got")
            self._stream(connection, checked("job", job) if job else "")
            return
        head, _, name = request.path.rpartition("/")
        if (head, name) != ("", "") and (head != "/job" or not name):
            raise Refused(404, f"there is no page {request.path}: / is the cluster, /job/NAME a job")
        job = checked("job", unquote(name)) if name else ""
        page = live.document(self._source.identity.cluster, job, self._fragment(job))
        connection.answer(200, HTML, page.encode("utf-8", "replace"), HEADERS)

    def _stream(self, connection: ClientConnection, job: str) -> None:
        if why := self._streams.admit(connection.owner):
            raise Refused(503, f"no further live page: {why}")
        try:
            connection.begin_stream("text/event-stream", HEADERS)
            self._send_changes(connection, job)
            connection.end_stream()
        finally:
            self._streams.free(connection.owner)

    def _send_changes(self, connection: ClientConnection, job: str) -> None:
        end_s, sent, sent_s, token = time.monotonic() + STREAM_S, "", 0.0, self._token()
        connection.stream(b"retry: 2000\n\n")
        while (looked_s := time.monotonic()) < end_s and connection.still_there() and self._token() == token:
            try:
                fragment = self._fragment(job)
            except Refused as refused:  # the job was forgotten
                fragment = live.message(str(refused))
            if fragment != sent:
                connection.stream(live.server_sent(fragment))
                sent, sent_s = fragment, looked_s
            elif looked_s - sent_s > QUIET_S:
                connection.stream(b": no news\n\n")
                sent_s = looked_s
            self._source.published.wait(_made_after(looked_s + LEAST_S), EVERY_S)

    def _fragment(self, job: str) -> str:
        with self._lock:
            made_s, fragment = self._kept.get(job, (float("-inf"), ""))
            if time.monotonic() - made_s > FRESH_S:
                fragment = self._source.fragment(job)
                if len(self._kept) >= KEPT:
                    self._kept.clear()
                self._kept[job] = (time.monotonic(), fragment)
            return fragment


def _made_after(at_s: float) -> Callable[[Snapshot], bool]:
    return lambda snapshot: snapshot.turned_s >= at_s


def page_server(settings: PageSettings, token: access.Token, source: PageSource, log: Log) -> Server:
    """Listen at `settings.listen`. Raises CannotStart."""
    listener = listen_on("page.listen", settings.listen, MAX_ARRIVING)
    page = Page(source, token, log)
    return Server(listener, page.handle, host_of, RequestLimits(MAX_REQUESTS, MAX_REQUESTS_OF_A_HOST), log)
