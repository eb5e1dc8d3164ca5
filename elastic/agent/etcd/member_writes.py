"""The writes to etcd that an agent and a torchrun participant have in common: the member record under its lease, and
what a generation is published with."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable
from typing import Protocol

from elastic.contract.records.job_records import GenerationRecord
from elastic.etcd.client import Compare, Etcd, EtcdError, Lease, ModIs, Present
from elastic.recovery.facts.membership import Change

STORE_SECRET_NBYTES = 16
"""Of a generation: see `util.sealed_store`."""


class OpensStores(Protocol):
    """See `store.Stores`."""

    def open(self, generation: int, basis: Hashable) -> tuple[str, int]: ...


class MemberKey:
    """The key of a member, with a lease that is kept alive. `on_lost(reason)` is called when the lease is lost."""

    def __init__(self, etcd: Etcd, key: str, ttl_s: float, renew_s: float, on_lost: Callable[[str], None]) -> None:
        self.key = key
        self.lease: Lease | None = None
        self._etcd, self._ttl_s, self._renew_s, self._on_lost = etcd, ttl_s, renew_s, on_lost

    @property
    def held(self) -> Lease | None:
        """The lease, unless there is none or it is lost."""
        return self.lease if self.lease is not None and not self.lease.lost else None

    def join(self, record: bytes) -> Lease:
        """Put `record` under a new lease. Raises EtcdError; then there is no lease."""
        self.drop()
        lease = self._etcd.keep(self._ttl_s, self._renew_s, self._on_lost)
        try:
            self._etcd.put(self.key, record, lease.id)
        except EtcdError:
            lease.close()
            raise
        self.lease = lease
        return lease

    def drop(self, *, revoke: bool = False) -> None:
        """Stop renewing the lease; with `revoke`, end it and remove the key at once."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.close(revoke=revoke)

    def guards(self, key: str, revision: int) -> list[Compare]:
        """Conditions for a write decided on a view: `key` is still at `revision` (0: absent), this member still there.

        Revisions distinguish snapshots of one etcd only. An etcd that was wiped since counts from the start, and may by
        chance have reached the same revision; but it lacks this member's key until the member has joined again.
        """
        return [ModIs(key, revision), Present(self.key)]


def next_record(
    stores: OpensStores,
    node: str,
    number: int,
    change: Change,
    *,
    basis: Hashable,
    previous: int = 0,
    at_step: int | None = None,
    managed: bool = False,
) -> GenerationRecord:
    """The record of a generation that `node` leads, with a store opened for it (see `Stores.open`, also for errors)."""
    host, port = stores.open(number, basis)
    return GenerationRecord(
        number=number,
        previous=previous,
        nodes=change.nodes,
        store_host=host,
        store_port=port,
        store_secret=secrets.token_hex(STORE_SECRET_NBYTES),
        leader=node,
        why=change.why,
        at_step=at_step,
        restore=change.restore,
        managed=managed,
        newcomers=change.newcomers,
    )
