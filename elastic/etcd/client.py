"""The etcd v3 client, used for all access to etcd: call deadlines, leases and watches that survive outages of etcd.

Every call ends within `call_s`. Reads, and writes that certainly did not reach etcd, are retried within that time; a
write that was sent and not answered is not, since it may have been applied (see EtcdUnavailable). The client uses one
connection to one endpoint at a time, and moves to the next endpoint when that one does not answer, has no leader or
refuses.

gRPC is imported by the first call. A process that has made a call must not fork: use subprocess without preexec_fn, and
`scrub_environment` for the child's environment.
"""

from __future__ import annotations

import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from elastic.contract.agent_files import EtcdAccess as EtcdAccess
from elastic.contract.structs import replace

from . import pages, protobuf
from .keepers import Lease as Lease
from .keepers import Newest, start_thread
from .keepers import Watch as Watch
from .signing import KEY_BYTES as KEY_BYTES
from .signing import ClusterSigner as ClusterSigner
from .signing import JobSigner as JobSigner
from .signing import Signer, stripped
from .signing import key_id as key_id
from .types import KV as KV
from .types import Absent as Absent
from .types import Compare as Compare
from .types import Delete as Delete
from .types import EtcdDenied as EtcdDenied
from .types import EtcdError as EtcdError
from .types import EtcdForged as EtcdForged
from .types import EtcdFull as EtcdFull
from .types import EtcdUnavailable as EtcdUnavailable
from .types import LeaseGone as LeaseGone
from .types import MemberHealth as MemberHealth
from .types import ModIs as ModIs
from .types import Op as Op
from .types import Present as Present
from .types import Put as Put
from .types import Refusal as Refusal
from .types import TxnResult as TxnResult
from .types import View as View

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it logs every lost connection to stderr

LOOK_EVERY_S = 15.0
"""Interval between looks at the TLS files of a connection that is in use."""
OLD_CALLS_S = 2.0
"""How long calls that began on the old connection may still take."""


