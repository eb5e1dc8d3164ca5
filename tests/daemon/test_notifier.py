"""Notifications arrive at a webhook and a command; a receiver that fails costs nothing but its own notifications."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import pathlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import snapshots
from support.daemons import Nodes
from support.wait import eventually

from elastic.contract.records.job_records import JobState, Phase
from elasticd.api.notify import notifier
from elasticd.api.notify.notifier import Command, Notifier, NotSent, Webhook
from elasticd.base import config, masking, ownership
from elasticd.base.errors import CannotStart, InvalidConfig
from elasticd.base.settings import NotifySettings
from elasticd.cluster.published_state import PublishedState

BODY = b'{"a": 1}'


class Receiver:
    """An HTTP server that keeps what is posted, and answers with `status`."""

    def __init__(self) -> None:
        self.status = 204
        self.headers: dict[str, str] = {}
        self.answer = b""
        self.got: list[tuple[str, str, dict[str, str], bytes]] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _take(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                receiver.got.append((self.command, self.path, dict(self.headers), body))
                self.send_response(receiver.status)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(receiver.answer)))
                self.end_headers()
                self.wfile.write(receiver.answer)

            do_GET = do_POST = _take

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks/s3cret"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for *_, body in self.got]

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


def script(folder: pathlib.Path, text: str) -> str:
    path = folder / "notify"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# ── the webhook ─────────────────────────────────────────────────────────────────────────────────────────────


def test_webhook_posts_the_body_as_json(receiver: Receiver) -> None:
    Webhook(receiver.url).send(BODY)
    ((method, path, headers, body),) = receiver.got
    assert (method, path, body) == ("POST", "/hooks/s3cret", BODY)
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(("status", "again"), [(400, False), (404, False), (429, True), (500, True), (503, True)])
def test_refusal_says_what_the_receiver_said_and_whether_to_try_again(
    receiver: Receiver, status: int, again: bool
) -> None:
    receiver.status, receiver.answer = status, b"no_text\n"
    with pytest.raises(NotSent, match=f"^HTTP {status} .*: no_text$") as error:
        Webhook(receiver.url).send(BODY)
    assert error.value.again is again


def test_at_a_limit_of_threads_it_is_sent_again(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    with pytest.raises(NotSent, match="can't start new thread") as error:
        Webhook(receiver.url).send(BODY)
    assert error.value.again


def test_redirect_is_a_failure_and_is_not_followed(receiver: Receiver) -> None:
    receiver.status, receiver.headers = 302, {"Location": receiver.url}
    with pytest.raises(NotSent, match="HTTP 302"):
        Webhook(receiver.url).send(BODY)
    assert len(receiver.got) == 1


def test_closed_port_and_a_silent_receiver_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "DEADLINE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with pytest.raises(NotSent, match="timed out") as error:
            Webhook(url).send(BODY)
        assert error.value.again
    with pytest.raises(NotSent, match="refused"):
        Webhook(url).send(BODY)


def test_receiver_that_speaks_no_http_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x00\x01 what?\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NotSent):
            Webhook(f"http://127.0.0.1:{server.getsockname()[1]}/").send(BODY)
        thread.join()


def test_receiver_whose_answer_never_ends_holds_up_one_attempt_until_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifier, "DEADLINE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        enough = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not enough.wait(0.02):  # each byte begins the time-out of the socket anew
                    connection.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        webhook = Webhook(f"http://127.0.0.1:{server.getsockname()[1]}/")
        for _ in range(2):
            with pytest.raises(NotSent, match="no whole answer") as error:
                webhook.send(BODY)
            assert error.value.again
        assert sum(each.name == "webhook" for each in threading.enumerate()) == 1, "one is left behind at most"
        enough.set()
        thread.join()


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────


def test_command_gets_the_body_its_arguments_and_no_secret(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICD_NOTIFY_WEBHOOK", "https://chat/s3cret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    program = script(tmp_path, 'cat > "$1/body"; env > "$1/env"; pwd > "$1/cwd"')
    Command([program, str(tmp_path)]).send(BODY)
    assert (tmp_path / "body").read_bytes() == BODY + b"\n"
    assert "s3cret" not in (tmp_path / "env").read_text()
    assert f"PATH={os.environ['PATH']}\n" in (tmp_path / "env").read_text()
    assert (tmp_path / "cwd").read_text() == "/\n"


def test_command_that_does_not_read_or_fails_is_named(tmp_path: pathlib.Path) -> None:
    Command([script(tmp_path, "exit 0")]).send(BODY * 100_000)
    with pytest.raises(NotSent, match=r"notify: exit code 3$"):
        Command([script(tmp_path, "exit 3")]).send(BODY)
    with pytest.raises(NotSent, match=r"notify: signal 9$"):
        Command([script(tmp_path, "kill -9 $$")]).send(BODY)


def test_command_that_vanished_after_the_start_is_a_failure(tmp_path: pathlib.Path) -> None:
    command = Command([script(tmp_path, "exit 0")])
    (tmp_path / "notify").unlink()
    with pytest.raises(NotSent, match="No such file"):
        command.send(BODY)


def test_command_is_killed_at_its_deadline_with_its_children(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "DEADLINE_S", 0.5)
    program = script(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(NotSent, match=r"killed after 0\.5 s"):
        Command([program]).send(BODY)
    child = int((tmp_path / "child").read_text())
    eventually(lambda: not _lives(child), 5.0, "the child is killed too")


def _lives(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root refuses what others may change")
def test_root_refuses_a_command_that_others_may_change(tmp_path: pathlib.Path) -> None:
    program = script(tmp_path, "exit 0")
    link = tmp_path / "link"
    link.symlink_to(program)
    ownership.trusted_program(str(link), "notify.command")
    os.chmod(program, 0o775)
    with pytest.raises(CannotStart, match=re.escape(f"notify.command = '{link}': other users may change it")):
        ownership.trusted_program(str(link), "notify.command")
    os.chmod(program, 0o755)
    os.chmod(tmp_path, 0o777)
    with pytest.raises(CannotStart, match="everyone may write to"):
        ownership.trusted_program(str(link), "notify.command")


# ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────


class Log:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda event, **facts: self.said.append((event, facts))


class Fragile:
    """A way that fails as long as `error` is set."""

    name = "webhook"

    def __init__(self) -> None:
        self.error: NotSent | None = None
        self.tried: list[dict[str, Any]] = []

    def send(self, body: bytes) -> None:
        self.tried.append(json.loads(body))
        if self.error:
            raise self.error


def waiting_jobs(*names: str) -> PublishedState:
    published = PublishedState()
    state = JobState(phase=Phase.WAITING, since_wall_s=time.time() - 10.0)
    jobs = {name: snapshots.job(name=name, state=state, incidents=()) for name in names}
    snapshot = snapshots.snapshot(*jobs.values())
    published.publish(snapshot)
    return published


def a_notifier(published: PublishedState, way: Fragile, log: Log, pauses_s: tuple[float, ...] = ()) -> Notifier:
    settings = NotifySettings(job_waiting_s=5.0)
    return Notifier(settings, "main", "a", [way], published, log, threading.Event(), pauses_s=pauses_s)


def test_each_turn_sends_one_and_no_notification_twice() -> None:
    way, log = Fragile(), Log()
    one = a_notifier(waiting_jobs("x", "y"), way, log)
    for sent in (1, 2, 2, 2):
        one.turn()
        assert len(way.tried) == sent
    assert [body["job"] for body in way.tried] == ["x", "y"]
    assert log.said == []


def test_outage_is_logged_once_and_its_end_with_what_was_lost() -> None:
    way, log = Fragile(), Log()
    one = a_notifier(waiting_jobs("p", "q", "r", "s", "t"), way, log)
    way.error = NotSent("refused by http://ada:s3cret@chat/", True)
    for _ in range(3):
        one.turn()
    way.error = None
    for _ in range(3):
        one.turn()
    assert [event for event, _ in log.said] == ["notify.failed", "notify.back"]
    assert log.said[1][1]["lost"] == 3
    assert "s3cret" not in str(log.said)


@pytest.mark.parametrize(("again", "attempts"), [(True, 3), (False, 1)])
def test_attempts_are_repeated_where_that_may_help_and_not_during_an_outage(again: bool, attempts: int) -> None:
    way, log = Fragile(), Log()
    one = a_notifier(waiting_jobs("p", "q"), way, log, pauses_s=(0.0, 0.0))
    way.error = NotSent("no", again)
    one.turn()
    assert len(way.tried) == attempts
    one.turn()
    assert len(way.tried) == attempts + 1


def test_closing_ends_the_pauses_between_attempts() -> None:
    way, log = Fragile(), Log()
    one = a_notifier(waiting_jobs("p"), way, log, pauses_s=(600.0, 600.0))
    way.error = NotSent("no", True)
    thread = threading.Thread(target=one.turn)
    thread.start()
    eventually(lambda: way.tried, 10.0, "the first attempt is made")
    one.closed.set()
    thread.join(60.0)
    assert not thread.is_alive()


def test_more_than_may_wait_are_dropped_the_oldest_first_and_logged() -> None:
    way, log = Fragile(), Log()
    names = [f"j{i:03d}" for i in range(notifier.PENDING + 7)]
    one = a_notifier(waiting_jobs(*names), way, log)
    for _ in names:
        one.turn()
    assert [body["job"] for body in way.tried] == names[7:]
    assert [(event, facts["lost"]) for event, facts in log.said] == [("notify.dropped", 7)]


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            'webhook = "chat.example.org/hooks/s3cret"',
            "notify.webhook = 'chat.example.org/********': write the whole URL",
        ),
        ('webhook = "ftp://chat/hooks/s3cret"', "notify.webhook = 'ftp://chat/********': write the whole URL, as in"),
        ('webhook = "https:///s3cret"', "notify.webhook = 'https:///********': write the"),
        ('webhook = "https://chat:port/s3cret"', "notify.webhook = 'https://chat:port/********': "),
        ('webhook = "https://[chat/s3cret"', "notify.webhook = 'https://[chat/********': "),
        (
            'webhook = "https://ada:s3cret@chat/"',
            "a user and password in the URL are not supported; send by",
        ),
        ('webhook = "https://chat/a b"', "ASCII without blanks only"),
        ('command = ["mail"]', "notify.command = 'mail': write the program's absolute path"),
        ('command = ["/nowhere/mail"]', "notify.command = '/nowhere/mail': there is no such file on this machine"),
        ('command = ["/etc/passwd"]', "notify.command = '/etc/passwd': cannot be executed: chmod +x /etc/passwd"),
        ('command = ["/bin/sh", "a\\u0000"]', "notify.command = '/bin/sh': a program and its arguments cannot contain"),
        (
            'on = ["job_failed", "job_fails"]',
            "notify.on = 'job_fails': there is no such event; choose from",
        ),
        ('webhook = "https://chat/x"\non = []', "notify.on = []: name at least one event"),
        ("job_waiting_s = -1", "notify.job_waiting_s = -1"),
        ('webhok = "x"', "notify.webhok = 'x': no such field; did you mean 'webhook'?"),
    ],
)
def test_bad_setting_is_named_with_its_value_and_cure(tmp_path: pathlib.Path, line: str, words: str) -> None:
    path = tmp_path / "elasticd.toml"
    path.write_text(f"[notify]\n{line}\n")
    with pytest.raises(InvalidConfig) as error:
        config.load(path, {}, {})
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "s3cret" not in str(error.value)


def test_good_settings_are_accepted() -> None:
    flags = {
        "notify.webhook": "https://[::1]:8443/x?y=z",
        "notify.command": "/bin/sh, -c, cat",
        "notify.on": "incident",
    }
    assert config.load(None, {}, flags).settings.notify == NotifySettings(
        webhook="https://[::1]:8443/x?y=z", command=("/bin/sh", "-c", "cat"), on=("incident",)
    )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", ""),
        ("https://chat/services/T0/s3cret", "https://chat/********"),
        ("https://ada:s3cret@chat:1/", "https://chat:1/********"),
        ("https://chat?token=s3cret://s3cret", "https://chat/********"),
        ("https://chat#s3cret", "https://chat/********"),
        ("http://chat:80", "http://chat:80"),
    ],
)
def test_webhook_is_shown_without_its_secret(url: str, shown: str) -> None:
    assert masking.masked_setting("notify.webhook", url) == shown


# ── a daemon ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.etcd
def test_waiting_job_is_notified_once_by_a_real_daemon(receiver: Receiver, tmp_path: pathlib.Path) -> None:
    program = script(tmp_path, f"cat >> {tmp_path}/got")
    with Nodes() as nodes:
        node = nodes.add("a", notify__webhook=receiver.url, notify__command=program, notify__job_waiting_s=1.0)
        node.submit("train", nodes="2", workers_per_node=1)
        eventually(lambda: (tmp_path / "got").exists(), 20.0, "the command is started")
        eventually(lambda: receiver.got, 20.0, "the webhook is called")
        told = receiver.bodies()[0]
        assert (told["event"], told["job"], told["cluster"], told["sender"]) == ("job_waiting", "train", "main", "a")
        assert "can never run here: it needs 2 workers on 2 nodes" in told["why"]
        shown = node.ctl("config", "show", "--json").stdout
        assert masking.masked_url(receiver.url) in shown
        assert "s3cret" not in shown + node.log.read_text()
        turn = node.get("/v1/status")["uptime_s"]
        eventually(lambda: node.get("/v1/status")["uptime_s"] > turn + 2.5, 20.0, "it has looked twice more")
        assert len(receiver.got) == 1
        assert len((tmp_path / "got").read_text().splitlines()) == 1
