"""accelerate's view of this process: its PartialState (rank, world size, device), read by Trainer and Accelerator.

accelerate looks at torchrun's variables once per process and forms a process group if it finds them. Under elastic the
group comes later and changes, so its view is set here instead: alone before and after training, and in each
generation the rank, the size and the device of the group that elastic has formed. It is built without asking CUDA for
anything: a process that is only a standby must not initialise it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

_LAUNCHER = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def first_device(*, use_cpu: bool) -> torch.device:
    """The device before training begins: the CPU in a process that will be told its GPU with its rank."""
    if use_cpu or "LOCAL_RANK" in os.environ or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def ddp_options(accelerator: Any) -> dict[str, Any]:
    """For `Job.ddp`, from the script's DistributedDataParallelKwargs; none without a group."""
    if accelerator.ddp_handler is None or not dist.is_initialized():
        return {}
    options: dict[str, Any] = accelerator.ddp_handler.to_kwargs()
    if options.pop("broadcast_buffers", True) is False:
        options["sync_buffers"] = False
    return options


def alone(device: torch.device, *, rank: int = 0, local_rank: int = 0) -> None:
    """From here on this process works for itself. `rank` stays what it was in the group, so that one process saves."""
    _set(device, DistributedType.NO, None, 1, rank, local_rank)


def grouped(device: torch.device, *, rank: int, local_rank: int, world_size: int, sharded: bool = False) -> None:
    """From here on this process is a rank of torch's default process group, if there is one (standalone: none).
    `sharded`: on CPUs, where Accelerate has no FSDP, it is given out for one with a GPU."""
    if not dist.is_initialized():
        alone(device, rank=rank, local_rank=local_rank)
    else:
        on_gpu = device.type == "cuda"
        kind = DistributedType.MULTI_GPU if on_gpu or sharded else DistributedType.MULTI_CPU
        _set(device, kind, "nccl" if on_gpu else "gloo", world_size, rank, local_rank)


def _set(
    device: torch.device, kind: DistributedType, backend: str | None, world_size: int, rank: int, local_rank: int
) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    try:
        PartialState(cpu=True)
    finally:
        os.environ.update(hidden)
    PartialState._shared_state.update(
        _cpu=device.type == "cpu",
        backend=backend,
        device=device,
        distributed_type=kind,
        num_processes=world_size,
        process_index=rank,
        local_process_index=local_rank,
    )
