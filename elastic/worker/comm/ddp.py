"""How much each rank's gradients weigh: DistributedDataParallel with gradients that are an exact mean over the global
batch, and bit-identical after re-forming.

Stock DDP averages the ranks' gradients with equal weights. That is the mean over the global batch only if every rank
has the same number of samples; here the parts may differ by one and may be empty. So a communication hook multiplies
each bucket by this rank's weight (samples here / samples in the global batch) and sums. The user's loop stays plain
PyTorch: a loss that is a mean over the samples of the rank's batch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic.worker.link.link import Link
from elastic.worker.link.misuse import MisuseRuntimeError
from elastic.worker.torch_internals import torch_private

from . import parts_loop
from .comm_hooks import Exchange, GradientHook, Sampler, plain
from .ddp_models import BufferSyncingDDP, FixedLayout, bucket_options
from .errors import GroupAborted


@dataclasses.dataclass(slots=True, eq=False)
class _Taken:
    """A batch of this step."""

    batch: object
    share: float
    alive: bool = True
    """Its loop has not ended."""
    used: bool = False
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
        self._wrapped: list[BufferSyncingDDP] = []
        self._bare: list[nn.Module] = []
        """Models that train without a group: no hook weights their gradients."""
        self._hooks: list[Any] = []
        self._enter()

    def _enter(self) -> None:
        """Nothing of an earlier group is left."""
        self._weight: float | None = None
        self._batch: object = None
        """The newest batch, until its loop is over."""
        self._taken: list[_Taken] = []
        """Those of this step."""
        self._unlike: tuple[float, float] | None = None
        """Shares of two loops that were alive at once in this step."""
        self._parts: parts_loop.PartsLoop | None = None
        self._held: Literal["", "new", "kept"] = ""
        """'kept': since an earlier step, which was committed without applying them."""
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
        if self._unlike or len(self._taken) > 1:
            if shares := self._unlike or self._several():
                raise MisuseRuntimeError(parts_loop.two_loops(shares))
            self._serve()
        elif self._taken:
            self._taken[0].used = True  # as `_serve`, in the hot path
        self._held = "new"
        return self._weight if self._weight is not None else 1.0 / dist.get_world_size()

    def of(self, model: parts_loop.ModelGradients) -> float:
        """The same, for a bucket of this model. A second backward in the last part is noted: what this rank has in its
        gradients by now is not the other ranks', so all decide by its sums (`_refuse_twice`)."""
        if not self._sums and self._sums_again(model):
            model.twice = True
        return self()

    def _sums_again(self, model: parts_loop.ModelGradients) -> bool:
        """Whether a further backward of this model would exchange sums again."""
        return self._parts is not None and self._parts.last and model.exchanged and not model.done

    def _begins(self, model: BufferSyncingDDP) -> None:
        """A forward of `model` with gradients: what the script has dropped is not exchanged again."""
        self.refuse_failed()
        if self._sums_again(model.grads) and not any(bool(grad.any()) for grad in parts_loop.gradients([model])):
            model.grads.done = True

    def exchanges_last(self, model: parts_loop.ModelGradients) -> None:
        """All gradients of a backward of this model are in buckets, whose exchange has begun."""
        model.own = model.waits = False
        if self._parts is not None and self._parts.last:
            model.exchanged = True

    def attach(self, model: nn.Module) -> None:
        """Register `model`, which is trained on the batches: wrapped for a group, or unwrapped (standalone)."""
        if any(model is each for each in (*self._wrapped, *self._bare)):
            return
        if isinstance(model, BufferSyncingDDP):
            self._wrapped.append(model)
            model.on_forward = self._begins
            grads = model.grads
        else:
            self._bare.append(model)
            grads = parts_loop.ModelGradients()
        wanted = [param for param in model.parameters() if param.requires_grad]
        for param in {id(each): each for each in (*wanted[:1], *wanted[-1:])}.values():
            added: Any = functools.partial(self._added, grads)
            self._hooks.append(param.register_post_accumulate_grad_hook(added))  # type: ignore[no-untyped-call]

    def _added(self, model: parts_loop.ModelGradients, _: torch.Tensor) -> None:
        """A backward has added to gradients. Of the first and the last parameter of each model."""
        model.own = True
        if self._parts is None and not self._sums:
            self._held = "new"

    def detach_all(self) -> None:
        """Drop the models and the weight: their group is closed."""
        for hook in self._hooks:
            hook.remove()
        for model in self._wrapped:
            model.end()
        for each in (self._hooks, self._wrapped, self._bare):
            each.clear()
        self._enter()

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
        return self._weighted or bool(self._wrapped)

    @property
    def exchanged(self) -> set[int]:
        """Identities of the parameters whose gradients are exchanged by the models, and were whenever applied."""
        return {key for model in self._wrapped if not model.grads.applied for key in model.exchanged}

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
        for each in self._taken:
            if each.alive and each.share != weight:
                self._unlike = each.share, weight
                if 0.0 in self._unlike:
                    raise MisuseRuntimeError(parts_loop.two_loops(self._unlike))
                break
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
        for model in self._wrapped:
            if model.require_backward_grad_sync is not exchange:  # all that DDP.no_sync() does
                model.require_backward_grad_sync = exchange

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
        self._sums, self._weighted, self._held = world_size, True, ""
        self._serve()
        if loss.requires_grad and (world_size > 1 or empty):
            factor = 0.0 if empty else float(world_size)
            loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    def counts_nothing(self) -> bool:
        """`empty`, for terms that are about to be added up. Raises RuntimeError if they may be of one of several
        batches, of which this rank has samples of some only."""
        if 0.0 in (shares := self._several()):
            raise MisuseRuntimeError(parts_loop.two_loops(shares))
        return self.empty

    @property
    def empty(self) -> bool:
        """This rank has no samples in this step, and one to take part with that must not count."""
        return self._weight == 0.0

    def before_step(self, *, applies: bool = True) -> None:
        """An optimizer is about to apply the gradients, or (`applies` False) the script may have done so without one.
        Raises RuntimeError if a loop over `batch.parts()` has not come to its end, and they lack their exchange or the
        weight of their last part; or as `BufferSyncingDDP.refuse_frozen`."""
        if (parts := self._parts) is not None:
            if self._lacking(parts):
                raise MisuseRuntimeError(parts_loop.LEFT)
            self._refuse_twice()
            # Within the last part another model's backward may still come.
            if self._unexchanged(parts, every=not parts.open):
                raise MisuseRuntimeError(parts_loop.UNEXCHANGED)
            for model in self._wrapped if applies and parts.last else ():
                parts.applied |= model.grads.exchanged
                model.grads.done |= model.grads.exchanged
            if not parts.open:
                self._whole_again()
        if applies:
            for model in self._wrapped:
                model.refuse_frozen()
                model.grads.applied |= model.grads.own
            for each in self._taken:
                each.used = True
            self._held = ""
        self.share_buffers()

    def committed(self) -> None:
        self._whole_again()
        self._sums, self._unlike = 0, None
        if self._held:
            self._held = "kept"
        if self._batch is None:
            self._weight = None
        self._taken.clear()
        for model in self._wrapped:
            if model.shared:
                model.shared = False

    # ── parts of a batch ────────────────────────────────────────────────────────────────────────────────────

    def refuse_used(self, batch: object) -> None:
        """A loop over the parts of `batch` begins. Raises RuntimeError if it was not taken in this step."""
        if all(parts_loop.samples(batch) != parts_loop.samples(each.batch) for each in self._taken):
            raise MisuseRuntimeError(parts_loop.USED)

    def enter_parts(self, batch: float) -> parts_loop.PartsLoop:
        """A loop over several micro-batches of a batch of this weight begins. Raises RuntimeError if gradients are
        held, which it would weight again. Of those kept over a commit not if one of the models has none any more: the
        step was skipped, and the script drops another model's later."""
        models = [*self._wrapped, *self._bare]
        if self._held and not self._sums and models:
            held = [any(bool(grad.any()) for grad in parts_loop.gradients([model])) for model in models]
            if all(held) if self._held == "kept" else any(held):
                raise MisuseRuntimeError(parts_loop.HELD)
        for model in self._wrapped:
            model.grads.enter_parts(had=bool(parts_loop.gradients([model])))
        self._parts = parts_loop.PartsLoop(batch)
        return self._parts

    def rescale(self, factor: float) -> None:
        """Multiply the gradients accumulated so far, so that micro-batches of unequal size keep their proportion."""
        if not self._sums:
            _scale([*self._wrapped, *self._bare], factor)

    def finish(self) -> None:
        """After the last micro-batch: apply its weight to models without a gradient hook. Raises RuntimeError if an
        optimizer may have applied gradients that were not exchanged."""
        self._refuse_twice()
        _scale(self._bare, self())
        if self._parts is None or not self._unexchanged(self._parts):
            self._whole_again()
        elif self._parts.applied:
            raise MisuseRuntimeError(parts_loop.UNEXCHANGED)
        else:  # they must not be applied
            self._parts.open = False

    def leave_parts(self, parts: parts_loop.PartsLoop) -> None:
        """The generator of the loop has ended, also early, or late: then another loop may have begun."""
        parts.open = False
        twice = any(model.grads.twice for model in self._wrapped)
        if parts is self._parts and not twice and not self._lacking(parts) and not self._unexchanged(parts):
            self._whole_again()

    def _refuse_twice(self) -> None:
        """Raises RuntimeError for a second backward's sums in the last part of a loop, unless dropped, or not finite: a
        GradScaler skips them."""
        for model in self._wrapped if self._parts is not None else ():
            if not model.grads.twice:
                continue
            sums = [p.grad for p in model.parameters() if id(p) in model.exchanged and p.grad is not None]
            sums = [grad._values() if grad.is_sparse else grad for grad in sums]
            if any(bool(g.any()) for g in sums) and all(g.isfinite().all() for g in sums):
                raise MisuseRuntimeError(parts_loop.TWICE)

    def _lacking(self, parts: parts_loop.PartsLoop) -> bool:
        """Whether there are gradients that lack their exchange, or the weight of the last micro-batch."""
        if not parts.last:
            return bool(parts_loop.gradients([*self._wrapped, *self._bare]))
        return not self._sums and bool(parts_loop.gradients(self._bare))

    def _unexchanged(self, parts: parts_loop.PartsLoop, *, every: bool = True) -> bool:
        """Whether the last micro-batch had no backward, so that the gradients of those before lack their exchange: of
        one of the models, or (`every` False) of all."""
        exchanged = any(model.grads.exchanged for model in self._wrapped)
        if not parts.last or (exchanged and not every):
            return False
        # Others have gradients from elsewhere: a GAN's critic that was called without its wrapper, or parameters that a
        # newer wrapper has.
        lack = [each for each in self._wrapped if not exchanged or each.grads.lacks_exchange]
        return bool(parts_loop.gradients(lack))

    def _whole_again(self) -> None:
        """The next backward is of the whole batch, and exchanges its gradients."""
        parts, self._parts = self._parts, None
        if parts is not None:
            self.begin(parts.batch)


