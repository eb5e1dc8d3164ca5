"""torch's own dynamic rendezvous with its state in etcd v3: for users who want its protocol on a current etcd.

    backend = create_backend(params)
    handler = DynamicRendezvousHandler.from_backend(run_id, store, backend, min_nodes, max_nodes)

torch's etcd backends use API v2, which etcd 3.6 has removed. The handler of `rendezvous` is the better choice: this
protocol takes 3N−1 writes to re-form and does not detect nodes that leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from elastic.contract.keys import ClusterKeys
from elastic.etcd.client import Etcd, EtcdError, ModIs, Put

from .settings import settings

T = TypeVar("T")


class EtcdBackend(RendezvousBackend):
    """One key; its fencing token is the revision at which it was last written."""

    def __init__(self, etcd: Etcd, key: str) -> None:
        self._etcd = etcd
        self._key = key

    @property
    def name(self) -> str:
        return "elastic-dynamic"

    def get_state(self) -> tuple[bytes, Token] | None:
        kv = self._asked(lambda: self._etcd.get(self._key))
        return (kv.value, kv.mod_revision) if kv else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """`token` None: only if there is no state. A token that this backend did not return never matches."""
        expected = 0 if token is None else token
        if isinstance(expected, int):
            result = self._asked(lambda: self._etcd.txn([ModIs(self._key, expected)], [Put(self._key, state)]))
            if result.ok:
                return state, result.revision, True
        found = self.get_state()
        return (*found, False) if found else None

    def _asked(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except EtcdError as error:
            # Also when the outcome of a write is unknown: torch reads the state again after this error.
            raise RendezvousConnectionError(f"the connection to etcd has failed: {error}") from error


def create_backend(params: RendezvousParameters) -> EtcdBackend:
    """Takes the same endpoint and ``--rdzv-conf`` as the handler. Raises ValueError for invalid ones."""
    chosen = settings(params)
    key = ClusterKeys(chosen.conf.cluster).job(chosen.job).root + "dynamic"
    return EtcdBackend(Etcd(chosen.access), key)
