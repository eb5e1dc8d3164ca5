"""Hugging Face's Accelerator in a generation of elastic: the loop of its documentation, recovered in place.

    def train(job, state):
        accelerator = Accelerator(job, state, gradient_accumulation_steps=2)
        model, optimizer, data, scheduler = accelerator.prepare(state.model, state.optimizer, data, state.scheduler)
        for epoch in accelerator.epochs(3):
            for batch in data:
                with accelerator.accumulate(model):
                    …
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                accelerator.commit(loss)

The DataLoader's `batch_size` is the number of samples over all ranks, for any world size, as with Accelerate's
`split_batches=True`; an optimizer step takes `gradient_accumulation_steps` such batches, and a scheduler makes one step
with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import elastic
from elastic.worker.data.seeds import seed_turn, word
from elastic.worker.job.job import Job
from elastic.worker.link.misuse import MisuseRuntimeError, MisuseValueError

from ._versions import require

require("accelerate", "1.15", "2")

import accelerate  # noqa: E402 - only after the check, whose message says what to install
from accelerate.utils import send_to_device  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from . import _data, _place  # noqa: E402

__all__ = ["Accelerator"]


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Make one in `train`, on each entry. `options` are those of accelerate.Accelerator.

    `seed`: of the order of the samples and of all random numbers. `weigh`: the loss is a mean over the samples of its
    batch, and is weighted by their number; False: it is scaled already, such as a sum over tokens divided by their
    number over all ranks and multiplied by `num_processes` × `gradient_accumulation_steps`.

    Raises ValueError for DeepSpeed, FSDP and Megatron-LM, and for fp16 without a part `scaler` of the state.
    """

    scaler: Any

    def __init__(self, job: Job, state: elastic.State, *, seed: int = 0, weigh: bool = True, **options: Any) -> None:
        if refused := [name for name in _REFUSED if options.get(name)]:
            raise MisuseValueError(
                f"{refused[0]}: not supported by elastic's Accelerator, each rank has the whole state. For FSDP2 make "
                "Accelerate's own in setup, with elastic.run(setup, train, sharded=True): docs/sharded.md"
            )
        _place.grouped(job.device, rank=job.rank, local_rank=job.local_rank, world_size=job.world_size)
        super().__init__(**{**options, "cpu": job.device.type == "cpu"})
        if self.scaler is not None:
            self.scaler = getattr(state, "scaler", None)
            if self.scaler is None:
                raise MisuseValueError("mixed_precision='fp16': its scale belongs to the state, "
                                 "State(…, scaler=torch.amp.GradScaler())")  # fmt: skip
        self._job, self._kept = job, state
        self._seed, self._weigh = seed, weigh
        self._train: _Batches | None = None
        self._scale = 1.0

    # ── preparing ───────────────────────────────────────────────────────────────────────────────────────────

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # as Accelerate does: there is no gradient to exchange
        wrapped = self._job.ddp(model, **_place.ddp_options(self))
        self._models[-1] = wrapped
        return wrapped

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True  # one step with each of the optimizer's, for any world size
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """The first one is the training data, from the state's step on; Accelerate prepares all others."""
        if self._train is not None:
            return _data.closed_to_children(super().prepare_data_loader(data_loader, *args, **kwargs))
        self._train = _Batches(self, data_loader)
        return self._train

    # ── training ────────────────────────────────────────────────────────────────────────────────────────────

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs from the current one to `count`. At the end of an epoch it is entered again without batches: what
        follows its last batch may not have been completed, and is done again."""
        train = self._train
        if train is None:
            raise MisuseRuntimeError("epochs(): prepare the training DataLoader first")
        if train.steps.samples is None:
            raise MisuseValueError("epochs(): the training data is a stream, which has none; count state.step instead")
        for epoch in range(max(0, self._kept.step - 1) // train.steps.per_epoch, count):
            train.epoch = epoch
            yield epoch

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """As Accelerate's, with the loss weighted by the samples of its batch."""
        super().backward(loss * self._scale if self._scale != 1.0 else loss, **options)

    def commit(self, loss: torch.Tensor | float | None = None) -> None:
        """The step is done, if this was the last batch that it accumulates. The last statement for each batch: see
        `Job.commit`."""
        if self.sync_gradients:
            self._job.commit(self._kept, loss=loss)

    def end_training(self) -> None:
        """As Accelerate's, but the process group is elastic's to end."""
        for tracker in self.trackers:
            tracker.finish()

    def _began(self, step: int, part: int, size: int, steps: _data.Steps) -> None:
        """The next batch is number `part` of `step`, with `size` samples (0: one that does not count)."""
        if self._kept.step != step:
            raise MisuseRuntimeError(
                f"batch {part} of step {step} began with state.step = {self._kept.step}: call accelerator.commit(loss) "
                "once for each batch, after the optimizer's step"
            )
        if part == 0 and self.step % steps.parts:
            # Accelerate's count goes on: the first batch, which the loop begins with again, would complete the step.
            raise MisuseRuntimeError(
                f"the loop over the training data was left within step {step}, which has {steps.parts} batches: leave "
                "it where accelerator.sync_gradients is true, after accelerator.commit(loss)"
            )
        seed_turn(word(self._seed, 1, step, self._job.rank, part))
        if self._weigh or not size:
            self._scale = size * steps.parts * steps.world_size / steps.whole(step).size
        else:
            self._scale = 1.0


