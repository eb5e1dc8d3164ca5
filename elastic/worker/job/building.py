"""Calls `setup`, and says what is wrong where it asks for a process group, which does not exist yet."""

from __future__ import annotations

import traceback

from elastic.worker.link.misuse import MisuseRuntimeError, MisuseTypeError
from elastic.worker.state.optimizers import SHARDED, sharded, sharded_module
from elastic.worker.state.state import State

from .job import Job, Setup

_UNFORMED = ("process group has not been initialized", "env:// rendezvous")
_SHARDING = {
    "zero_redundancy_optimizer.py": sharded(SHARDED),
    "_fsdp_init.py": sharded_module("model", "fully_shard"),
    "device_mesh.py": sharded_module("model", "DeviceMesh"),
}
"""File of torch in which the error was raised -> the way out."""


def build(setup: Setup, job: Job) -> State:
    """The state that `setup` builds. Raises TypeError if that is no State or is sharded, RuntimeError if it uses the
    process group, and what `setup` raises."""
    try:
        state: object = setup(job)
    except (ValueError, RuntimeError) as error:
        if not any(said in str(error) for said in _UNFORMED):
            raise
        files = {frame.f_code.co_filename.rpartition("/")[2] for frame, _ in traceback.walk_tb(error.__traceback__)}
        if found := next((said for file, said in _SHARDING.items() if file in files), ""):
            raise MisuseTypeError(found) from error
        raise MisuseRuntimeError(
            "setup() uses torch.distributed, and the process group is formed after it, anew for each generation: move "
            f"this to train(), where job.broadcast() sends a value of rank 0 to all ranks ({error})"
        ) from error
    if not isinstance(state, State):
        raise MisuseTypeError(f"setup returned {type(state).__name__}: return elastic.State(model=…, optimizer=…)")
    return state
