"""etcd in memory: the semantics of the real one, with an explicit clock and no threads.

`FakeServer` holds revisions, leases and history; `FakeClient(server)` has the methods of `elastic.etcd.client.Etcd`.
Nothing happens by itself: `server.advance(now_s)` renews and expires leases up to that instant, `client.pump()` (or
`server.pump()`) delivers to watches what has changed. A simulation delays news by pumping later, and cuts off one
client or stops the server. The contract suite holds it to the real etcd's behaviour.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from elastic.etcd.client import (
    KV,
    Absent,
    Compare,
    Delete,
    EtcdError,
    EtcdUnavailable,
    LeaseGone,
    MemberHealth,
    ModIs,
    Op,
    Present,
    Put,
    TxnResult,
    View,
)
from elastic.etcd.keepers import Newest
from elastic.etcd.types import EtcdRefused

T = TypeVar("T")

MIN_TTL_S = 2.0
"""What a real etcd makes of a shorter lease."""
MOST_NBYTES = 1_572_864
"""Of a request, as etcd has it by default."""

Change = KV | str
"""A key as written, or the name of a deleted one."""


@dataclass
class _Granted:
    ttl_s: float
    expires_s: float
    keys: set[str] = field(default_factory=set)


class FakeServer:
    def __init__(self, now_s: float = 0.0, expiry_delay_s: float = 0.0) -> None:
        """`expiry_delay_s`: how long after its time a lease really goes; 0 to 0.5 s in a real etcd."""
        self.now_s = now_s
        self.up = True
        self.alarms: tuple[str, ...] = ()
        """What it has raised alarm about; it takes writes all the same."""
        self.clients: list[FakeClient] = []
        self.writes = 0
        """Requests that changed something, leases included."""
        self._expiry_delay_s = expiry_delay_s
        self._clusters = itertools.count(1)
        self._lease_ids = itertools.count(1)
        self._begin()

    def _begin(self) -> None:
        self.cluster = next(self._clusters)
        self.revision = 1
        self.compacted = 0
        self.kvs: dict[str, KV] = {}
        self.leases: dict[int, _Granted] = {}
        self._history: list[tuple[int, tuple[Change, ...]]] = []

    # What a test does to it

    def advance(self, now_s: float) -> None:
        """Let time pass: renewals and expiries happen in their order."""
        while (next_s := self._next_s()) is not None and next_s <= now_s:
            self.now_s = max(self.now_s, next_s)
            for client in tuple(self.clients):
                client.tick()
            if self.up:
                for lease in [i for i, g in self.leases.items() if g.expires_s + self._expiry_delay_s <= self.now_s]:
                    self.revoke(lease)
        self.now_s = max(self.now_s, now_s)

    def stop(self) -> None:
        """It answers nobody."""
        self.up = False

    def start(self) -> None:
        """It is back, with its data. As after a real restart or change of leader, every lease starts anew."""
        self.up = True
        for granted in self.leases.values():
            granted.expires_s = self.now_s + granted.ttl_s

    def wipe(self) -> None:
        """It is back without its data, as another cluster."""
        self._begin()
        self.up = True

    def compact(self, revision: int) -> None:
        if not self.compacted < revision <= self.revision:
            raise EtcdError(f"revision {revision} is compacted already, or in the future")
        self.compacted = revision
        self._history = [entry for entry in self._history if entry[0] >= revision]

    def pump(self) -> int:
        """Deliver everything to everybody; returns how many views were delivered."""
        return sum(client.pump() for client in tuple(self.clients))

    # What clients ask of it

    def put_all(self, ops: Sequence[Op]) -> int:
        """Do all operations at one revision; returns the revision afterwards."""
        if sum(len(op.value) for op in ops if isinstance(op, Put)) > MOST_NBYTES:
            raise EtcdRefused("etcdserver: request is too large")
        if missing := [op.lease for op in ops if isinstance(op, Put) and op.lease and op.lease not in self.leases]:
            raise LeaseGone(f"requested lease not found: {missing[0]}")
        revision = self.revision + 1
        changes: list[Change] = []
        for op in self._expanded(ops):
            old = self.kvs.pop(op.key, None)
            if old and old.lease in self.leases:
                self.leases[old.lease].keys.discard(op.key)
            if isinstance(op, Put):
                created = old.create_revision if old else revision
                self.kvs[op.key] = kv = KV(op.key, op.value, created, revision, op.lease)
                if op.lease:
                    self.leases[op.lease].keys.add(op.key)
                changes.append(kv)
            elif old:
                changes.append(op.key)
        if changes:
            self.revision = revision
            self.writes += 1
            self._history.append((revision, tuple(changes)))
        return self.revision

    def _expanded(self, ops: Sequence[Op]) -> list[Op]:
        """With a deletion for each key of a prefix."""
        found: list[Op] = []
        for op in ops:
            if isinstance(op, Delete) and op.prefix:
                below = (key for key in sorted(self.kvs) if key.startswith(op.key))
                found += [Delete(key) for key in below if not op.before or key < op.before]
            else:
                found.append(op)
        return found

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> TxnResult:
        for ops in (then, otherwise):  # a real etcd looks at both, before it compares
            puts = [op.key for op in ops if isinstance(op, Put)]
            ranges = [op.key for op in ops if isinstance(op, Delete) and op.prefix]
            deleted = {op.key for op in ops if isinstance(op, Delete)}
            within = [key for key in puts for each in ranges if key.startswith(each)]
            if len(set(puts)) < len(puts) or deleted & set(puts) or within:
                raise EtcdRefused("duplicate key given in txn request")
        ok = all(self.holds(compare) for compare in compares)
        return TxnResult(ok, self.put_all(then if ok else otherwise))

    def holds(self, compare: Compare) -> bool:
        kv = self.kvs.get(compare.key)
        match compare:
            case Absent():
                return kv is None
            case Present():
                return kv is not None
            case ModIs(_, revision):
                return (kv.mod_revision if kv else 0) == revision

    def grant(self, ttl_s: float) -> tuple[int, float]:
        ttl_s = max(MIN_TTL_S, math.ceil(ttl_s))
        lease = next(self._lease_ids)
        self.leases[lease] = _Granted(ttl_s, self.now_s + ttl_s)
        self.writes += 1
        return lease, ttl_s

    def renew(self, lease: int) -> float:
        if (granted := self.leases.get(lease)) is None:
            raise LeaseGone(f"etcd knows no lease {lease:x}")
        granted.expires_s = self.now_s + granted.ttl_s
        return granted.ttl_s

    def revoke(self, lease: int) -> None:
        if (granted := self.leases.get(lease)) is None:
            raise LeaseGone(f"requested lease not found: {lease}")
        self.put_all([Delete(key) for key in sorted(granted.keys)])
        del self.leases[lease]
        self.writes += 1

    def contents(self, prefix: str, before: str = "") -> dict[str, KV]:
        return {
            key: self.kvs[key] for key in sorted(self.kvs) if key.startswith(prefix) and (not before or key < before)
        }

    def since(self, revision: int) -> list[tuple[int, tuple[Change, ...]]]:
        """Changes after `revision`, which must not be compacted. Revisions have no gaps, so it is an index."""
        return self._history[len(self._history) - (self.revision - revision) :] if revision < self.revision else []

    def _next_s(self) -> float | None:
        times = [kept.due_s for client in self.clients for kept in client.kept]
        if self.up:
            times += [granted.expires_s + self._expiry_delay_s for granted in self.leases.values()]
        return min(times, default=None)


class FakeLease:
    """Like `elastic.etcd.client.Lease`, driven by the server's clock."""

    def __init__(self, client: FakeClient, ttl_s: float, every_s: float, on_lost: Callable[[str], None]) -> None:
        self.renewed_s = client.server.now_s
        self.id, self._ttl_s = client.server.grant(ttl_s)
        if every_s * 2 >= self._ttl_s:
            raise ValueError(f"renew_every_s = {every_s:g} must be below half of the lease's {self._ttl_s:g} s")
        self.lost = False
        self._client = client
        self._rate = client.rate
        self._every_s = every_s / self._rate
        self._on_lost = on_lost
        self._next_s = self.renewed_s + self._every_s

    @property
    def due_s(self) -> float:
        if self._client.paused:
            return math.inf
        return min(self._next_s, self.renewed_s + self._ttl_s / self._rate)

    def close(self, revoke: bool = True) -> None:
        if self in self._client.kept:
            self._client.kept.remove(self)
            if revoke:
                try:
                    self._client.revoke(self.id)
                except EtcdError:
                    pass  # it runs out by itself

    def tick(self) -> None:
        now_s = self._client.server.now_s
        if now_s < self.due_s:
            return None
        if now_s >= self.renewed_s + self._ttl_s / self._rate:
            return self._lose(f"not renewed for {self._ttl_s:g} s")
        self._next_s = now_s + min(self._every_s, 0.25)
        try:
            self._ttl_s = self._client.renew(self.id, 0)
        except LeaseGone as gone:
            return self._lose(str(gone))
        except EtcdUnavailable:
            return None
        self.renewed_s, self._next_s = now_s, now_s + self._every_s
        return None

    def _lose(self, reason: str) -> None:
        self.lost = True
        self._client.kept.remove(self)
        self._on_lost(reason)


