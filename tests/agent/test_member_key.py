"""The key of a member of a job, which agents and torchrun's participants share."""

from __future__ import annotations

import pytest
from support.fake_etcd import FakeClient, FakeServer

from elastic.agent.etcd.member_writes import MemberKey
from elastic.etcd.client import EtcdUnavailable

KEY, TTL_S, RENEW_S = "/elastic/c/jobs/job/members/a", 4.0, 1.0


def member(server: FakeServer) -> tuple[FakeClient, MemberKey]:
    client = FakeClient(server)
    return client, MemberKey(client, KEY, TTL_S, RENEW_S, lambda reason: None)  # type: ignore[arg-type]


def test_only_the_newest_lease_is_renewed() -> None:
    server = FakeServer()
    client, key = member(server)
    first = key.join(b"one")
    second = key.join(b"two")
    assert client.kept == [second]
    server.advance(server.now_s + 2 * TTL_S)
    assert server.kvs[KEY].value == b"two"
    assert not second.lost
    with pytest.raises(Exception, match=str(first.id)):
        client.renew(first.id, 1.0)


def test_a_member_that_could_not_be_put_holds_no_lease() -> None:
    server = FakeServer()
    client, key = member(server)
    real = client.put

    def refuse(name: str, value: bytes, lease: int = 0) -> int:
        raise EtcdUnavailable("cut off", maybe_done=False)

    client.put = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(EtcdUnavailable):
        key.join(b"one")
    assert key.held is None
    assert client.kept == []
    client.put = real  # type: ignore[method-assign]
    assert key.join(b"one") is key.held


@pytest.mark.parametrize(("revoke", "kept"), [(True, False), (False, True)])
def test_dropped_with_its_key_or_left_to_expire(revoke: bool, kept: bool) -> None:
    server = FakeServer()
    client, key = member(server)
    key.join(b"one")
    key.drop(revoke=revoke)
    assert client.kept == []
    assert (KEY in server.kvs) is kept
    server.advance(server.now_s + 2 * TTL_S)
    assert KEY not in server.kvs
