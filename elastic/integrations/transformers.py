"""Hugging Face's Trainer, recovered in place: the surviving processes keep model and optimizer, no step is lost.

    from elastic.integrations.transformers import Trainer, TrainingArguments

Everything else of a script stays. `Trainer.train` forms the group, and runs the stock training loop again in each
generation, around the same model, optimizer, scheduler and callbacks, at the step that was committed last. A step is
committed before it is logged, evaluated and saved: if a rank dies in any of these, they are done again.

The global batch keeps its size whatever the world size: `per_device_train_batch_size` × `gradient_accumulation_steps` ×
the world size at the first step, or `global_train_batch_size`. In a smaller world each rank takes more micro-batches.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import elastic
from elastic.contract.timeouts import QUIET_S
from elastic.worker.job.job import Job
from elastic.worker.link.misuse import MisuseRuntimeError, MisuseTypeError, MisuseValueError

from ._versions import require

require("transformers", "5.20", "6")
require("accelerate", "1.15", "2")

import transformers  # noqa: E402 - only after the check, whose message says what to install
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils.data import IterableDataset  # noqa: E402
from transformers.trainer_utils import TrainOutput, get_last_checkpoint  # noqa: E402

from . import _data, _place  # noqa: E402
from ._schedule import Schedule  # noqa: E402
from ._trainer_arguments import Seq2SeqTrainingArguments, TrainingArguments, refuse, settle  # noqa: E402
from ._trainer_recovery import Generation, History, Recovery, begin_anew, listed, resume_folder, states_now  # noqa: E402

__all__ = ["ElasticMixin", "Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]

OWN_LOADER = (
    "{}.get_train_dataloader returns a loader of its own, and elastic's Trainer shares out each global batch to the "
    "ranks itself. Give the order of the samples as _get_train_sampler(self, train_dataset=None), a sampler over all "
    "of them, and what makes a batch of samples as data_collator. A batch sampler needs a loop with job.batches"
)

TRAINED_ALREADY = (
    "train() was called a second time: under elasticd a process trains once. Make the second training a job of its "
    "own, whose script begins with what the first one has saved (save_model, from_pretrained)"
)

FSDP_WANTS = (
    "fsdp: give elastic's Trainer model_init=… in place of model=…, and no resume_from_checkpoint: the model is built "
    "and sharded in the process group, anew where the world changes, and goes on by the job's own checkpoints"
)


class ElasticMixin:
    """Makes a Trainer elastic: ``class MyTrainer(ElasticMixin, SomeTrainer)``, with elastic's TrainingArguments."""

    quiet_s = QUIET_S
    """How long an evaluation may take for one batch, or a save, before it is taken for a hang; below
    timeouts.group_s."""

    # Of the Trainer:
    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    callback_handler: Any
    state: Any
    control: Any
    current_flos: Any

    _run: Generation | None = None
    _recovery: Recovery | None = None
    _own: tuple[int, torch.Tensor, float] | None = None
    """(step of the newest commit, this rank's losses and operations since the last log, summed, as of then)."""
    _began: Sequence[tuple[Any, dict[str, Any]]] = ()
    """The callbacks, and their states before training."""
    _managed = False
    _whole: dict[str, torch.Tensor] | None = None
    """With FSDP, the final weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse(self.args)
        self.args.taken = True
        self._given_optimizer = self.optimizer is not None
        if self.args.fsdp and getattr(self, "model_init", None) is None:
            raise MisuseValueError(FSDP_WANTS)

    # ── the run ─────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Train to completion across failures, as `transformers.Trainer.train`. Afterwards there is no process group:
        each rank evaluates for itself, and the one that was rank 0 saves.

        `resume_from_checkpoint`: a checkpoint of Trainer's, for a job that has no state of its own yet. Raises
        ValueError for `trial` (hyperparameter search).
        """
        if trial is not None:
            raise MisuseValueError(
                "trial: elastic's Trainer does not support hyperparameter search; run one job per trial"
            )
        if self._managed:
            raise MisuseRuntimeError(TRAINED_ALREADY)
        if self.args.fsdp and resume_from_checkpoint:
            raise MisuseValueError(FSDP_WANTS)
        self._managed = "TORCHELASTIC_RUN_ID" in os.environ
        self._began = states_now(self)
        gas = self.args.gradient_accumulation_steps
        last: list[Any] = []

        def setup(job: Job) -> elastic.State:
            return self._setup(job, resume_from_checkpoint)

        def train(job: Job, state: elastic.State) -> None:
            last[:] = [job, self._generation(job, state, gas, ignore_keys_for_eval)]

        elastic.run(setup, train, sharded=bool(self.args.fsdp))
        job, finish = last
        if self.args.fsdp:
            self.model = self.call_model_init().to(job.device)  # type: ignore[attr-defined]
            self.model.load_state_dict(self._whole)
            self.callback_handler.model, self._whole = self.model, None
        self._alone(job)
        return super()._finalize_training(*finish)  # type: ignore[misc]

    def _setup(self, job: Job, checkpoint: Any) -> elastic.State:
        if self.args.use_cpu and job.device.type != "cpu":
            raise MisuseValueError(
                "use_cpu=True on a machine with GPUs: start the job with CUDA_VISIBLE_DEVICES='' as well"
            )
        if self._recovery is not None:  # all ranks have lost the state, and nothing was ever saved
            if getattr(self, "model_init", None) is None:
                raise RuntimeError(
                    "all state was lost, and Trainer(model=…) has no second one: the process starts anew"
                )
            transformers.set_seed(self.args.seed)
            self.model = self.call_model_init()  # type: ignore[attr-defined]
            self.optimizer = self.lr_scheduler = None
            begin_anew(self)
        if self.args.fsdp:
            self._grouped(job)
            self.create_accelerator_and_postprocess()  # type: ignore[attr-defined]
        else:
            _place.alone(job.device)
        settle(self.args, job.device)
        self.model.to(job.device)
        self.model_wrapped = self.model
        if self.optimizer is None:
            self.create_optimizer()  # type: ignore[attr-defined]
        if self.args.fsdp:
            self.model, prepared = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped, self.optimizer = self.model, prepared.optimizer
            _keep_names(self.model)
        schedule = Schedule(self.lr_scheduler if self._given_optimizer else None)
        kept: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "schedule": schedule}
        scaler = torch.amp.GradScaler(job.device.type) if self.args.mixed_precision == "fp16" else None
        if scaler is not None:
            kept["scaler"] = scaler
        trainer, history = "", History()
        if checkpoint:
            trainer, history = self._from_checkpoint(checkpoint, schedule)
        self._recovery = Recovery(self, self.optimizer, schedule, scaler, getattr(self, "model_init", None))
        return elastic.State(trainer=trainer, history=history, global_batch=0, **kept)

    def _from_checkpoint(self, checkpoint: Any, schedule: Schedule) -> tuple[str, History]:
        """Load a checkpoint of Trainer's; returns its TrainerState as `kept.trainer` and `kept.history`."""
        folder = get_last_checkpoint(self.args.output_dir) if checkpoint is True else os.fspath(checkpoint)
        if folder is None:
            raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
        self._load_from_checkpoint(folder)
        for name, part in (("optimizer.pt", self.optimizer), ("scheduler.pt", schedule)):
            path = os.path.join(folder, name)
            if os.path.exists(path):
                saved = torch.load(path, map_location="cpu", weights_only=True)
                part.load_state_dict(saved if part is self.optimizer else {"held": saved})
        with open(os.path.join(folder, "trainer_state.json"), encoding="utf-8") as file:
            state = json.load(file)
        history, callbacks = state.pop("log_history"), state.pop("stateful_callbacks")
        control = callbacks.pop("TrainerControl", {}).get("args", {})
        if not self.args.restore_callback_states_from_checkpoint:  # as in the stock one, the script's own count
            callbacks = {name: [{**each, "args": {}} for each in listed(held)] for name, held in callbacks.items()}
        saved = {"state": state, "control": control, "done": True}
        return json.dumps(saved), History(json.dumps(history), json.dumps(callbacks))

    def _generation(self, job: Job, kept: Any, gas: int, ignore_keys: Any) -> tuple[Any, ...]:
        """Run the stock loop in this generation; returns the arguments of its `_finalize_training`."""
        recovery = self._recovery
        assert recovery is not None
        args = self.args
        self._grouped(job)
        settle(args, job.device)
        if not kept.global_batch:
            kept.global_batch = args.global_train_batch_size or args.train_batch_size * gas * job.world_size
        resumed = json.loads(kept.trainer) if kept.trainer else None
        eval_on_start = args.eval_on_start
        try:
            steps, sampler = self._plan(job, kept.global_batch)
            run = self._run = Generation(
                job=job, kept=kept, steps=steps, sampler=sampler, sizes=[], resumed=resumed, ignore_keys=ignore_keys
            )
            args.gradient_accumulation_steps = steps.parts
            args.eval_on_start = eval_on_start and resumed is None
            recovery.enter(run)
            with run.read as read:
                folder = read.enter_context(resume_folder(kept))
                super().train(resume_from_checkpoint=folder, ignore_keys_for_eval=ignore_keys)  # type: ignore[misc]
            if args.fsdp:
                self._whole = {name: _whole(held) for name, held in self.model.state_dict().items()}
            return run.finish
        finally:
            recovery.leave()
            args.gradient_accumulation_steps, args.eval_on_start = gas, eval_on_start
            self._run = None
            self._alone(job)

    def _grouped(self, job: Job) -> None:
        place = {"rank": job.rank, "local_rank": job.local_rank, "world_size": job.world_size}
        _place.grouped(job.device, **place, sharded=bool(self.args.fsdp))

    def _alone(self, job: Job) -> None:
        """The group is over: hold nothing of it, and work without one."""
        _place.alone(job.device, rank=job.rank, local_rank=job.local_rank)
        settle(self.args, job.device)
        self.model_wrapped = self.model
        self.create_accelerator_and_postprocess()  # type: ignore[attr-defined]
        if self._recovery is not None:
            self.optimizer = self._recovery.optimizer

    def _plan(self, job: Job, batch_size: int) -> tuple[_data.Steps, Any]:
        data = self.train_dataset  # type: ignore[attr-defined]
        if data is None:
            raise MisuseValueError("Trainer: training requires a train_dataset.")
        sampler = None if isinstance(data, IterableDataset) else self._get_train_sampler()  # type: ignore[attr-defined]
        parts = _data.parts_needed(batch_size, job.world_size, self.args.train_batch_size)
        drop_last = self.args.dataloader_drop_last
        return _data.Steps.of(job, data, sampler, batch_size=batch_size, parts=parts, drop_last=drop_last), sampler

    # ── what the stock loop calls ───────────────────────────────────────────────────────────────────────────

    def _get_dataloader(self, dataset: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        """For training, this rank's micro-batches: what the stock `get_train_dataloader` returns, and that of a
        subclass which calls it. `_get_train_sampler` and `data_collator` are a subclass's to change."""
        run = self._run
        if run is None or not kwargs.get("is_training"):
            return super()._get_dataloader(dataset, description, *args, **kwargs)  # type: ignore[misc]
        options, collate = self.args, self.data_collator  # type: ignore[attr-defined]
        if hasattr(dataset, "column_names") and not isinstance(dataset, IterableDataset):
            dataset = self._remove_unused_columns(dataset, description=description)  # type: ignore[attr-defined]
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)  # type: ignore[attr-defined]
        run.loader = _data.loader(
            dataset,
            run.steps,
            sampler=run.sampler,
            collate=collate,
            seed=int(options.seed if options.data_seed is None else options.data_seed),
            first_step=self._step_in(run),
            num_workers=options.dataloader_num_workers,
            pin_memory=options.dataloader_pin_memory and run.job.device.type == "cuda",
            prefetch_factor=options.dataloader_prefetch_factor,
            multiprocessing_context=options.dataloader_multiprocessing_context,
        )
        return run.loader

    @staticmethod
    def _step_in(run: Generation) -> int:
        return int(run.resumed["state"]["global_step"]) if run.resumed else 0

    def get_total_train_batch_size(self, args: Any) -> int:
        run = self._run
        return run.steps.batch_size if run else int(super().get_total_train_batch_size(args))  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        run = self._run
        if run is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc,no-any-return]
        if self.callback_handler.train_dataloader is not run.loader:
            owner = next(each for each in type(self).__mro__ if "get_train_dataloader" in vars(each))
            raise MisuseTypeError(OWN_LOADER.format(owner.__name__))
        run.sizes, run.part = run.steps.sizes(self.state.global_step), 0
        run.loss = torch.zeros((), device=run.job.device)
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        counted = [batch if size else _uncounted(batch) for batch, size in zip(batches, run.sizes, strict=True)]
        return batches, self._get_num_items_in_batch(counted, device)  # type: ignore[attr-defined]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        run = self._run
        if run is None:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc,no-any-return]
        size, step = run.sizes[run.part], self.state.global_step
        run.part += 1
        # The stock step divides a mean loss by this: so it becomes its part in the mean over the global batch.
        self.current_gradient_accumulation_steps = run.steps.whole(step).size / (max(size, 1) * run.job.world_size)
        with contextlib.nullcontext() if size else _muted(self.accelerator):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        loss = loss if size else torch.zeros_like(loss)
        run.loss += loss
        return loss

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        run = self._run
        if run is None or not training or model is not self.model or self.args.fsdp:
            return super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        if not dist.is_initialized():
            return run.job.ddp(model)
        # Autocast only: the model is wrapped below.
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)
        return run.job.ddp(prepared, **_place.ddp_options(self.accelerator))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self._run is not None and self.control.should_training_stop:
            return  # the last step before the interruption was the last one
        super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, epoch: Any, ignore_keys_for_eval: Any,
        start_time: Any, learning_rate: Any = None,
    ) -> None:  # fmt: skip
        run = self._run
        if run is not None and self.state.global_step > run.committed:
            self._commit(run, tr_loss, grad_norm, learning_rate)
        super()._maybe_log_save_evaluate(  # type: ignore[misc]
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
        )

    def _commit(self, run: Generation, tr_loss: Any, grad_norm: Any, learning_rate: Any) -> None:
        run.committed = self.state.global_step
        recovery = self._recovery
        assert recovery is not None
        recovery.hold(run.kept, grad_norm, learning_rate)
        own, step = (tr_loss.detach().clone(), float(self.current_flos)), run.kept.step
        try:
            run.job.commit(run.kept, loss=run.loss)
        finally:
            if run.kept.step > step:  # else the step is done again, and its loss is added again
                self._own = run.kept.step, *own
        recovery.compare(run)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        run = self._run
        if run is None:
            return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[misc]
        # The best model is loaded when no rank needs the trained one any more.
        self.store_flos()  # type: ignore[attr-defined]
        run.finish = trial, num_train_samples, start_time
        return TrainOutput(self.state.global_step, 0.0, {})

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._quiet("evaluation"):
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._quiet("evaluation"):  # each batch is a sign of progress
            return super().prediction_step(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._quiet("save"):
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _quiet(self, what: str) -> Any:
        return self._run.job.quiet(what, self.quiet_s) if self._run is not None else contextlib.nullcontext()

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return _data.closed_to_children(super().get_eval_dataloader(*args, **kwargs))  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return _data.closed_to_children(super().get_test_dataloader(*args, **kwargs))  # type: ignore[misc]

    # Model, optimizer and all else live on in this process, or came from a survivor.

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._run is None:
            super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        if self._run is None:
            super()._load_optimizer_and_scheduler(*args, **kwargs)  # type: ignore[misc]

    def _load_scaler(self, *args: Any, **kwargs: Any) -> None:
        if self._run is None:
            super()._load_scaler(*args, **kwargs)  # type: ignore[misc]

    def _load_rng_state(self, *args: Any, **kwargs: Any) -> None:
        if self._run is None:
            super()._load_rng_state(*args, **kwargs)  # type: ignore[misc]


class Trainer(ElasticMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer, in which workers are replaced in place; it wants the TrainingArguments of this module."""


class Seq2SeqTrainer(ElasticMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """The same for transformers.Seq2SeqTrainer, with Seq2SeqTrainingArguments."""


def _keep_names(model: Any) -> None:
    """`fully_shard` puts FSDP before the name of a class, and the stock loss knows a causal model by its name: whether
    label smoothing shifts the labels depends on it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._get_name = functools.partial(str, type(module).__name__.removeprefix("FSDP"))  # type: ignore[attr-defined]


def _whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def _uncounted(batch: Any) -> Any:
    """`batch` as it is counted for `num_items_in_batch`: without any label."""
    return {
        key: torch.full_like(batch[key], -100) if isinstance(batch[key], torch.Tensor) else batch[key]
        for key in ("labels", "shift_labels")
        if key in batch
    }


@contextlib.contextmanager
def _muted(accelerator: Any) -> Iterator[None]:
    """Within, a backward gives gradients of zero."""
    backward = accelerator.backward
    accelerator.backward = lambda loss, **options: backward(loss * 0.0, **options)
    try:
        yield
    finally:
        del accelerator.backward
