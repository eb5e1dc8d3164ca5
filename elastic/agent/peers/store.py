"""The TCPStore of a generation, hosted here when this agent leads, and closed when it takes too much memory."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import threading
from collections.abc import Hashable
from datetime import timedelta

import structlog
from torch._C._distributed_c10d import TCPStore

from elastic.contract.records.reasons import Code, Reason, reason
from elastic.util.processes import memory_nbytes
from elastic.util.resolver import without_dns

from .listening import ANY, Ports, listen

log = structlog.get_logger()

OWN_HOST = "localhost"
"""Where the store's own client connects if it listens on every address: no dead link or changed address affects it."""
KEPT = 2
"""The current generation's and the one before: clients of the latter may still be aborting their group."""

LIMIT_NBYTES = 256 * 2**20
"""By so much this process may grow while a store is open. Every host that reaches the port can write into it, and
torch offers no limit."""
LIMIT_PER_PAIR_NBYTES = 512
"""And by this for each pair of ranks: each rank of gloo writes an address of some 140 bytes for each other rank."""


class Stores:
    """Opens a new store for each generation; never reuses that of another generation.

    `open` is called in a thread of the writer's, `overfull` in that of the loop.
    """

    def __init__(self, host: str, bind: str = "", ports: Ports = ANY) -> None:
        """`host`: to publish; `bind`: the address to listen on, '' for every one; `ports`: see `listen`."""
        self._host = host
        self._bind = bind
        self._ports = ports
        self._lock = threading.Lock()
        self._open: dict[int, TCPStore] = {}
        self._bases: dict[int, Hashable] = {}
        self._closed: dict[int, Reason] = {}
        """Generation -> why its store was closed."""
        self._before_nbytes = 0
        """Memory of this process when the newest store was opened."""

    def open(self, generation: int, basis: Hashable = None) -> tuple[str, int]:
        """Returns (host, port) to publish. `basis`: what the publication is based on.

        A second call for a generation on the same basis returns the same store: the first publication may have
        succeeded without an answer. On another basis etcd has lost its data in between, and the number is used a second
        time: nodes that came to the first store still count there, and would be waited for, or taken for new ranks.
        """
        with self._lock:
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
        with self._lock:
            self._open[generation], self._bases[generation] = store, basis
            for old in sorted(self._open)[:-KEPT]:
                del self._open[old], self._bases[old]
            self._closed = {n: why for n, why in self._closed.items() if generation - KEPT < n < generation}
            self._before_nbytes = own_nbytes()
        return self._host, store.port

    def overfull(self, generation: int, ranks: int) -> Reason | None:
        """Why the store of `generation`, which has so many ranks, was closed here; None: it was not. Closes it, and
        that of the generation before, if this process has grown beyond the limit since."""
        with self._lock:
            limit = LIMIT_NBYTES + LIMIT_PER_PAIR_NBYTES * ranks**2
            if self._open and (grown := self._grown_nbytes()) > limit:
                why = reason(Code.STORE_GREW, mib=grown >> 20, most=limit >> 20)
                log.error("store.overfull", generations=sorted(self._open), grown_mb=grown >> 20, limit_mb=limit >> 20)
                self._closed.update(dict.fromkeys(self._open, why))
                self._open.clear()
                self._bases.clear()
                ctypes.CDLL(None).malloc_trim(0)  # else the next store's growth would go unseen up to this size
            return self._closed.get(generation)

    def _grown_nbytes(self) -> int:
        try:
            return own_nbytes() - self._before_nbytes
        except OSError:  # no descriptor is free: looked at again soon, and no reason to end with all workers
            return 0

    def close(self) -> None:
        with self._lock:
            self._open.clear()
            self._bases.clear()


def own_nbytes() -> int:
    """Memory of this process that it shares with no file and no other process: snapshots do not count. Raises
    OSError."""
    resident, shared = memory_nbytes(os.getpid())
    return resident - shared
