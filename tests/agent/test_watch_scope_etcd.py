"""An agent's watch: all of its job, or its head."""

from __future__ import annotations

import pytest
from support.fake_etcd import FakeClient, FakeServer

from elastic.agent.etcd.watch_scope import WatchScope
from elastic.contract.keys import ClusterKeys
from elastic.etcd.client import EtcdUnavailable, Put, View

KEYS = ClusterKeys("c").job("job")


class Watcher:
    def __init__(self, members: int = 0) -> None:
        self.server = FakeServer()
        self.server.put_all([Put(KEYS.spec, b"spec"), Put(KEYS.progress, b"progress")])
        self.server.put_all([Put(KEYS.member(f"n{i}"), b"member") for i in range(members)])
        self.client = FakeClient(self.server)
        self.sight = WatchScope(self.client, KEYS, crowd=3)  # type: ignore[arg-type]
        self.seen: list[View] = []

    def look(self) -> set[str]:
        """The keys of the newest job_view, without what all keys of the job begin with."""
        self.server.pump()
        view = self.seen[-1]
        assert view.prefix == self.sight.prefix
        return {key.removeprefix(KEYS.root) for key in view.kvs}


@pytest.mark.parametrize(("members", "sees"), [(3, {"head/spec", "progress"}), (4, {"head/spec"})])
def test_watch_scope_of_a_large_job_starts_with_head_only(members: int, sees: set[str]) -> None:
    watcher = Watcher(members)
    watcher.sight.start(watcher.seen.append, 0.0)
    assert {key for key in watcher.look() if not key.startswith("members/")} == sees
    assert any(key.startswith("members/") for key in watcher.look()) is watcher.sight.complete


def test_watch_scope_without_etcd_contact_starts_with_all_keys() -> None:
    watcher = Watcher(4)
    watcher.client.cut()
    watcher.sight.start(watcher.seen.append, 0.0)
    assert watcher.sight.complete


def test_watch_scope_switches_and_tracks_time_since_narrowing() -> None:
    watcher = Watcher(1)
    watcher.sight.start(watcher.seen.append, 0.0)
    assert watcher.sight.narrow_for_s(5.0) is None
    before = watcher.client.watches
    watcher.sight.choose(True, 6.0)
    assert watcher.client.watches is before, "nothing to change"
    watcher.sight.choose(False, 7.0)
    assert watcher.look() == {"head/spec"}
    assert watcher.sight.narrow_for_s(9.0) == 2.0
    watcher.sight.choose(True, 10.0)
    assert watcher.look() == {"head/spec", "progress", "members/n0"}
    assert watcher.sight.narrow_for_s(11.0) is None
    watcher.sight.close()
    count = len(watcher.seen)
    watcher.server.put_all([Put(KEYS.spec, b"another")])
    watcher.server.pump()
    assert len(watcher.seen) == count


def test_watch_scope_has_no_accounts_of_ranks() -> None:
    """Every agent writes one in ten seconds: in a job of 64 nodes no agent is to be woken by the others' accounts."""
    watcher = Watcher(2)
    watcher.sight.start(watcher.seen.append, 0.0)
    job = vars(KEYS) | {"member": KEYS.member("n0"), "broken": KEYS.broken(1), "incident": KEYS.account(1, "n0", "x")}
    job.pop("ranks"), job.pop("root")
    assert all(key < KEYS.ranks for key in job.values()), "an agent's watch ends where the accounts begin"
    before = watcher.look()
    count = len(watcher.seen)
    watcher.server.put_all([Put(KEYS.ranks_of("n0"), b"account")])
    assert watcher.look() == before
    assert len(watcher.seen) == count
    watcher.server.put_all([Put(KEYS.progress, b"another")])
    assert watcher.look() == before
    assert len(watcher.seen) == count + 1


def test_a_scope_that_cannot_be_watched_now_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a limit of threads: the loop of the agent goes on with the watch that it has."""
    watcher = Watcher(1)
    watcher.sight.start(watcher.seen.append, 0.0)

    def fails(*args: object, **options: object) -> None:
        raise EtcdUnavailable("can't start new thread", maybe_done=False)

    with monkeypatch.context() as starved:
        starved.setattr(watcher.client, "watch", fails)
        watcher.sight.choose(False, 1.0)
    assert (watcher.sight.complete, watcher.look()) == (True, {"head/spec", "members/n0", "progress"})
    watcher.sight.choose(False, 2.0)
    assert (watcher.sight.complete, watcher.look()) == (False, {"head/spec"})


def test_the_base_is_read_when_it_is_asked_for_and_not_again() -> None:
    watcher = Watcher(4)
    watcher.server.put_all([Put(KEYS.base, b"base")])
    watcher.sight.start(watcher.seen.append, 0.0)
    assert watcher.look() == {"head/spec"}
    watcher.sight.read_base()
    watcher.server.put_all([Put(KEYS.spec, b"another")])
    assert watcher.look() == {"head/spec", "base"}
    watcher.server.put_all([Put(KEYS.base, b"newer"), Put(KEYS.spec, b"a third")])
    watcher.look()
    assert watcher.seen[-1].kvs[KEYS.base].value == b"base"
    watcher.sight.choose(True, 1.0)
    watcher.look()
    assert watcher.seen[-1].kvs[KEYS.base].value == b"newer", "all of the job is watched"


def test_a_base_that_cannot_be_read_is_a_loss_of_contact_and_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more often than once a second, whatever is there."""
    watcher, now = Watcher(4), [100.0]
    monkeypatch.setattr(watcher.sight, "_clock_s", lambda: now[0])
    watcher.server.put_all([Put(KEYS.base, b"base")])
    watcher.sight.start(watcher.seen.append, 0.0)
    watcher.look()
    for key in (b"1", b"2"):
        watcher.sight.read_base()
        watcher.server.put_all([Put(KEYS.spec, key)])
        watcher.look()
    assert not watcher.seen[-1].connected
    assert "of another generation" in watcher.seen[-1].error
    now[0] += 1.0
    watcher.look()
    assert watcher.seen[-1].connected
    assert watcher.look() == {"head/spec", "base"}
