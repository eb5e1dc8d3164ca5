"""``torchrun --rdzv-backend=elastic``: stock torchrun as a client of elasticd's rendezvous.

    torchrun --nnodes=2:4 --rdzv-backend=elastic --rdzv-id=myjob --rdzv-endpoint=host1:2379,host2:2379 \\
             --rdzv-conf=last_call_timeout=5 train.py

Torch loads this module in every process that uses torch.distributed.elastic, so it imports nothing heavy; the handler
itself is in `rendezvous`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousParameters,
    )


def handler() -> RendezvousHandlerCreator:
    """The entry point in ``torchrun.handlers``: returns the function that creates a handler."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Raises ValueError for invalid settings, RendezvousConnectionError when etcd denies access."""
    from .rendezvous import EtcdRendezvousHandler
    from .settings import settings

    made = EtcdRendezvousHandler(settings(params))
    made.start()
    return made
