"""One gRPC connection to one etcd member. Imports gRPC, so only the first call imports this module."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc

from elastic.contract.agent_files import EtcdAccess

from . import etcd3_import
from .expiry import expired
from .keepers import Compacted, WatchBatch, start_thread
from .login import NOT_ENABLED, with_login
from .types import KV, EtcdDenied, EtcdError, EtcdFull, EtcdRefused, EtcdUnavailable, LeaseGone, key_text

_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # etcd answers more frequent pings with GOAWAY
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel to a stuck member must not share the stuck connection
    ("grpc.max_receive_message_length", 256 << 20),  # a prefix with thousands of keys
    ("grpc.http2.bdp_probe", 0),  # its pings after reads, to size this window, would wake both sides:
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.enable_http_proxy", 0),  # etcd is never behind an HTTP proxy
    ("grpc.enable_retries", 0),  # `elastic.etcd.client` decides which requests may be repeated
)
# gRPC wakes each thread that reads a stream ten times a second, so that Ctrl-C is delivered. Ours are never the main
# thread; docs/scale.md has the cost for many agents on one machine.
_waits: Any = getattr(grpc, "_common", None)
if hasattr(_waits, "MAXIMUM_WAIT_TIMEOUT"):
    _waits.MAXIMUM_WAIT_TIMEOUT = 5.0
OPEN_S = 10.0
"""Time limit for connecting and logging in. Longer than a call's: TLS and etcd's expensive password hash take seconds
on a busy node or member, so both continue after the call that started them has timed out."""
DENIED_S = 5.0
"""How long a refused login is reported without asking again: each attempt costs etcd a password hash."""
_LOGIN_AGAIN = ("invalid auth token", "revision of auth store is old", "user name is empty")
_NOT_DONE = (
    "no leader",
    "not leader",
    "too many requests",
    "failed to connect",
    "primary lessor",
    "connection refused",
)
# Transient errors that etcd reports with the code UNKNOWN. The last two: etcd's own deadline expired, not ours.
_RETRY = ("primary lessor", "too many requests", "stream removed", "context deadline", "context canceled")
_RETRY_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
)


class Token:
    """The token of a login. Every member accepts it, so the connections of one client share it."""

    def __init__(self) -> None:
        self.text = ""


class Connection:
    """A connection to one member. `silent` becomes True when a call ended without any answer."""

    def __init__(
        self, endpoint: str, access: EtcdAccess, token: Token | None = None, *, find_login: bool = True
    ) -> None:
        """`find_login`: take the one beside a Unix socket, if `access` has none."""
        given, access = access, with_login(endpoint, access) if find_login else access
        self._found_login = access is not given
        self._needs_none = False
        """Whether etcd wants no login yet, and one was found: elasticd is about to close its embedded etcd."""
        self.endpoint = endpoint.removeprefix("http://").removeprefix("https://")
        self.silent = False
        self._access = access
        self._rpc = etcd3_import.load()
        self._token = token or Token()
        self._lock = threading.Lock()
        self._opening: Future[None] | None = None
        """Connecting and logging in, in a thread of its own."""
        self._open = not access.ca_file or self.endpoint.startswith("unix:")
        """Without TLS there is no handshake to wait for."""
        self._denied: tuple[float, EtcdError] | None = None
        self._files = _files(access)
        self._channel = _channel(self.endpoint, access)
        self._methods: dict[str, Any] = {}

    @property
    def opening(self) -> bool:
        """Whether it is being opened at the moment, and so worth waiting for."""
        opening = self._opening
        return opening is not None and not opening.done()

    @property
    def outdated(self) -> bool:
        """Whether the TLS files have been replaced since: gRPC keeps using those it was given, even expired ones."""
        return _files(self._access) != self._files

    @property
    def open(self) -> bool:
        """Whether it is connected and the user is logged in."""
        return self._open and bool(self._token.text or not self._access.user or self._needs_none)

    def call(self, method: str, request: Callable[[Any], Any], within_s: float, *, login: bool = True) -> Any:
        """One unary request, `method` like 'KV.Put'. Raises EtcdError or a subclass.

        `login`: False for a request that etcd answers without authentication.
        """
        end_s = time.monotonic() + within_s
        message = request(self._rpc.messages)
        token = self._ready(within_s, login=login)
        try:
            return self._send(method, message, max(0.05, end_s - time.monotonic()))
        except EtcdDenied as error:
            if not self._access.user or not any(sign in str(error) for sign in _LOGIN_AGAIN):
                raise
            self._needs_none = False
        self._ready(max(0.05, end_s - time.monotonic()), stale=token)
        return self._send(method, message, max(0.05, end_s - time.monotonic()))

    def watch(self, span: dict[str, bytes], start: int, within_s: float) -> Stream:
        self._ready(within_s)
        pb = self._rpc.messages
        request = pb.WatchRequest(create_request=pb.WatchCreateRequest(**span, start_revision=start))
        return Stream(self._rpc.stubs.WatchStub(self._channel).Watch, request, self._metadata())

    def _ready(self, within_s: float, *, stale: str | None = None, login: bool = True) -> str:
        """Wait until the connection is open and there is a token other than `stale`; returns the token.

        Raises EtcdUnavailable after `within_s`: opening continues, and a later call finds it done.
        """
        login = login and bool(self._access.user) and not self._needs_none
        with self._lock:
            token = self._token.text
            if token and token == stale:
                self._token.text = token = ""
            if self._open and (token or not login):
                return token
            if self._denied is not None and time.monotonic() < self._denied[0]:
                raise self._denied[1]
            if self._opening is None or self._opening.done():
                opening, name = Future[None](), f"etcd-open-{self.endpoint}"
                start_thread(threading.Thread(target=self._make, args=(opening, login), name=name, daemon=True))
                self._opening = opening  # not before it has begun: each later call would wait for it
            opening = self._opening
        try:
            opening.result(within_s)
        except TimeoutError:
            if login and (denied := self._denied) is not None:
                raise denied[1] from None  # asked again, and until etcd answers its last answer stands
            doing = "logging in" if login else "connecting"
            raise EtcdUnavailable(f"{self.endpoint}: still {doing}", maybe_done=False) from None
        return self._token.text

    def _make(self, opening: Future[None], login: bool) -> None:
        pb = self._rpc.messages
        try:
            if login and not self._token.text:
                request = pb.AuthenticateRequest(name=self._access.user, password=self._access.password)
                self._token.text = self._send("Auth.Authenticate", request, OPEN_S).token
            elif not self._open:
                self._ask_status()
            self._open, self._denied = True, None
        except EtcdError as error:
            if self._found_login and NOT_ENABLED in str(error):
                self._needs_none, self._open, self._denied = True, True, None
            elif isinstance(error, EtcdUnavailable):
                self._denied = None
                opening.set_exception(EtcdUnavailable(str(error), maybe_done=False))  # the caller's was not sent
            else:
                self._denied = time.monotonic() + DENIED_S, error
                opening.set_exception(error)
        finally:
            if not opening.done():
                opening.set_result(None)

    def probe(self) -> None:
        """Raise EtcdError unless the member answers, within `OPEN_S`, and accepts the login, if there is one."""
        self._ready(OPEN_S)
        self._ask_status()

    def _ask_status(self) -> None:
        """Raise EtcdError unless the member answers. Newer ones (3.5.30) tell their status to etcd's root only: that it
        is not permitted is an answer to a client that they know."""
        try:
            self._send("Maintenance.Status", self._rpc.messages.StatusRequest(), OPEN_S)
        except EtcdDenied as error:
            if "permission denied" not in str(error):
                raise

    def close(self) -> None:
        self._channel.close()

    def _send(self, method: str, message: Any, within_s: float) -> Any:
        try:
            return self._method(method)(message, timeout=within_s, metadata=self._metadata())
        except grpc.RpcError as error:
            self.silent |= error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            raise translate(error, self.endpoint, self._access) from None
        except ValueError as error:  # raised by gRPC when another thread has closed the channel
            raise EtcdUnavailable(f"{self.endpoint}: {error}", maybe_done=False) from None

    def _method(self, name: str) -> Any:
        if name not in self._methods:
            service, _, method = name.partition(".")
            if method == "LeaseKeepAlive":
                # A stream in etcd's definition. A stream of one request and one answer is legal, and needs no thread.
                pb = self._rpc.messages
                self._methods[name] = self._channel.unary_unary(
                    "/etcdserverpb.Lease/LeaseKeepAlive",
                    request_serializer=pb.LeaseKeepAliveRequest.SerializeToString,
                    response_deserializer=pb.LeaseKeepAliveResponse.FromString,
                )
            else:
                stub = getattr(self._rpc.stubs, f"{service}Stub")(self._channel)
                self._methods[name] = getattr(stub, method)
        return self._methods[name]

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        # Without hasleader, a partitioned member accepts requests and watches and lets them hang.
        leader = (("hasleader", "true"),)
        token = self._token.text
        return (*leader, ("token", token)) if token else leader


def why_no_quorum(connection: Connection, within_s: float) -> str:
    """Why this member cannot serve; empty: it can. Without a right to anything in etcd: a member confirms with the
    quorum that it is up to date before it looks whether a read is permitted."""
    try:
        ask = lambda pb: pb.RangeRequest(key=b"/", limit=1, keys_only=True)  # noqa: E731
        connection.call("KV.Range", ask, within_s, login=False)
    except EtcdUnavailable as error:
        return str(error)
    except EtcdError:
        return ""  # denied
    return ""


def _files(access: EtcdAccess) -> tuple[tuple[int, int, int] | None, ...]:
    """(inode, mtime, size) of each TLS file, to detect replacement; None: it cannot be read."""
    identities: list[tuple[int, int, int] | None] = []
    for name in filter(None, (access.ca_file, access.cert_file, access.key_file)):
        try:
            file = os.stat(name)
            identities.append((file.st_ino, file.st_mtime_ns, file.st_size))
        except OSError:
            identities.append(None)
    return tuple(identities)


def _channel(endpoint: str, access: EtcdAccess) -> grpc.Channel:
    if not access.ca_file or endpoint.startswith("unix:"):
        return grpc.insecure_channel(endpoint, options=_OPTIONS)
    try:
        ca, key, cert = (
            Path(name).read_bytes() if name else None for name in (access.ca_file, access.key_file, access.cert_file)
        )
    except OSError as error:
        raise EtcdDenied(f"cannot read {error.filename}: {error.strerror}") from None
    return grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(ca, key, cert), options=_OPTIONS)


class Stream:
    """One watch. Iteration blocks until a batch arrives, and raises EtcdError when the stream ends."""

    def __init__(self, method: Any, request: Any, metadata: Any) -> None:
        self._request = request
        self._over = threading.Event()
        try:
            self._call = method(self._requests(), metadata=metadata)
        except (ValueError, RuntimeError) as error:  # the channel is closed; gRPC can start no thread
            raise EtcdUnavailable(str(error), maybe_done=False) from None

    def _requests(self) -> Iterator[Any]:
        yield self._request
        self._over.wait()  # in gRPC's thread: etcd's gRPC proxy ends the stream when the requests end

    def __iter__(self) -> Iterator[WatchBatch]:
        try:
            for answer in self._call:
                if answer.compact_revision:
                    raise Compacted(f"revisions before {answer.compact_revision} are compacted")
                if answer.canceled:
                    raise EtcdUnavailable("etcd cancelled the watch", maybe_done=False)
                yield WatchBatch(tuple(_change(event) for event in answer.events))
        except grpc.RpcError as error:
            raise translate(error, "watch") from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        self._over.set()
        self._call.cancel()


def _change(event: Any) -> KV | tuple[str, int]:
    """A written key, or (key, revision) of a deletion."""
    kv = event.kv
    if event.type == event.DELETE:
        return key_text(kv.key), kv.mod_revision
    return KV(key_text(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


TLS_FAILED = ("handshake failed", "handshake read failed", "handshake write failed", "unwrap failed")
"""Signs in gRPC's message, in lower case. The last: in TLS 1.3 a client's handshake is over before the server has
looked at its certificate, and what comes instead of data is the refusal."""


def _tls_trouble(details: str) -> str:
    """Explanation of a failed TLS handshake, to prefix gRPC's own message; empty: it is another failure."""
    if not any(sign in details for sign in TLS_FAILED):
        return ""
    if "alert" in details:
        return "etcd refuses the client certificate (cert_file), or wants one: "
    if "has expired" in details:
        return "etcd's own certificate, or that of its authority, has expired: "
    if "certificate" in details:
        return "etcd's certificate is not signed by the authority of ca_file, or not for this name: "
    # A refused certificate can look the same: the connection may be closed before the alert is read.
    return "etcd ends the TLS handshake: it refuses the client certificate (cert_file) or wants one, or has no TLS: "


def translate(error: Any, where: str, access: EtcdAccess | None = None) -> EtcdError:
    """The EtcdError that corresponds to a gRPC failure. `access`: its certificates may be the reason."""
    code, details = error.code(), error.details() or ""
    lowered = details.lower()
    trouble = _tls_trouble(lowered)
    if trouble and access is not None and (old := expired(access, time.time())):
        trouble = f"{old}: "
    text = f"{where}: {trouble}{details or code.name.lower()}"
    if code is grpc.StatusCode.NOT_FOUND and "lease not found" in lowered:
        return LeaseGone(text)
    if "database space exceeded" in lowered:
        return EtcdFull(f"{text} (compact and defragment etcd, then disarm the alarm)")
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return EtcdDenied(text)
    if "authentication failed" in lowered or any(sign in lowered for sign in _LOGIN_AGAIN):
        return EtcdDenied(text)
    if code in _RETRY_CODES or any(sign in lowered for sign in _RETRY):
        return EtcdUnavailable(text, maybe_done=not any(sign in lowered for sign in _NOT_DONE))
    if code is grpc.StatusCode.INVALID_ARGUMENT or "larger than max" in lowered:
        return EtcdRefused(text)
    return EtcdError(text)
