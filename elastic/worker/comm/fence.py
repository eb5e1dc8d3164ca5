"""The fence before the optimizer: no rank applies its gradients before all have theirs; and then all living ranks do.

A death within the collective lets it return on some ranks and raise on others, which would leave them at two steps. So
every living rank counts itself, in the store of the generation that breaks: who had all its gradients, and who was
let through. A rank of which the collective has raised goes on as if it had returned, where another was let through, or
where all that live had their gradients: they are complete, and the script can apply them. Otherwise none does.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .errors import GroupAborted, is_communication_error
from .in_flight import complete
from .p2p import control_device

LIMIT_S = 1.0
"""At most so long a rank waits for the others to count themselves. One that has died never does: of two, this long."""
LOOK_S, LOOK_PER_RANK_S = 0.004, 2e-5


class StoreAccess(Protocol):
    world_size: int

    def store_after_abort(self, limit: timedelta) -> Store:
        """A connection to the generation's store that an abort leaves alone. Raises DistNetworkError or
        DistStoreError."""
        ...

    def store_done(self) -> None: ...


class Fence:
    """Of one generation. `broken` is for any thread."""

    def __init__(self, group: StoreAccess) -> None:
        self._group = group
        self._at = (-1, -1)
        """(newest step with whose gradients this rank has come, newest with which it was let through)."""
        self._lock = threading.Lock()
        self._counted: tuple[int, int] | None = None
        """`_at` when the group broke."""
        self._over = threading.Event()
        self._go = False

    def wait(self, step: int) -> None:
        """Until all ranks have their gradients of `step`; the host waits for the device. Raises GroupAborted where this
        rank is not to apply them, and what the collective raises."""
        self._at = (step, self._at[1])
        came = torch.ones(1, device=control_device())
        try:
            complete(dist.all_reduce(came, async_op=True), came.device)
            through = came.item() == self._group.world_size  # NCCL ends an aborted one in silence, with any value
        except (RuntimeError, GroupAborted) as error:
            if not (is_communication_error(error) and self._others_go(step)):
                raise
        else:
            if not through and not self._others_go(step):
                raise GroupAborted("the group was aborted at the fence before the optimizer")
        self._at = (step, step)

    def broken(self) -> None:
        """The group of this rank is being aborted, or has failed here."""
        with self._lock:
            if self._counted is not None:
                return
            self._counted = self._at
        threading.Thread(target=self._count, args=self._counted, name="elastic-fence", daemon=True).start()

    def _others_go(self, step: int) -> bool:
        self.broken()
        self._over.wait(LIMIT_S)
        return self._go and self._counted is not None and self._counted[0] == step

    def _count(self, came: int, passed: int) -> None:
        end_s = time.monotonic() + LIMIT_S
        try:
            store = self._group.store_after_abort(timedelta(seconds=LIMIT_S))
            for step in {came, passed} - {-1}:
                store.add(f"fence/{step}/came", 1)
            if passed >= 0:
                store.add(f"fence/{passed}/passed", 1)
            store.add("fence/all", 1)  # last: who is in it is in the others
            while came > passed and time.monotonic() < end_s and not self._decided(store, came):
                time.sleep(LOOK_S + LOOK_PER_RANK_S * self._group.world_size)
        except (dist.DistNetworkError, dist.DistStoreError):
            pass  # its host is lost as well: no rank is known to have been let through
        finally:
            self._group.store_done()
            self._over.set()

    def _decided(self, store: Store, step: int) -> bool:
        counted = store.add("fence/all", 0)
        if store.add(f"fence/{step}/passed", 0):
            self._go = True
        elif counted >= self._group.world_size - 1:
            self._go = store.add(f"fence/{step}/came", 0) >= counted
        else:
            return False
        return True