_REFUSED = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")


class _Batches:
    """This rank's part of the training data, from the state's step on."""

    def __init__(self, accelerator: Accelerator, data: DataLoader[Any]) -> None:
        if not isinstance(data, DataLoader) or data.batch_size is None:
            raise MisuseValueError(
                "the training data: a torch DataLoader with a batch_size, the samples over all ranks"
            )
        job, parts = accelerator._job, accelerator.gradient_accumulation_steps
        self.dataset = data.dataset
        self.steps = _data.Steps.of(
            job,
            data.dataset,
            data.sampler,
            batch_size=data.batch_size * parts,
            parts=parts,
            drop_last=data.drop_last,
        )
        self.epoch: int | None = None
        """Set by `epochs`; None: that of the state's step."""
        self._accelerator = accelerator
        self._loader = _data.loader(
            data.dataset,
            self.steps,
            sampler=None if self.steps.samples is None else data.sampler,
            collate=data.collate_fn,
            seed=accelerator._seed,
            first_step=accelerator._kept.step,
            skipped=False,
            num_workers=data.num_workers,
            pin_memory=data.pin_memory and job.device.type == "cuda",
            prefetch_factor=data.prefetch_factor,
            multiprocessing_context=data.multiprocessing_context,
        )

    def __len__(self) -> int:
        """Batches in an epoch. Raises TypeError for a stream."""
        if self.steps.samples is None:
            raise TypeError("a stream has no length")
        return self.steps.per_epoch * self.steps.parts

    def __iter__(self) -> Iterator[Any]:
        accelerator, steps = self._accelerator, self.steps
        first = accelerator._kept.step
        if isinstance(self._loader, _data.Loader):
            epoch, skipped = divmod(first, steps.per_epoch)
            if self.epoch is not None and self.epoch > epoch:
                raise MisuseRuntimeError(
                    f"epoch {epoch} was left at step {skipped} of {steps.per_epoch}, and the loop goes on with epoch "
                    f"{self.epoch}: the step is the position in the data, and nothing keeps how much was left out. To "
                    "end training there, leave both loops; to train on a part of the data in each epoch, give the "
                    "DataLoader a sampler of so many samples, RandomSampler(data, num_samples=…)"
                )
            if self.epoch is not None and self.epoch < epoch:
                return  # it is over
            self._loader.set_epoch(epoch, skipped)
        for number, batch in enumerate(self._loader):
            step, part = divmod(first * steps.parts + number, steps.parts)
            start, stop = steps.part(step, part)
            accelerator._began(step, part, stop - start, steps)
            yield send_to_device(batch, accelerator.device)
