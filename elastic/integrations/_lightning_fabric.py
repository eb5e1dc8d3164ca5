"""Fabric in `train` of ``elastic.run``: its precision, its wrappers and its collectives, in elastic's group."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

from elastic.worker.job.job import Job

from ._lightning_env import ElasticEnvironment


class _FabricStrategy(DDPStrategy):
    def __init__(self, job: Job, **ddp_options: Any) -> None:
        super().__init__(cluster_environment=ElasticEnvironment(), **ddp_options)
        self.job = job

    @property
    def root_device(self) -> torch.device:
        return self.job.device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        """elastic has started this process."""

    def _setup_distributed(self) -> None:
        self._set_world_ranks()

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return self.job.ddp(module, **self._ddp_kwargs)


def fabric(job: Job, *, precision: Any = "32-true", **options: Any) -> Fabric:
    """A Fabric for this generation, to be made in `train` of ``elastic.run``.

    ``model, optimizer = fabric.setup(state.model, state.optimizer)`` wraps the model for this generation; the state
    keeps the bare ones. `options`: `loggers` and `callbacks` as for Fabric, the others as for ``Job.ddp``.
    """
    own = {name: options.pop(name) for name in ("loggers", "callbacks") if name in options}
    on_gpu = job.device.type == "cuda"
    made = Fabric(
        accelerator="cuda" if on_gpu else "cpu",
        devices="auto" if on_gpu else 1,
        strategy=_FabricStrategy(job, **options),
        precision=precision,
        **own,
    )
    made.launch()  # in this process: it sets the strategy up
    return made
