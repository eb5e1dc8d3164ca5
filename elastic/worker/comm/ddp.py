"""DistributedDataParallel, with gradients that are an exact mean over the global batch and bit-identical after
re-forming.

Stock DDP averages the ranks' gradients with equal weights. That is the mean over the global batch only if every rank
has the same number of samples; here the parts may differ by one and may be empty. So a communication hook multiplies
each bucket by this rank's weight (samples here / samples in the global batch) and sums. The user's loop stays plain
PyTorch: a loss that is a mean over the samples of the rank's batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import torch_private
from .buffers import broadcast_coalesced
from .comm_hooks import Exchange, GradientHook, Sampler, plain


class GradientWeight:
    """This rank's weight in the current step: set by `batches`, read by the gradient hook."""

    def __init__(self) -> None:
        self._weight: float | None = None
        self._ends = False
        """The loop over batches is over, and its last batch is not committed."""
        self._taken: float | None = None
        """Of the batch that a loop has taken and the step has not committed."""
        self._batch: object = None
        """The newest batch, until its loop is over."""
        self._left: set[float] = set()
        """Weights of the batches of this step whose loops are gone, as of next(job.batches(…))."""
        self._mixed: tuple[float, ...] = ()
        """Those of a backward that had one weight for several of them."""
        self._unlike: tuple[float, float] | None = None
        """The weights of two loops that have one."""
        self._models: list[nn.Module] = []
        self._sums = 0
        self._part_weight: float | None = None
        """Of the last micro-batch, while a loop over several is under way."""
        self._of_batch = 0.0
        """Of the batch that such a loop cuts."""
        self._exchanges = True
        """The backward of the micro-batch that was taken last exchanges the gradients."""
        self._whole = False
        """The gradients hold the result of such a loop, which no optimizer has applied yet."""
        self.failed = False
        """An exchange of gradients has failed in this group, even if the script handles the error."""
        self._weighted = False
        """`add_up` was called in this group."""

    def __call__(self) -> float:
        """Samples of the current backward / samples of the global batch; 1 / world size before the first batch is
        taken. After `add_up` 1 / world size on every rank: all weights of a step then add up to 1, so that sums which
        an earlier backward of the step has left in the gradients remain what they are.

        Raises RuntimeError in a step of two loops whose batches have other weights: gradients have one only."""
        if self._sums:
            return 1.0 / self._sums
        if self._unlike is not None:
            raise RuntimeError(_two_loops(self._unlike))
        if self._taken is None and len(self._left) > 1:
            self._mixed = tuple(sorted(self._left))
        return self._weight if self._weight is not None else 1.0 / dist.get_world_size()

    def attach(self, model: nn.Module) -> None:
        """Register `model`, which is trained on the batches: wrapped for a group, or unwrapped (standalone)."""
        if all(model is not known for known in self._models):
            self._models.append(model)

    def detach_all(self) -> None:
        """Drop the models and the weight: their group is closed."""
        self._models.clear()
        self._weight = self._part_weight = self._batch = None
        self._sums, self._whole, self._exchanges = 0, False, True
        self._step_over()
        self.failed = self._weighted = False

    @property
    def exchanges(self) -> bool:
        """Whether this group is known to exchange gradients."""
        return self._weighted or any(isinstance(model, DistributedDataParallel) for model in self._models)

    @property
    def exchanged(self) -> set[int]:
        """Identities of the parameters whose gradients are exchanged by the models."""
        return {key for model in self._models if isinstance(model, _Told) for key in model.exchanged}

    @property
    def own_buffers(self) -> set[int]:
        """Identities of the buffers of which each rank has its own, as `wrap` was told."""
        apart = (model for model in self._models if isinstance(model, _Told) and not model.broadcast_buffers)
        return {id(buffer) for model in apart for buffer in model.buffers()}

    def share_buffers(self, *, last: bool = True) -> None:
        """Broadcast rank 0's buffers before a step is applied, or (`last` False) sooner. All ranks call it at the same
        point."""
        for model in self._models:
            if isinstance(model, _Told):
                model.share_buffers(last=last)

    def before_step(self) -> None:
        """An optimizer is about to apply the gradients. Raises RuntimeError if they are of several batches with one
        weight, or if a loop over `batch.parts()` has not come to its end, and they lack their exchange or the weight
        of their last part."""
        if self._mixed:
            raise RuntimeError(_two_loops(self._mixed))
        if self._part_weight is not None and self._left_early():
            raise RuntimeError(
                "the loop over batch.parts() was left before its end: its gradients are not the batch's mean. Run it "
                "to its end; in zip() it comes first: zip(batch.parts(), masks)"
            )
        self._leave_parts()
        self._whole = False
        self.share_buffers()

    def _left_early(self) -> bool:
        if not self._exchanges:  # not even begun with the last part: each rank has gradients of its own
            return bool(_grads(self._models))
        return self._part_weight != 1.0 and not self._sums and bool(_grads(self._unwrapped()))

    def _unwrapped(self) -> list[nn.Module]:
        return [model for model in self._models if not isinstance(model, DistributedDataParallel)]

    def fail(self) -> None:
        """Gradients may be sums over some ranks only: they must not be applied in this group any more."""
        self.failed = True

    def take(self, weight: float, batch: object) -> None:
        """A loop over batches has its next one, of this weight. If another loop has one in this step, of another
        weight, that is refused where the weight is used; sums of `add_up` do not use it. Raises RuntimeError if the
        rank has no sample of one of them only: `empty` is one answer for both."""
        if self._taken is not None and self._taken != weight:
            self._unlike = self._taken, weight
            if 0.0 in self._unlike:
                raise RuntimeError(_two_loops(self._unlike))
        self._taken, self._batch, self._ends = weight, batch, False
        self.begin(weight)

    def begin(self, weight: float, *, exchange: bool = True) -> None:
        """Set the weight of the next forward and backward; without `exchange` they only accumulate, as in `no_sync`."""
        self._weight, self._exchanges = weight, exchange
        for model in self._models:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = exchange  # all that DDP.no_sync() does

    def release(self, batch: object, *, committed: bool) -> None:
        """The loop over batches whose last one was `batch` is over: further gradients have the weight of a loop of the
        script's own. Those of that batch keep theirs until it is `committed`. Nothing if another loop, or another
        generation, has begun in the meantime: a generator may be closed late."""
        if batch is not self._batch:
            return
        self._batch = None
        if committed:
            self._weight = self._taken = None
        else:
            self._ends = True
            if self._taken is not None:
                self._left.add(self._taken)
                self._taken = None

    def add_up(self, loss: torch.Tensor, world_size: int) -> None:
        """Until the commit gradients are summed over ranks and micro-batches: `loss`, this rank's part of the mean, has
        its weight already. Its backward is scaled to balance the weight that the exchange applies; without samples
        it is zero."""
        self._sums, self._weighted = world_size, True
        if loss.requires_grad and (world_size > 1 or self.empty):
            factor = 0.0 if self.empty else float(world_size)
            loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    def committed(self) -> None:
        self._leave_parts()
        self._sums, self._whole = 0, False
        if self._ends:
            self._weight = None
        self._step_over()
        for model in self._models:
            if isinstance(model, _Told):
                model.shared = False

    def _step_over(self) -> None:
        """No batch of this step counts any more."""
        self._taken, self._unlike, self._ends, self._mixed = None, None, False, ()
        self._left.clear()

    @property
    def empty(self) -> bool:
        """This rank has no samples in this step, and one to take part with that must not count."""
        return self._weight == 0.0

    def enter_parts(self, last: float, batch: float) -> None:
        """A loop over several micro-batches begins; the weights of its last one and of the whole `batch`. Raises
        RuntimeError if the gradients of such a loop are held already: this one would weight them again."""
        if self._whole and not self._sums and any(bool(grad.any()) for grad in _grads(self._models)):
            raise RuntimeError(
                "a second loop over batch.parts() in one step: the gradients of the first would be weighted again. "
                "Put both losses into one loop"
            )
        self._part_weight, self._of_batch = last, batch

    def rescale(self, factor: float) -> None:
        """Multiply the gradients accumulated so far, so that micro-batches of unequal size keep their proportion."""
        if self._sums:
            return
        _scale(self._models, factor)

    def finish(self) -> None:
        """After the last micro-batch: apply its weight to models without a gradient hook."""
        _scale(self._unwrapped(), self())
        self._whole = self._part_weight is not None
        self._leave_parts()

    def _leave_parts(self) -> None:
        """The loop over micro-batches is over, or was left and its gradients dropped: what follows is of the whole
        batch, and exchanged."""
        if self._part_weight is not None:
            self._part_weight = None
            self.begin(self._of_batch)


