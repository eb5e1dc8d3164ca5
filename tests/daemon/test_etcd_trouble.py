"""What a daemon says of an etcd cluster of which a part is in trouble, and what it does for its space."""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec
import pytest
import structlog
from support import plain_views

from elastic.contract.records.node_records import NodeRecord
from elastic.etcd.client import Etcd, MemberHealth, View
from elasticd.api.views.instant import Identity, Now
from elasticd.base.settings import EtcdSettings, Settings
from elasticd.cluster import reconcile
from elasticd.cluster.cluster import Cluster, Node
from elasticd.cluster.published_state import Contact, Snapshot
from elasticd.etcd.members import AGAIN_S, LOOK_S, Members
from elasticd.node import loop as loops
from elasticd.node.chores import Chores


def member(number: int, error: str = "", database_mb: float = 1.0) -> MemberHealth:
    return MemberHealth(f"10.0.0.{number}:2379", "" if error else "3.5.13", not error, error, database_mb)


class Asked:
    """Three members; the third fails at the looks that are told."""

    def __init__(self, fails: list[bool]) -> None:
        self.fails = iter(fails)

    def members(self, within_s: float) -> list[MemberHealth]:
        return [member(1), member(2), member(3, "connection refused" if next(self.fails) else "")]


def test_a_member_counts_as_down_after_two_looks_and_is_logged_once() -> None:
    shown: list[tuple[MemberHealth, ...]] = []
    with structlog.testing.capture_logs() as lines:
        watcher = Members(
            cast(Etcd, Asked([False, True, False, True, True, True, False])), shown.append, structlog.get_logger()
        )
        for _ in range(7):
            watcher.look()
    assert [found[2].ok for found in shown] == [True, True, True, True, False, False, True]
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("etcd.member_lost", "warning"),
        ("etcd.member_back", "info"),
    ]


def test_a_member_that_is_down_at_the_start_is_shown_at_once_and_one_in_doubt_is_asked_again_soon() -> None:
    shown: list[tuple[MemberHealth, ...]] = []
    watcher = Members(cast(Etcd, Asked([True, False, True, True])), shown.append, structlog.get_logger())
    pauses = [watcher.look() for _ in range(4)]
    assert [found[2].ok for found in shown] == [False, True, True, False]
    assert pauses == [LOOK_S, LOOK_S, AGAIN_S, LOOK_S]


def test_members_that_are_all_away_are_asked_again_soon() -> None:
    """Once etcd is back, `status` is not to say for long that none of them is up."""

    class Away:
        def members(self, within_s: float) -> list[MemberHealth]:
            return [member(1, "connection refused"), member(2, "connection refused")]

    watcher = Members(cast(Etcd, Away()), lambda found: None, structlog.get_logger())
    assert [watcher.look() for _ in range(3)] == [AGAIN_S] * 3


def problems(*members: MemberHealth, connected: bool = True) -> list[str]:
    snapshot = Snapshot(contact=Contact(connected=connected, members=members), registered=True)
    identity = Identity("c", "n", "1", 1, 0.0, (), False, "")
    status = plain_views.status(snapshot, identity, Now(0.0, 0.0))
    assert status["health"] == ("degraded" if status["problems"] else "healthy")
    assert [row["ok"] for row in status["etcd"]["members"]] == [m.ok for m in members]
    return cast(list[str], status["problems"])


def test_members_in_trouble_are_problems_of_the_cluster() -> None:
    assert problems() == []
    assert problems(member(1), member(2), member(3)) == []
    (said,) = problems(member(1), member(2), member(3, "connection refused"))
    assert said == (
        "etcd member 10.0.0.3:2379 is in trouble: connection refused; 2 of 3 are well, 2 are needed"
    )  # fmt: skip
    _, said = problems(member(1), member(2), member(3, "connection refused"), connected=False)
    assert "2 of 3 were well when last asked, 2 are needed" in said
    (said,) = problems(member(1), member(2, database_mb=1900.0), member(3))
    assert "10.0.0.2:2379: its database takes 1900 MB" in said


NODE = NodeRecord(node="a", hostname="h", address="h", slots=1, gpus=0, version="1", pid=1, started_wall_s=0.0)


def test_the_oldest_node_alone_has_history_compacted() -> None:
    nodes = {name: Node(msgspec.structs.replace(NODE, node=name), age) for name, age in (("a", 7), ("b", 3), ("c", 9))}
    assert [name for name in nodes if reconcile.is_oldest(Cluster(nodes=nodes), name)] == ["b"]
    assert not reconcile.is_oldest(Cluster(), "a")


class Recorder:
    def __init__(self) -> None:
        self.compacted: list[int] = []

    def compact(self, revision: int) -> None:
        self.compacted.append(revision)


def bare_loop() -> Any:
    made: Any = loops.DaemonLoop.__new__(loops.DaemonLoop)
    made.settings = Settings(node="a", etcd=EtcdSettings(endpoints=("10.0.0.1:2379",)))
    made._cluster = Cluster(nodes={"a": Node(NODE, 1)}, revision=100)
    made.writer, made.log = Recorder(), structlog.get_logger()
    made._contact, made._contact_said = Contact(), ("", 0.0)
    return made


def compactions(every_s: float, endpoints: tuple[str, ...] = ("10.0.0.1:2379",), node: str = "a") -> list[int]:
    recorder = Recorder()
    settings = Settings(node=node, etcd=EtcdSettings(endpoints=endpoints, compact_every_s=every_s))
    chores = Chores(settings, cast(Any, recorder))
    for turn in range(10):
        chores._compact(Cluster(nodes={"a": Node(NODE, 1)}, revision=100 + turn), turn * 10.0)
    return recorder.compacted


def test_etcd_compaction_keeps_revisions_of_the_configured_age() -> None:
    assert compactions(30.0) == [100, 103, 106]
    assert compactions(0.0) == []
    assert compactions(30.0, ()) == [], "the embedded etcd does it by itself"
    assert compactions(30.0, node="z") == [], "another node's daemon does it"


def test_the_first_failure_after_the_start_is_logged_and_each_new_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    loop = bare_loop()

    def seen(connected: bool, error: str = "") -> None:
        view = View({}, 1, connected, clock[0], error)
        loop._say_contact(view)
        loop._contact = Contact(view.connected, view.as_of_s, view.error)
        clock[0] += 4.0

    with structlog.testing.capture_logs() as lines:
        for error in ("still logging in", "still logging in", "authentication failed", "authentication failed"):
            seen(False, error)
        seen(True)
        seen(False, "connection refused")
    assert [(line["log_level"], line["error"]) for line in lines] == [
        ("warning", "still logging in"),
        ("warning", "authentication failed"),
        ("info", ""),
        ("warning", "connection refused"),
    ]


def test_a_reason_that_comes_too_soon_after_another_is_logged_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch publishes the loss once per reason: a refusal in the seconds after "still logging in" was never said."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    loop = bare_loop()
    with structlog.testing.capture_logs() as lines:
        for clock[0], error in ((0.0, "still logging in"), (2.0, "authentication failed")):
            loop._say_contact(View({}, 0, False, clock[0], error))
            loop._contact = Contact(False, clock[0], error)
        for clock[0] in (3.0, 4.0, 5.0, 6.0, 60.0):
            loop._say_contact(loop._contact)  # as each turn does
    assert [line["error"] for line in lines] == ["still logging in", "authentication failed"]
