"""The methods of `Job` that all ranks call together, beside `ddp` and `commit`."""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elastic.contract.timeouts import QUIET_S
from elastic.worker.comm.errors import is_communication_error
from elastic.worker.comm.p2p import control_device
from elastic.worker.data.batches import MapDataset
from elastic.worker.link.misuse import MisuseError, MisuseIgnored, MisuseRuntimeError, MisuseTypeError
from elastic.worker.state.handover import shared_values
from elastic.worker.state.modes import Modes

from . import evaluation
from .lr_scaling import Mode, ScaledSteps, factor

if TYPE_CHECKING:
    from elastic.worker.comm.ddp import GradientWeight
    from elastic.worker.link.link import Link
    from elastic.worker.state.state import State


class JobCalls(abc.ABC):
    """Base class of `Job`, which has the attributes."""

    device: torch.device
    rank: int
    world_size: int
    generation: int
    _group_s: float
    _link: Link
    _scaled: ScaledSteps
    _gradient_weight: GradientWeight
    refused: MisuseError | None = None
    """What was refused in this generation, perhaps handled by the script."""

    def _goes_on(self) -> None:
        """Raises GroupAborted or MisuseIgnored where the script has handled an error that ends its `train`."""
        self._gradient_weight.refuse_failed()
        if self.refused is not None:
            raise MisuseIgnored(self.refused)

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's `value` on every rank; what the other ranks pass is ignored. All ranks call it at the same point.

        None, bool, int, float, str, bytes, list, tuple, set, dict and dense tensors in any nesting; types are kept,
        nothing is pickled. Tensors arrive on the device type that they have on rank 0. No rank returns before all have
        the value: if one is lost, it raises on all, and `train` is entered again.

        Raises TypeError or ValueError on every rank if the value cannot be sent, and RuntimeError in `setup`, which has
        no process group.
        """
        with self._collective("broadcast"):
            return shared_values.broadcast_value(value, rank=self.rank, world_size=self.world_size, device=self.device)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank, on every rank. All ranks call it at the same point.

        Types as for `broadcast`; tensors arrive on the CPU. For small values, such as the states of the ranks' data
        loaders: each takes as much as the largest. Raises TypeError or ValueError on every rank if one of the values
        cannot be sent, and RuntimeError in `setup`.
        """
        with self._collective("gather"):
            return shared_values.gather(value, rank=self.rank, world_size=self.world_size, device=self.device)

    def evaluate(
        self,
        state: State,
        dataset: MapDataset,
        measure: evaluation.Measure,
        *,
        batch_size: int,
        limit_s: float = QUIET_S,
        **options: Any,
    ) -> dict[str, float]:
        """Sums over `dataset`, with the samples shared out to the ranks; equal on all ranks and for any world size.

        `measure(batch)` returns sums over the samples of a batch by name, `{"loss": …, "right": …}`, as tensors of one
        element or numbers; the number of samples is added as `count`. It is called with batches of `batch_size` samples
        (the last one has the rest), under `torch.no_grad`, with the state's modules in evaluation mode; modes and
        generators are as before afterwards. The span is a `quiet` one of at most `limit_s` seconds. `options`:
        `num_workers`, `collate`, `pin_memory`, `seed`, as for `batches`.

        Call it where the state is consistent, best at the top of an iteration: a rank that is lost then costs no step.
        Raises RuntimeError between an optimizer's step and the commit and in `setup`, ValueError for an empty dataset
        or names that differ, TypeError for a value of several elements.
        """
        if not state.clean():
            raise MisuseRuntimeError(
                "job.evaluate between an optimizer's step and job.commit(): a rank that is lost meanwhile would cost "
                "the whole state. Call it at the top of an iteration, or after job.commit()"
            )
        modes = Modes({str(number): module for number, module in enumerate(state.modules())})
        with self._collective("evaluate"):
            # A forward in evaluation mode exchanges no buffers once they are equal. It must not: ranks have different
            # numbers of batches.
            self._gradient_weight.share_buffers(last=False)
        with self.quiet("evaluation", limit_s), evaluation.unnoticed():
            before = [(module, module.training) for root in state.modules() for module in root.modules()]
            try:
                for root in state.modules():
                    root.eval()
                return evaluation.evaluate(
                    dataset,
                    measure,
                    batch_size=batch_size,
                    rank=self.rank,
                    world_size=self.world_size,
                    step=state.step,
                    device=self.device,
                    agree=self.broadcast,
                    **options,
                )
            finally:
                for module, training in before:  # parents first
                    if module.training != training:
                        module.train(training)  # some do more there than set the flag, as LoRA's layers
                modes.put_back()

    def weighted(
        self, loss_sum: torch.Tensor, count: torch.Tensor | float | None = None, *, total: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss to call `backward` on, if its terms, such as tokens, are to weigh the same on all ranks.

        `loss_sum`: the sum over this rank's terms. `count`: their number; the ranks' numbers are added, so all ranks
        call it at the same point. With micro-batches, the number over all of them, once a step: `total=job.total(n)`.
        The gradient that `job.ddp` gives is then that of (sum over all terms) / (number of all terms), for any world
        size, until the next commit. Call it for each backward of the step, or for none. What it returns is this rank's
        contribution; the ranks' sum is the mean loss.

        Raises TypeError if neither or both of `count` and `total` are given, RuntimeError in `setup`.
        """
        if (count is None) == (total is None):
            raise MisuseTypeError(
                "job.weighted: either count, of this backward alone, or total=job.total(…) of the step"
            )
        everywhere = self.total(count) if total is None else total  # type: ignore[arg-type]  # not None, as checked
        wide = loss_sum if loss_sum.dtype in (torch.float32, torch.float64) else loss_sum.float()
        loss = wide / torch.where(everywhere > 0, everywhere, torch.ones_like(everywhere)).to(wide)
        self._gradient_weight.add_up(loss, self.world_size)
        return loss

    def total(self, count: torch.Tensor | float) -> torch.Tensor:
        """The sum of the ranks' `count`, as float64 on the job's device; for `weighted`. All ranks call it at the same
        point. A rank without samples in this step counts as 0. Raises RuntimeError in `setup`."""
        nothing = self._gradient_weight.counts_nothing()
        with self._collective("total"):
            found = torch.as_tensor(0.0 if nothing else count, dtype=torch.float64).detach()
            if self.world_size > 1:
                found = found.to(self.device if self.device.type == "cuda" else control_device(), copy=True)
                dist.all_reduce(found)
            return found.to(self.device)

    def lr_scale(self, *optimizers: torch.optim.Optimizer, mode: Mode, base_world_size: int) -> float:
        """The factor for learning rates that were chosen for `base_world_size` ranks, if the batch grows with them.

        ``"linear"``: world size / `base_world_size`; ``"sqrt"``: its square root; ``"none"``: 1. `optimizers` use their
        rates times that factor in this generation, in each step only: the state and its schedulers keep the rates of
        the base world size. So nothing compounds. Call it in `train`, on each entry, once for all optimizers.

        `job.batches` needs none of it: its global batch does not depend on the world size. Raises ValueError for
        another mode, or a `base_world_size` below 1; RuntimeError in `setup`.
        """
        if not self.generation:
            raise MisuseRuntimeError("job.lr_scale belongs in train(): in setup() the world size is not known yet")
        by = factor(mode, self.world_size, base_world_size)
        self._scaled.scale(optimizers, by)
        return by

    def new_group(self, ranks: Sequence[int] | None = None) -> Any:
        """A process group of some ranks (None: all), for collectives of the script's own: torch's `new_group`.

        Call it in `train`, on all ranks, also those outside, and in the same order. It is closed with the generation:
        if a rank is lost, its collectives raise on all ranks. It has the time-out of the job's group. Without a process
        group (standalone) None is returned.

        Raises ValueError for ranks that do not exist, twice the same, or none; RuntimeError in `setup`.
        """
        with self._collective("new_group"):
            chosen = list(range(self.world_size)) if ranks is None else [int(rank) for rank in ranks]
            if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= rank < self.world_size for rank in chosen):
                raise ValueError(
                    f"job.new_group({chosen}): distinct ranks of 0 to {self.world_size - 1}; the world size may change "
                    "at each re-formation, so compute them from job.world_size"
                )
            if not dist.is_initialized():
                return None
            limit = None if math.isinf(self._group_s) else timedelta(seconds=self._group_s)
            return dist.new_group(sorted(chosen), timeout=limit)

    @abc.abstractmethod
    def quiet(self, what: str, limit_s: float = QUIET_S) -> contextlib.AbstractContextManager[None]:
        """See `Job.quiet`."""

    @contextlib.contextmanager
    def _collective(self, method: str) -> Iterator[None]:
        """A span in which this rank may wait for the others. Raises RuntimeError outside of `train`."""
        if not self.generation:
            raise MisuseRuntimeError(f"job.{method} belongs in train(): in setup() the ranks have no process group yet")
        self._goes_on()
        self._link.contributed()
        try:
            yield
        except RuntimeError as error:
            if is_communication_error(error):
                self._gradient_weight.fail()
            raise
        self._link.entered()
