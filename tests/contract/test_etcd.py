"""One suite for the fake and the real etcd: what the fake says in a simulation, the real one does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from support.etcd_server import EtcdServer
from support.fake_etcd import FakeClient, FakeServer
from support.wait import eventually, stretched

from elastic.etcd.client import Absent, Delete, Etcd, EtcdError, EtcdUnavailable, LeaseGone, ModIs, Present, Put, View
from elastic.etcd.types import EtcdRefused

Client = Etcd | FakeClient


class FakeWorld:
    def __init__(self) -> None:
        self.server = FakeServer()

    def client(self) -> FakeClient:
        return FakeClient(self.server, call_s=0.5)

    def until(self, check: Callable[[], object], within_s: float = 10.0) -> None:
        end_s = self.server.now_s + within_s
        while True:
            self.server.pump()
            if check():
                return
            assert self.server.now_s < end_s, f"not within {within_s:g} s of the fake's time"
            self.server.advance(self.server.now_s + 0.05)

    def now_s(self) -> float:
        return self.server.now_s

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server.start()

    def wipe(self) -> None:
        self.server.wipe()

    def close(self) -> None:
        for client in tuple(self.server.clients):
            client.close()


class RealWorld:
    def __init__(self, server: EtcdServer) -> None:
        self.server = server
        self._clients: list[Etcd] = []

    def client(self) -> Etcd:
        self._clients.append(Etcd(self.server.access, call_s=0.5))
        return self._clients[-1]

    def until(self, check: Callable[[], object], within_s: float = 10.0) -> None:
        eventually(check, within_s)

    def now_s(self) -> float:
        return time.monotonic()

    def stop(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()

    def wipe(self) -> None:
        self.server.wipe()

    def close(self) -> None:
        for client in self._clients:
            client.close()


World = FakeWorld | RealWorld


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as one:
        yield one


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.etcd)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "fake":
        world = FakeWorld()
        yield world
        world.close()
    else:
        server: EtcdServer = request.getfixturevalue("server")
        server.ensure_started()
        real = RealWorld(server)
        real.client().txn([], [Delete("/", prefix=True)])
        yield real
        real.close()


def test_revisions_create_and_mod(world: World) -> None:
    etcd = world.client()
    assert etcd.get("/t/a") is None
    first = etcd.put("/t/a", b"1")
    second = etcd.put("/t/b", b"2")
    third = etcd.put("/t/a", b"3")
    assert (second, third) == (first + 1, first + 2)
    kv = etcd.get("/t/a")
    assert kv is not None
    assert (kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.lease) == ("/t/a", b"3", first, third, 0)
    assert etcd.delete("/t/a") is True
    assert etcd.delete("/t/a") is False
    again = etcd.put("/t/a", b"4")
    assert again == third + 2, "a deletion takes a revision, deleting nothing does not"
    kv = etcd.get("/t/a")
    assert kv is not None
    assert kv.create_revision == again


def test_etcd_prefix_is_read_and_deleted_at_one_revision(world: World) -> None:
    etcd = world.client()
    for key in ("/t/b", "/t/a", "/tt", "/t", "/t/a/deep"):
        etcd.put(key, key.encode())
    view = etcd.get_prefix("/t/")
    assert list(view.kvs) == ["/t/a", "/t/a/deep", "/t/b"]
    assert view.connected
    assert etcd.txn([], [Delete("/t/", prefix=True)]).revision == view.revision + 1
    assert etcd.txn([], [Delete("/t/", prefix=True)]).revision == view.revision + 1, "nothing was left"
    after = etcd.get_prefix("/t")
    assert list(after.kvs) == ["/t", "/tt"]
    assert after.revision == view.revision + 1


def test_the_newest_key_of_a_prefix_and_how_many_there_are(world: World) -> None:
    etcd = world.client()
    nothing = etcd.newest("/a/")
    assert (nothing.count, nothing.key, nothing.mod_revision) == (0, "", 0)
    etcd.put("/a/1", b"x")
    last = etcd.put("/a/2", b"x")
    now = etcd.put("/b", b"x")
    newest = etcd.newest("/a/")
    assert (newest.count, newest.key, newest.mod_revision, newest.revision) == (2, "/a/2", last, now)
    assert newest.cluster == nothing.cluster


def test_etcd_view_names_its_prefix(world: World) -> None:
    etcd = world.client()
    assert etcd.get_prefix("/a/").prefix == "/a/"
    seen: list[View] = []
    etcd.watch("/a/", seen.append)
    world.until(lambda: seen)
    etcd.put("/a/1", b"x")
    world.until(lambda: seen[-1].kvs)
    world.stop()
    world.until(lambda: not seen[-1].connected)
    assert {view.prefix for view in seen} == {"/a/"}


def test_a_watch_of_the_keys_before_one_sees_no_change_from_there_on(world: World) -> None:
    etcd = world.client()
    for key in ("/a/1", "/a/q", "/a/r", "/a/r1", "/a/s"):
        etcd.put(key, b"x")
    assert list(etcd.get_prefix("/a/", "/a/r").kvs) == ["/a/1", "/a/q"]
    newest = etcd.newest("/a/", "/a/r")
    assert (newest.count, newest.key) == (2, "/a/q")
    seen: list[View] = []
    etcd.watch("/a/", seen.append, before="/a/r")
    world.until(lambda: seen)
    etcd.put("/a/r2", b"x")
    etcd.delete("/a/s")
    last = etcd.put("/a/q", b"y")
    world.until(lambda: seen[-1].revision >= last)
    etcd.put("/a/r1", b"y")
    world.stop()
    world.until(lambda: not seen[-1].connected)
    world.start()
    world.until(lambda: seen[-1].connected)
    assert {tuple(view.kvs) for view in seen} == {("/a/1", "/a/q")}
    assert seen[-1].kvs["/a/q"].value == b"y"


def test_a_transaction_compares_and_does_all_or_the_other(world: World) -> None:
    etcd = world.client()
    made = etcd.txn([Absent("/t/g")], [Put("/t/g", b"1"), Put("/t/h", b"x")])
    assert made.ok
    kv = etcd.get("/t/g")
    assert kv is not None
    assert kv.mod_revision == made.revision
    lost = etcd.txn([Absent("/t/g")], [Put("/t/g", b"2")])
    assert not lost.ok
    assert lost.revision == made.revision, "nothing was written"
    won = etcd.txn([ModIs("/t/g", made.revision), Present("/t/h")], [Put("/t/g", b"3"), Delete("/t/h")])
    assert won.ok
    assert etcd.get("/t/h") is None
    stale = etcd.txn([ModIs("/t/g", made.revision)], [Put("/t/g", b"4")], [Put("/t/lost", b"y")])
    assert not stale.ok
    kv = etcd.get("/t/lost")
    assert kv is not None
    assert kv.mod_revision == stale.revision
    assert etcd.txn([ModIs("/t/never", 0)], []).ok, "revision 0 means: no such key"
    with pytest.raises(EtcdError, match="duplicate key"):
        etcd.txn([], [Put("/t/g", b"5"), Put("/t/g", b"6")])


def test_a_transaction_deletes_a_prefix(world: World) -> None:
    etcd = world.client()
    for key in ("/t/a/1", "/t/a/2", "/t/b"):
        etcd.put(key, b"x")
    stale = etcd.txn([Absent("/t/b")], [Delete("/t/a/", prefix=True)])
    assert not stale.ok
    done = etcd.txn([Present("/t/b")], [Delete("/t/a/", prefix=True), Put("/t/b", b"y")])
    assert done.ok
    assert set(etcd.get_prefix("/t/").kvs) == {"/t/b"}
    with pytest.raises(EtcdError, match="duplicate key"):
        etcd.txn([], [Delete("/t/a/", prefix=True), Put("/t/a/3", b"z")])


def test_etcd_lease_revoke_deletes_its_keys_at_one_revision(world: World) -> None:
    etcd = world.client()
    lease = etcd.grant(5)
    etcd.put("/t/a", b"1", lease)
    etcd.put("/t/b", b"2", lease)
    last = etcd.put("/t/b", b"3")
    kv = etcd.get("/t/a")
    assert kv is not None
    assert kv.lease == lease
    etcd.revoke(lease)
    assert etcd.get("/t/a") is None
    view = etcd.get_prefix("/t/")
    assert list(view.kvs) == ["/t/b"], "written anew without the lease, it stays"
    assert view.revision == last + 1
    with pytest.raises(LeaseGone):
        etcd.revoke(lease)
    with pytest.raises(LeaseGone):
        etcd.put("/t/a", b"1", lease)
    with pytest.raises(LeaseGone):
        etcd.txn([], [Put("/t/a", b"1", lease), Put("/t/c", b"1")])
    assert etcd.get("/t/c") is None


def test_etcd_lease_expires_unless_kept_alive(world: World) -> None:
    etcd, lost = world.client(), []
    kept = etcd.keep(2, 0.5, lost.append)
    etcd.put("/t/kept", b"1", kept.id)
    loose = etcd.grant(1)  # etcd makes it 2
    etcd.put("/t/loose", b"1", loose)
    began_s = world.now_s()
    world.until(lambda: etcd.get("/t/loose") is None)
    assert 1.5 < world.now_s() - began_s < stretched(4.0)
    assert etcd.get("/t/kept")
    assert not lost
    assert not kept.lost
    kept.close()
    assert etcd.get("/t/kept") is None, "closing revokes"
    assert not lost, "closing is no loss"


def test_a_lease_revoked_by_others_is_reported_lost(world: World) -> None:
    etcd, lost = world.client(), []
    kept = etcd.keep(4, 0.5, lost.append)
    world.client().revoke(kept.id)
    world.until(lambda: kept.lost, 3)
    assert len(lost) == 1


def test_a_lease_is_declared_lost_by_the_own_clock_while_etcd_is_away(world: World) -> None:
    etcd, lost = world.client(), []
    kept = etcd.keep(2, 0.5, lost.append)
    world.stop()
    began_s = world.now_s()
    world.until(lambda: lost, 5)
    assert 1.0 < world.now_s() - began_s <= 2.6
    assert kept.lost
    assert "not renewed" in lost[0]


def test_renewal_must_fit_into_the_lease(world: World) -> None:
    with pytest.raises(ValueError, match="renew_every_s"):
        world.client().keep(2, 1.0, lambda reason: None)


class Seen:
    """What a watch delivered."""

    def __init__(self) -> None:
        self.views: list[View] = []

    def __call__(self, view: View) -> None:
        self.views.append(view)

    def values(self) -> dict[str, bytes]:
        return {key: kv.value for key, kv in self.views[-1].kvs.items()} if self.views else {}


def test_etcd_watch_delivers_the_snapshot_and_then_every_change(world: World) -> None:
    etcd, seen = world.client(), Seen()
    etcd.put("/t/a", b"0")
    watch = etcd.watch("/t/", seen)
    world.until(lambda: seen.values() == {"/t/a": b"0"})
    for i in range(1, 6):
        etcd.put("/t/a", str(i).encode())
        etcd.put("/elsewhere", b"x")
    both = etcd.txn([], [Delete("/t/a"), Put("/t/b", b"1")])
    world.until(lambda: seen.values() == {"/t/b": b"1"})
    shown = [v.kvs["/t/a"].value for v in seen.views if "/t/a" in v.kvs]
    assert shown == sorted(shown)
    assert not [v for v in seen.views if len(v.kvs) != 1], "one transaction, one contents"
    assert seen.views[-1].revision == both.revision
    revisions = [view.revision for view in seen.views]
    assert revisions == sorted(revisions)
    with pytest.raises(TypeError):
        seen.views[-1].kvs["/t/b"] = None  # type: ignore[index]
    watch.close()
    count = len(seen.views)
    etcd.put("/t/c", b"2")
    assert etcd.get("/t/c")
    assert len(seen.views) == count, "closed is closed"


def test_a_watch_sees_leases_expire(world: World) -> None:
    etcd, seen = world.client(), Seen()
    etcd.watch("/t/", seen)
    etcd.put("/t/m", b"1", etcd.grant(2))
    world.until(lambda: "/t/m" in seen.values())
    world.until(lambda: "/t/m" not in seen.values(), 5)


def test_a_watch_outlives_an_outage(world: World) -> None:
    etcd, seen = world.client(), Seen()
    etcd.put("/t/a", b"1")
    etcd.watch("/t/", seen)
    world.until(lambda: seen.views)
    world.stop()
    world.until(lambda: not seen.views[-1].connected, 5)
    assert seen.values() == {"/t/a": b"1"}, "the contents stays"
    assert seen.views[-1].error
    with pytest.raises(EtcdUnavailable):
        etcd.put("/t/a", b"x")
    world.start()
    other = world.client()
    world.until(lambda: seen.views[-1].connected, 5)
    other.put("/t/a", b"2")
    other.put("/t/b", b"3")
    world.until(lambda: seen.values() == {"/t/a": b"2", "/t/b": b"3"}, 5)


def test_a_watch_begun_while_etcd_is_away_says_so_and_comes_alive(world: World) -> None:
    etcd, seen = world.client(), Seen()
    etcd.put("/t/a", b"1")
    world.stop()
    etcd.watch("/t/", seen)
    world.until(lambda: seen.views, 5)
    assert not seen.views[0].connected
    assert not seen.views[0].kvs
    assert seen.views[0].revision == 0
    world.start()
    world.until(lambda: seen.values() == {"/t/a": b"1"}, 5)
    assert seen.views[-1].connected


def test_a_watch_sees_that_etcd_was_wiped(world: World) -> None:
    etcd, seen, lost = world.client(), Seen(), []
    etcd.watch("/t/", seen)
    etcd.keep(20, 0.5, lost.append)
    for i in range(20):
        etcd.put(f"/t/{i}", b"1")
    world.until(lambda: len(seen.values()) == 20)
    world.wipe()
    world.until(lambda: not seen.values(), 10)
    assert seen.views[-1].revision < 20
    etcd.put("/t/new", b"2")
    world.until(lambda: seen.values() == {"/t/new": b"2"}, 5)
    world.until(lambda: lost, 5)


def test_compaction_does_not_hurt_a_watch(world: World) -> None:
    etcd, seen = world.client(), Seen()
    etcd.put("/t/a", b"1")
    etcd.watch("/t/", seen)
    world.until(lambda: seen.views)
    for _ in range(5):
        last = etcd.put("/elsewhere", b"x")
    etcd.compact(last)
    with pytest.raises(EtcdError):
        etcd.compact(last)
    etcd.put("/t/a", b"2")
    world.until(lambda: seen.values() == {"/t/a": b"2"})


def test_a_compaction_past_a_watch_that_was_away(world: World) -> None:
    etcd, seen = world.client(), Seen()
    etcd.put("/t/a", b"1")
    etcd.watch("/t/", seen)
    world.until(lambda: seen.views)
    world.stop()
    world.until(lambda: not seen.views[-1].connected, 5)
    world.start()
    other = world.client()
    other.put("/t/a", b"2")
    other.delete("/t/a")
    other.compact(other.put("/t/b", b"3"))
    world.until(lambda: seen.values() == {"/t/b": b"3"}, 5)


def test_health(world: World) -> None:
    etcd = world.client()
    [member] = etcd.members()
    assert member.ok
    assert member.version.startswith("3.")
    assert etcd.alarms() == ()
    world.stop()
    [member] = etcd.members()
    assert not member.ok
    assert member.error


def test_a_closed_client_says_so(world: World) -> None:
    etcd = world.client()
    etcd.put("/t/a", b"1")
    etcd.close()
    etcd.close()
    with pytest.raises(EtcdError, match="closed"):
        etcd.get("/t/a")


@pytest.mark.parametrize("nbytes", [1_700_000, 3_000_000], ids=["by etcd", "by its gRPC"])
def test_a_request_that_is_too_large_is_refused_for_good(world: World, nbytes: int) -> None:
    etcd = world.client()
    with pytest.raises(EtcdRefused):
        etcd.put("/t/large", bytes(nbytes))
    with pytest.raises(EtcdRefused):
        etcd.txn([Absent("/t/large")], [Put("/t/large", bytes(nbytes))])


def test_keys_below_a_prefix_are_deleted_up_to_one_of_them(world: World) -> None:
    etcd = world.client()
    for key in ("/t/a/1", "/t/a/2", "/t/a/3", "/t/b"):
        etcd.put(key, b"x")
    etcd.txn([], [Delete("/t/a/", prefix=True, before="/t/a/3")])
    assert set(etcd.get_prefix("/t/").kvs) == {"/t/a/3", "/t/b"}


def test_a_prefix_of_several_pages_is_read_whole(world: World) -> None:
    etcd = world.client()
    for first in range(0, 300, 100):
        etcd.txn([], [Put(f"/t/many/{number:04d}", b"x" * 999) for number in range(first, first + 100)])
    etcd.put("/t/other", b"x")
    view = etcd.get_prefix("/t/many/")
    assert list(view.kvs) == [f"/t/many/{number:04d}" for number in range(300)]
    assert set(etcd.get_prefix("/t/many/", before="/t/many/0002").kvs) == {"/t/many/0000", "/t/many/0001"}