def scrub_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` for a child process, without our gRPC and protobuf settings, which would leak into a user's script."""
    return {name: value for name, value in env.items() if not name.startswith(("GRPC_", "PROTOCOL_BUFFERS_"))}


class Etcd:
    """Thread-safe etcd client. The first call connects, not the constructor."""

    def __init__(self, access: EtcdAccess, *, call_s: float = 1.5, signer: Signer | None = None) -> None:
        """`call_s`: every call returns or raises within about this many seconds. `signer`: signs the records that are
        written, and checks those that are read; without it, signatures are ignored."""
        if not access.endpoints:
            raise ValueError("etcd endpoints = (): give at least one host:port")
        self.access = access
        self.call_s = call_s
        self.signer = signer
        self.signatures_ignored = False
        """Whether a signed record was read without a key to check it."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connections: dict[str, Any] = {}  # endpoint -> wire.Connection, whose module imports gRPC
        self._token: Any = None
        self._asking: dict[str, Any] = {}
        """Connections used by `members`, one per endpoint."""
        self._look_s = 0.0
        """When the TLS files of the connection in use are looked at again."""
        self._renewing = threading.Lock()
        self._next = random.randrange(len(access.endpoints))  # spread a thousand nodes over the members
        self._watches: list[Watch] = []
        self._leases: list[Lease] = []
        self.on_call: Callable[[str, float, str], None] = lambda method, seconds, error: None
        """Called after each call with its gRPC method, its duration, and '' or the name of its error."""

    # Keys

    def get(self, key: str) -> KV | None:
        """The key, or None if it does not exist. Raises EtcdForged for a record without a valid signature."""
        answer = self._call("KV.Range", lambda pb: pb.RangeRequest(key=key.encode()), repeat=True)
        if not answer.kvs:
            return None
        kv = protobuf.kv(answer.kvs[0])
        return self.signer.opened(kv) if self.signer else self._stripped(kv)

    def get_prefix(self, prefix: str, before: str = "") -> View:
        """All keys that begin with `prefix`, at one revision; with `before`, those that sort before it. See `pages`."""
        asked_s = time.monotonic()
        ask = lambda fields: self._call("KV.Range", lambda pb: pb.RangeRequest(**fields), repeat=True)  # noqa: E731
        found, revision = pages.read(ask, prefix, before)
        kvs, refused = self.verified(found)
        view = View(MappingProxyType(kvs), revision, connected=True, as_of_s=asked_s, prefix=prefix)
        return replace(view, refused=refused) if refused else view

    def verified(self, kvs: Iterable[KV]) -> tuple[dict[str, KV], dict[str, Refusal]]:
        """Keys as they are in etcd, as (those that are accepted, without their signatures; those that are refused)."""
        if self.signer is not None:
            return self.signer.verified(kvs)
        return {kv.key: self._stripped(kv) for kv in kvs}, {}

    def _stripped(self, kv: KV) -> KV:
        payload, signed = stripped(kv.value)
        if not signed:
            return kv
        self.signatures_ignored = True
        return replace(kv, value=payload)

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write one key; returns its mod revision. Raises LeaseGone, and EtcdUnavailable if the outcome is unknown."""
        (put,) = self._sealed([Put(key, value, lease)])
        assert isinstance(put, Put)
        answer = self._call("KV.Put", lambda pb: pb.PutRequest(key=key.encode(), value=put.value, lease=lease))
        return int(answer.header.revision)

    def delete(self, key: str) -> bool:
        """Delete one key; returns whether it existed."""
        return bool(self._call("KV.DeleteRange", lambda pb: pb.DeleteRangeRequest(key=key.encode())).deleted)

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> TxnResult:
        """Apply `then` if all compares hold, else `otherwise`; at most 128 operations each.

        Raises EtcdUnavailable if no answer arrived: the outcome is then unknown (unless `maybe_done` is False), and the
        caller has to learn it from its watch or by reading.
        """
        then, otherwise = self._sealed(then), self._sealed(otherwise)

        def request(pb: Any) -> Any:
            return pb.TxnRequest(
                compare=[protobuf.compare(pb, c) for c in compares],
                success=[protobuf.op(pb, op) for op in then],
                failure=[protobuf.op(pb, op) for op in otherwise],
            )

        answer = self._call("KV.Txn", request)
        return TxnResult(bool(answer.succeeded), int(answer.header.revision))

    def _sealed(self, ops: Sequence[Op]) -> Sequence[Op]:
        return self.signer.sealed(ops) if self.signer else ops

    def compact(self, revision: int) -> None:
        """Discard the history before `revision`. Raises EtcdError if that is compacted already, or in the future."""
        self._call("KV.Compact", lambda pb: pb.CompactionRequest(revision=revision))

    # Leases

    def grant(self, ttl_s: float) -> int:
        """Grant a lease that expires `ttl_s` after its last renewal (whole seconds, rounded up; etcd's minimum is about
        2 s)."""
        return self._grant(ttl_s)[0]

    def revoke(self, lease: int) -> None:
        """Revoke a lease, which deletes its keys. Raises LeaseGone if there is no such lease."""
        self._call("Lease.LeaseRevoke", lambda pb: pb.LeaseRevokeRequest(ID=lease))

    def keep(self, ttl_s: float, renew_every_s: float, on_lost: Callable[[str], None]) -> Lease:
        """Grant a lease and renew it in a thread of its own until `Lease.close()`.

        When it is lost, `on_lost(reason)` is called once, in that thread. It is lost when etcd says so, or when `ttl_s`
        have passed on this host's monotonic clock since the last successful renewal was *sent*: never later than etcd
        can delete its keys.
        """
        sent_s = time.monotonic()
        lease, granted_s = self._grant(ttl_s)
        kept = Lease(self, lease, granted_s, renew_every_s, on_lost, sent_s)
        with self._lock:
            self._leases = [*(old for old in self._leases if not old.lost), kept]
        kept.start()
        return kept

    def renew(self, lease: int, within_s: float) -> float:
        """Renew once, in one attempt of at most `within_s`; returns the seconds granted. Raises LeaseGone."""
        answer = self._try("Lease.LeaseKeepAlive", lambda pb: pb.LeaseKeepAliveRequest(ID=lease), within_s)
        if answer.TTL <= 0:
            raise LeaseGone(f"etcd knows no lease {lease:x}")
        return float(answer.TTL)

    def _grant(self, ttl_s: float) -> tuple[int, float]:
        # Safe to repeat: a grant whose answer was lost leaves a lease without keys, which expires by itself.
        ttl = math.ceil(ttl_s)
        answer = self._call("Lease.LeaseGrant", lambda pb: pb.LeaseGrantRequest(TTL=ttl), repeat=True)
        return int(answer.ID), float(answer.TTL)

    # Watches

    def watch(
        self,
        prefix: str,
        on_view: Callable[[View], None],
        *,
        refresh_s: float = 5.0,
        before: str = "",
        completed: Callable[[View], View] | None = None,
    ) -> Watch:
        """Call `on_view`, in a thread of its own, with a view of `prefix` now and after changes. `before`: only the
        keys of the prefix that sort before this one. `completed`: adds to a view what `on_view` needs beside it; it may
        raise EtcdError, and the contact is then lost until it does not.

        Changes that arrive faster than `on_view` handles them are merged into the newest view. It is also called every
        `refresh_s`, after etcd confirmed the contact, and with `connected=False` when contact is lost; the view then
        keeps its contents (revision 0 and empty if there was no contact yet). After an outage, a compaction or a wiped
        etcd the keys are read again, so keys that were created and deleted in between are not seen. `on_view` must be
        quick and must not raise.
        """
        watch = Watch(self, prefix, on_view, refresh_s, before, completed)
        with self._lock:
            self._watches = [*(old for old in self._watches if not old.closed), watch]
        watch.start()
        return watch

    def newest(self, prefix: str, before: str = "") -> Newest:
        """The most recently written key below `prefix` and the number of keys: enough to detect any change. `before`:
        see `get_prefix`."""

        def request(pb: Any) -> Any:
            by_mod = {"sort_order": pb.RangeRequest.DESCEND, "sort_target": pb.RangeRequest.MOD}
            return pb.RangeRequest(**protobuf.span(prefix, before), limit=1, keys_only=True, **by_mod)

        answer = self._call("KV.Range", request, repeat=True)
        kv = protobuf.kv(answer.kvs[0]) if answer.kvs else KV("", b"", 0, 0, 0)
        return Newest(answer.header.cluster_id, answer.header.revision, answer.count, kv.key, kv.mod_revision)

    def revision(self, key: str) -> int:
        """etcd's current revision, confirmed by a quorum. `key`: any key that the user may read."""
        return int(self._call("KV.Range", lambda pb: pb.RangeRequest(key=key.encode()), repeat=True).header.revision)

    def events(self, prefix: str, start: int, before: str = "") -> Any:
        """Open a stream of the changes from revision `start` on: an iterable of batches, with `cancel()`. `before`: see
        `get_prefix`."""
        return self._connected().watch(protobuf.span(prefix, before), start, self.call_s)

    # Health

    def members(self, within_s: float = 0.0) -> list[MemberHealth]:
        """Query each endpoint separately, for up to `within_s` seconds each (0: `call_s`).

        An endpoint that does not answer is listed with its error; nothing is raised for it.
        """
        from .wire import Connection, why_no_quorum

        healths = []
        for endpoint in self.access.endpoints:
            with self._lock:
                connection = self._asking.pop(endpoint, None) or Connection(endpoint, self.access)
            try:
                ask = lambda pb: pb.StatusRequest()  # noqa: E731
                status = connection.call("Maintenance.Status", ask, within_s or self.call_s, login=False)
                error = "" if status.leader else "has no leader"
                healths.append(MemberHealth(endpoint, status.version, bool(status.leader), error, status.dbSize / 1e6))
            except EtcdUnavailable as failure:
                healths.append(MemberHealth(endpoint, "", False, str(failure)))
            except EtcdError:  # newer members tell their status to etcd's root only
                error = why_no_quorum(connection, within_s or self.call_s)
                healths.append(MemberHealth(endpoint, "", not error, error))
            with self._lock:  # reused: a TLS handshake per query would be most of the cost
                keep = not (connection.silent or self._closed.is_set() or endpoint in self._asking)
                if keep:
                    self._asking[endpoint] = connection
            if not keep:
                connection.close()
        return healths

    def anonymous_endpoint(self) -> str | None:
        """An endpoint that answers a request without password and certificate, so that anyone may write to etcd there;
        '' if there is none; None if no endpoint answered at all.

        Unix sockets are not queried: access to them is controlled by their directory's permissions.
        """
        from .wire import Connection

        anonymous = EtcdAccess(endpoints=self.access.endpoints, ca_file=self.access.ca_file)
        answered = False
        for endpoint in self.access.endpoints:
            if endpoint.startswith("unix:"):
                answered = True
                continue
            connection = Connection(endpoint, anonymous)
            try:
                connection.call("KV.Range", lambda pb: pb.RangeRequest(key=b"/", limit=1, keys_only=True), self.call_s)
                return endpoint
            except EtcdUnavailable as error:  # a handshake refused for lack of a certificate is an answer
                answered |= not connection.silent and "refused" not in str(error).lower()
            except EtcdError:
                answered = True
            finally:
                connection.close()
        return "" if answered else None

    def alarms(self) -> tuple[str, ...]:
        """Alarms raised by etcd: 'NOSPACE' (no writes accepted), 'CORRUPT'. A local read of one member."""
        errors = self._call("Maintenance.Status", lambda pb: pb.StatusRequest(), repeat=True).errors
        return tuple(sorted({found[1] for error in errors if (found := re.search(r"alarm:(\w+)", error))}))

    # Calls

    def _call(self, method: str, request: Callable[[Any], Any], *, repeat: bool = False) -> Any:
        """`repeat`: whether the request may be sent again although it may have been applied."""
        import tenacity

        end_s = time.monotonic() + self.call_s
        share_s = self.call_s
        if repeat and len(self.access.endpoints) > 1:
            share_s = max(0.3, self.call_s / min(3, len(self.access.endpoints)))  # leave time for another member

        def again(error: BaseException) -> bool:
            return isinstance(error, EtcdUnavailable) and (repeat or not error.maybe_done)

        def once() -> Any:
            left_s = max(0.05, end_s - time.monotonic())
            return self._try(method, request, min(left_s, share_s))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(again),
            stop=lambda _: self._closed.is_set() or time.monotonic() >= end_s,
            wait=lambda _: max(0.0, min(random.uniform(0.03, 0.15), end_s - time.monotonic())),
            sleep=tenacity.sleep_using_event(self._closed),
            reraise=True,
        )
        began_s, failed = time.monotonic(), ""
        try:
            return retrying(once)
        except EtcdError as error:
            failed = type(error).__name__
            raise
        finally:
            self.on_call(method, time.monotonic() - began_s, failed)

    def _try(self, method: str, request: Callable[[Any], Any], within_s: float) -> Any:
        connection = self._connected()
        try:
            return connection.call(method, request, within_s)
        except EtcdUnavailable:
            self._leave(connection)
            raise

    def _connected(self) -> Any:
        from .wire import Connection, Token

        with self._lock:
            if self._closed.is_set():
                raise EtcdError("this etcd client is closed")
            endpoints = self.access.endpoints
            current = self._connections.get(endpoints[self._next % len(endpoints)])
            if current is None or not current.open:  # another one may have finished opening
                for number, endpoint in enumerate(endpoints):
                    if endpoint in self._connections and self._connections[endpoint].open:
                        self._next = number
            endpoint = endpoints[self._next % len(endpoints)]
            if endpoint not in self._connections:
                self._token = self._token or Token()
                self._connections[endpoint] = Connection(endpoint, self.access, self._token)
            found = self._connections[endpoint]
        self._look_at_files(endpoint, found)
        return found

    def _look_at_files(self, endpoint: str, connection: Any) -> None:
        """Take renewed certificates into use: a connection keeps those it was opened with, even once they have expired.
        Returns at once."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_EVERY_S
        if connection.outdated and self._renewing.acquire(blocking=False):
            name, work = "etcd-certificates", partial(self._renew, endpoint, connection)
            try:
                start_thread(threading.Thread(target=work, name=name, daemon=True))
            except EtcdUnavailable:  # at the next look
                self._renewing.release()

    def _renew(self, endpoint: str, old: Any) -> None:
        """The new connection must have been answered before the old one is closed: files that do not match (yet), or
        that etcd refuses, change nothing."""
        from .wire import Connection

        unused: Any = None
        try:
            new = unused = Connection(endpoint, self.access, self._token)
            new.probe()
            with self._lock:
                if not self._closed.is_set() and self._connections.get(endpoint) is old:
                    self._connections[endpoint], unused = new, old
            threading.Event().wait(OLD_CALLS_S if unused is old else 0)
        except EtcdError:
            pass  # the files may be half written: at the next look
        finally:
            self._renewing.release()
            if unused is not None:
                unused.close()

    def _leave(self, connection: Any) -> None:
        """`connection` failed a call: select the next endpoint, and make the watches check their contact.

        A connection that is still opening continues to do so, and is used once it is open.
        """
        close = False
        with self._lock:
            endpoints = self.access.endpoints
            endpoint = next((e for e, known in self._connections.items() if known is connection), None)
            # With one endpoint a refused connection is best left to gRPC, which reconnects by itself.
            if endpoint is not None and (connection.silent or connection.outdated or len(endpoints) > 1):
                if not connection.opening:
                    del self._connections[endpoint]
                    close = True
                if endpoint == endpoints[self._next % len(endpoints)]:
                    self._next += 1
            watches = self._watches
        if close:
            connection.close()
        for watch in watches:
            watch.nudge()

    def close(self) -> None:
        """End watches, renewals (leases are not revoked) and connections. May be called twice."""
        with self._lock:
            self._closed.set()
            connections = [*self._connections.values(), *self._asking.values()]
            self._connections, self._asking = {}, {}
            watches, self._watches = self._watches, []
            leases, self._leases = self._leases, []
        for connection in connections:
            connection.close()  # ends the calls under way, so that the threads end soon
        for lease in leases:
            lease.close(revoke=False)
        for watch in watches:
            watch.close()
