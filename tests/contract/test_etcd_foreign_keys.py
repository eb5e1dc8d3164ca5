"""Foreign keys below our prefix: etcd takes any bytes for a key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.etcd_server import EtcdServer
from support.wait import eventually

from elastic.etcd.client import Etcd, View

pytestmark = pytest.mark.etcd

NO_TEXT = (b"/t/\xff", b"/t/\xfe")


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    with EtcdServer() as server:
        client = Etcd(server.access)
        yield client
        client.close()


def put(etcd: Etcd, key: bytes) -> None:
    etcd._call("KV.Put", lambda pb: pb.PutRequest(key=key, value=b"theirs"))


def delete(etcd: Etcd, key: bytes) -> None:
    etcd._call("KV.DeleteRange", lambda pb: pb.DeleteRangeRequest(key=key))


@pytest.mark.parametrize("before", [True, False], ids=["there before", "written under watch"])
def test_a_key_that_is_no_text_ends_no_watch(etcd: Etcd, before: bool) -> None:
    views: list[View] = []
    etcd.put("/t/ours", b"1")
    if before:
        put(etcd, NO_TEXT[0])
        etcd.watch("/t/", views.append)
        eventually(lambda: views, 5)
    else:
        etcd.watch("/t/", views.append)
        eventually(lambda: views, 5)
        put(etcd, NO_TEXT[0])
    put(etcd, NO_TEXT[1])
    etcd.put("/t/ours", b"2")
    eventually(lambda: views[-1].kvs["/t/ours"].value == b"2", 5)
    assert set(views[-1].kvs) == {"/t/ours", "/t/\\xff", "/t/\\xfe"}, "each is itself"
    assert set(etcd.get_prefix("/t/").kvs) == set(views[-1].kvs)
    delete(etcd, NO_TEXT[0])
    eventually(lambda: set(views[-1].kvs) == {"/t/ours", "/t/\\xfe"}, 5)
    assert etcd.newest("/t/").key == "/t/ours"
    assert all(view.connected for view in views)
