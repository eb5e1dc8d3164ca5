"""The TCPStore of a generation, hosted here when this agent leads."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

OWN_HOST = "localhost"
KEPT = 2
"""The present generation's and the one before: its clients may still be letting go."""


class Stores:
    """Opens a fresh store for each generation; never reuses one of another generation."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._open: dict[int, TCPStore] = {}

    def open(self, generation: int) -> tuple[str, int]:
        """Returns (host, port) to publish.

        Asked again for a generation, it is the same store: the first publication may have got through unheard.
        """
        if known := self._open.get(generation):
            return self._host, known.port
        # It listens on every address. Its own client takes the one that no dead link or changed address can cut.
        store = TCPStore(
            OWN_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60), multi_tenant=True
        )
        self._open[generation] = store
        for old in sorted(self._open)[:-KEPT]:
            del self._open[old]
        return self._host, store.port

    def client(self, generation: int, host: str, port: int) -> Store:
        """The store of `generation`, here or elsewhere, with its keys under a prefix of their own."""
        store = self._open.get(generation) or TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        return PrefixStore(f"agents/{generation}", store)

    def close(self) -> None:
        self._open.clear()
