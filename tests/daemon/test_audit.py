"""The audit trail: what is written to etcd of a user's request, and what is not."""

from __future__ import annotations

from typing import cast

import pytest
import structlog
from structlog.testing import capture_logs
from support.fake_etcd import FakeClient, FakeServer

from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import decode
from elastic.contract.records.node_records import EventRecord
from elastic.etcd.client import Etcd
from elasticd.access import audit
from elasticd.access.audit import Audit
from elasticd.access.authority import Peer

KEYS = ClusterKeys("main")
BOB = Peer(1001, 1001, "bob", pid=77)


class Trail:
    def __init__(self) -> None:
        self.server = FakeServer()
        self.audit = Audit(cast(Etcd, FakeClient(self.server)), KEYS, "n1", structlog.get_logger())

    def events(self) -> list[EventRecord]:
        return [decode(EventRecord, kv.value) for key, kv in sorted(self.server.kvs.items()) if KEYS.events in key]


@pytest.fixture
def trail() -> Trail:
    return Trail()


def test_change_is_an_event_and_a_log_line(trail: Trail) -> None:
    with capture_logs() as lines:
        trail.audit.done(BOB, "node.drain_requested", node="n2", text="reason = 'disk'")
    (event,) = trail.events()
    assert (event.kind, event.node, event.user, event.uid, event.pid) == ("node.drain_requested", "n2", "bob", 1001, 77)
    assert event.text == "reason = 'disk' (on n1)"
    (line,) = lines
    assert (line["event"], line["uid"], line["by_pid"], line["result"]) == ("audit", 1001, 77, "done")


def test_refusals_are_logged_each_and_stored_once(trail: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    with capture_logs() as lines:
        for _ in range(5):
            trail.audit.failed(BOB, "job.stop_requested", 403, "it belongs to alice", job="x")
        trail.audit.failed(BOB, "job.stop_requested", 403, "it belongs to alice", job="y")
        trail.audit.failed(BOB, "job.stop_requested", 404, "no such job", job="z")
    assert [line["log_level"] for line in lines] == ["warning"] * 7
    assert sorted((e.job, e.text) for e in trail.events()) == [
        ("x", "refused: and 1 more in this hour, the last: it belongs to alice (on n1)"),
        ("x", "refused: it belongs to alice (on n1)"), ("y", "refused: it belongs to alice (on n1)"),
    ]  # fmt: skip


def test_thousands_of_refusals_are_a_few_events_of_each_user(trail: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "COUNTED_S", 0.0)
    for number in range(2_100):
        trail.audit.failed(BOB, "node.cordoned", 403, "root can", node=f"invented{number}")
    trail.audit.failed(Peer(1002, 1002, "eve"), "node.cordoned", 403, "root can", node="n1")
    texts = [event.text for event in trail.events() if event.user == "bob"]
    assert len(texts) == audit.MOST_REFUSED + 1
    assert "and 2090 more in this hour, the last: root can" in " ".join(texts)
    assert [event.node for event in trail.events() if event.user == "eve"] == ["n1"]
    monkeypatch.setattr(audit, "HOUR_S", 0.0)
    trail.audit.failed(BOB, "node.cordoned", 403, "root can", node="n1")
    assert len(trail.events()) == audit.MOST_REFUSED + 3


def test_change_counts_though_etcd_does_not_take_its_event(trail: Trail) -> None:
    trail.server.up = False
    with capture_logs() as lines:
        trail.audit.done(BOB, "job.scaled", job="x")
    assert [line["event"] for line in lines] == ["audit", "audit.not_in_etcd"]
