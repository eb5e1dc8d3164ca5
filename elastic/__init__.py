"""Fault-tolerant training with torch: the library that a training script imports.

    import elastic

    def setup(job): ...                 # once per process: build model and optimizer
    def train(job, state): ...          # called again after each re-formation of the group, from state.step

    elastic.run(setup, train)

Importing it is cheap: torch is imported when one of the names below is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.worker.job.job import Job

    from .worker.data.batches import Batch
    from .worker.run import run
    from .worker.state.state import State

__all__ = ["Batch", "Job", "State", "__version__", "run"]

__version__ = "0.1.0"

_HOMES = {"Batch": "data.batches", "Job": "job.job", "State": "state.state", "run": "run"}


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if home := _HOMES.get(name):
            import importlib

            return getattr(importlib.import_module(f".worker.{home}", __name__), name)
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
