"""How gradients travel between ranks: as they are, in 16 bits, or by a hook of the script's own; their weights: `ddp`.

All of it stands in elastic's own communication hook, which multiplies a bucket by this rank's weight, reports progress,
and keeps gradients from being applied if an exchange has failed. DDP takes one hook per model, so others are given to
`job.ddp` instead of `register_comm_hook`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastic.worker.link.misuse import MisuseTypeError, MisuseValueError
from elastic.worker.torch_internals import torch_private

from .errors import GroupAborted
from .in_flight import IN_FLIGHT

Future = torch.futures.Future[Any]
Result = Callable[[Future], torch.Tensor]
Hook = Callable[[Any, Any], Future]
"""A communication hook of torch's kind, ``hook(state, bucket)``: it divides by the world size and sums."""


Exchange = Callable[[Any, float, dist.ProcessGroup], tuple[Future, Result]]
"""(bucket, weight, group): begins the exchange of a bucket. Returns torch's future, and what makes the bucket's new
contents of it."""


def plain(bucket: Any, weight: float, group: dist.ProcessGroup) -> tuple[Future, Result]:
    return _summed(scaled(bucket.buffer(), weight), group), _tensor


def cast(dtype: torch.dtype, bucket: Any, weight: float, group: dist.ProcessGroup) -> tuple[Future, Result]:
    """The sum is made in `dtype`, of 16 bits: half the bytes. Each rank's part is rounded before it is added. Raises
    TypeError for sparse gradients."""
    gradient: torch.Tensor = bucket.buffer()
    if gradient.layout is not torch.strided:
        raise MisuseTypeError(
            "job.ddp: compress is for dense gradients; leave it out, or make the embedding sparse=False"
        )
    return _summed(scaled(gradient, weight).to(dtype), group), lambda future: gradient.copy_(_tensor(future))


def own(hook: Hook, state: Any, bucket: Any, weight: float, group: dist.ProcessGroup) -> tuple[Future, Result]:
    """By a hook of the script's own. Its mean over the ranks becomes the mean over the samples."""
    scaled(bucket.buffer(), weight * group.size())
    future = hook(state, bucket)
    if not callable(getattr(future, "then", None)):  # torch's futures have no common class that is public
        raise MisuseTypeError(
            f"job.ddp: hook returned {type(future).__name__}: return a torch.futures.Future with the bucket's sum"
        )
    return future, _tensor


def chosen(compress: Any, hook: Hook | None, hook_state: Any) -> Exchange:
    """The exchange for these arguments of `job.ddp`. Raises ValueError or TypeError."""
    if hook is not None:
        if compress is not None:
            raise MisuseValueError("job.ddp: compress and hook exclude each other: a hook does its own compression")
        if not callable(hook):
            raise MisuseTypeError(
                f"job.ddp: hook is {type(hook).__name__}: a function hook(state, bucket) as torch has them"
            )
        return functools.partial(own, hook, hook_state)
    match compress:
        case None:
            return plain
        case "bf16":
            return functools.partial(cast, torch.bfloat16)
        case "fp16":
            return functools.partial(cast, torch.float16)
    raise MisuseValueError(
        f"job.ddp: compress={compress!r}: 'bf16', 'fp16' or None; torch's powerSGD_hook goes to hook"
    )


class Sampler(Protocol):
    """Looks at the gradients of this rank alone, while it is `on`."""

    on: bool

    def own(self, bucket: Any) -> None: ...


class GradientHook:
    """Called by DDP with each bucket of a backward, in the same order on all ranks."""

    def __init__(
        self,
        exchange: Exchange,
        group: dist.ProcessGroup,
        *,
        weight: Callable[[], float],
        on_contributed: Callable[[], None],
        on_received: Callable[[], None],
        on_failed: Callable[[], None],
        sampler: Sampler | None = None,
        ends_with_backward: bool = True,
    ) -> None:
        """`weight` is called once per bucket, `on_contributed` once the exchange of the last one has begun,
        `on_received` when the sums are there, `on_failed` if they fail. `ends_with_backward`: DDP looks at the sums in
        a callback that it queues after the last bucket; with a static graph it does so at once in the first step."""
        self._sampler = sampler
        self._exchange, self._group, self._weight = exchange, group, weight
        self._contributed, self._received, self._failed = on_contributed, on_received, on_failed
        self._failures = _Failures(on_failed)
        self._in_place = exchange is plain and ends_with_backward
        self._works: list[dist.Work] = []

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if self._sampler is not None and self._sampler.on:
            self._sampler.own(bucket)
        gradient = bucket.buffer()
        on_cpu = gradient.device.type == "cpu"
        if self._in_place and on_cpu and gradient.layout is torch.strided and not gradient.is_complex():
            return self._sum_in_place(bucket, gradient)
        with self._failures:
            future, result = self._exchange(bucket, self._weight(), self._group)
        if bucket.is_last():
            self._contributed()
            if on_cpu:
                # DDP's own wait for the sums is queued right after this hook; a callback queued by a callback runs
                # after it. On a GPU that wait is the device's: the backward returns with the sums in flight, and the
                # host waits for them where it next reads a value (loss.item(), GradScaler), or in the guard.
                torch_private.at_end_of_backward(lambda: torch_private.at_end_of_backward(self._received))

        failures = self._failures

        # Holds no reference to the group, as `self` does: it runs, and is dropped, in a thread of gloo. If that were
        # the last reference, the group would be destroyed there, join that very thread, and end the process.
        def received(done: Future) -> torch.Tensor:
            with failures:
                return result(done)

        if on_cpu:
            return IN_FLIGHT.follow(future, received, self._failed)
        return future.then(received)

    def _sum_in_place(self, bucket: Any, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """The main thread waits for the sums at the end of the backward. With a future that follows gloo's, threads of
        gloo would run Python for each bucket, on the cores that training needs."""
        if bucket.index() == 0:
            for work in self._works:  # of a backward that has failed before its end
                IN_FLIGHT.forget(work)
            self._works.clear()
        with self._failures:
            # `dist.all_reduce` without its checks, for each bucket.
            work = self._group.allreduce([scaled(gradient, self._weight())], dist.AllreduceOptions())
        IN_FLIGHT.add(work)
        self._works.append(work)
        if bucket.is_last():
            self._contributed()
            torch_private.at_end_of_backward(self._finish)  # before DDP's own, which is queued after this hook
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(gradient)
        return done

    def _finish(self) -> None:
        works, self._works = self._works, []
        with self._failures:
            for work in works:
                IN_FLIGHT.finish(work)
        torch_private.at_end_of_backward(self._received)


def scaled(gradient: torch.Tensor, weight: float) -> torch.Tensor:
    """`gradient` × `weight`, in place."""
    if weight == 0.0:
        return gradient.zero_()  # not a product: a loss over no samples may be NaN
    return gradient if weight == 1.0 else gradient.mul_(weight)


def _summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> Future:
    work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None  # only for ranks outside the group
    future: Future = work.get_future()
    return future


def _tensor(future: Future) -> torch.Tensor:
    """A hook's future has a tensor, or a list of one as that of a collective."""
    value = future.value()
    tensor: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
    return tensor


class _Failures:
    """Calls `failed` for an exception in its block, which goes on. One object for all blocks, which may run in several
    threads: this is entered twice for each bucket, and `contextlib` costs more there than the exchange's own calls."""

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception | GroupAborted):  # torch's, of the hook that the script gave, or the abort's
            self._failed()