def _scale(models: Sequence[nn.Module], factor: float) -> None:
    grads = parts_loop.gradients(models)
    if grads and factor != 1.0:
        torch_private.foreach_mul(grads, factor)


OPTIONS = {"sync_buffers", *inspect.signature(DistributedDataParallel).parameters} - {"module", "init_sync"}
"""Those of `wrap` that scripts may give, some of them under the name of this torch."""


def wrap(
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    weight: GradientWeight,
    link: Link,
    sync_buffers: bool = True,
    exchange: Exchange = plain,
    sampler: Sampler | None = None,
    **options: Any,
) -> DistributedDataParallel:
    """Wrap `model`, whose parameters are already equal on all ranks: only the bucket layout is communicated here.

    `link` is told when the last bucket of a backward has been passed to the group, as from then on this rank only waits
    for the others, and when the sums are complete, at the end of that backward: from then on the others may wait for
    this rank. The latter not on a GPU, where a backward does not wait for them. Likewise of the exchange of buffers.

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
    wrapped.link = link
    weight.attach(wrapped)
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None  # DDP has refused to be built without one
    grads = wrapped.grads  # DDP holds the hook: the wrapper itself in it would be a cycle, and keep the group

    def contributed() -> None:
        weight.exchanges_last(grads)
        link.contributed()

    hook = GradientHook(
        exchange,
        group,
        weight=functools.partial(weight.of, grads),
        on_contributed=contributed,
        on_received=link.entered,
        on_failed=weight.fail,
        sampler=sampler,
        ends_with_backward=not options.get("static_graph", False),
    )
    # A lambda, because DDP rejects annotations other than the exact types it expects.
    wrapped.register_comm_hook(None, lambda _, bucket: hook(bucket))
    return wrapped