def _two_loops(weights: Sequence[float]) -> str:
    shares = " and ".join(f"{weight:.4g}" for weight in weights)
    return (
        f"two loops over batches in one step, of which this rank has {shares} of the samples: one weight cannot give "
        "the mean of both. Read both in one dataset, dataset[i] == (a, b), or give job.weighted the sum and the number "
        "of each loss's terms. If the first batch is only to look at: batches = job.batches(…); probe = next(batches); "
        "batches.close()"
    )


def _grads(models: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [p.grad for model in models for p in model.parameters() if p.grad is not None]


def _scale(models: Sequence[nn.Module], factor: float) -> None:
    grads = _grads(models)
    if grads and factor != 1.0:
        torch_private.foreach_mul(grads, factor)


def refuse_subgroup(options: Mapping[str, Any], world_size: int) -> None:
    """`options`: those of DistributedDataParallel. Raises ValueError for a process group, or a device mesh, of some of
    the ranks: the weights of its ranks do not add up to 1, and all replicas are to be equal."""
    name, size = "process_group", world_size
    if (group := options.get(name)) is not None:
        size = dist.get_world_size(group)
    elif (mesh := options.get("device_mesh")) is not None:
        name, size = "device_mesh", mesh.size()
    if size != world_size:
        raise ValueError(
            f"job.ddp: a {name} of {max(size, 0)} of the {world_size} ranks: each rank's gradients have the weight of "
            f"its samples among those of all ranks, and all have the same model. Leave {name} out"
        )


class Weight(Protocol):
    def __call__(self) -> float: ...


def wrap(
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    weight: Weight,
    on_contributed: Callable[[], None],
    on_received: Callable[[], None] = lambda: None,
    on_failed: Callable[[], None] = lambda: None,
    on_buffers: tuple[Callable[[], None], Callable[[], None]] = (lambda: None, lambda: None),
    sync_buffers: bool = True,
    exchange: Exchange = plain,
    sampler: Sampler | None = None,
    **options: Any,
) -> DistributedDataParallel:
    """Wrap `model`, whose parameters are already equal on all ranks: only the bucket layout is communicated here.

    `weight` is called once per bucket.

    `on_contributed` is called when the last bucket of a backward has been passed to the group: from then on this rank
    only waits for the others. `on_received` is called when the sums are complete, at the end of that backward: from
    then on the others may wait for this rank. Not on a GPU, where a backward does not wait for them. `on_failed` is
    called if the sums fail. `on_buffers` are called before and after the exchange of buffers.

    `sync_buffers`: as in stock DDP all ranks keep rank 0's buffers (BatchNorm's running statistics), but they are
    broadcast before the optimizer step and not at the start of the next forward. Without it each rank has its own, and
    those of a lost rank are replaced by the source's; switch it off for models whose buffers never change.

    `exchange`: how the gradients are summed, see `comm_hooks`. `sampler`: sees each bucket before it is summed.

    `options` are passed to DistributedDataParallel. By default gradients are views of its buckets: that saves the copy
    back, which offsets the multiplication by the weight, and as much memory as the gradients take.
    """
    options.setdefault("gradient_as_bucket_view", True)
    if not sync_buffers:
        # torch 2.13 renamed the option and warns about the old name; either means no broadcast here, as init_sync is
        # off.
        known = inspect.signature(DistributedDataParallel).parameters
        options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
    # With find_unused_parameters alone DDP never rebuilds its buckets: its first layout is its only one.
    rebuilds = options.get("static_graph", False) or not options.get("find_unused_parameters", False)
    kind = _FixedLayout if rebuilds else _Told
    wrapped = kind(model, process_group=process_group, init_sync=False, **options)
    wrapped.on_buffers = on_buffers
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None  # DDP has refused to be built without one
    hook = GradientHook(
        exchange,
        group,
        weight=weight,
        on_contributed=on_contributed,
        on_received=on_received,
        on_failed=on_failed,
        sampler=sampler,
    )
    # A lambda, because DDP rejects annotations other than the exact types it expects.
    wrapped.register_comm_hook(None, lambda _, bucket: hook(bucket))
    if isinstance(weight, GradientWeight):
        weight.attach(wrapped)
    return wrapped


class _Told(DistributedDataParallel):
    """DDP that reports when it waits for rank 0's buffers, and broadcasts them before a step is applied.

    Stock DDP broadcasts rank 0's buffers at the start of the next forward. Until then BatchNorm's running statistics
    exist on rank 0 only, and would be lost with it. Broadcast before the optimizer step, they are equal on all ranks
    when the step is committed, and the next forward starts from the same values without another exchange.
    """

    on_buffers: tuple[Callable[[], None], Callable[[], None]]
    exchanged: set[int]
    """Identities of the parameters in its buckets: not those that wanted no gradients when it was built."""
    shared = False
    """The buffers were exchanged before this step is applied. Once a step they are in any case: forwards without
    gradients change them too (in training mode), of which each rank may have another number."""
    _alike = False
    """No training forward with gradients has changed this rank's buffers since they were exchanged."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        # A part may train while the whole is in evaluation mode.
        self._writers = [model, *(module for module in model.modules() if any(True for _ in module.buffers(False)))]

    def _build_params_for_reducer(self) -> Any:
        parameters, expect_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        self.exchanged = set(map(id, parameters))
        return parameters, expect_sparse

    def share_buffers(self, *, last: bool) -> None:
        """Broadcast rank 0's buffers unless they are already equal; with `last` once a step at least. All ranks call it
        at the same point of a step."""
        if self._alike and (self.shared or not last):
            return
        # DDP's check says no after a forward without gradients, which leaves this flag unset.
        kept, self.require_forward_param_sync = self.require_forward_param_sync, True
        due = super()._check_sync_bufs_pre_fwd()  # type: ignore[no-untyped-call]
        self.require_forward_param_sync = kept
        if due:
            self._sync_buffers()
            self._alike, self.shared = True, last

    def _check_sync_bufs_pre_fwd(self) -> bool:
        due = not self._alike and super()._check_sync_bufs_pre_fwd()  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and any(module.training for module in self._writers):
            self._alike = False
        elif due:
            self._alike = True
        return bool(due)

    def _sync_buffers(self) -> None:
        waits, goes_on = self.on_buffers
        waits()
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        goes_on()

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Stock DDP waits here inside gloo, where an abort may not reach it (`in_flight`)."""
        ours = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        if ours:
            broadcast_coalesced(ours, self.process_group, authoritative_rank, buffer_size)
        if others := [tensor for tensor in tensors if tensor.device.type != "cpu"]:
            super()._distributed_broadcast_coalesced(others, buffer_size, authoritative_rank)  # type: ignore[no-untyped-call]


class _FixedLayout(_Told):
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
