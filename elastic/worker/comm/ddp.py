"""DistributedDataParallel, with gradients that are an exact mean over the global batch and bit-identical after
re-forming.

Stock DDP averages the ranks' gradients with equal weights. That is the mean over the global batch only if every rank
has the same number of samples; here the parts may differ by one and may be empty. So a communication hook multiplies
each bucket by this rank's weight (samples here / samples in the global batch) and sums. The user's loop stays plain
PyTorch: a loss that is a mean over the samples of the rank's batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic.worker.link.misuse import MisuseRuntimeError
from elastic.worker.torch_internals import torch_private

from .comm_hooks import Exchange, GradientHook, Sampler, plain
from .ddp_models import BufferSyncingDDP, FixedLayout, bucket_options
from .errors import GroupAborted
from .parts_loop import (
    HELD,
    LEFT,
    TWICE,
    UNEXCHANGED,
    USED,
    PartsLoop,
    UnsyncedGradients,
    gradients,
    samples,
    two_loops,
)


class _Taken:
    """A batch of this step."""

    __slots__ = ("alive", "batch", "share", "used")

    def __init__(self, batch: object, share: float) -> None:
        self.batch, self.share = batch, share
        self.alive = True
        """Its loop has not ended."""
        self.used = False
        """A backward has had its weight, or an optimizer has stepped since."""


class GradientWeight:
    """This rank's weight in the current step: set by `batches`, read by the gradient hook.

    It is that of the newest batch; 1 / world size before the first one, and after a commit whose loop is gone. The next
    backward is of the batches of loops that are alive; if none is, as of next(job.batches(…)), of those that none has
    used. One that is of batches with unlike shares is refused.

    A batch is whole, or cut by a loop over its parts (`_parts`), which has the weight of one of them:

    - an earlier part: gradients are this rank's own, and no optimizer may apply them.
    - the last part: exchanged, with its weight, by its backward. What has no gradient hook gets the weight in `finish`.
    - left early: as the part in which it was left, while the gradients lack their exchange or their weight.

    The way back to whole is `finish`, `leave_parts` if no gradient lacks anything, an optimizer's step after it if they
    were dropped, or `committed`: never an optimizer's step within the loop, as of a GAN's first model.

    Gradients are free, or held (`_held`): of a backward, and applied by no optimizer. A further exchange of the whole
    batch keeps them, as all weights add up to 1; those of last parts do not, so a loop over parts is refused then.

    Beside all that, `add_up` (`_sums`) gives every rank the same weight until the commit, which keeps held gradients.
    """

    def __init__(self) -> None:
        self._models: list[nn.Module] = []
        self._wrapped: list[BufferSyncingDDP] = []
        """Those of them that `wrap` has wrapped. A list of its own: `isinstance` asks torch's ABC each time."""
        self._hooks: list[Any] = []
        self._weight: float | None = None
        self._batch: object = None
        """The newest batch, until its loop is over."""
        self._taken: list[_Taken] = []
        """Those of this step."""
        self._unlike: tuple[float, float] | None = None
        """Shares of two loops that were alive at once in this step."""
        self._parts: PartsLoop | None = None
        self._held = False
        self._kept = False
        """Held since an earlier step, which was committed without applying them."""
        self._sums = 0
        self._weighted = False
        """`add_up` was called in this group."""
        self.failed = False
        """An exchange has failed in this group, even if the script handles the error."""

    def __call__(self) -> float:
        """Samples of the current backward / samples of the global batch; 1 / world size before the first batch is
        taken. After `add_up` 1 / world size on every rank: all weights of a step then add up to 1, so that sums which
        an earlier backward of the step has left in the gradients remain what they are.

        Raises RuntimeError in a step of two loops whose batches have other weights: gradients have one only."""
        if self._sums:
            return 1.0 / self._sums
        if shares := self._unlike or self._several():
            raise MisuseRuntimeError(two_loops(shares))
        self._serve()
        self._held, self._kept = True, False
        return self._weight if self._weight is not None else 1.0 / dist.get_world_size()

    def of(self, model: int) -> float:
        """The same, for a bucket of the model of this identity. A second backward in the last part is noted: what this
        rank has in its gradients by now is not the other ranks', so all decide by its sums (`_refuse_twice`)."""
        parts = self._parts
        if parts is not None and model in parts.summed() and not self._sums:
            parts.twice.add(model)
        return self()

    def _begins(self, model: nn.Module) -> None:
        self.refuse_failed()
        if self._parts is not None:
            self._parts.begins(model)

    def exchanges_last(self, model: int) -> None:
        """The last bucket of a backward of the model of this identity is exchanged."""
        if self._parts is not None and self._parts.last:
            self._parts.exchanged.add(model)

    def told_by(self, model: nn.Module) -> dict[str, Any]:
        """Attach `model`. Returns arguments of its `GradientHook`."""
        self.attach(model)
        key = id(model)  # DDP holds the hook, and a cycle through it would keep the group
        if isinstance(model, BufferSyncingDDP):
            model.own.begins = self._begins
        return {
            "weight": functools.partial(self.of, key),
            "on_last": functools.partial(self.exchanges_last, key),
        }

    def attach(self, model: nn.Module) -> None:
        """Register `model`, which is trained on the batches: wrapped for a group, or unwrapped (standalone)."""
        if any(model is known for known in self._models):
            return
        self._models.append(model)
        if isinstance(model, BufferSyncingDDP):
            self._wrapped.append(model)
        own = model.own if isinstance(model, BufferSyncingDDP) else UnsyncedGradients()
        wanted = [param for param in model.parameters() if param.requires_grad]
        for param in {id(each): each for each in (*wanted[:1], *wanted[-1:])}.values():
            added: Any = functools.partial(self._added, own)
            self._hooks.append(param.register_post_accumulate_grad_hook(added))  # type: ignore[no-untyped-call]

    def _added(self, own: UnsyncedGradients, _: torch.Tensor) -> None:
        """A backward has added to gradients. Of the first and the last parameter of each model."""
        own.held = True
        if self._parts is None and not self._sums:
            self._held, self._kept = True, False

    def detach_all(self) -> None:
        """Drop the models and the weight: their group is closed."""
        for hook in self._hooks:
            hook.remove()
        for model in self._wrapped:
            model.end()
        self._hooks.clear()
        self._models.clear()
        self._wrapped.clear()
        self._weight = self._batch = self._parts = None
        self._sums, self._held, self._kept = 0, False, False
        self._step_over()
        self.failed = self._weighted = False

    def fail(self) -> None:
        """Gradients may be sums over some ranks only: they must not be applied in this group any more."""
        self.failed = True

    def refuse_failed(self) -> None:
        """Raises GroupAborted."""
        if self.failed:
            raise GroupAborted("an exchange between the ranks has failed, and what is here is no sum over all of them")

    @property
    def exchanges(self) -> bool:
        """Whether this group is known to exchange gradients."""
        return self._weighted or any(isinstance(model, DistributedDataParallel) for model in self._models)

    @property
    def exchanged(self) -> set[int]:
        """Identities of the parameters whose gradients are exchanged by the models, and were whenever applied."""
        return {key for model in self._wrapped if not model.own.applied for key in model.exchanged}

    @property
    def own_buffers(self) -> set[int]:
        """Identities of the buffers of which each rank has its own, as `wrap` was told."""
        apart = (model for model in self._wrapped if not model.broadcast_buffers)
        return {id(buffer) for model in apart for buffer in model.buffers()}

    def share_buffers(self, *, last: bool = True) -> None:
        """Broadcast rank 0's buffers before a step is applied, or (`last` False) sooner. All ranks call it at the same
        point."""
        for model in self._wrapped:
            model.share_buffers(last=last)

    # ── batches ─────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, weight: float, batch: object) -> None:
        """A loop over batches has its next one, of this weight. If another loop has one in this step, of another
        weight, that is refused where the weight is used; sums of `add_up` do not use it. Raises RuntimeError if the
        rank has no sample of one of them only: `empty` is one answer for both."""
        if other := next((each for each in self._taken if each.alive and each.share != weight), None):
            self._unlike = other.share, weight
            if 0.0 in self._unlike:
                raise MisuseRuntimeError(two_loops(self._unlike))
        self._batch = batch
        self._taken.append(_Taken(batch, weight))
        if self._parts is not None:
            self._parts.batch = weight  # gradients of it still lack what they lack
        self._set(weight, exchange=True)

    def begin(self, weight: float, *, exchange: bool = True) -> None:
        """Set the weight of the next forward and backward; without `exchange` they only accumulate, as in `no_sync`."""
        if self._parts is not None:
            self._parts.last = exchange
        self._set(weight, exchange=exchange)

    def _set(self, weight: float, *, exchange: bool) -> None:
        self._weight = weight
        for model in self._models:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = exchange  # all that DDP.no_sync() does

    def release(self, batch: object, *, committed: bool) -> None:
        """The loop over batches whose last one was `batch` is over: further gradients have the weight of a loop of the
        script's own. Those of that batch keep theirs until it is `committed`. Nothing if another loop, or another
        generation, has begun in the meantime: a generator may be closed late."""
        for each in self._taken:
            each.alive = each.alive and each.batch is not batch
        if batch is self._batch:
            self._batch = None
            if committed:
                self._weight = None

    def _next(self) -> list[_Taken]:
        """Of which the next backward is."""
        alive = [each for each in self._taken if each.alive]
        return alive or [each for each in self._taken if not each.used]

    def _several(self) -> list[float]:
        """Their shares, if these are unlike; those of loops that are alive are `_unlike`."""
        shares = {each.share for each in self._next()}
        return sorted(shares) if len(shares) > 1 else []

    def _serve(self) -> None:
        """A backward has their weight: what follows may be of another one."""
        for each in self._next():
            each.used = True

    # ── a step ──────────────────────────────────────────────────────────────────────────────────────────────

    def add_up(self, loss: torch.Tensor, world_size: int) -> None:
        """Until the commit gradients are summed over ranks and micro-batches: `loss`, this rank's part of the mean, has
        its weight already. Its backward is scaled to balance the weight that the exchange applies; without samples
        it is zero. Raises RuntimeError as `counts_nothing`."""
        empty = self.counts_nothing()
        self._sums, self._weighted, self._held = world_size, True, False
        self._serve()
        if loss.requires_grad and (world_size > 1 or empty):
            factor = 0.0 if empty else float(world_size)
            loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    def counts_nothing(self) -> bool:
        """`empty`, for terms that are about to be added up. Raises RuntimeError if they may be of one of several
        batches, of which this rank has samples of some only."""
        if 0.0 in (shares := self._several()):
            raise MisuseRuntimeError(two_loops(shares))
        return self.empty

    @property
    def empty(self) -> bool:
        """This rank has no samples in this step, and one to take part with that must not count."""
        return self._weight == 0.0

    def before_step(self, *, applies: bool = True) -> None:
        """An optimizer is about to apply the gradients, or (`applies` False) the script may have done so without one.
        Raises RuntimeError if a loop over `batch.parts()` has not come to its end, and they lack their exchange or the
        weight of their last part; or as `BufferSyncingDDP.refuse_frozen`."""
        if self._parts is not None:
            if self._lacking(self._parts):
                raise MisuseRuntimeError(LEFT)
            self._refuse_twice(self._parts)
            # Within the last part another model's backward may still come.
            if self._unexchanged(self._parts, every=not self._parts.open):
                raise MisuseRuntimeError(UNEXCHANGED)
            if applies and self._parts.last:
                self._parts.applied |= self._parts.exchanged
            if not self._parts.open:
                self._whole_again()
        if applies:
            for model in self._wrapped:
                model.refuse_frozen()
                model.own.applied |= model.own.held
            for each in self._taken:
                each.used = True
            self._held = self._kept = False
        self.share_buffers()

    def committed(self) -> None:
        self._whole_again()
        self._sums, self._kept = 0, self._held
        if self._batch is None:
            self._weight = None
        self._step_over()
        for model in self._wrapped:
            model.shared = False

    def _step_over(self) -> None:
        """No batch of this step counts any more."""
        self._unlike = None
        self._taken.clear()

    # ── parts of a batch ────────────────────────────────────────────────────────────────────────────────────

    def refuse_used(self, batch: object) -> None:
        """A loop over the parts of `batch` begins. Raises RuntimeError if it was not taken in this step."""
        if all(samples(batch) != samples(each.batch) for each in self._taken):
            raise MisuseRuntimeError(USED)

    def enter_parts(self, batch: float) -> PartsLoop:
        """A loop over several micro-batches of a batch of this weight begins. Raises RuntimeError if gradients are
        held, which it would weight again. Of those kept over a commit not if one of the models has none any more: the
        step was skipped, and the script drops another model's later."""
        if self._held and not self._sums and self._models:
            found = [any(bool(grad.any()) for grad in gradients([model])) for model in self._models]
            if all(found) if self._kept else any(found):
                raise MisuseRuntimeError(HELD)
        for model in self._wrapped:
            model.own.trained = False
        self._parts = PartsLoop(batch, {id(model) for model in self._wrapped if gradients([model])})
        return self._parts

    def rescale(self, factor: float) -> None:
        """Multiply the gradients accumulated so far, so that micro-batches of unequal size keep their proportion."""
        if self._sums:
            return
        _scale(self._models, factor)

    def finish(self) -> None:
        """After the last micro-batch: apply its weight to models without a gradient hook. Raises RuntimeError if an
        optimizer may have applied gradients that were not exchanged."""
        if self._parts is not None:
            self._refuse_twice(self._parts)
        _scale(self._unwrapped(), self())
        if self._parts is None or not self._unexchanged(self._parts):
            self._whole_again()
        elif self._parts.applied:
            raise MisuseRuntimeError(UNEXCHANGED)
        else:  # they must not be applied
            self._parts.open = False

    def leave_parts(self, parts: PartsLoop) -> None:
        """The generator of the loop has ended, also early, or late: then another loop may have begun."""
        parts.open = False
        if parts is self._parts and not parts.twice and not self._lacking(parts) and not self._unexchanged(parts):
            self._whole_again()

    def _refuse_twice(self, parts: PartsLoop) -> None:
        """Raises RuntimeError for a second backward's, unless dropped, or not finite: a GradScaler skips them."""
        for model in self._wrapped if parts.twice else ():
            sums = [p.grad for p in model.parameters() if id(p) in model.exchanged and p.grad is not None]
            sums = [grad._values() if grad.is_sparse else grad for grad in sums]
            if id(model) in parts.twice and any(bool(g.any()) for g in sums) and all(g.isfinite().all() for g in sums):
                raise MisuseRuntimeError(TWICE)

    def _lacking(self, parts: PartsLoop) -> bool:
        """Whether there are gradients that lack their exchange, or the weight of the last micro-batch."""
        if not parts.last:
            return bool(gradients(self._models))
        return not self._sums and bool(gradients(self._unwrapped()))

    def _unexchanged(self, parts: PartsLoop, *, every: bool = True) -> bool:
        """Whether the last micro-batch had no backward, so that the gradients of those before lack their exchange: of
        one of the models, or (`every` False) of all."""
        if not parts.last or (parts.exchanged and not every):
            return False
        if not parts.exchanged:
            return bool(gradients(self._wrapped))
        # Others have gradients from elsewhere: a GAN's critic that was called without its wrapper, or parameters that a
        # newer wrapper has.
        known = parts.exchanged | parts.had
        return bool(gradients([model for model in self._wrapped if model.own.trained and id(model) not in known]))

    def _whole_again(self) -> None:
        """The next backward is of the whole batch, and exchanges its gradients."""
        parts, self._parts = self._parts, None
        if parts is not None:
            self.begin(parts.batch)

    def _unwrapped(self) -> list[nn.Module]:
        return [model for model in self._models if not isinstance(model, DistributedDataParallel)]


