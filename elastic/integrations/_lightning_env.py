"""The ranks, as Lightning asks for them."""

from __future__ import annotations

import os

import torch.distributed
from lightning.fabric.plugins.environments import ClusterEnvironment


class ElasticEnvironment(ClusterEnvironment):
    """Ranks as elastic has them: of the process group, or none before and after it."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    """Not used: elastic forms the process group."""
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    def global_rank(self) -> int:
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ.get("RANK", "0"))

    def local_rank(self) -> int:
        return max(0, int(os.environ.get("LOCAL_RANK", "0")))

    def node_rank(self) -> int:
        return max(0, int(os.environ.get("GROUP_RANK", "0")))

    def set_world_size(self, size: int) -> None:
        """It follows from the group."""

    def set_global_rank(self, rank: int) -> None:
        """It follows from the group."""
