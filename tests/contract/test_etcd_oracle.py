"""Random requests to the fake and to the real etcd: the same answers, the same revisions, the same contents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.etcd_server import EtcdServer
from support.fake_etcd import FakeClient, FakeServer

from elastic.etcd.client import Absent, Compare, Delete, Etcd, EtcdError, ModIs, Op, Present, Put, View

pytestmark = pytest.mark.etcd

KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from([b"1", b"2"])
LEASES = st.sampled_from(["none", "held", "gone"])
COMPARES = st.one_of(
    st.tuples(st.just("absent"), KEYS),
    st.tuples(st.just("present"), KEYS),
    st.tuples(st.just("mod"), KEYS, st.integers(0, 2)),  # so many revisions ago
)
OPS = st.one_of(st.tuples(st.just("put"), KEYS, VALUES, LEASES), st.tuples(st.just("delete"), KEYS))
REQUESTS = st.one_of(
    st.tuples(st.just("put"), KEYS, VALUES, LEASES),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("delete_prefix")),
    st.tuples(st.just("grant")),
    st.tuples(st.just("revoke")),
    st.tuples(st.just("txn"), st.lists(COMPARES, max_size=2), st.lists(OPS, max_size=3), st.lists(OPS, max_size=2)),
)
numbers = itertools.count()


class Side:
    """One of the two, with keys below its own prefix and revisions counted from its own beginning."""

    def __init__(self, etcd: Etcd | FakeClient, prefix: str) -> None:
        self.etcd = etcd
        self.prefix = prefix
        self.base = etcd.put(f"{prefix}base", b"")
        self.last = self.base
        self.gone = etcd.grant(60)
        etcd.revoke(self.gone)
        self.held = etcd.grant(60)

    def ask(self, request: tuple[object, ...]) -> object:
        try:
            return self._ask(request)
        except EtcdError as error:
            return type(error).__name__

    def _ask(self, request: tuple[object, ...]) -> object:
        etcd = self.etcd
        match request:
            case ("put", str(key), bytes(value), str(lease)):
                return self._mark(etcd.put(self.prefix + key, value, self._lease(lease)))
            case ("delete", str(key)):
                return etcd.delete(self.prefix + key)
            case ("delete_prefix",):
                return self._mark(etcd.txn([], [Delete(self.prefix, prefix=True)]).revision)
            case ("grant",):
                self.held = etcd.grant(60)
                return None
            case ("revoke",):
                return etcd.revoke(self.held)
            case ("txn", compares, then, otherwise):
                result = etcd.txn(
                    [self._compare(c) for c in compares],  # type: ignore[attr-defined]
                    [self._op(op) for op in then],  # type: ignore[attr-defined]
                    [self._op(op) for op in otherwise],  # type: ignore[attr-defined]
                )
                return result.ok, self._mark(result.revision)
        raise AssertionError(request)

    def contents(self) -> object:
        view: View = self.etcd.get_prefix(self.prefix)
        return self._mark(view.revision), {
            key.removeprefix(self.prefix): (
                kv.value,
                kv.create_revision - self.base,
                kv.mod_revision - self.base,
                {0: "none", self.held: "held"}.get(kv.lease, "older"),
            )
            for key, kv in view.kvs.items()
        }

    def _mark(self, revision: int) -> int:
        self.last = revision
        return revision - self.base

    def _lease(self, which: str) -> int:
        return {"none": 0, "held": self.held, "gone": self.gone}[which]

    def _compare(self, compare: tuple[object, ...]) -> Compare:
        match compare:
            case ("absent", str(key)):
                return Absent(self.prefix + key)
            case ("present", str(key)):
                return Present(self.prefix + key)
            case ("mod", str(key), int(ago)):
                return ModIs(self.prefix + key, max(1, self.last - ago))  # 0 would mean: absent
        raise AssertionError(compare)

    def _op(self, op: tuple[object, ...]) -> Op:
        match op:
            case ("put", str(key), bytes(value), str(lease)):
                return Put(self.prefix + key, value, self._lease(lease))
            case ("delete", str(key)):
                return Delete(self.prefix + key)
        raise AssertionError(op)


@pytest.fixture(scope="module")
def real() -> Iterator[Etcd]:
    with EtcdServer() as server:
        etcd = Etcd(server.access, call_s=20.0)  # a busy machine is no failure
        yield etcd
        etcd.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(REQUESTS, min_size=5, max_size=25))
def test_the_fake_answers_like_the_real_one(real: Etcd, requests: list[tuple[object, ...]]) -> None:
    prefix = f"/oracle/{next(numbers)}/"
    fake, genuine = Side(FakeClient(FakeServer()), prefix), Side(real, prefix)
    for request in requests:
        assert fake.ask(request) == genuine.ask(request), request
        assert fake.contents() == genuine.contents(), request
