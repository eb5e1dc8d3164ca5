"""Preemption notices of three clouds, from a metadata service in this process; and what follows from one."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from support.daemons import Nodes
from support.wait import eventually

from elasticd.base import entry_points
from elasticd.machine.preemption import RELUCTANT, Aws, Azure, Gcp, PreemptionWatch
from elasticd.plugins import Notice, NoticeUnknown

NOW_S = 1_800_000_000.0  # 2027-01-15T08:00:00Z


class Metadata:
    """A metadata service: `answers` maps (method, path) to (status, body), or to a function of the headers."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Any] = {}
        answers = self.answers

        class Handler(http.server.BaseHTTPRequestHandler):
            def _answer(self) -> None:
                found = answers.get((self.command, self.path), (404, ""))
                status, body = found(self.headers) if callable(found) else found
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_PUT = _answer

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    service = Metadata()
    yield service
    service.close()


def aws_answers(metadata: Metadata, action: tuple[int, str]) -> None:
    metadata.answers["PUT", "/latest/api/token"] = lambda headers: (
        (200, "secret") if headers["X-aws-ec2-metadata-token-ttl-seconds"] else (400, "")
    )
    metadata.answers["GET", "/latest/meta-data/spot/instance-action"] = lambda headers: (
        action if headers["X-aws-ec2-metadata-token"] == "secret" else (401, "")
    )


def test_aws_announces_an_interruption_with_its_time(metadata: Metadata) -> None:
    aws_answers(metadata, (404, ""))
    assert Aws(metadata.url).look(NOW_S) is None
    aws_answers(metadata, (200, '{"action": "terminate", "time": "2027-01-15T08:02:00Z"}'))
    notice = Aws(metadata.url).look(NOW_S)
    assert notice == Notice("spot interruption: terminate at 2027-01-15T08:02:00Z", 120.0)


def test_gcp_announces_a_preemption(metadata: Metadata) -> None:
    said = ["FALSE"]
    metadata.answers["GET", "/computeMetadata/v1/instance/preempted"] = lambda headers: (
        (200, said[0]) if headers["Metadata-Flavor"] == "Google" else (403, "")
    )
    assert Gcp(metadata.url).look(NOW_S) is None
    said[0] = "TRUE"
    assert Gcp(metadata.url).look(NOW_S) == Notice("preemption", 30.0)


@pytest.mark.parametrize(
    ("events", "wanted"),
    [
        ("[]", None),
        ('[{"EventType": "Freeze", "NotBefore": ""}]', None),
        ('[{"EventType": "Preempt", "NotBefore": "", "Resources": ["vmss_1"]}]', None),
        (
            '[{"EventType": "Preempt", "NotBefore": "", "Resources": ["vmss_1", "VMSS_0"]}]',
            Notice("scheduled event Preempt", 30.0),
        ),
        (
            '[{"EventType": "Freeze"}, '
            '{"EventType": "Preempt", "NotBefore": "Fri, 15 Jan 2027 08:00:45 GMT", "Resources": ["vmss_0"]}]',
            Notice("scheduled event Preempt", 45.0),
        ),
        (
            '[{"EventType": "Terminate", "NotBefore": "Fri, 15 Jan 2027 07:00:00 GMT", "Resources": ["vmss_0"]}]',
            Notice("scheduled event Terminate", 1.0),
        ),
    ],
)  # fmt: skip
def test_azure_announces_scheduled_events(metadata: Metadata, events: str, wanted: Notice | None) -> None:
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    metadata.answers["GET", path] = lambda headers: (
        (200, f'{{"DocumentIncarnation": 1, "Events": {events}}}') if headers["Metadata"] == "true" else (400, "")
    )
    name = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    metadata.answers["GET", name] = lambda headers: (200, "vmss_0\n") if headers["Metadata"] == "true" else (400, "")
    assert Azure(metadata.url).look(NOW_S) == wanted


