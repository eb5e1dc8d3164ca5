"""The methods of `Job` for loops over data: batches, streams, a loader of the script's own, and epochs."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from elastic.worker.comm.p2p import control_device
from elastic.worker.data import batches as data
from elastic.worker.data import steps as own_loaders
from elastic.worker.data import streams
from elastic.worker.data.arguments import whole
from elastic.worker.data.places import at_one_place
from elastic.worker.data.seeds import seed_everything
from elastic.worker.link.misuse import MisuseError, MisuseRuntimeError
from elastic.worker.state.handover import shared_values
from elastic.worker.state.parts.data_progress import DataProgress, refuse_unlike

from .job_calls import JobCalls

if TYPE_CHECKING:
    from elastic.worker.state.state import State

_END: Any = object()


class JobData(JobCalls):
    """Base class of `Job`, which has the attributes."""

    _batch: data.Batch | None

    def batches(
        self,
        dataset: Any,
        state: State,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        **options: Any,
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

        Random numbers drawn in `dataset[i]` depend only on (seed, epoch, position of the sample in the epoch), so they
        are the same for any world size; those drawn in the training loop (dropout) depend on (seed, step, rank). This
        holds for Python's `random`, numpy's global generator and torch's, on CPU and CUDA. Those drawn in a
        `__getitems__` depend on the position of its first sample, and so on the world size.

        Raises TypeError for data that cannot be read by number and for numbers that are not whole, ValueError for an
        empty dataset, invalid sizes and a sampler without an end, RuntimeError if a turn ends without a commit, or if
        the data, the numbers or the sampler's order are others than in the steps so far, or on other ranks.
        """
        loaded = data.batches(
            dataset,
            state,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            gradient_weight=self._gradient_weight,
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
        **options: Any,
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
        count = whole("the number of epochs", count, least=0)
        for each in state.data_progress.rounds(count, lambda: state.step, lambda: self._end_round(state)):
            seed_everything(seed, 5, each.begin, self.rank)
            state.round_begins()
            yield each.index

    def streams(
        self, make: streams.Make, state: State, *, count: int, batch_size: int, steps: int, **options: Any
    ) -> Iterator[data.Batch]:
        """As `batches`, for data that can only be read in order: `count` streams, each made by `make(stream, count)`.

        The state needs a part for them: ``elastic.State(…, streams=None)``. Guarantees and errors: `streams.streams`;
        RuntimeError within `job.epochs`.
        """
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

    @abc.abstractmethod
    def commit(self, state: State, loss: torch.Tensor | float | None = None) -> None:
        """See `Job.commit`."""

    @abc.abstractmethod
    def _print_once(self, said: str) -> None:
        """On stderr, once for all ranks."""

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

    def _compare_loops(self, progress: DataProgress) -> None:
        """After a commit of all ranks. Raises MisuseRuntimeError if their loops take other batches."""
        with self._collective("commit"):
            mine = torch.tensor([progress.digest()], dtype=torch.int64, device=control_device())
            all_of_them = [torch.zeros_like(mine) for _ in range(self.world_size)]
            torch.distributed.all_gather(all_of_them, mine)
            if len({int(each) for each in all_of_them}) > 1:
                own, cpu = progress.told(), torch.device("cpu")
                refuse_unlike(shared_values.gather(own, rank=self.rank, world_size=self.world_size, device=cpu))