class FakeWatch:
    """Like `elastic.etcd.client.Watch`; views come when pumped."""

    def __init__(
        self,
        client: FakeClient,
        prefix: str,
        on_view: Callable[[View], None],
        before: str,
        completed: Callable[[View], View] | None,
    ) -> None:
        self.prefix = prefix
        self._completed = completed
        self._before = before
        self.view: View | None = None
        self.closed = False
        self._client = client
        self._on_view = on_view
        self._cluster = 0

    def nudge(self) -> None:
        pass

    def close(self, wait: bool = True) -> None:
        self.closed = True

    def pump(self, limit: int | None = None) -> int:
        """Deliver at most `limit` views (None: all there are); returns how many."""
        if self.closed or self._client.paused or limit == 0:
            return 0
        server, view = self._client.server, self.view
        if not self._client.in_contact:
            if view and not view.connected:
                return 0
            view = view or View(MappingProxyType({}), 0, connected=True, as_of_s=-math.inf, prefix=self.prefix)
            return self._show(replace(view, connected=False, error="cut off"))
        if view is None or not view.connected or self._cluster != server.cluster or view.revision < server.compacted:
            self._cluster = server.cluster
            return self._show(self._client.get_prefix(self.prefix, self._before))
        shown = 0
        for revision, changes in server.since(view.revision):
            kvs = self._apply(view.kvs, changes)
            if kvs is None:
                continue
            view = replace(view, kvs=MappingProxyType(kvs), revision=revision, as_of_s=server.now_s)
            shown += self._show(view)
            if self.closed or shown == limit:
                return shown
        if server.revision > view.revision:  # nothing of ours: not worth a call
            self.view = replace(view, revision=server.revision, as_of_s=server.now_s)
        return shown

    def _apply(self, kvs: Mapping[str, KV], changes: Sequence[Change]) -> dict[str, KV] | None:
        new: dict[str, KV] | None = None
        for change in changes:
            key = change if isinstance(change, str) else change.key
            if not key.startswith(self.prefix) or (self._before and key >= self._before):
                continue
            new = dict(kvs) if new is None else new
            if isinstance(change, str):
                new.pop(key, None)
            else:
                new[key] = change
        return new

    def _show(self, view: View) -> int:
        try:
            shown = self._completed(view) if self._completed else view
        except EtcdError as error:
            view = shown = replace(view, connected=False, error=str(error))
        self.view = view
        self._on_view(shown)
        return 1


