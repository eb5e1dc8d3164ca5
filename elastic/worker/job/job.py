"""The argument of `setup` and `train`: the job as seen by one worker. In `job_steps` what it does in each step, here
the methods that all ranks call together, and its loops over data."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import timedelta
from types import CodeType
from typing import Any, NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elastic.contract.timeouts import QUIET_S
from elastic.worker.comm.in_flight import complete
from elastic.worker.comm.p2p import control_device
from elastic.worker.data import arguments, streams
from elastic.worker.data import batches as data
from elastic.worker.data import steps as own_loaders
from elastic.worker.data.seeds import seed_everything
from elastic.worker.link.misuse import MisuseError, MisuseRuntimeError, MisuseTypeError
from elastic.worker.state.handover import shared_values
from elastic.worker.state.modes import Modes
from elastic.worker.state.optimizers import SHARDED, sharded, sharded_module
from elastic.worker.state.state import State

from . import evaluation
from .data_ranks import data_rank, refuse_sharded, refuse_weights
from .job_steps import JobSteps
from .lr_scaling import Mode, factor

_END: Any = object()


class Job(JobSteps):
    """One training run, as seen by this worker in the current generation."""

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
        dataset: data.MapDataset,
        measure: evaluation.Measure,
        *,
        batch_size: int,
        limit_s: float = QUIET_S,
        **options: Unpack[arguments.ReadOptions],
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
        arguments.refuse_unknown(self.evaluate, options, arguments.ReadOptions.__optional_keys__)
        refuse_sharded(
            state,
            "job.evaluate",
            "ranks would take unequal numbers of batches, and each forward needs the parts of all ranks. Evaluate in "
            "the loop, the same number of batches on each rank",
        )
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
            total = torch.as_tensor(0.0 if nothing else count, dtype=torch.float64).detach()
            if self.world_size > 1:
                total = total.to(self.device if self.device.type == "cuda" else control_device(), copy=True)
                complete(dist.all_reduce(total, async_op=True), total.device)
            return total.to(self.device)

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

    # ── loops ───────────────────────────────────────────────────────────────────────────────────────────────

    def batches(
        self,
        dataset: Any,
        state: State,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        mesh: DeviceMesh | None = None,
        **options: Unpack[arguments.BatchOptions],
    ) -> Iterator[data.Batch]:
        """Iterate over this rank's part of each global batch of `batch_size` samples, from step `state.step` on.

        `batch_size` is the number of samples over all ranks and does not change with the world size. `epochs` and
        `steps` are totals from the start of training, within `job.epochs` from the start of its round; the smaller one
        counts; neither: one epoch. Further options:

        - `seed`, `shuffle` (True), `drop_last`: the samples that do not fill the last batch of an epoch are left out.
        - `sampler`: yields the indices of an epoch, of all ranks together, and is iterated anew for each epoch, after
          its `set_epoch`, with seeded generators. `batch_sampler`: yields the global batches, of any sizes.
        - `commits`: optimizer steps for each batch; it is yielded so often, with `batch.part` from 0 on, each time as
          it was read, and each ends with `job.commit`.
        - `micro_batch`: see `Batch.parts`. `num_workers` processes load ahead, with `pin_memory`. `collate`.
        - `allow_changed`: go on at this step, whatever the steps so far were taken from.
        - `mesh`, of a sharded state: the DeviceMesh that the data is parallel over; ranks along other dimensions take
          the same samples. Needed where the model is sharded by more than `fully_shard`. Parts of unequal sizes are
          refused: sharding averages the means of all ranks alike.

        Random numbers drawn in `dataset[i]` depend only on (seed, epoch, position of the sample in the epoch), so they
        are the same for any world size; those drawn in the training loop (dropout) depend on (seed, step, rank). This
        holds for Python's `random`, numpy's global generator and torch's, on CPU and CUDA. Those drawn in a
        `__getitems__` depend on the position of its first sample, and so on the world size.

        Raises TypeError for data that cannot be read by number and for numbers that are not whole, ValueError for an
        empty dataset, invalid sizes and a sampler without an end, RuntimeError if a turn ends without a commit, or if
        the data, the numbers or the sampler's order are others than in the steps so far, or on other ranks.
        """
        arguments.refuse_unknown(self.batches, options, arguments.BatchOptions.__optional_keys__)
        rank, world_size, weight = self.rank, self.world_size, self._gradient_weight
        if state.is_sharded:
            refuse_weights(options)
            rank, world_size = data_rank(state.modules(), mesh, rank, world_size, alike=self._alike or world_size == 1)
        elif mesh is not None:
            raise MisuseTypeError("job.batches(mesh=…): the state is not sharded; leave it out")
        loaded = data.batches(
            dataset,
            state,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            rank=rank,
            world_size=world_size,
            device=self.device,
            gradient_weight=None if state.is_sharded else weight,
            equal_parts=state.is_sharded,
            on_turn=self._end_turn,
            progress=state.data_progress,
            **options,
        )
        return at_one_place(self._timed(loaded, state))

    def steps(
        self,
        loader: Iterable[Any],
        state: State,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        **options: Unpack[arguments.StepsOptions],
    ) -> Iterator[Any]:
        """Iterate over what `loader` yields on this rank, one item for each step, from step `state.step` on.

        A DataLoader (with a DistributedSampler, say), or any other iterable: ``range(1000)`` for a loop that makes its
        batches itself. `set_epoch` is called on it, and on its sampler, for each epoch. Python's, numpy's and torch's
        generators are seeded before each draw and again before each turn, by (seed, step, rank). When `train` is
        entered again, a DataLoader goes on at its indices, without reading what was trained on; other iterables are
        drawn from up to the step. So at an unchanged world size the weights are those of an undisturbed run. In another
        world the share of each rank is another one; where that is known to matter it is said on stderr.

        Options: `epochs`, `steps`, `commits` and `allow_changed` as for `batches`; `seed`. The gradients' mean over the
        ranks is that of stock DDP: of ranks with equal batches.

        Raises RuntimeError as `batches`, and for a generator that was begun before, ValueError for a loader that yields
        nothing.
        """
        arguments.refuse_unknown(self.steps, options, arguments.StepsOptions.__optional_keys__)
        loaded = own_loaders.steps(
            loader,
            state,
            epochs=epochs,
            steps=steps,
            rank=self.rank,
            world_size=self.world_size,
            on_turn=self._end_turn,
            progress=state.data_progress,
            **options,
        )
        return at_one_place(self._timed(loaded, state))

    def epochs(self, state: State, count: int, *, seed: int = 0) -> Iterator[int]:
        """Iterate over the numbers of `count` epochs, or other rounds, from the one under way on.

        The loops in the body count from its beginning: `batches` and `steps` give one epoch, unless told otherwise.
        What follows them in the body (a schedule's step, the best value, an evaluation) may change the state, and is
        committed as a step of its own when the body has ended. If a rank is lost there, the body is entered again: its
        loops yield nothing, and that part runs again, from the state of the last batch. Rounds may be nested, and
        follow each other: `train` goes on in the one under way. The generators are seeded before each body.

        To leave early, `break` at the top of the body.
        """
        count = arguments.whole("the number of epochs", count, least=0)
        for each in state.data_progress.rounds(count, lambda: state.step, lambda: self._end_round(state)):
            seed_everything(seed, 5, each.begin, self.rank)
            state.round_begins()
            yield each.index

    def streams(
        self,
        make: streams.Make,
        state: State,
        *,
        count: int,
        batch_size: int,
        steps: int,
        **options: Unpack[arguments.StreamOptions],
    ) -> Iterator[data.Batch]:
        """As `batches`, for data that can only be read in order: `count` streams, each made by `make(stream, count)`.

        The state needs a part for them: ``elastic.State(…, streams=None)``. Guarantees and errors: `streams.streams`;
        RuntimeError within `job.epochs`.
        """
        arguments.refuse_unknown(self.streams, options, arguments.StreamOptions.__optional_keys__)
        refuse_sharded(
            state, "job.streams", "its batches are shared out to all ranks alike; take job.batches or job.steps"
        )
        if state.data_progress.in_round:
            raise MisuseRuntimeError(
                "job.streams within job.epochs: a stream has a sample for each commit, and the end of a round is one "
                "without; call job.streams outside, and let state.step say what is done once in so many steps"
            )
        loaded = streams.streams(
            make,
            state,
            count=count,
            batch_size=batch_size,
            steps=steps,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            gradient_weight=self._gradient_weight,
            on_turn=self._end_turn,
            **options,
        )
        return at_one_place(self._timed(loaded, state))

    # ── internal ────────────────────────────────────────────────────────────────────────────────────────────

    def _end_round(self, state: State) -> None:
        self._goes_on()
        self._link.check(state.step)
        self.commit(state)

    def _timed(self, loaded: Iterator[Any], state: State) -> Generator[Any, None, None]:
        """`loaded`, with the time until each batch is there reported as waiting for data."""
        state.loop_begins()
        last, given, progress = None, None, state.data_progress
        try:
            with contextlib.closing(loaded) as batches:  # type: ignore[type-var]  # both are generators
                while True:
                    began_s = time.monotonic()
                    batch = next(batches, _END)
                    self._link.waited(time.monotonic() - began_s)
                    if batch is _END:
                        self._batch = given = None
                        return
                    if type(batch) is data.Batch:
                        self._batch = last = batch
                    given = state.step
                    yield batch
        finally:
            if given is not None:
                progress.left(given, state.step)
            # The last batch ends with its loop, but the script may still have to train on next(job.batches(…)).
            if last is not None:
                self._gradient_weight.release(last, committed=state.step > last.step)

    def _end_turn(self, state: State, step: int) -> None:
        """The turn of `step` is over. Ends the generation where the script has caught the error of its step."""
        self._goes_on()
        self._link.check(state.step)
        try:
            data.refuse_uncommitted(state, step)
            state.turned()
        except MisuseError as error:
            self.refused = error
            raise


class _Place(NamedTuple):
    code: CodeType | None
    span: tuple[int | None, int | None, int | None, int | None]
    """(first line, last line, first column, last column)."""

    def __str__(self) -> str:
        return f"{os.path.basename(self.code.co_filename) if self.code else '?'}:{self.span[0]}"


_NOWHERE = _Place(None, (None,) * 4)


def _place(code: CodeType, offset: int) -> _Place:
    """By its span in the source: of one `for` Python 3.12 gives two offsets, that of the instruction and that of its
    cache, and changes between them as it specializes the instruction, and takes that back."""
    return _Place(code, next(itertools.islice(code.co_positions(), offset // 2, None)))


def at_one_place(loop: Generator[Any, None, None]) -> Iterator[Any]:
    """The batches of `loop`. Raises RuntimeError where the script takes one at a place that it has left for another:
    two places in turn, as a `for` and a `next()` in its body. After a failure `train` begins at its first place, and
    the loop at the step that was interrupted, so that the batch of one place would be that of the other."""
    code: CodeType | None = None
    offset, last, left = -1, _NOWHERE, set[_Place]()
    with contextlib.closing(loop):
        while True:
            frame = inspect.currentframe()
            caller = frame.f_back if frame is not None else None
            if caller is not None and (caller.f_lasti != offset or caller.f_code is not code):
                code, offset = caller.f_code, caller.f_lasti
                place = _place(code, offset)
                if place in left and place != last:
                    raise MisuseRuntimeError(
                        f"{place} and {last} take batches of one loop in turn. After a failure train() begins at the "
                        "first of them again, and the loop at the step that was interrupted: the batches would change "
                        "places. Take each batch at one place, and let state.step say what is done with it, as in "
                        "`if state.step % 2`; or take the samples of both as one batch, and commit once"
                    )
                left.add(last)
                last = place
            del frame, caller  # they hold the script's variables
            if (batch := next(loop, _END)) is _END:
                return
            yield batch


Setup = Callable[[Job], State]
"""Builds the state. Called once per process, and again only if the state is lost on all ranks and none was ever
saved."""

Train = Callable[[Job, State], None]
"""Called once per generation."""


_UNFORMED = ("process group has not been initialized", "env:// rendezvous")
_SHARDING = {
    "zero_redundancy_optimizer.py": sharded(SHARDED),
    "_fsdp_init.py": sharded_module("model", "fully_shard"),
    "device_mesh.py": sharded_module("model", "DeviceMesh"),
}
"""File of torch in which the error was raised -> the way out."""


def build(setup: Setup, job: Job) -> State:
    """The state that `setup` builds; the job guards its optimizers. Raises TypeError if that is no State or is sharded,
    RuntimeError if it uses the process group, and what `setup` raises."""
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
            f"this to train(), where job.broadcast() sends a value of rank 0 to all ranks; or, to shard the model, "
            f"call elastic.run(setup, train, sharded=True) ({error})"
        ) from error
    if not isinstance(state, State):
        raise MisuseTypeError(f"setup returned {type(state).__name__}: return elastic.State(model=…, optimizer=…)")
    state.watch_optimizers(job.guard())
    return state
