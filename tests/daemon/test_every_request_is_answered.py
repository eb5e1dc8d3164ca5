"""Whatever arrives at the daemon's sockets is answered with a status and words, in bounded time, by few threads."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.door import Door, Heard, answer_on
from support.wait import eventually

from elasticd.api import actions, httpd
from elasticd.api import server as api
from elasticd.api.httpd import RequestLimits, Server
from elasticd.api.routes.routes import ROUTES
from elasticd.base.errors import Refused
from elasticd.cluster.published_state import PublishedState
from elasticd.ctl.client import Client, Failed


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actions, "SEEN_S", 0.0)
        made = Door(tmp_path_factory.mktemp("d"))
        yield made
        made.close()


def post(path: str, body: bytes, *headers: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", *(headers or [f"Content-Length: {len(body)}"])]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


DEEP = b"[" * 100_000
WRONG = {
    "NUL in a name": (b"GET /v1/jobs/a%00b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a name of 300": (b"GET /v1/jobs/" + b"x" * 300 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "last=nan": (b"GET /v1/incidents?last=nan HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "tail=inf": (b"GET /v1/jobs/train/logs?tail=inf HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "rank=1e400": (b"GET /v1/jobs/train/logs?rank=1e400 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "wait_over_s=nan": (b"GET /v1/jobs/train?wait_over_s=nan HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a deep body": (post("/v1/jobs", DEEP), 400),
    "a deep spec": (post("/v1/jobs", b'{"name": "a", "env": ' + b'{"a":' * 900 + b"1" + b"}" * 901), 400),
    "a length of two": (post("/v1/jobs", b"{}", "Content-Length: \xb2"), 400),
    "a negative length": (post("/v1/jobs", b"{}", "Content-Length: -2"), 400),
    "two lengths": (post("/v1/jobs", b"{}", "Content-Length: 2", "Content-Length: 3"), 400),
    "chunks": (post("/v1/nodes/a/cordon", b"2\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 200),
    "broken chunks": (post("/v1/nodes/a/cordon", b"zz\r\n{}", "Transfer-Encoding: chunked"), 400),
    "an unknown coding": (post("/v1/jobs", b"{}", "Transfer-Encoding: gzip"), 501),
    "too large": (post("/v1/jobs", b"x" * (2**20 + 1)), 413),
    "a large head": (b"GET / HTTP/1.1\r\nHost: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    "half a body": (post("/v1/jobs", b"{", "Content-Length: 20"), 400),
    "no HTTP": (b"\x16\x03\x01\x02\x00", 400),
    "an odd target": (b"GET //[ HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "a body that is no object": (post("/v1/nodes/a/drain", b"3"), 400),
    "a number of 5000 digits": (post("/v1/nodes/a/drain", b'{"deadline_s": ' + b"9" * 5000 + b"}"), 400),
    "a deadline of nan": (post("/v1/nodes/a/drain", b'{"deadline_s": NaN}'), 400),
    "a deadline beyond all": (post("/v1/nodes/a/drain", b'{"deadline_s": 1e308}'), 400),
    "HEAD": (b"HEAD /v1/status HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    "another method": (b"BREW /v1/status HTTP/1.1\r\nHost: x\r\n\r\n", 405),
}


@pytest.mark.parametrize("name", WRONG)
def test_malformed_request_is_answered_with_a_status_and_a_message(door: Door, name: str) -> None:
    raw, status = WRONG[name]
    got, content = door.say(raw)
    assert got == status, content
    if status >= 400 and name != "HEAD":
        assert content["error"]["status"] == status
        assert content["error"]["message"]
    assert "api.failed" not in door.log.said


@given(
    raw=st.one_of(st.binary(max_size=400), st.binary(max_size=80).map(lambda b: b"GET /" + b + b" HTTP/1.1\r\n\r\n"))
)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bytes_are_answered(door: Door, raw: bytes) -> None:
    with door.connect() as line:
        line.sendall(raw)
        line.shutdown(socket.SHUT_WR)
        answer = line.recv(65536)
    assert answer.startswith(b"HTTP/1.1 ") or not raw.strip(b"\r\n"), answer
    assert "api.failed" not in door.log.said


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("name", "script", "module", "args", "env", "nodes", "workers_per_node", "checkpoint", "hang", "restarts",
          "python", "workdir", "preload", "standby", "stop_grace_s", "reason", "deadline_s", "replace",
          "spec")  # fmt: skip


@given(
    route=st.sampled_from([(verb, p.pattern) for verb, p, _ in ROUTES if verb != "GET"]),
    body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_body_of_any_change_is_answered(door: Door, route: tuple[str, str], body: dict[str, Any]) -> None:
    verb, pattern = route
    path = pattern.replace("(?P<job>[^/]+)", "train").replace("(?P<node>[^/]+)", "a")
    raw = json.dumps({"name": "j", "script": "/t.py"} | body if path == "/v1/jobs" else body).encode()
    status, content = door.say(post(path, raw).replace(b"POST", verb.encode(), 1))
    assert status in (200, 201, 400, 404, 409), content
    assert "api.failed" not in door.log.said


def test_a_fault_of_ours_is_answered_too(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler := api.Handler, "send_json", lambda *_: 1 / 0)
    status, content = door.say(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, "ZeroDivisionError" in content["error"]["message"]) == (500, True), Handler
    assert door.log.said.pop() == "api.failed"


def test_a_request_that_does_not_arrive_is_told_so(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpd, "REQUEST_S", 0.05)
    status, content = door.say(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n{", end=False)
    assert (status, content["error"]["message"]) == (408, "the request was not complete after 0.05 s")


def test_slow_connections_of_one_user_do_not_block_other_users(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    users = iter([1000] * 78 + [0] * 5 + [1001])
    monkeypatch.setattr(door.server, "owner", lambda _: next(users))
    with contextlib.ExitStack() as slow:
        for _ in range(78):
            line = slow.enter_context(door.connect())
            with contextlib.suppress(OSError):
                line.sendall(b"GET /v1/sta")
        for _ in range(6):  # five of root's, one of another user's
            assert door.say(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")[0] == 200


def test_request_beyond_the_connection_limit_is_answered_with_the_reason(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door.server, "places", RequestLimits(4, 0))
    status, content = door.say(post("/v1/jobs", b"{}"))
    assert (status, content["error"]["message"]) == (
        503,
        "elasticd is busy: 0 requests of yours are being served already; try again",
    )
    with pytest.raises(Failed, match="elasticd is busy"):
        Client(str(door.path)).post("/v1/jobs", {"args": ["x" * 900_000]})


def test_places() -> None:
    places = RequestLimits(10, 4, kept=3, kept_for=0)
    assert [places.admit(1) for _ in range(4)] == [""] * 4
    assert "4 requests of yours" in places.admit(1)
    assert [places.admit(2) for _ in range(3)] == [""] * 3
    assert "7 requests are being served" in places.admit(2), "three are root's"
    assert [places.admit(0) for _ in range(3)] == [""] * 3
    assert "10 requests" in places.admit(0)
    places.free(1)
    assert places.admit(2) == ""
    places.free(0)
    assert places.admit(3) != "", "root's stay root's"


@pytest.fixture
def server() -> Iterator[Server]:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
    listener = SimpleNamespace(accept=lambda: (ours, None))
    made = Server(cast(socket.socket, listener), lambda _: None, lambda _: 1, RequestLimits(4, 4), cast(Any, Heard()))
    yield made
    ours.close()
    theirs.close()


def test_a_request_that_cannot_be_taken_is_said_once_and_not_tried_without_pause(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept() -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    pauses: list[float | None] = []
    monkeypatch.setattr(server.listener, "accept", accept)
    monkeypatch.setattr(server._pause, "wait", pauses.append)
    for _ in range(3):
        server.serve_one()
    assert server.log.said == ["api.cannot_accept"]  # type: ignore[attr-defined]
    assert pauses == [httpd.RETRY_S] * 3


def test_a_request_without_a_thread_gives_its_place_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    server.serve_one()
    assert not server.places._taken


@pytest.fixture
def scraped() -> Iterator[Server]:
    made = api.metrics_server("127.0.0.1:0", PublishedState(), lambda: b"m", cast(Any, Heard()))
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    yield made
    made.listener.shutdown(socket.SHUT_RDWR)
    made.listener.close()
    thread.join(60.0)


def got(server: Server, path: str) -> int:
    with socket.create_connection(server.listener.getsockname(), 5) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return int(line.recv(65536).split()[1])


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"])
def test_slow_connections_take_neither_places_nor_threads(scraped: Server, sent: bytes) -> None:
    with contextlib.ExitStack() as slow:
        before = threading.active_count()
        for _ in range(httpd.MAX_ARRIVING + 50):
            slow.enter_context(socket.create_connection(scraped.listener.getsockname(), 5)).sendall(sent)
        assert [got(scraped, path) for path in ("/metrics", "/metrics", "/nothing")] == [200, 200, 404]
        assert got(scraped, "/healthz") in (200, 503), "a snapshot's age"
        eventually(lambda: threading.active_count() - before <= 1, 5.0, "those that have answered end")
        assert len(scraped._arriving) <= httpd.MAX_ARRIVING


def test_probes_of_health_have_places_of_their_own(scraped: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraped, "places", RequestLimits(0, 0))
    assert got(scraped, "/metrics") == 503
    with socket.create_connection(scraped.listener.getsockname(), 5) as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert "alive" in answer_on(line)[1]


def test_of_too_many_arriving_requests_those_of_the_busiest_user_go(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = iter([1001, *[1000] * 40])
    monkeypatch.setattr(door.server, "owner", lambda _: next(users))
    monkeypatch.setattr(httpd, "MAX_ARRIVING", 20)
    with contextlib.ExitStack() as slow:
        first = slow.enter_context(door.connect())
        for _ in range(40):
            slow.enter_context(door.connect())
        first.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer_on(first)[0] == 200


def test_http_parser_error_is_a_refused_request() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"rubbish\r\n\r\n")
        with pytest.raises(Refused, match="no HTTP request"):
            httpd.ClientConnection(ours, "").receive()