class FakeClient:
    """One process's client. `cut()` and `heal()` its link; `paused` stops it as SIGSTOP would; `crash()` ends it."""

    signatures_ignored = False

    def __init__(self, server: FakeServer, *, call_s: float = 1.5) -> None:
        self.server = server
        self.call_s = call_s
        self.paused = False
        self.rate = 1.0
        """How fast its own clock runs: it keeps its leases by that."""
        self.lose_answers = False
        """Requests arrive and are done, but their answers do not come back."""
        self.kept: list[FakeLease] = []
        self.watches: list[FakeWatch] = []
        self._linked = True
        self._closed = False
        server.clients.append(self)

    # What a test does to it

    @property
    def in_contact(self) -> bool:
        return self._linked and self.server.up and not self.lose_answers

    def cut(self) -> None:
        self._linked = False

    def heal(self) -> None:
        self._linked = True

    def tick(self) -> None:
        if not self.paused:
            for kept in tuple(self.kept):
                kept.tick()

    def pump(self, limit: int | None = None) -> int:
        """Deliver at most `limit` views to each watch; returns how many in all."""
        self.watches = [watch for watch in self.watches if not watch.closed]
        return sum(watch.pump(limit) for watch in tuple(self.watches))

    def crash(self) -> None:
        """The process is gone: nothing is revoked."""
        self.kept.clear()
        self.close()

    # The methods of Etcd

    def get(self, key: str) -> KV | None:
        self._ask()
        return self.server.kvs.get(key)

    def get_prefix(self, prefix: str, before: str = "") -> View:
        self._ask()
        kvs = MappingProxyType(self.server.contents(prefix, before))
        return View(kvs, self.server.revision, connected=True, as_of_s=self.server.now_s, prefix=prefix)

    def newest(self, prefix: str, before: str = "") -> Newest:
        self._ask()
        kvs = self.server.contents(prefix, before)
        last = max(kvs.values(), key=lambda kv: kv.mod_revision, default=None)
        return Newest(
            cluster=self.server.cluster,
            revision=self.server.revision,
            count=len(kvs),
            key=last.key if last else "",
            mod_revision=last.mod_revision if last else 0,
        )

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        return self._do(lambda: self.server.put_all([Put(key, value, lease)]))

    def delete(self, key: str) -> bool:
        there = key in self.server.kvs
        self._do(lambda: self.server.put_all([Delete(key)] if there else []))
        return there

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        return self._do(lambda: self.server.txn(compares, then, otherwise))

    def compact(self, revision: int) -> None:
        self._do(lambda: self.server.compact(revision))

    def grant(self, ttl_s: float) -> int:
        return self._do(lambda: self.server.grant(ttl_s))[0]

    def revoke(self, lease: int) -> None:
        self._do(lambda: self.server.revoke(lease))

    def renew(self, lease: int, within_s: float) -> float:
        return self._do(lambda: self.server.renew(lease))

    def keep(self, ttl_s: float, renew_every_s: float, on_lost: Callable[[str], None]) -> FakeLease:
        self._ask()
        kept = FakeLease(self, ttl_s, renew_every_s, on_lost)
        self.kept.append(kept)
        return kept

    def watch(
        self,
        prefix: str,
        on_view: Callable[[View], None],
        *,
        refresh_s: float = 5.0,
        before: str = "",
        completed: Callable[[View], View] | None = None,
    ) -> FakeWatch:
        watch = FakeWatch(self, prefix, on_view, before, completed)
        self.watches.append(watch)
        return watch

    def members(self, within_s: float = 0.0) -> list[MemberHealth]:
        error = "" if self.in_contact else "cut off"
        return [MemberHealth("fake", "3.5.1" if self.in_contact else "", self.in_contact, error)]

    def anonymous_endpoint(self) -> str | None:
        return ""

    def alarms(self) -> tuple[str, ...]:
        self._ask()
        return self.server.alarms

    def close(self) -> None:
        self._closed = True
        self.kept.clear()
        for watch in self.watches:
            watch.close()
        if self in self.server.clients:
            self.server.clients.remove(self)

    def _ask(self) -> None:
        if self._closed:
            raise EtcdError("this etcd client is closed")
        if not self.in_contact:
            raise EtcdUnavailable("cut off", maybe_done=self.lose_answers)

    def _do(self, act: Callable[[], T]) -> T:
        if self.lose_answers and self._linked and self.server.up and not self._closed:
            act()
        self._ask()
        return act()
