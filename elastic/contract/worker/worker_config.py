"""What an agent tells its workers through their environment: elasticd's variables, and torchrun's for a rank.

The only place that spells these variables: the agent writes them, the worker reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

JOB = "TORCHELASTIC_RUN_ID"
SLOT = "LOCAL_RANK"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_TORCHRUNS = {"job": JOB, "slot": SLOT}


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a job for its workers. Each field is the variable ELASTIC_<FIELD>, or torchrun's for the same; an
    empty one is not set."""

    job: str = ""
    slot: int = 0
    """-1: a standby."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    gpu: bool = False
    """The node gives GPUs to the job. Not asked of torch.cuda: a query would initialise CUDA in a mere standby."""
    forming: Literal["new", "reconfigure"] = "new"
    exit_timeout_s: float = float("inf")
    """How long a process may take to exit after its script has ended."""
    stop_grace_s: float = float("inf")
    """The same after its script has failed, if that is less."""
    form_timeout_s: float = 60.0
    fingerprint_every_steps: int = 0
    on_bad_numbers: str = "stop"
    snapshots: str = "auto"
    debug_gradients: int = 0
    """Steps between samples of the gradients; 0: none."""
    debug_layers: bool = False
    checkpoint_dir: str = ""
    checkpoint_remote: str = ""
    checkpoint_every_steps: int = 0
    checkpoint_every_s: float = 0.0
    checkpoint_shared: bool = True
    plain_defaults: str = ""
    """Comma-separated names of variables that are set for plain scripts only: `elastic.run` removes them."""

    @property
    def process_group(self) -> Literal["gloo", "nccl"]:
        """The back end, chosen."""
        return "nccl" if self.backend == "nccl" or (self.backend == "auto" and self.gpu) else "gloo"

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """`inherited` with these settings: a variable of an empty one is removed, or a worker would take it for the
        job's."""
        values = {variable(name): getattr(self, name) for name in self.__struct_fields__}
        env = {name: value for name, value in inherited.items() if name not in values}
        return env | {name: _text(value) for name, value in values.items() if value != ""}

    @staticmethod
    def read(environment: Mapping[str, str]) -> WorkerConfig:
        """Raises msgspec.ValidationError."""
        names = WorkerConfig.__struct_fields__
        given = {name: environment[variable(name)] for name in names if variable(name) in environment}
        return msgspec.convert(given, WorkerConfig, strict=False)


class RankVariables(msgspec.Struct, frozen=True, kw_only=True):
    """torchrun's variables that are different in each generation."""

    rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    store_host: str
    store_port: int
    generation: int

    def environment(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.group_rank),
            "GROUP_WORLD_SIZE": str(self.group_world_size),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.store_host,
            "MASTER_PORT": str(self.store_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.generation - 1),
        }


def variable(field: str) -> str:
    """The variable of a field of WorkerConfig."""
    return _TORCHRUNS.get(field) or f"ELASTIC_{field.upper()}"


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
