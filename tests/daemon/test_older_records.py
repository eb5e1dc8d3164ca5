"""Records in etcd that no longer count: what the daemon goes on with, and what it writes over them."""

from __future__ import annotations

from types import MappingProxyType
from typing import cast

from elastic.contract.keys import ClusterKeys
from elastic.contract.records.node_records import NodeRecord
from elastic.etcd.client import KV, Refusal, View
from elastic.etcd.stamps import Stamps
from elasticd.cluster.cluster import Cluster, Node
from elasticd.node import older_records
from elasticd.node.older_records import AFTER_S, EACH_S, SIGN_S, UNSIGNED_S, OlderRecords
from elasticd.node.writer import ClusterWriter

KEYS = ClusterKeys("main")
DRAIN, STATE = KEYS.drain("n"), KEYS.job("a").state


class Writer:
    def __init__(self) -> None:
        self.right: list[tuple[str, int, bytes | None]] = []
        self.deleted: list[str] = []

    def put_right(self, key: str, there: KV, newest: KV | None) -> None:
        self.right.append((key, there.mod_revision, newest.value if newest else None))

    def delete(self, what: str, keys: list[str]) -> None:
        self.deleted += keys


def kv(key: str, value: bytes = b"{}", mod_revision: int = 5, stamp: int = 9) -> KV:
    return KV(key, value, 1, mod_revision, 0, stamp)


def view(kvs: list[KV], older: tuple[str, ...] = (), connected: bool = True) -> View:
    refused = {key: Refusal(kv(key, b"old", 7), "older", in_place_of_newer=True) for key in older}
    return View(MappingProxyType({k.key: k for k in kvs}), 9, connected, 0.0, refused=refused)


def nodes(*names: str) -> Cluster:
    facts = {"hostname": "h", "address": "x", "slots": 1, "gpus": 0, "version": "1", "pid": 1, "started_wall_s": 0.0}
    made = {name: NodeRecord(node=name, **facts) for name in names}  # type: ignore[arg-type]
    return Cluster(nodes={name: Node(record, at) for at, (name, record) in enumerate(made.items())})


def made(node: str = "a") -> tuple[OlderRecords, Writer, Stamps]:
    writer, stamps = Writer(), Stamps(KEYS)
    return OlderRecords(KEYS, stamps, node, cast(ClusterWriter, writer)), writer, stamps


def test_what_may_have_arrived_late_is_not_shown_and_what_stays_is_written_over() -> None:
    older, writer, _ = made()
    seen = view([kv(STATE, b"new")], older=(STATE,))
    assert not older.look(seen, 0.0).refused
    older.repair(nodes("a"), AFTER_S - 0.1)
    assert not writer.right
    older.repair(nodes("a"), AFTER_S)
    assert writer.right == [(STATE, 7, b"new")]
    assert older.look(seen, AFTER_S).refused.keys() == {STATE}
    assert not older.look(view([kv(STATE, b"newer")]), 10.0).refused
    assert not older.look(seen, 11.0).refused, "another time"


def test_the_daemons_mend_one_after_the_other() -> None:
    older, writer, _ = made("c")
    older.look(view([kv(STATE)], older=(STATE,)), 0.0)
    older.repair(nodes("a", "b", "c"), AFTER_S + 2 * EACH_S - 0.1)
    assert not writer.right
    older.repair(nodes("a", "b", "c"), AFTER_S + 2 * EACH_S)
    assert writer.right


def test_what_was_deleted_for_good_is_deleted_again_and_what_is_not_known_is_left() -> None:
    older, writer, stamps = made()
    stamps.end(DRAIN, 10)
    stamps.take(STATE, 10)
    older.look(view([], older=(DRAIN, STATE)), 0.0)
    older.repair(nodes("a"), 5.0)
    assert writer.right == [(DRAIN, 7, None)]


def test_an_older_record_of_a_deletion_goes_after_all_who_may_know_the_newer_one_had_their_turn() -> None:
    key = KEYS.ended(DRAIN)
    for newest, turn in ((None, 2 + 1), (b"new", 1)):
        older, writer, _ = made("b")
        older.look(view([kv(key, newest)] if newest else [], older=(key,)), 0.0)
        older.repair(nodes("a", "b"), AFTER_S + EACH_S * turn - 0.1)
        assert not writer.right
        older.repair(nodes("a", "b"), AFTER_S + EACH_S * turn)
        assert writer.right == [(key, 7, newest)]


def test_a_node_that_is_not_signed_anew_does_not_count() -> None:
    older, _, _ = made()
    key = KEYS.node("n")
    assert SIGN_S * 2 < UNSIGNED_S
    for now_s, counts in ((0.0, True), (UNSIGNED_S - 1, True), (UNSIGNED_S, False)):
        found = older.look(view([kv(key)]), now_s)
        assert (key in found.kvs, key in found.refused) == (counts, not counts)
    assert key not in older.look(view([kv(key, mod_revision=8)]), UNSIGNED_S + 1).kvs, "the same record, put back"
    assert key in older.look(view([kv(key, stamp=10)]), UNSIGNED_S + 2).kvs
    older.look(view([kv(key, stamp=10)], connected=False), UNSIGNED_S + 3)
    assert key in older.look(view([kv(key, stamp=10)]), 3 * UNSIGNED_S).kvs, "nothing can be signed while etcd is away"
    assert key in older.look(view([kv(KEYS.node("n"), stamp=0)]), 9 * UNSIGNED_S).kvs, "a cluster without a key"


def test_deletions_for_good_that_stay_in_etcd_are_bounded() -> None:
    older, writer, _ = made()
    keys = [KEYS.ended(KEYS.drain(f"n{number}")) for number in range(older_records.KEPT_ENDINGS + 3)]
    older.look(view([kv(key, stamp=number + 1) for number, key in enumerate(keys)]), 100.0)
    older.repair(nodes("a"), 100.0)
    assert writer.deleted == keys[:3]
