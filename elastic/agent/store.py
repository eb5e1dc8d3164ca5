"""The TCPStore of a generation, hosted here when this agent leads."""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ..util.resolver import without_dns
from .listening import ANY, Ports, listen

OWN_HOST = "localhost"
"""Where the store's own client connects if it listens on every address: no dead link or changed address affects it."""
KEPT = 2
"""The current generation's and the one before: clients of the latter may still be aborting their group."""


class Stores:
    """Opens a new store for each generation; never reuses that of another generation."""

    def __init__(self, host: str, bind: str = "", ports: Ports = ANY) -> None:
        """`host`: to publish; `bind`: the address to listen on, '' for every one; `ports`: see `listen`."""
        self._host = host
        self._bind = bind
        self._ports = ports
        self._open: dict[int, TCPStore] = {}
        self._bases: dict[int, Hashable] = {}

    def open(self, generation: int, basis: Hashable = None) -> tuple[str, int]:
        """Returns (host, port) to publish. `basis`: what the publication is based on.

        A second call for a generation on the same basis returns the same store: the first publication may have
        succeeded without an answer. On another basis etcd has lost its data in between, and the number is used a second
        time: nodes that came to the first store still count there, and would be waited for, or taken for new ranks.
        """
        known = self._open.get(generation)
        if known is not None and self._bases[generation] == basis:
            return self._host, known.port
        listener = listen(self._bind, self._ports)
        own, port = listener.getsockname()[:2]
        if ipaddress.ip_address(own).is_unspecified:
            own = OWN_HOST
        with without_dns():
            store = TCPStore(
                own, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60), multi_tenant=True,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        self._open[generation], self._bases[generation] = store, basis
        for old in sorted(self._open)[:-KEPT]:
            del self._open[old], self._bases[old]
        return self._host, store.port

    def client(self, generation: int, host: str, port: int) -> Store:
        """The store of `generation`, local or remote, with its keys under a prefix of their own."""
        store = self._open.get(generation) or TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        return PrefixStore(f"agents/{generation}", store)

    def close(self) -> None:
        self._open.clear()
        self._bases.clear()
