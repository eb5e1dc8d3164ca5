"""Nodes are remembered: one that is gone stays on every screen until it is back or forgotten."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from click.testing import CliRunner, Result
from support import plain_views
from support.door import Door
from support.fake_etcd import FakeClient
from support.snapshots import job, snapshot

from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import decode, encode
from elastic.contract.records.node_records import CordonRecord, DrainRecord, KnownNode, NodeRecord
from elastic.contract.records.reasons import Code, reason, reasons
from elasticd.api.doctor import absent
from elasticd.api.metrics import metrics
from elasticd.api.page import live
from elasticd.api.views.instant import Identity, Now
from elasticd.base.answers import Json, Status, read
from elasticd.cluster.assignment import plan
from elasticd.cluster.cluster import Cluster, Node
from elasticd.cluster.published_state import Snapshot
from elasticd.cluster.reconcile import LEFT_KEPT_S, LOST_AFTER_S
from elasticd.cluster.reconcile import inventory as due
from elasticd.ctl import main as ctl
from elasticd.diagnosis.timeline import happened
from elasticd.machine.doctor import ERROR, WARNING

from .test_node_record import Daemon

KEYS = ClusterKeys("main")
NOW = Now(monotonic_s=100.0, wall_s=1_000_000.0)
IDENTITY = Identity("main", "a", "0.1", 7, 40.0, ("127.0.0.1:2379",), False, "")


def record(name: str, **facts: object) -> NodeRecord:
    base = {"node": name, "hostname": f"h-{name}", "address": "10.0.0.2", "slots": 2, "gpus": 0, "version": "0.1"}
    return msgspec.convert(base | {"pid": 1, "started_wall_s": 5.0} | facts, NodeRecord)


def gone(name: str, away_wall_s: float = NOW.wall_s - 60, *, left: bool = False) -> KnownNode:
    return KnownNode.of(record(name), away_wall_s, left)


def seen(*known: KnownNode, **facts: object) -> Snapshot:
    """Node a is there, `known` are not."""
    here = snapshot()
    there = {each.node: each for each in (KnownNode.of(here.cluster.nodes["a"].record), *known)}
    return replace(here, cluster=replace(here.cluster, known=there, **facts))  # type: ignore[arg-type]


def status(published: Snapshot) -> Json:
    return plain_views.status(published, IDENTITY, NOW)


def test_a_lost_node_is_on_every_screen_and_the_cluster_is_degraded() -> None:
    assert status(seen())["health"] == "healthy"
    published = seen(gone("b"))
    data = status(published)
    row = next(row for row in data["nodes"] if row["node"] == "b")
    assert (row["state"], row["hostname"], row["slots"], row["away_since_wall_s"]) == ("lost", "h-b", None, 999_940.0)
    assert row["why"].startswith("lost since ")
    assert data["health"] == "degraded"
    assert [p for p in data["problems"] if p.startswith("b: lost since ")]
    (finding,) = absent(published.cluster, NOW.wall_s)
    assert (finding.node, finding.level) == ("b", ERROR)
    assert finding.fix.endswith("elasticctl nodes forget b")
    text = metrics.exposition(lambda: published, IDENTITY)().decode()
    assert 'elasticd_node_state{node="b",state="lost"} 1.0' in text
    assert 'elasticd_node_slots{node="b"}' not in text, "it holds no workers now"
    assert "class='now lost'>lost" in live.cluster(read(data, Status), [])


def test_a_node_that_was_stopped_in_order_is_off_and_degrades_nothing() -> None:
    shut = DrainRecord(reason="the machine shuts down", since_wall_s=1.0)
    published = seen(
        gone("b", left=True),
        gone("c", left=True),
        drains={"c": shut},
        cordons={"b": CordonRecord(reason="fans", since_wall_s=1.0)},
    )
    data = status(published)
    rows = {row["node"]: row for row in data["nodes"]}
    assert (data["health"], rows["b"]["state"], rows["c"]["state"]) == ("healthy", "off", "off")
    assert rows["b"]["why"].endswith(": its elasticd was stopped; cordoned: fans")
    assert rows["c"]["why"].endswith(": the machine shuts down"), "its drain waits for nothing"
    assert {f.level for f in absent(published.cluster, NOW.wall_s)} == {WARNING}


def test_a_thousand_lost_nodes_are_a_few_lines() -> None:
    problems = status(seen(*(gone(f"n{n}") for n in range(1000))))["problems"]
    assert len(problems) < 12
    assert problems[-1].startswith("992 more nodes are lost, ")


def test_a_node_whose_agents_live_is_not_lost() -> None:
    published = seen(gone("b"))
    published = replace(published, cluster=replace(published.cluster, jobs={"train": job()}))
    assert {row["node"]: row["state"] for row in status(published)["nodes"]} == {"a": "ready", "b": "no daemon"}
    assert not list(absent(published.cluster, NOW.wall_s))


def test_a_job_that_waits_names_lost_nodes() -> None:
    waiting = replace(job(), members={}, generation=None)
    wide = msgspec.structs.replace(waiting.spec.spec, nodes="2:2")  # type: ignore[union-attr]
    waiting = replace(waiting, spec=msgspec.structs.replace(waiting.spec, spec=wide))  # type: ignore[type-var]
    published = seen(gone("b"), jobs={"train": waiting})
    lost = reason(Code.NODE_IS, node="b", state="lost")
    assert lost in reasons(plan(published.cluster, {}, "a").waiting["train"])


def test_the_event_says_whether_a_node_left_in_order() -> None:
    both = {name: Node(record(name), n) for n, name in enumerate("ab")}
    before, after = Cluster(nodes=both), Cluster(nodes={"a": both["a"]})
    texts = [
        happened(before, replace(after, known={"b": row}), 1.0)[0].text for row in (gone("b"), gone("b", left=True))
    ]
    assert texts == ["its lease expired: node lost, or elasticd killed", "its elasticd was stopped"]


def test_random_histories_of_nodes() -> None:
    """What is written follows from the view alone: a second look at what was written finds nothing more to write."""
    chance = random.Random(7)
    for _ in range(300):
        names = [f"n{n}" for n in range(chance.randint(1, 5))]
        there = {n: Node(record(n), at) for at, n in enumerate(names) if n == "n0" or chance.random() < 0.5}
        instants = [0.0, NOW.wall_s - LEFT_KEPT_S - 1, NOW.wall_s - 5]
        listed = [n for n in names if chance.random() < 0.8]
        known = {n: gone(n, chance.choice(instants), left=chance.random() < 0.5) for n in listed}
        missing_s = {n: chance.choice([0.0, LOST_AFTER_S]) for n in names}
        view = Cluster(nodes=there, known=known)
        rows = dict(known)
        for me in names:
            own = there[me].record if me in there else None
            for name, row in due(view, me, own, missing_s.__getitem__, NOW.wall_s):
                assert name == me or (me == "n0" and name not in there), (
                    "of others the oldest node's alone, of the gone"
                )
                rows.pop(name, None) if row is None else rows.update({name: row})
        after = Cluster(nodes=there, known=rows)
        assert not [
            1
            for me in names
            for _ in due(after, me, there[me].record if me in there else None, missing_s.__getitem__, NOW.wall_s)
        ]
        for name, row in rows.items():
            assert (name in there) <= (row == KnownNode.of(record(name)))
        assert set(there) <= set(rows)
        kept = {n for n, row in known.items() if n not in there and not row.left}
        assert kept <= set(rows), "a lost node is never forgotten by itself"


def test_a_daemon_keeps_the_inventory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(tmp_path, monkeypatch)
    daemon.settle()

    def row(name: str) -> KnownNode:
        return decode(KnownNode, daemon.server.kvs[KEYS.known_node(name)].value)

    assert row("a") == KnownNode.of(daemon.record)
    other = FakeClient(daemon.server)
    lease = other.keep(5.0, 1.0, lambda why: None)
    other.put(KEYS.node("b"), encode(record("b")), lease.id)
    other.put(KEYS.known_node("b"), encode(KnownNode.of(record("b"))))
    daemon.settle()
    assert not row("b").away_wall_s
    lease.close()
    daemon.settle()
    daemon.settle()
    assert row("b").away_wall_s
    assert not row("b").left
    writes = daemon.server.revision
    daemon.settle()
    assert daemon.server.revision == writes, "nothing is written without a change"
    daemon.loop.leave(in_order=True)
    assert row("a").left
    assert row("a").away_wall_s
    assert KEYS.node("a") not in daemon.server.kvs


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def door(tmp_path: pathlib.Path) -> Iterator[Door]:
    there = Door(tmp_path)
    (tmp_path / "jobs").mkdir()
    there.published.publish(seen(gone("b")))
    there.client.put(KEYS.known_node("b"), encode(gone("b")))
    yield there
    there.close()


def call(door: Door, *words: str) -> Result:
    return CliRunner().invoke(ctl.main, ["--socket", str(door.path), *words])


def test_a_lost_node_is_cordoned_drained_and_the_answers_are_true(door: Door) -> None:
    assert call(door, "status").exit_code == 3
    assert "b: lost since " in call(door, "status").stdout
    assert "lost since " in call(door, "nodes").stdout
    assert call(door, "cordon", "b").exit_code == 0
    done = call(door, "drain", "b", "--wait")
    assert (done.exit_code, "no job runs" in done.stdout) == (1, False)
    assert done.stdout.startswith("b is lost since ")
    assert done.stdout.endswith("; it takes no new work if it comes back\n")
    assert decode(DrainRecord, door.etcd.kvs[KEYS.drain("b")].value)
    assert call(door, "uncordon", "b").stdout == "b may take work again, once its elasticd runs: now none does\n"


def test_only_a_node_that_is_gone_is_forgotten(door: Door) -> None:
    done = call(door, "nodes", "forget", "b")
    assert (done.exit_code, done.stdout) == (0, "b is forgotten\n")
    assert KEYS.known_node("b") not in door.etcd.kvs
    assert "its elasticd runs; drain it" in call(door, "nodes", "forget", "a").output
    assert call(door, "nodes", "forget", "z").exit_code == 1
