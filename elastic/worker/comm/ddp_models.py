"""The classes that `ddp.wrap` builds: DistributedDataParallel with one layout of its buckets, and with buffers that are
broadcast before a step is applied. And which of its options they cannot have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from elastic.worker.link.link import Link
from elastic.worker.link.misuse import MisuseRuntimeError, MisuseValueError
from elastic.worker.torch_internals import torch_private

from .in_flight import IN_FLIGHT
from .parts_loop import ModelGradients

BUCKET_MB = 25
"""MiB in a bucket, but for the first: stock DDP's default."""

FROZEN = (
    "were frozen (requires_grad_(False)) after job.ddp had wrapped it: the exchange waits for their gradients, and "
    "each rank has its own of the others. Parameters that train freezes at some step: freeze them before job.ddp, "
    "on each entry of train (if state.step > N), or call job.ddp(model, find_unused_parameters=True)"
)

JOINED = (
    "torch.distributed.algorithms.Join around job.ddp: a rank that has no more batches would go on without commits. "
    "Leave it out: job.batches, job.streams and job.steps give each rank the same number of batches, which may be of "
    "unlike sizes, and the gradient is the mean over all samples"
)


OVER = (
    "this wrapper of job.ddp is of an earlier entry of train, whose process group is closed: call job.ddp in train, on "
    "each entry, and use what it returns"
)


