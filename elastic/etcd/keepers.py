"""The two background activities on etcd: lease renewal, and a watch that keeps a view up to date.

Both are independent of gRPC and use etcd through the few methods of `Source`.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

import msgspec

from elastic.contract.structs import replace

from .signing import Signer
from .types import KV, EtcdError, EtcdUnavailable, LeaseGone, Refusal, View


class Compacted(EtcdError):
    """The history that a watch needs has been compacted."""


class WatchBatch(msgspec.Struct, frozen=True):
    """One batch of a watch stream: written keys, (key, revision) of deletions. Empty: the watch was created."""

    changes: tuple[KV | tuple[str, int], ...]


class Newest(msgspec.Struct, frozen=True):
    """The most recently written key of a prefix, and the number of its keys."""

    cluster: int
    revision: int
    count: int
    key: str
    mod_revision: int


class Stream(Protocol):
    def __iter__(self) -> Iterator[WatchBatch]: ...
    def cancel(self) -> None: ...


class Source(Protocol):
    call_s: float

    @property
    def signer(self) -> Signer | None: ...

    def get_prefix(self, prefix: str, before: str = "") -> View: ...
    def verified(self, kvs: Iterable[KV]) -> tuple[dict[str, KV], dict[str, Refusal]]: ...
    def newest(self, prefix: str, before: str = "") -> Newest: ...
    def revision(self, key: str) -> int: ...
    def events(self, prefix: str, start: int, before: str = "") -> Stream: ...
    def renew(self, lease: int, within_s: float) -> float: ...
    def revoke(self, lease: int) -> None: ...


class Lease:
    """A lease under renewal. `id` is for Put; `lost` is True once the lease must be assumed expired."""

    def __init__(
        self,
        source: Source,
        lease: int,
        ttl_s: float,
        renew_every_s: float,
        on_lost: Callable[[str], None],
        sent_s: float,
    ) -> None:
        if renew_every_s * 2 >= ttl_s:
            raise ValueError(f"renew_every_s = {renew_every_s:g} must be below half of the lease's {ttl_s:g} s")
        self.id = lease
        self.lost = False
        self.renewed_s = sent_s
        """Monotonic time just before the last successful renewal was sent."""
        self._source = source
        self._ttl_s = ttl_s
        self._renew_every_s = renew_every_s
        self._on_lost = on_lost
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"etcd-lease-{lease:x}", daemon=True)

    def start(self) -> None:
        """Raises EtcdUnavailable; the lease then expires by itself."""
        try:
            start_thread(self._thread)
        except EtcdUnavailable:
            self.lost = True
            raise

    def close(self, revoke: bool = True) -> None:
        """Stop renewing and, with `revoke`, end the lease at once. Never raises; may be called twice."""
        first = not self._closing.is_set()
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(self._source.call_s + 1)
        if first and revoke and not self.lost:
            with suppress(EtcdError):  # it expires by itself
                self._source.revoke(self.id)

    def _run(self) -> None:
        pause_s = self._renew_every_s
        error = ""
        while not self._closing.wait(min(pause_s, max(0.0, self._left_s()))):
            if self._left_s() <= 0:
                return self._lose(f"not renewed for {self._ttl_s:g} s: {error or 'this process was stopped'}")
            sent_s = time.monotonic()
            try:
                self._ttl_s = self._source.renew(self.id, min(self._source.call_s, self._left_s()))
            except LeaseGone as gone:
                return self._lose(str(gone))
            except EtcdError as failure:
                error = str(failure)
                pause_s = min(self._renew_every_s, 0.25)
            else:
                self.renewed_s, error = sent_s, ""
                pause_s = self._renew_every_s
        return None

    def _left_s(self) -> float:
        return self.renewed_s + self._ttl_s - time.monotonic()

    def _lose(self, reason: str) -> None:
        if not self._closing.is_set():
            self.lost = True
            self._on_lost(reason)


class Watch:
    """A watch of one prefix; see `Etcd.watch`. `view` is the newest view, None before the first."""

    def __init__(
        self,
        source: Source,
        prefix: str,
        on_view: Callable[[View], None],
        refresh_s: float,
        before: str,
        completed: Callable[[View], View] | None = None,
    ) -> None:
        self.prefix = prefix
        self._completed = completed
        self._before = before
        self.view: View | None = None
        self._source = source
        self._on_view = on_view
        self._refresh_s = refresh_s
        self._cluster = 0
        self._closing = threading.Event()
        self._inbox: queue.SimpleQueue[WatchBatch | EtcdError | None] = queue.SimpleQueue()
        """From the stream's reader; None: check whether etcd still answers."""
        self._thread = threading.Thread(target=self._run, name=f"etcd-watch-{prefix}", daemon=True)

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def start(self) -> None:
        """Raises EtcdUnavailable; the watch is then closed."""
        try:
            start_thread(self._thread)
        except EtcdUnavailable:
            self._closing.set()
            raise

    def nudge(self) -> None:
        """Check the contact now rather than at the next refresh: another call got no answer from etcd."""
        self._inbox.put(None)

    def close(self, wait: bool = True) -> None:
        """End the watch; afterwards `on_view` is not called any more, without `wait` once more at most. May be called
        twice, and from `on_view`."""
        self._closing.set()
        self.nudge()
        if wait and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(self._source.call_s + 1)

    def _run(self) -> None:
        fruitless = 0
        while not self._closing.is_set():
            try:
                self._catch_up()
            except EtcdError as error:
                needs = f": the user needs a role with readwrite below {self.prefix} (docs/security.md)"
                self._lost(f"{error}{needs if 'permission denied' in str(error) else ''}")
            else:
                began_s = time.monotonic()
                with suppress(EtcdError):  # not yet a loss of contact: _catch_up decides that
                    self._follow()
                if time.monotonic() - began_s > self._refresh_s:
                    fruitless = 0  # the stream was open for a while
            fruitless = min(fruitless + 1, 6)
            self._closing.wait(min(1.0, 0.02 * 2**fruitless) * random.uniform(0.5, 1.0))

    def _catch_up(self) -> None:
        """Bring the view up to date: keep it if etcd shows that nothing changed, else read the prefix again."""
        asked_s = time.monotonic()
        newest = self._source.newest(self.prefix, self._before)
        if self.view is None or not self._unchanged(self.view, newest):
            self._cluster = newest.cluster
            read = self._source.get_prefix(self.prefix, self._before)
            if self.view is not None:
                self._deleted(self.view.kvs.keys() - read.kvs.keys() - read.refused.keys())
                kept = {
                    k: self.view.kvs[k] for k, r in read.refused.items() if r.in_place_of_newer and k in self.view.kvs
                }
                read = replace(read, kvs=MappingProxyType({**read.kvs, **kept})) if kept else read
            return self._show(read)
        return self._show(replace(self.view, revision=newest.revision, connected=True, as_of_s=asked_s, error=""))

    def _unchanged(self, view: View, newest: Newest) -> bool:
        kvs = {**view.kvs, **{key: refusal.kv for key, refusal in view.refused.items()}} if view.refused else view.kvs
        newest_kv = kvs.get(newest.key)
        return (
            newest.cluster == self._cluster
            and newest.revision >= view.revision
            and newest.count == len(kvs)
            and newest.mod_revision == max((kv.mod_revision for kv in kvs.values()), default=0)
            and newest.mod_revision == (newest_kv.mod_revision if newest_kv else 0)
        )

    def _follow(self) -> None:
        """Read the stream until it breaks (raises EtcdError) or the watch is closed."""
        while not self._inbox.empty():  # left over from the previous stream
            self._inbox.get_nowait()
        assert self.view is not None
        stream = self._source.events(self.prefix, self.view.revision + 1, self._before)
        reader = threading.Thread(target=self._read, args=(stream,), name=f"{self._thread.name}-read", daemon=True)
        stands = False
        try:
            start_thread(reader)
            wait_s = self._source.call_s
            while not self._closing.is_set():
                try:
                    item = self._inbox.get(timeout=wait_s)
                except queue.Empty:
                    if not stands:
                        raise EtcdUnavailable("etcd did not open the watch", maybe_done=False) from None
                    item = None
                if self._closing.is_set():
                    return
                if isinstance(item, WatchBatch):
                    stands, wait_s = True, self._refresh_s
                    changes, item, more = self._backlog(item)  # a slow consumer gets one merged view
                    if changes:
                        self._apply(changes)
                    if not more:
                        continue
                if isinstance(item, EtcdError):
                    raise item
                self._confirm()
        finally:
            stream.cancel()
            if reader.is_alive():
                reader.join()  # the inbox is unbounded, and the cancelled stream ends

    def _read(self, stream: Iterable[WatchBatch]) -> None:
        try:
            for batch in stream:
                self._inbox.put(batch)
            self._inbox.put(EtcdUnavailable("etcd ended the watch", maybe_done=False))
        except EtcdError as error:
            self._inbox.put(error)

    def _confirm(self) -> None:
        """Check that etcd answers and that its revision has not gone back."""
        assert self.view is not None
        asked_s = time.monotonic()
        if (revision := self._source.revision(self.prefix)) < self.view.revision:
            raise EtcdUnavailable(f"etcd went back from revision {self.view.revision} to {revision}: wiped?")
        self._show(replace(self.view, connected=True, as_of_s=asked_s, error=""))

    def _backlog(self, first: WatchBatch) -> tuple[list[KV | tuple[str, int]], EtcdError | None, bool]:
        """All changes received already; the item behind them (None: `nudge`); whether there was such an item."""
        changes = list(first.changes)
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return changes, None, False
            if not isinstance(item, WatchBatch):
                return changes, item, True
            changes.extend(item.changes)

    def _apply(self, changes: Iterable[KV | tuple[str, int]]) -> None:
        assert self.view is not None
        kvs, revision = dict(self.view.kvs), self.view.revision
        # What was refused is checked again: the spec that says which submission is the current one may come after it.
        written = {key: refusal.kv for key, refusal in self.view.refused.items()}
        for change in changes:
            if isinstance(change, KV):
                written[change.key], revision = change, max(revision, change.mod_revision)
            else:
                kvs.pop(change[0], None)
                written.pop(change[0], None)
                revision = max(revision, change[1])
                self._deleted(change[:1])
        accepted, refused = self._source.verified(written.values())
        kvs.update(accepted)
        for key, refusal in refused.items():
            if not refusal.in_place_of_newer:
                kvs.pop(key, None)
        as_of_s = time.monotonic()
        view = View(MappingProxyType(kvs), revision, connected=True, as_of_s=as_of_s, prefix=self.prefix)
        self._show(replace(view, refused=MappingProxyType(refused)))

    def _deleted(self, keys: Iterable[str]) -> None:
        if self._source.signer is not None:
            self._source.signer.deleted(keys)

    def _lost(self, error: str) -> None:
        """Publish the loss once, and again when the reason changes; before the first contact with an empty view of
        revision 0."""
        nothing = View(MappingProxyType({}), 0, connected=True, as_of_s=float("-inf"), prefix=self.prefix)
        view = self.view or nothing
        if view.connected or error != view.error:
            self._show(replace(view, connected=False, error=error))

    def _show(self, view: View) -> None:
        """Raises EtcdError if a view of a standing contact cannot be completed: then it is not shown."""
        self.view = view
        if not self._closing.is_set():
            self._on_view(self._completed(view) if self._completed else view)


def start_thread(thread: threading.Thread) -> None:
    """Start it. Raises EtcdUnavailable at a limit of threads: that passes, and must end no agent and no daemon."""
    try:
        thread.start()
    except RuntimeError as error:
        raise EtcdUnavailable(str(error), maybe_done=False) from None
