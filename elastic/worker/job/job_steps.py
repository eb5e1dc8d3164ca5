"""What a job does at each entry of `train` and in each step: enter, wrap the model, guard, commit, log."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic.contract.timeouts import QUIET_S
from elastic.worker.checks.first_bad import FirstBad
from elastic.worker.checks.gradient_samples import GradientSampler
from elastic.worker.checks.kept_gradients import KeptGradients
from elastic.worker.checks.numerics import Fingerprint, disagreeing, refuse_different
from elastic.worker.checks.replicas import Replicas
from elastic.worker.comm import comm_hooks, ddp, ddp_models
from elastic.worker.comm.errors import GroupAborted, is_communication_error
from elastic.worker.comm.fence import Fence
from elastic.worker.data import batches as data
from elastic.worker.data.arguments import refuse_unknown
from elastic.worker.data.seeds import Generators
from elastic.worker.link.link import Link
from elastic.worker.link.misuse import MisuseError, MisuseIgnored, MisuseRuntimeError, MisuseValueError
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler
from elastic.worker.state.handover import shared_values
from elastic.worker.state.parts.data_progress import DataProgress, refuse_unlike
from elastic.worker.state.state import State

from .logged import JobLog, LossReader
from .lr_scaling import ScaledSteps


class _Given:
    """An attribute that `enter` sets. Not by `__getattr__`: with one, each attribute of a job takes twice the time."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, job: JobSteps | None, owner: type) -> NoReturn:
        raise MisuseRuntimeError(
            f"job.{self._name} in setup(): the ranks are given after it, and this process may become any of them. What "
            "one process of each node does here, such as a download, is for `if job.local_rank == 0`; what depends "
            "on the rank or the world size belongs in train()"
        )


_GIVEN = ("rank", "world_size")