class BufferSyncingDDP(DistributedDataParallel):
    """DDP that reports when it waits for rank 0's buffers, and broadcasts them before a step is applied.

    Stock DDP broadcasts rank 0's buffers at the start of the next forward. Until then BatchNorm's running statistics
    exist on rank 0 only, and would be lost with it. Broadcast before the optimizer step, they are equal on all ranks
    when the step is committed, and the next forward starts from the same values without another exchange.
    """

    link: Link
    on_forward: Callable[[BufferSyncingDDP], None]
    """Called at a forward with gradients."""
    grads: ModelGradients
    exchanged: set[int]
    """Identities of the parameters in its buckets: not those that wanted no gradients when it was built."""
    shared = False
    """The buffers were exchanged before this step is applied. Once a step they are in any case: forwards without
    gradients change them too (in training mode), of which each rank may have another number."""
    _alike = False
    """No training forward with gradients has changed this rank's buffers since they were exchanged."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.grads = ModelGradients()
        # A part may train while the whole is in evaluation mode.
        self._writers = [model, *(module for module in model.modules() if any(True for _ in module.buffers(False)))]

    def end(self) -> None:
        """Its group is closed. What still has this wrapper may keep it (torch.compile's cache does); the hooks of its
        reducer must not: after an aborted backward they would run in the next generation's, and raise."""
        torch_private.end_reducer(self)
        vars(self).update(forward=_over)

    def join_hook(self, **_: Any) -> Any:
        """Raises RuntimeError."""
        raise MisuseRuntimeError(JOINED)

    def _build_params_for_reducer(self) -> Any:
        parameters, expect_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        self._exchanged_parameters = list(parameters)
        self.exchanged = set(map(id, parameters))
        return parameters, expect_sparse

    def refuse_frozen(self) -> None:
        """Raises RuntimeError if gradients were not exchanged, or cannot be, because parameters that were frozen
        meanwhile have none. Stock DDP raises at its next forward, after this rank's own gradients were applied."""
        if not self.grads.waits:
            return
        wants = [param.requires_grad for param in self._exchanged_parameters]
        # A backward may still come. It fills all buckets if the unused are looked for, and none if all are frozen.
        if all(wants) or not (self.grads.own or (any(wants) and not self.find_unused_parameters)):
            return
        named = self.module.named_parameters()
        frozen = [name for name, param in named if id(param) in self.exchanged and not param.requires_grad]
        more = f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
        raise MisuseRuntimeError(f"{', '.join(frozen[:3])}{more} of a model {FROZEN}")

    def share_buffers(self, *, last: bool) -> None:
        """Broadcast rank 0's buffers unless they are already equal; with `last` once a step at least. All ranks call it
        at the same point of a step."""
        if not self.modules_buffers or (self._alike and (self.shared or not last)):
            return
        # DDP's check says no after a forward without gradients, which leaves this flag unset.
        kept, self.require_forward_param_sync = self.require_forward_param_sync, True
        due = super()._check_sync_bufs_pre_fwd()  # type: ignore[no-untyped-call]
        self.require_forward_param_sync = kept
        if due:
            self._sync_buffers()
            self._alike, self.shared = True, last

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.on_forward(self)  # before anything of DDP's, which fails after a backward that has failed
        return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _check_sync_bufs_pre_fwd(self) -> bool:
        due = not self._alike and super()._check_sync_bufs_pre_fwd()  # type: ignore[no-untyped-call]
        trains = torch.is_grad_enabled()
        self.grads.trained |= trains
        if trains:
            self.grads.waits = self.require_backward_grad_sync
        if trains and any(module.training for module in self._writers):
            self._alike = False
        elif due:
            self._alike = True
        return bool(due)

    def _sync_buffers(self) -> None:
        self.link.contributed()
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        self.link.entered()

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Stock DDP waits here inside gloo, where an abort may not reach it (`in_flight`)."""
        ours = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        if ours:
            broadcast_coalesced(ours, self.process_group, authoritative_rank, buffer_size)
        if others := [tensor for tensor in tensors if tensor.device.type != "cpu"]:
            super()._distributed_broadcast_coalesced(others, buffer_size, authoritative_rank)  # type: ignore[no-untyped-call]


def _over(*_: Any, **__: Any) -> NoReturn:
    raise MisuseRuntimeError(OVER)


class FixedLayout(BufferSyncingDDP):
    """DDP whose buckets have their final layout from the first backward on.

    Stock DDP starts with a single bucket and splits it after the first backward, in the order in which gradients became
    ready. The order in which gloo and NCCL add up the ranks' values depends on the position of an element in its
    bucket, so with three ranks or more the first step after re-forming would round differently from the same step of an
    undisturbed run. Here the one rebuild happens at once, in reverse order of the parameters, which is nearly the order
    in which gradients become ready.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._has_rebuilt_buckets = torch_private.rebuild_buckets(self.reducer)

    def _build_params_for_reducer(self) -> Any:
        parameters, expect_sparse = super()._build_params_for_reducer()
        return parameters[::-1], expect_sparse[::-1]


def bucket_options(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of DistributedDataParallel that decide the size of its buckets, where the user's `options` do not.

    The first bucket of stock DDP holds 1 MB, so that its exchange runs beside the backward. On CPUs both need the same
    cores, and what gloo does for a bucket costs more than that saves. So gradients that fit into one bucket of the
    usual size are in one.
    """
    if "bucket_cap_mb" in options or "bucket_cap_mb_list" in options:
        return {}
    params = [param for param in model.parameters() if param.requires_grad]
    if not all(param.device.type == "cpu" and not is_lazy(param) for param in params):
        return {}
    nbytes = sum(param.numel() * param.element_size() for param in params)
    return {"bucket_cap_mb": BUCKET_MB} if nbytes <= BUCKET_MB << 20 else {}


def refuse_subgroup(options: Mapping[str, Any], world_size: int) -> None:
    """`options`: those of DistributedDataParallel. Raises ValueError for a process group, or a device mesh, of some of
    the ranks: the weights of its ranks do not add up to 1, and all replicas are to be equal."""
    name, size = "process_group", world_size
    if (group := options.get(name)) is not None:
        size = dist.get_world_size(group)
    elif (mesh := options.get("device_mesh")) is not None:
        name, size = "device_mesh", mesh.size()
    if size != world_size:
        raise MisuseValueError(
            f"job.ddp: a {name} of {max(size, 0)} of the {world_size} ranks: each rank's gradients have the weight of "
            f"its samples among those of all ranks, and all have the same model. Leave {name} out"
        )


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int, bucket_bytes: int
) -> None:
    """Copy rank `source`'s tensors, on the CPU, into those of all ranks, in messages of about `bucket_bytes`.

    Raises GroupAborted if the group is aborted meanwhile, and gloo's RuntimeError if a message fails; these tensors are
    then unchanged, but for those of messages that are complete.
    """
    started = []
    for bucket in _buckets(tensors, bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        # As bytes: gloo takes no int16, no float8.
        work = dist.broadcast(flat.view(torch.uint8), group=group, group_src=source, async_op=True)
        assert work is not None  # only for ranks outside the group
        started.append((bucket, flat, IN_FLIGHT.follow(work.get_future(), _done, lambda: None)))
    for bucket, flat, future in started:
        future.wait()
        if group.rank() != source:
            parts = flat.split_with_sizes([tensor.numel() for tensor in bucket])
            shaped = [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)]
            torch_private.foreach_copy(bucket, shaped)


def _buckets(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Of one dtype each, and the same on all ranks."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket, size = list[torch.Tensor](), 0
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def _done(future: torch.futures.Future[Any]) -> torch.Tensor:
    future.value()  # raises what gloo has raised
    return torch.empty(0)
