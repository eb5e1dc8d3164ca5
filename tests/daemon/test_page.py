"""The live page: what it shows, that no text in it becomes markup, and which requests may read it."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import pathlib
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.daemons import Nodes
from support.door import Heard
from support.pages import EVIL, Seen
from support.snapshots import SPEC, job, progress, row, snapshot
from support.wait import eventually

from elastic.contract.records.job_records import IncidentRecord, JobState, Phase, SpecRecord, WorkerError, encode
from elastic.contract.records.node_records import EventRecord
from elasticd.api.page import access, live, server
from elasticd.api.views import views
from elasticd.base import config
from elasticd.base.errors import InvalidConfig, Refused
from elasticd.base.folders import Folder
from elasticd.base.masking import MASK
from elasticd.base.settings import PageSettings
from elasticd.cluster.published_state import PublishedState, Snapshot

IDENTITY = views.Identity("main", "a", "0.1", 7, 40.0, ("127.0.0.1:2379",), False, "")
NOW = views.Now(monotonic_s=100.0, wall_s=1000.0)
TOKEN = "0123456789abcdef-TOKEN"


def event(text: str = "generation 2: 3 ranks", **facts: object) -> EventRecord:
    base = {"when_wall_s": 990.0, "kind": "generation.formed", "job": "train", "node": "", "text": text}
    return msgspec.convert(base | facts, EventRecord)


def published(*events: EventRecord, **facts: object) -> Snapshot:
    seen = snapshot(job(**facts))
    kept = {f"/elastic/main/events/{i:03}": encode(e) for i, e in enumerate(events)}
    return replace(seen, cluster=replace(seen.cluster, events=kept))


def source(seen: Snapshot, folder: pathlib.Path) -> server.PageSource:
    published = PublishedState()
    published.publish(seen)
    return server.PageSource(published, IDENTITY, lambda name: Folder(folder, (name, "logs")))


def test_the_cluster_page_shows_jobs_nodes_and_newest_events(tmp_path: pathlib.Path) -> None:
    page = source(published(event("old"), event("new")), tmp_path).fragment("")
    seen = Seen(page)
    for wanted in ("Cluster main", "train", "running", "9.9", "0.25", "elasticd does not answer there", "etcd answers"):
        assert wanted in seen.said, wanted
    assert ("href", "/job/train") in seen.attributes
    assert seen.said.index("new") < seen.said.index("old")


def test_a_jobs_page_shows_ranks_incidents_ledger_and_time_line(tmp_path: pathlib.Path) -> None:
    facts = {"progress": progress(ranks=[msgspec.to_builtins(row(2, "b", 0, step_s=0.0325, rss_mb=812.0))])}
    page = source(published(event(), **facts), tmp_path).fragment("train")
    seen = Seen(page)
    for wanted in ("Ranks", "32 ms", "812 MB", "Time line", "Incidents", "144 ms", "0 steps", "Settings of the job"):
        assert wanted in seen.said, wanted
    assert 'rect class="failed"' in page
    assert "No curves" in seen.said


def test_no_text_becomes_markup_on_the_live_page(tmp_path: pathlib.Path) -> None:
    error = WorkerError(node=EVIL, slot=0, rank=1, message=EVIL, traceback=EVIL)
    record = IncidentRecord(generation=2, kind=EVIL, node=EVIL, ranks=(1,), detail=EVIL, wall_s=990.0)
    spec = replace_spec(script=EVIL, args=(EVIL,), env={EVIL: EVIL})
    seen = published(
        event(EVIL, kind=EVIL, node=EVIL, job=EVIL),
        event(EVIL, kind=EVIL, node=EVIL),
        state=JobState(phase=Phase.WAITING, reason=EVIL, error=error),
        incidents=(record,),
        spec=SpecRecord(spec=spec, submitted_wall_s=900.0, submitted_by=EVIL),
        progress=progress(waiting_for=EVIL, ranks=[msgspec.to_builtins(row(2, EVIL, 0, phase=EVIL))]),
    )
    node = seen.cluster.nodes["a"]
    sick = replace(node, record=msgspec.structs.replace(node.record, healthy=False, reason=EVIL, address=EVIL))
    seen = replace(seen, cluster=replace(seen.cluster, nodes={"a": sick}), stays_out=EVIL)
    seen = replace(seen, contact=replace(seen.contact, connected=False, error=EVIL))
    for name in ("", "train"):
        fragment = source(seen, tmp_path).fragment(name)
        found = Seen(live.document("main", name, fragment))
        assert found.tags.count("script") == 1, "the page's own"
        assert not set(found.tags) & {"img", "iframe", "object", "base", "form", "link"}
        assert not {attribute for attribute, _ in found.attributes} & {"onerror", "src", "style"}
        assert "alert" in found.said
        assert "\x1b" not in found.said


def replace_spec(**facts: Any) -> Any:
    return msgspec.structs.replace(SPEC, **facts)


def test_secrets_are_hidden_on_the_page_as_for_strangers_in_the_api(tmp_path: pathlib.Path) -> None:
    spec = replace_spec(args=("--token", "s3cret-1"), env={"HF_TOKEN": "s3cret-2", "URL": "https://u:s3cret-3@host/x"})
    record = SpecRecord(spec=spec, submitted_wall_s=900.0, submitted_by="ada")
    page = source(published(spec=record), tmp_path).fragment("train")
    assert "s3cret" not in page
    assert page.count(MASK) == 4


def test_the_document_loads_nothing_from_elsewhere_and_its_policy_allows_only_its_own_script() -> None:
    page = live.document("main", "train", live.message("x"))
    for kind, content in (("style", re.search("<style>(.*?)</style>", page, re.S)),
                          ("script", re.search("<script>(.*?)</script>", page, re.S))):  # fmt: skip
        assert content
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in live.POLICY
    assert "unsafe" not in live.POLICY
    assert live.POLICY.startswith("default-src 'none'")
    assert not re.search(r"//(?!\s)|url\(|@import", page.replace("//evil", "")), "an address of another host"
    assert '<noscript><meta http-equiv=refresh content="10"></noscript>' in page


def test_long_tables_are_cut_and_nodes_in_trouble_come_first() -> None:
    seen = snapshot(job())
    nodes = {f"n{i:04}": seen.cluster.nodes["a"] for i in range(live.MOST_NODES + 40)}
    last = max(nodes)
    sick = msgspec.structs.replace(nodes[last].record, healthy=False, reason="no disk")
    nodes[last] = replace(nodes[last], record=sick)
    status = views.status(replace(seen, cluster=replace(seen.cluster, nodes=nodes)), IDENTITY, NOW)
    page = live.cluster(status, [])
    assert "and 42 more" in page, "340 nodes, and two that only the job names"
    assert page.index(f"<td>{last}") < page.index("<td>n0000")


@pytest.mark.parametrize(
    "facts",
    [
        {"progress": None, "generation": None, "incidents": (), "state": JobState()},
        {"spec": None},
        {"state": JobState(phase=Phase.FAILED, since_wall_s=1e300)},
    ],
)
def test_a_job_of_which_little_is_known_has_a_live_page_too(facts: dict[str, object], tmp_path: pathlib.Path) -> None:
    for name in ("", "train"):
        assert "train" in source(published(**facts), tmp_path).fragment(name)


@given(st.text())
def test_a_fragment_of_any_text_stays_one_event(text: str) -> None:
    """Read as the standard of server-sent events says: lines end with CR, LF or CRLF; an empty one ends the event."""
    raw = live.server_sent(text).decode()
    *lines, end, rest = re.split("\r\n|\r|\n", raw)
    assert (end, rest) == ("", "")
    assert lines[0] == "event: page"
    assert all(line.startswith("data: ") for line in lines[1:])
    said = "\n".join(line.removeprefix("data: ") for line in lines[1:])
    assert said == text.replace("\r", " ").encode("utf-8", "replace").decode()


# ── access ──────────────────────────────────────────────────────────────────────────────────────────────────


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    "given_", [basic("", TOKEN), basic("ada", TOKEN), f"Bearer {TOKEN}", f"bearer  {TOKEN} ",
               basic("", TOKEN).replace("Basic", "basic")]
)  # fmt: skip
def test_the_token_is_taken_as_password_or_as_bearer(given_: str) -> None:
    access.check({"authorization": given_, "host": "node7:9462"}, TOKEN)


@pytest.mark.parametrize(
    "given_", ["", TOKEN, basic(TOKEN, ""), basic("", TOKEN + "x"), basic("", TOKEN[:-1]), "Basic ####", "Basic /w==",
               "Bearer", "Basic", "Bearer \xff", "Digest " + TOKEN]
)  # fmt: skip
def test_anything_else_than_the_token_is_refused(given_: str) -> None:
    with pytest.raises(Refused, match="token") as caught:
        access.check({"authorization": given_, "host": "localhost"}, TOKEN)
    assert caught.value.status == 401


@pytest.mark.parametrize("host", ["localhost", "localhost:9462", "127.0.0.1:9462", "127.8.1.1", "[::1]", "[::1]:9462",
                                  "LOCALHOST:1"])  # fmt: skip
def test_without_a_token_the_page_is_read_under_this_machines_names(host: str) -> None:
    access.check({"host": host}, "")


@pytest.mark.parametrize(
    "host", ["evil.example:9462", "localhost.evil.example", "10.0.0.1:9462", "", "127.0.0.1.x", "["]
)
def test_without_a_token_a_name_made_to_resolve_to_loopback_is_refused(host: str) -> None:
    with pytest.raises(Refused, match="localhost") as caught:
        access.check({"host": host}, "")
    assert caught.value.status == 403


@pytest.mark.parametrize("listen", ["0.0.0.0:9462", "[::]:9462", "10.0.0.1:9462", "node7:9462"])
def test_an_address_for_other_machines_needs_a_token(listen: str) -> None:
    with pytest.raises(InvalidConfig, match=r"page\.token_file is needed"):
        config.load(None, {}, {"page.listen": listen})
    config.load(None, {}, {"page.listen": listen, "page.token_file": "/f"})


def test_loopback_needs_no_token_and_takes_one() -> None:
    assert access.token(PageSettings(), os.geteuid()) == ""
    for listen in ("127.0.0.1:0", "localhost:9462", "[::1]:9462"):
        assert config.load(None, {}, {"page.listen": listen}).settings.page.listen == listen
        assert access.token(PageSettings(listen=listen), os.geteuid()) == ""


def test_the_token_is_the_first_line_of_a_private_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "token"
    wanted = PageSettings(listen="127.0.0.1:0", token_file=str(file))
    with pytest.raises(InvalidConfig, match="No such file"):
        access.token(wanted, os.geteuid())
    file.touch(mode=0o600)
    file.write_text(f"{TOKEN}\nanything\n")
    assert access.token(wanted, os.geteuid()) == TOKEN
    file.chmod(0o644)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        access.token(wanted, os.geteuid())
    file.chmod(0o600)
    for text in ("", "\n", "short", "ä" * 40):
        file.write_text(text)
        with pytest.raises(InvalidConfig, match="at least 16"):
            access.token(wanted, os.geteuid())


# ── served ──────────────────────────────────────────────────────────────────────────────────────────────────


class Quiet:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@contextmanager
def serving(found: server.PageSource, token: str | access.Token = "") -> Iterator[int]:
    """The port of a page that is served in a thread."""
    log: Any = Quiet()
    counts = token if callable(token) else lambda: token
    served = server.page_server(PageSettings(listen="127.0.0.1:0"), counts, found, log)
    thread = threading.Thread(target=served.serve, daemon=True)
    thread.start()
    try:
        yield served.listener.getsockname()[1]
    finally:
        served.listener.shutdown(socket.SHUT_RDWR)  # ends its accept
        served.listener.close()
        thread.join(60)
        assert not thread.is_alive()


def fetch(port: int, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


def next_event(answer: http.client.HTTPResponse) -> str:
    """The next fragment of a stream."""
    lines: list[str] = []
    while line := answer.readline().decode():
        if line.startswith("data: "):
            lines.append(line.removeprefix("data: ").rstrip("\n"))
        elif line == "\n" and lines:
            return "\n".join(lines)
    raise AssertionError(f"the stream ended: {lines}")


def test_the_pages_answer_with_the_policy_and_refuse_what_they_do_not_know(tmp_path: pathlib.Path) -> None:
    with serving(source(published(), tmp_path)) as port:
        for path, status in (("/", 200), ("/job/train", 200), ("/job/none", 404), ("/job/", 404), ("/x", 404),
                             ("/job/..%2f..", 400), ("/events?job=%00", 400), ("/job/a/b", 404),
                             ("//", 404)):  # fmt: skip
            answer, said = fetch(port, path)
            assert answer.status == status, path
            assert answer.getheader("Content-Security-Policy") == live.POLICY, path
            assert answer.getheader("Content-Type") == "text/html; charset=utf-8", path
            assert said.endswith("</html>\n"), path
        assert fetch(port, "/", "POST")[0].status == 405
        assert fetch(port, "/", "HEAD")[1] == ""
        assert fetch(port, "/", Host="evil.example")[0].status == 403


def test_without_the_token_nothing_of_the_cluster_is_shown(tmp_path: pathlib.Path) -> None:
    with serving(source(published(), tmp_path), TOKEN) as port:
        for path in ("/", "/job/train", "/events", "/x"):
            answer, said = fetch(port, path)
            assert answer.status == 401, path
            assert (answer.getheader("WWW-Authenticate") or "").startswith("Basic ")
            assert "train" not in said
            assert "main " not in Seen(said).said
        answer, said = fetch(port, "/", Authorization=basic("", TOKEN), Host="node7")
        assert answer.status == 200
        assert "train" in said


def test_a_changed_token_counts_at_once_and_a_file_that_is_gone_lets_no_reader_in(tmp_path: pathlib.Path) -> None:
    file, log = tmp_path / "token", Heard()
    file.touch(mode=0o600)
    file.write_text(f"{TOKEN}\n")
    settings = PageSettings(listen="127.0.0.1:0", token_file=str(file))
    held = access.TokenFile(settings, os.geteuid(), False, cast(Any, log))
    with serving(source(published(), tmp_path), held) as port:
        first, second = basic("", TOKEN), basic("", "another-token-of-32-characters-..")
        assert fetch(port, "/", Authorization=first)[0].status == 200
        stream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        stream.request("GET", "/events", headers={"Authorization": first})
        answer = stream.getresponse()
        assert "train" in next_event(answer)

        (tmp_path / "new").touch(mode=0o600)
        (tmp_path / "new").write_text("another-token-of-32-characters-..\n")
        (tmp_path / "new").rename(file)
        assert fetch(port, "/", Authorization=first)[0].status == 401
        assert fetch(port, "/", Authorization=second)[0].status == 200
        assert answer.read() == b"", "the stream of the old token has ended"
        stream.close()

        file.chmod(0o644)
        assert fetch(port, "/", Authorization=second)[0].status == 503
        file.unlink()
        assert fetch(port, "/", Authorization=second)[0].status == 503
        assert log.said == ["page.token_changed", "page.token_refused", "page.token_refused"]


def test_the_number_of_streams_is_limited_and_pages_are_still_served(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STREAMS_OF_A_HOST", 1)
    with serving(source(published(), tmp_path)) as port:
        stream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        stream.request("GET", "/events")
        assert "train" in next_event(stream.getresponse())
        assert fetch(port, "/events")[0].status == 503
        assert fetch(port, "/")[0].status == 200
        stream.close()
        again = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

        def taken() -> bool:
            again.close()
            again.request("GET", "/events")
            return again.getresponse().status == 200

        eventually(taken, 10, "the place of the stream that was closed")
        again.close()


def test_a_stream_ends_after_its_time(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STREAM_S", 0.0)
    with serving(source(published(), tmp_path)) as port:
        answer, said = fetch(port, "/events")
        assert (answer.status, said) == (200, "retry: 2000\n\n")


def test_a_daemon_serves_the_page_with_its_token_and_streams_each_change(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(f"{TOKEN}\n")
    with Nodes() as nodes:
        node = nodes.add("a", page__listen="127.0.0.1:0", page__token_file=str(file))
        url = next(e["url"] for e in node.events() if e["event"] == "page.listening")
        port = int(url.rpartition(":")[2])
        assert fetch(port, "/")[0].status == 401
        stream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        stream.request("GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"})
        answer = stream.getresponse()
        assert answer.status == 200
        assert "none: submit one" in next_event(answer)
        node.submit("train", fake={}, args=[EVIL], env={"API_KEY": "s3cret"})
        page = eventually(lambda: _with(fetch(port, "/job/train", Authorization=basic("me", TOKEN))[1], "Ranks"), 20)
        assert MASK in page
        assert "s3cret" not in page
        assert Seen(page).tags.count("script") == 1
        node.post("/v1/nodes/a/cordon", {"reason": EVIL})
        found = eventually(lambda: _with(next_event(answer), "/job/train", "cordoned", "alert("), 20, "both changes")
        assert "<script>" not in found
        stream.close()


def _with(page: str, *words: str) -> str:
    assert all(word in page for word in words), json.dumps(page)[-2000:]
    return page