def _scale(models: Sequence[nn.Module], factor: float) -> None:
    grads = gradients(models)
    if grads and factor != 1.0:
        torch_private.foreach_mul(grads, factor)


def wrap(
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    weight: Callable[[], float],
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
    back, which offsets the multiplication by the weight, and as much memory as the gradients take. `bucket_options`
    decides the size of the buckets.
    """
    options = {"gradient_as_bucket_view": True} | bucket_options(model, options) | options
    if not sync_buffers:
        # torch 2.13 renamed the option and warns about the old name; either means no broadcast here, as init_sync is
        # off.
        known = inspect.signature(DistributedDataParallel).parameters
        options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
    # With find_unused_parameters alone DDP never rebuilds its buckets: its first layout is its only one.
    rebuilds = options.get("static_graph", False) or not options.get("find_unused_parameters", False)
    kind = FixedLayout if rebuilds else BufferSyncingDDP
    wrapped = kind(model, process_group=process_group, init_sync=False, **options)
    wrapped.on_buffers = on_buffers
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None  # DDP has refused to be built without one
    hook = GradientHook(
        exchange,
        group,
        **(weight.told_by(wrapped) if isinstance(weight, GradientWeight) else {"weight": weight}),
        on_contributed=wrapped.own.exchanged(on_contributed),
        on_received=on_received,
        on_failed=on_failed,
        sampler=sampler,
        ends_with_backward=not options.get("static_graph", False),
    )
    # A lambda, because DDP rejects annotations other than the exact types it expects.
    wrapped.register_comm_hook(None, lambda _, bucket: hook(bucket))
    return wrapped
