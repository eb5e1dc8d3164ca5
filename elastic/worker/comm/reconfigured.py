"""A process group that torch forms again in place, the second implementation behind `Group` (torch 2.14 and newer).

torch keeps the group object and connects it anew: from one generation to the next `dist.group.WORLD` is the same object
with another membership. Waiting for all ranks, aborting and closing are those of `Group`: torch frees no rank from a
collective either. Between two generations the object is not in torch's registries.

It is kept only if it was formed and closed in order. After a forming that failed, or with a collective that did not
end, this rank makes a new one. Ranks with a kept group and ranks with a new one form a group together.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import msgspec
import torch

from elastic.util.sealed_store import DelegatingStore
from elastic.worker.torch_internals import torch_private

from . import sockets
from .group import Backend, Group

Forming = Literal["new", "reconfigure"]


class _Kept(msgspec.Struct, frozen=True):
    known: torch_private.RegisteredGroup
    store: DelegatingStore
    """Its server changes with each generation: torch keeps the store for the life of a group."""
    timeout_s: float


_kept: _Kept | None = None
"""The group of this process between two generations."""


class ReconfiguredGroup(Group):
    """One `Group` per generation as always; torch's object is that of the generation before where there is one."""

    _formed: _Kept | None = None

    def _init(self) -> None:
        global _kept
        kept, _kept = _kept, None  # unless it is formed and closed in order, the next generation makes a new one
        if kept is None or kept.timeout_s != self._timeout_s:
            kept = self._made()
        assert self._store is not None
        kept.store.store = self._store
        self._store.set(f"handle/{self.rank}", kept.known.group.get_reconfigure_handle())
        handles = self._store.multi_get([f"handle/{rank}" for rank in range(self.world_size)])
        torch_private.reconfigure(
            kept.known.group,
            self.generation,
            [handle.decode() for handle in handles],  # the order assigns the ranks
            timedelta(seconds=self._timeout_s),  # for collectives too, whatever the group was created with
        )
        torch_private.put_back_default_group(kept.known, self._store, self.world_size)
        self._formed = kept

    def _made(self) -> _Kept:
        store = DelegatingStore(self._store)
        self._create("gloo", store, enable_reconfigure=True)
        return _Kept(torch_private.take_out_default_group(), store, self._timeout_s)

    def _strike_off(self) -> None:
        global _kept
        if self._abandoned or self._formed is None:
            super()._strike_off()
            return
        torch_private.forget_all_groups()
        for sock in sockets.gloo_sockets():  # no destructor closes them
            sockets.cut(sock)
        self._formed.store.store = None
        _kept = self._formed


def group_kind(forming: Forming, backend: Backend) -> type[Group]:
    """The implementation for this setting. Raises RuntimeError where torch cannot do it."""
    if forming == "new":
        return Group
    if not torch_private.RECONFIGURABLE:
        raise RuntimeError(
            f"forming = 'reconfigure' needs torch 2.14 or newer, and this is {torch.__version__}: remove the setting"
        )
    if backend != "gloo":
        raise RuntimeError(
            f"forming = 'reconfigure' needs backend = 'gloo', and this job's is {backend}: torch reconfigures no group "
            "that has a back end for the CPU and another for the GPU"
        )
    return ReconfiguredGroup


def release() -> None:
    """Destroy the group of this process, if there is one."""
    global _kept
    _kept = None
