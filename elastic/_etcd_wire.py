"""One gRPC connection to one member of etcd. Imports gRPC, so it is imported by the first call only."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from . import _etcd3_import
from ._etcd_keepers import Batch, Compacted
from ._etcd_types import KV, EtcdDenied, EtcdError, EtcdFull, EtcdUnavailable, LeaseGone, key_text
from .core.agentfile import EtcdAccess

_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # more often, and etcd answers with GOAWAY
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel to a stuck member must not share the stuck connection
    ("grpc.max_receive_message_length", 256 << 20),  # a prefix with thousands of keys
    ("grpc.http2.bdp_probe", 0),  # a ping after what is read, to size the window: our pictures are small
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.enable_http_proxy", 0),  # etcd is never behind the proxy for web pages
    ("grpc.enable_retries", 0),  # we know which requests may be repeated
)
# gRPC wakes each thread that reads a stream ten times a second, so that Ctrl-C gets through to it. Ours are never the
# main thread; what it costs many agents on one machine stands in docs/scale.md.
_waits: Any = getattr(grpc, "_common", None)
if hasattr(_waits, "MAXIMUM_WAIT_TIMEOUT"):
    _waits.MAXIMUM_WAIT_TIMEOUT = 5.0
_STATUS_ERRORS = 8
"""Number of the field `errors` in etcd's StatusResponse."""
_LOGIN_AGAIN = ("invalid auth token", "revision of auth store is old", "user name is empty")
_NOT_DONE = (
    "no leader",
    "not leader",
    "too many requests",
    "failed to connect",
    "primary lessor",
    "connection refused",
)
# What etcd reports with the code UNKNOWN although it passes. The last two: its own time ran out, not ours.
_RETRY = ("primary lessor", "too many requests", "stream removed", "context deadline", "context canceled")
_RETRY_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
)


class Connection:
    """`silent` becomes True when a call ended without any answer."""

    def __init__(self, endpoint: str, access: EtcdAccess) -> None:
        self.endpoint = endpoint.removeprefix("http://").removeprefix("https://")
        self.silent = False
        self._access = access
        self._rpc = _etcd3_import.load()
        self._token = ""
        self._login_lock = threading.Lock()
        self._channel = _channel(self.endpoint, access)
        self._methods: dict[str, Any] = {}

    def call(self, method: str, request: Callable[[Any], Any], within_s: float) -> Any:
        """One unary request, `method` like 'KV.Put'. Raises EtcdError in one of its kinds."""
        message = request(self._rpc.messages)
        token = self._login(within_s, stale="") if self._access.user else ""
        try:
            return self._send(method, message, within_s)
        except EtcdDenied as error:
            if not self._access.user or not any(sign in str(error) for sign in _LOGIN_AGAIN):
                raise
            self._login(within_s, stale=token)
            return self._send(method, message, within_s)

    def watch(self, span: dict[str, bytes], start: int, within_s: float) -> Stream:
        if self._access.user:
            self._login(within_s, stale="")
        pb = self._rpc.messages
        request = pb.WatchRequest(create_request=pb.WatchCreateRequest(**span, start_revision=start))
        return Stream(self._rpc.stubs.WatchStub(self._channel).Watch, request, self._metadata())

    def close(self) -> None:
        self._channel.close()

    def _send(self, method: str, message: Any, within_s: float) -> Any:
        try:
            return self._method(method)(message, timeout=within_s, metadata=self._metadata())
        except grpc.RpcError as error:
            self.silent |= error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            raise translate(error, self.endpoint) from None
        except ValueError as error:  # how gRPC says that another thread has closed the channel
            raise EtcdUnavailable(f"{self.endpoint}: {error}", maybe_done=False) from None

    def _method(self, name: str) -> Any:
        if name not in self._methods:
            service, _, method = name.partition(".")
            if method == "LeaseKeepAlive":
                # A stream in etcd's definition. One request and one answer are a legal stream, and need no thread.
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
        # Without hasleader, a member cut off from the others takes requests and watches and lets them hang.
        leader = (("hasleader", "true"),)
        return (*leader, ("token", self._token)) if self._token else leader

    def _login(self, within_s: float, stale: str) -> str:
        """Return a token; get one if there is none, or only the `stale` one."""
        with self._login_lock:
            if self._token == stale:
                pb = self._rpc.messages
                self._token = ""
                request = pb.AuthenticateRequest(name=self._access.user, password=self._access.password)
                self._token = self._send("Auth.Authenticate", request, within_s).token
            return self._token


def alarms_of(status: Any) -> tuple[str, ...]:
    """The alarms that a member has raised ('NOSPACE', 'CORRUPT'), from the list of errors in its status.

    etcd sends that list since 3.4; the definitions that etcd3 carries are older, so it may be an unknown field.
    """
    from google.protobuf.unknown_fields import UnknownFieldSet

    unknown: Any = UnknownFieldSet(status)
    errors = list(getattr(status, "errors", ()))
    errors += [str(f.data, "utf-8", "replace") for f in unknown if f.field_number == _STATUS_ERRORS]
    return tuple(sorted({found[1] for error in errors if (found := re.search(r"alarm:(\w+)", error))}))


def _channel(endpoint: str, access: EtcdAccess) -> grpc.Channel:
    if not access.ca_file:
        return grpc.insecure_channel(endpoint, options=_OPTIONS)
    try:
        ca, key, cert = (
            Path(name).read_bytes() if name else None for name in (access.ca_file, access.key_file, access.cert_file)
        )
    except OSError as error:
        raise EtcdDenied(f"cannot read {error.filename}: {error.strerror}") from None
    return grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(ca, key, cert), options=_OPTIONS)


class Stream:
    """One watch. Iterating blocks until a batch comes, and raises EtcdError when the stream ends."""

    def __init__(self, method: Any, request: Any, metadata: Any) -> None:
        self._request = request
        self._over = threading.Event()
        try:
            self._call = method(self._requests(), metadata=metadata)
        except ValueError as error:
            raise EtcdUnavailable(str(error), maybe_done=False) from None

    def _requests(self) -> Iterator[Any]:
        yield self._request
        self._over.wait()  # in gRPC's thread: when the requests end, etcd may end the stream

    def __iter__(self) -> Iterator[Batch]:
        try:
            for answer in self._call:
                if answer.compact_revision:
                    raise Compacted(f"revisions before {answer.compact_revision} are compacted")
                if answer.canceled:
                    raise EtcdUnavailable("etcd cancelled the watch", maybe_done=False)
                yield Batch(tuple(_change(event) for event in answer.events))
        except grpc.RpcError as error:
            raise translate(error, "watch") from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        self._over.set()
        self._call.cancel()


def _change(event: Any) -> KV | tuple[str, int]:
    """A key as it was written, or (key, revision) of a deletion."""
    kv = event.kv
    if event.type == event.DELETE:
        return key_text(kv.key), kv.mod_revision
    return KV(key_text(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def translate(error: Any, where: str) -> EtcdError:
    """What a gRPC failure means for the caller."""
    code, details = error.code(), error.details() or ""
    text = f"{where}: {details or code.name.lower()}"
    lowered = details.lower()
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
    return EtcdError(text)