class JobSteps:
    """Base class of `Job`."""

    name: str
    device: torch.device
    """The device of this worker's tensors."""
    local_rank: int
    """This worker's slot on its node: the index of its GPU."""
    rank: int
    """Of this generation. Where an agent starts the workers, the ranks are given after `setup`."""
    world_size: int
    if not TYPE_CHECKING:
        rank, world_size = _Given(), _Given()
    generation: int = 0
    refused: MisuseError | None = None
    """What was refused in this generation, perhaps handled by the script."""

    def __init__(
        self,
        *,
        name: str,
        device: torch.device,
        local_rank: int,
        link: Link,
        fingerprint_every_steps: int = 0,
        ignore_bad_numbers: bool = False,
        debug: tuple[int, bool] = (0, False),
    ) -> None:
        """`debug`: steps between samples of the gradients (0: none), and whether each layer's output is looked at."""
        self.name = name
        self.device = device
        self.local_rank = local_rank
        self._link = link
        self._checkpoint_scheduler: CheckpointScheduler | None = None
        self._group_s = math.inf
        self._gradient_weight = ddp.GradientWeight()
        self._began_s = 0.0
        self._loss = LossReader()
        self._fingerprint_every = fingerprint_every_steps
        self._ignore_bad_numbers = ignore_bad_numbers
        self._replicas = Replicas(self._gradient_weight, only_say=ignore_bad_numbers)
        self._quiet_until_s = 0.0
        self._scaled = ScaledSteps()
        self._state: State | None = None
        self.generators = Generators()
        self.rows = JobLog(link.logged)
        self.sampler = GradientSampler(debug[0], link.sampled)
        self._every_layer = debug[1]
        self._first_bad = FirstBad()
        self._suspect = 0
        """Step whose loss was not finite: until it is done again, each layer's output is looked at."""
        self._kept = KeptGradients()
        self._alike = False
        self._fence: Fence | None = None
        self._batch: data.Batch | None = None
        """The one that the script has now."""

    def __repr__(self) -> str:
        rank, of = (vars(self).get(name, "?") for name in _GIVEN)
        return f"<Job {self.name}: rank {rank} of {of}, generation {self.generation}>"

    def enter(
        self,
        *,
        rank: int,
        world_size: int,
        generation: int,
        checkpoint_scheduler: CheckpointScheduler | None,
        group_s: float = math.inf,
        state: State | None = None,
        keys: int = 1,
        fence: Callable[[], Fence] | None = None,
    ) -> None:
        """Begin a generation: `train` is about to be called with `state`. Collectives time out after `group_s` seconds.
        `keys`: number of different parts of the state that the ranks hold. `fence`: makes one. Not for scripts."""
        step = state.step if state is not None else 0
        self._state = state
        self._alike = keys == 1 and world_size > 1
        # Replicas of different parts would else stand at different steps after a death, and no replica would help: the
        # gradients of one part are complete on its ranks before those of another are.
        self._fence = fence() if fence and 1 < keys < world_size else None
        self.rank, self.world_size, self.generation = rank, world_size, generation
        self._checkpoint_scheduler = checkpoint_scheduler
        self._group_s = group_s if world_size > 1 else math.inf
        self._gradient_weight.detach_all()
        self.refused = None
        self._replicas.enter()
        self._scaled.clear()
        self._began_s = time.monotonic()
        self._loss = LossReader()  # the last one's value may be of a step that is undone
        self.rows.enter(step, first=rank == 0)
        self._print_once(self._kept.entered(step))
        self.sampler.begin(step)
        if state is not None:
            state.data_progress.enter()
        if state is not None and (self._every_layer or self._suspect > step):
            self._first_bad.watch(state.modules())
        self._link.entered()

    def forget(self) -> None:
        """Drop every reference to the state and to what `train` has made of it. Not for scripts."""
        self._state = self._batch = None
        for name in _GIVEN:
            vars(self).pop(name, None)
        self._gradient_weight.detach_all()
        self._first_bad.off()

    def left(self, state: State) -> None:
        """`train` has returned on this rank. Not for scripts."""
        self._goes_on()
        if state.data_progress.due:
            self._print_once(state.data_progress.check(state.step))
        self.rows.finish(state.step)

    # ── for scripts ─────────────────────────────────────────────────────────────────────────────────────────

    def ddp(
        self,
        model: nn.Module,
        *,
        compress: Literal["bf16", "fp16"] | None = None,
        hook: comm_hooks.Hook | None = None,
        hook_state: Any = None,
        **options: Any,
    ) -> DistributedDataParallel | nn.Module:
        """`model` with its gradients averaged over the global batch.

        Call it in `train`, on each entry: the wrapper belongs to one generation. Without a process group (standalone)
        `model` itself is returned. `options`: `sync_buffers` (see `ddp.wrap`) and those of DistributedDataParallel.

        `compress`: exchange the gradients in 16 bits. `hook`: a communication hook of torch's kind, called as
        ``hook(hook_state, bucket)``; its mean over the ranks becomes the mean over the samples. What it keeps in
        `hook_state` is not restored after a failure. Raises ValueError for other values, for both, and for a
        `process_group` of some ranks only; RuntimeError if the ranks begin with different parameters.
        """
        refuse_unknown(self.ddp, options, ddp.OPTIONS)
        exchange = comm_hooks.chosen(compress, hook, hook_state)
        if not torch.distributed.is_initialized():
            self._gradient_weight.attach(model)  # for `Batch.parts`
            return model
        ddp_models.refuse_subgroup(options, self.world_size)
        link = self._link
        link.contributed()  # it begins with a collective that compares the parameters' shapes
        wrapped = ddp.wrap(
            model,
            weight=self._gradient_weight,
            link=link,
            exchange=exchange,
            sampler=self.sampler,
            **options,
        )
        if self._state is not None and not self._state.step:  # later it would cost each recovery a pass over the model
            refuse_different(model, world_size=self.world_size)
        link.entered()
        return wrapped

    def commit(self, state: State, loss: torch.Tensor | float | None = None) -> None:
        """Commit this step on this rank. Call it once per optimizer step, as the last statement.

        `loss` is checked for NaN and infinity on each rank; ``elasticctl status`` shows rank 0's. May not return: at
        the end of a generation it raises out of `train`, which is called again in the next one. Changes that the loop
        makes to the state after `commit` are then lost; loops over `batches` and `streams` raise RuntimeError for such
        changes, other loops do not.

        Raises CannotEncodeError or TypeError if the state holds anything that could not be sent to a replacement, and,
        standalone, FloatingPointError for a loss that is NaN or infinite.
        """
        try:
            self._commit(state, loss)
        except MisuseError as error:
            self.refused = error
            raise

    def log(self, **values: torch.Tensor | float) -> None:
        """Log numbers by name for the step under way, such as ``job.log(accuracy=0.93, lr=1e-3)``.

        They count once the step is committed. Those of rank 0 are shown by ``elasticctl status``, exported as metrics
        and, with the job's `tensorboard` set, written to files: each step once, also if it was lost and done again.
        All ranks should call it with the same names: if rank 0 is lost within its last step, those of another rank
        take their place. Nothing is exchanged, and no GPU is waited for. A later value of the same name in the same
        step replaces the earlier one; names with other characters: ``job.log(**{"loss/train": loss})``.

        Raises TypeError for what is neither a number nor a tensor of one element, ValueError for more than 64 names.
        """
        self.rows.add(values)

    @contextlib.contextmanager
    def quiet(self, what: str, limit_s: float = QUIET_S) -> Iterator[None]:
        """Context for a span without steps, such as an evaluation: not taken for a hang for at most `limit_s` seconds.

        The other ranks may be waiting in a collective meanwhile, so `limit_s` must be below `timeouts.group_s`;
        ValueError is raised otherwise, or if it is not positive. A nested span has its own limit; after it the outer
        one continues.
        """
        if limit_s <= 0:
            raise MisuseValueError(f"quiet({what!r}, limit_s={limit_s}): a positive number of seconds")
        if limit_s >= self._group_s:
            raise MisuseValueError(
                f"quiet({what!r}, limit_s={limit_s:g}): must be below timeouts.group_s ({self._group_s:g} s), after "
                "which the ranks that wait for this one give up; lower the one, or raise the other in elasticd.toml"
            )
        outer_s, self._quiet_until_s = self._quiet_until_s, time.monotonic() + limit_s
        self._link.quiet(limit_s)
        try:
            if self._checkpoint_scheduler is not None:
                # Otherwise a copy begun by the last commit would not be completed until the next optimizer step.
                self._checkpoint_scheduler.settle()
            yield
        finally:
            self._quiet_until_s = outer_s
            self._link.quiet(max(0.0, outer_s - time.monotonic()))

    # ── internal ────────────────────────────────────────────────────────────────────────────────────────────

    def _goes_on(self) -> None:
        """Raises GroupAborted or MisuseIgnored where the script has handled an error that ends its `train`."""
        self._gradient_weight.refuse_failed()
        if self.refused is not None:
            raise MisuseIgnored(self.refused)

    @contextlib.contextmanager
    def _collective(self, method: str) -> Iterator[None]:
        """A span in which this rank may wait for the others. Raises RuntimeError outside of `train`."""
        if not self.generation:
            raise MisuseRuntimeError(f"job.{method} belongs in train(): in setup() the ranks have no process group yet")
        self._goes_on()
        self._link.contributed()
        try:
            yield
        except (RuntimeError, GroupAborted) as error:
            if is_communication_error(error):
                self._gradient_weight.fail()
            raise
        self._link.entered()

    def _commit(self, state: State, loss: torch.Tensor | float | None) -> None:
        self._goes_on()
        progress = state.data_progress
        if compared := progress.due:
            self._print_once(progress.check(state.step))
        if skipped := state.clean():  # no optimizer has stepped
            if self._may_have_queued_kernels():
                self._before_optimizer(applies=False)  # gradients applied in any other way were not guarded
            else:
                # A step skipped by GradScaler is committed with the buffers of its forward.
                self._gradient_weight.share_buffers()
        value = self._loss.read(loss)
        empty = self._gradient_weight.empty
        state.committed(self.generation)
        step = state.step
        self._gradient_weight.committed()
        self._print_once(self._kept.committed(state, step, applied=not skipped))
        self._print_once(self.generators.unseeded())
        now_s = time.monotonic()
        step_s, self._began_s = now_s - self._began_s, now_s
        self._link.committed(step, step_s, value)
        self.rows.committed(step)
        if self.sampler.on:
            self.sampler.committed(state, generation=self.generation, step=step, rank=self.rank, empty=empty)
        self.sampler.begin(step)
        bad = value is not None and not math.isfinite(value) and not self._ignore_bad_numbers
        if bad:
            self._suspect = step
            detail = "; ".join(filter(None, (f"loss is {value}", self._first_bad.description(self._batch))))
            self._link.bad_numbers(step, "bad loss", detail, (self.rank,))
        if self._first_bad.on:
            self._drop_layer_outputs(step)
        if compared and self.world_size > 1 and torch.distributed.is_initialized():
            self._compare_loops(progress)
        if self._fingerprint_every and step % self._fingerprint_every == 0:
            self._compare_replicas(state)
        waits = self._checkpoint_scheduler is not None and self._checkpoint_scheduler.exchanges_at(step)
        digest = self._replicas.digest(state) if waits and self.world_size > 1 else (0, 0)
        if waits:
            self._link.contributed()
        if self._checkpoint_scheduler is not None and self._checkpoint_scheduler.after(
            state, keep=not bad, digest=digest
        ):
            self._replicas.refuse(state, rank=self.rank, world_size=self.world_size, step=step)
        if self._checkpoint_scheduler is not None and state.is_sharded and self._link.stops_after(step):
            self._link.contributed()
            self._checkpoint_scheduler.moves(state)
        self._link.check(step)
        if waits:
            self._link.entered()

    def guard(self) -> Callable[[], None]:
        """The function that the optimizers' pre-step hook calls: the state is about to change."""
        return self._before_optimizer

    def _print_once(self, text: str) -> None:
        """On stderr, once for all ranks."""
        if text and self.rank == 0:
            print(f"elastic: {text}", file=sys.stderr, flush=True)

    def _drop_layer_outputs(self, step: int) -> None:
        """After the commit of `step`: the outputs of its layers are not needed any more."""
        self._first_bad.begin()
        if not self._every_layer and step > self._suspect:
            self._first_bad.off()

    def _may_have_queued_kernels(self) -> bool:
        """Whether kernels that an abort could interrupt may be queued on the device."""
        return self.device.type == "cuda" and self.world_size > 1

    def _before_optimizer(self, *, applies: bool = True) -> None:
        """Apply no gradient whose all-reduce was not seen to complete on this rank.

        An abort ends the kernels in flight with arbitrary contents in their buffers, and work queued behind them still
        runs. So the host waits for the queued work, the all-reduces and any collective of the script, and only then
        checks whether the group was aborted: the flag is set before the abort begins, so sums that an abort interrupted
        are never taken for complete.
        """
        self._goes_on()
        self._gradient_weight.before_step(applies=applies)
        if self._may_have_queued_kernels():
            self._link.contributed()
            torch.cuda.current_stream(self.device).synchronize()
        self._link.applying()
        if self._fence is not None and self._state is not None and self._state.clean():
            self._link.contributed()
            self._fence.wait(self._state.step)
            self._link.applying(complete=True)
        if self.sampler.on and self._state is not None:
            self.sampler.applied(self._state)
        if self._checkpoint_scheduler is not None:
            self._checkpoint_scheduler.settle()

    def _compare_replicas(self, state: State) -> None:
        if not self._alike:
            return
        # Of the tensors that the state has now: one that was replaced is no part of it any more.
        own = self._gradient_weight.own_buffers
        fingerprint = Fingerprint([tensor for _, tensor in state.tensors(own=False) if id(tensor) not in own])
        digest = fingerprint.of(state.step // self._fingerprint_every)
        self._link.contributed()
        outliers = disagreeing(digest, world_size=self.world_size)
        self._link.entered()
        if outliers and not self._ignore_bad_numbers:
            self._link.bad_numbers(state.step, "drift", "weights differ from the other replicas'", outliers)

    def _compare_loops(self, progress: DataProgress) -> None:
        """After a commit of all ranks. Raises MisuseRuntimeError if their loops take other batches."""
        with self._collective("commit"):
            if disagreeing(progress.digest(), world_size=self.world_size):
                own, cpu = progress.numbers(), torch.device("cpu")
                refuse_unlike(shared_values.gather(own, rank=self.rank, world_size=self.world_size, device=cpu))
