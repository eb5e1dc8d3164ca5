"""torch's dynamic rendezvous on our backend: its contract, and two of its handlers meeting through it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.etcd_server import EtcdServer
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from elastic.torchrun.dynamic_backend import EtcdBackend, create_backend

pytestmark = pytest.mark.etcd


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as one:
        yield one


@pytest.fixture
def backend(server: EtcdServer, request: pytest.FixtureRequest) -> EtcdBackend:
    return create_backend(RendezvousParameters("elastic", server.endpoint, request.node.name, 1, 2))


def test_the_contract_of_get_and_set_state(backend: EtcdBackend) -> None:
    assert backend.get_state() is None
    assert backend.set_state(b"x", token=7) is None
    first = backend.set_state(b"a")
    assert first is not None
    assert first[0::2] == (b"a", True)
    assert backend.get_state() == first[:2]
    assert backend.set_state(b"b") == (*first[:2], False), "without a token, only where there is nothing"
    assert backend.set_state(b"b", token="no token of ours") == (*first[:2], False)
    second = backend.set_state(b"b", token=first[1])
    assert second is not None
    assert second[0::2] == (b"b", True)
    assert backend.set_state(b"c", token=first[1]) == (*second[:2], False), "an old token does not match"
    same = backend.set_state(b"b", token=second[1])
    assert same is not None
    assert same[2]
    assert same[1] != second[1], "writing the same again is a new state"


def test_torchs_own_handlers_meet(backend: EtcdBackend, server: EtcdServer) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    quick = RendezvousTimeout(last_call=timedelta(seconds=1))
    handlers = [DynamicRendezvousHandler.from_backend("r", store, backend, 2, 2, timeout=quick) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(lambda handler: handler.next_rendezvous(), handlers, timeout=30))
    assert {info.rank for info in infos} == {0, 1}
    assert {info.world_size for info in infos} == {2}
    for handler in handlers:
        handler.shutdown()


def test_an_etcd_that_is_away_is_a_connection_error() -> None:
    away = create_backend(RendezvousParameters("elastic", "127.0.0.1:1", "r", 1, 2))
    with pytest.raises(RendezvousConnectionError):
        away.get_state()
    with pytest.raises(RendezvousConnectionError):
        away.set_state(b"a")