@pytest.mark.parametrize(
    "body", ["", "[]", "<html>", '{"action": 1}', '{"action": "stop", "time": "soon"}', "[" * 50_000]
)
def test_answers_that_are_not_as_documented_are_errors(metadata: Metadata, body: str) -> None:
    aws_answers(metadata, (200, body))
    with pytest.raises(NoticeUnknown):
        Aws(metadata.url).look(NOW_S)


def test_a_service_that_is_not_there_is_an_error(metadata: Metadata) -> None:
    metadata.answers["GET", "/computeMetadata/v1/instance/preempted"] = (500, "")
    with pytest.raises(NoticeUnknown, match="500"):
        Gcp(metadata.url).look(NOW_S)
    with pytest.raises(NoticeUnknown, match="refused"):
        Gcp("http://127.0.0.1:1").look(NOW_S)


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nTR"]
)
def test_what_is_no_http_or_is_cut_off_is_an_error(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer = server.accept()[0]
            peer.recv(4096)
            peer.sendall(said)
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(NoticeUnknown):
                Gcp(f"http://127.0.0.1:{server.getsockname()[1]}").look(NOW_S)
        finally:
            thread.join()


@pytest.mark.parametrize(("name", "kind"), [("aws", Aws), ("azure", Azure), ("gcp", Gcp)])
def test_each_provider_is_an_entry_point(name: str, kind: type) -> None:
    found = entry_points.made("preemption", name, structlog.get_logger(), "")
    assert type(found) is kind
    assert found.url.startswith("http://")
    assert entry_points.made("preemption", name, structlog.get_logger(), "http://x").url == "http://x"


class Said:
    """A source that answers by list, and a drain that notes."""

    def __init__(self, *answers: Notice | NoticeUnknown | None) -> None:
        self.answers = list(answers)
        self.drained: list[Notice] = []
        self.accepts = True

    def look(self, now_wall_s: float) -> Notice | None:
        answer = self.answers.pop(0)
        if isinstance(answer, NoticeUnknown):
            raise answer
        return answer

    def drain(self, notice: Notice) -> bool:
        self.drained.append(notice)
        return self.accepts


class Log:
    """Event names, as logged."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def warning(self, event: str, **_: object) -> None:
        self.said.append(event)


def watched(said: Said, looks: int, before: Callable[[int], None] = lambda i: None) -> tuple[list[Notice], list[str]]:
    log = Log()
    watch = PreemptionWatch(said, said.drain, log)  # type: ignore[arg-type]
    for i in range(looks):
        before(i)
        watch.look()
    return said.drained, log.said


NOTICE = Notice("preemption", 30.0)


def test_one_notice_drains_once_and_a_refused_drain_is_repeated() -> None:
    assert watched(Said(None, NOTICE, NOTICE), 3) == ([NOTICE], ["preemption.notice"])
    said = Said(NOTICE, NOTICE, NOTICE)
    said.accepts = False

    def before(i: int) -> None:
        said.accepts = i >= 1

    assert watched(said, 3, before)[0] == [NOTICE, NOTICE]


def test_a_second_notice_after_a_withdrawn_one_drains_again() -> None:
    assert watched(Said(NOTICE, None, NOTICE), 3)[0] == [NOTICE, NOTICE]


def test_failures_of_the_service_neither_drain_nor_fill_the_log() -> None:
    failures = [NoticeUnknown("refused")] * (RELUCTANT * 3)
    drained, said = watched(Said(*failures, NOTICE), len(failures) + 1)
    assert drained == [NOTICE]
    assert said == ["preemption.unknown", "preemption.notice"]


@pytest.mark.etcd
def test_notice_drains_the_node_and_is_in_the_time_line(metadata: Metadata) -> None:
    metadata.answers["GET", "/computeMetadata/v1/instance/preempted"] = (200, "TRUE")
    with Nodes() as nodes:
        node = nodes.add("a", preemption="gcp", preemption_url=metadata.url)
        rows = eventually(lambda: [n for n in node.get("/v1/status")["nodes"] if n["state"] == "draining"], 30.0)
        assert "preemption" in rows[0]["reason"]
        line = node.ctl("events").stdout
        assert "preemption" in line
        assert "node a" in line or " a " in line
