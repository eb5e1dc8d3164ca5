"""The strategy for `lightning.Trainer`: see `integrations.lightning`."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.seed import isolate_rng

from elastic.contract.timeouts import QUIET_S
from elastic.worker.data.samplers import drawn
from elastic.worker.data.seeds import seed_everything, seed_turn, word
from elastic.worker.job.job import Job
from elastic.worker.link.misuse import MisuseValueError
from elastic.worker.run import run
from elastic.worker.state.state import State

from ._epoch_rest import skipped
from ._lightning_env import ElasticEnvironment
from ._prepare_lock import one_at_a_time

REFUSED = {
    "WeightAveraging": "its average is no part of the state: keep a torch.optim.swa_utils.AveragedModel in the module",
    "StochasticWeightAveraging": "its average is no part of the state: average the weights of checkpoints afterwards",
}
"""Callbacks by the name of a class in their ancestry -> why, and what to do instead."""

NO_MESH = (
    "LightningModule.device_mesh: ElasticStrategy does not shard, each rank has the whole model. Shard in a loop of "
    "your own, with Fabric's ModelParallelStrategy and elastic.run(setup, train, sharded=True), see docs/sharded.md"
)

_SAVED = ("_last_global_step_saved", "_last_checkpoint_saved")
"""Attributes of a ModelCheckpoint that decide whether it saves, and are not in its state dict."""


class ElasticStrategy(DDPStrategy):
    """Data-parallel training whose `Trainer.fit` survives the loss of workers in place.

    `seed`: of the random numbers in training, which are drawn from (seed, batch, rank); default: that of
    ``lightning.seed_everything``, else 0. `quiet_s`: how long what lies between two training batches (validation,
    saving) may take without being taken for a hang. `ddp_options`: as for ``Job.ddp``.

    Raises ValueError for Lightning's communication hooks and model averaging.
    """

    strategy_name = "elastic"

    def __init__(self, *, seed: int | None = None, quiet_s: float = QUIET_S, **ddp_options: Any) -> None:
        for name in ("ddp_comm_hook", "ddp_comm_wrapper", "ddp_comm_state", "model_averaging_period"):
            if ddp_options.get(name) is not None:
                raise MisuseValueError(
                    f"ElasticStrategy({name}=…): elastic has a hook of its own on the gradients; leave it out"
                )
        super().__init__(cluster_environment=ElasticEnvironment(), **ddp_options)
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self.job: Job | None = None
        self.state: State | None = None
        self._quiet_s = quiet_s
        self._between = ExitStack()
        self._made: tuple[list[Any], list[Any]] = ([], [])
        self._loss: torch.Tensor | None = None

    # ── the process ─────────────────────────────────────────────────────────────────────────────────────────

    def _configure_launcher(self) -> None:
        self._launcher = _Runs(self)

    @property
    def root_device(self) -> torch.device:
        if self.job is not None:
            return self.job.device
        return self.parallel_devices[min(self.local_rank, len(self.parallel_devices) - 1)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank if self.world_size > 1 else 0}

    def setup_distributed(self) -> None:
        self.set_world_ranks()

    def build(self, trainer: Trainer, model: LightningModule, job: Job) -> State:
        """Once per process, before there is a group: everything that makes or changes parameters."""
        self.job = job
        _refuse(trainer)
        self.connect(model)
        datamodule = trainer.datamodule
        with one_at_a_time(job.name):
            if datamodule is not None:
                call._call_lightning_datamodule_hook(trainer, "prepare_data")
            call._call_lightning_module_hook(trainer, "prepare_data")
        if datamodule is not None:
            call._call_lightning_datamodule_hook(trainer, "setup", stage="fit")
        call._call_lightning_module_hook(trainer, "setup", stage="fit")
        try:
            call._call_lightning_module_hook(trainer, "configure_model")
        except TypeError as error:
            if "device_mesh" in str(traceback.extract_tb(error.__traceback__)[-1].line):  # it is None
                raise MisuseValueError(NO_MESH) from error
            raise
        if self._layer_sync is not None:
            self._layer_sync.apply(model)
        self.precision_plugin.convert_module(model)
        self._made = optimizers, schedulers = _init_optimizers_and_lr_schedulers(model)
        parts: dict[str, Any] = {"model": model}
        parts |= {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
        parts |= {f"scheduler_{i}": config.scheduler for i, config in enumerate(schedulers)}
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
            parts["scaler"] = scaler
        return State(**parts, trainer={})

    # ── a generation ────────────────────────────────────────────────────────────────────────────────────────

    def setup(self, trainer: Trainer) -> None:
        self.accelerator.setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            self.precision_plugin.convert_module(self.model)
            self.model_to_device()
            self.setup_precision_plugin()
            return
        self.configure_ddp()
        self.optimizers, self.lr_scheduler_configs = self._made
        self.setup_precision_plugin()
        if self.state is not None and self.state.step:
            kept = self.state.trainer
            call._call_callbacks_load_state_dict(trainer, {"callbacks": _copied(kept["callbacks"])})
            for callback, saved in zip(_checkpoints(trainer), kept["saved"], strict=True):
                vars(callback).update(saved)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        assert self.job is not None
        return self.job.ddp(model, **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        """elastic has its own."""

    def process_dataloader(self, dataloader: Any) -> Any:
        """Have all ranks draw the same order, and a training loader go on after the committed batches of its epoch."""
        trainer = self.lightning_module.trainer
        sampler = getattr(dataloader, "sampler", None)
        if self.state is not None and isinstance(sampler, DistributedSamplerWrapper):
            sampler.dataset._sampler = _SameOnAllRanks(sampler, self.seed)
        if self.state is None or not self.state.step or not trainer.training or not trainer.fit_loop.restarting:
            return dataloader
        _set_sampler_epoch(dataloader, trainer.fit_loop.epoch_progress.current.processed)
        batches = trainer.fit_loop.epoch_loop.batch_progress
        # After the last one the iterator is not asked again, and the next epoch is to be whole.
        return dataloader if batches.is_last_batch else skipped(dataloader, batches.current.ready)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
        return output

    def stepped(self, trainer: Trainer) -> None:
        """A batch has ended: commit if it was the last one of an optimizer step."""
        assert self.job is not None
        assert self.state is not None
        whole = not trainer.fit_loop.epoch_loop._should_accumulate()
        if not (whole if trainer.lightning_module.automatic_optimization else not self.state.clean()):
            return
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # each rank's own
        self.state.trainer = {
            "loops": loops,
            "callbacks": _copied(call._call_callbacks_state_dict(trainer)),
            "saved": [{name: vars(c)[name] for name in _SAVED if name in vars(c)} for c in _checkpoints(trainer)],
            "should_stop": trainer.should_stop,
            "metrics": _copied(dict(trainer.callback_metrics)),
        }
        self.job.commit(self.state, loss=self._loss)

    def between_batches(self, *contexts: AbstractContextManager[None]) -> None:
        """Until `end_between`, no batch is expected; the `contexts` last as long."""
        assert self.job is not None
        self.end_between()
        limit_s = min(self._quiet_s, 0.9 * self.job._group_s)
        self._between.enter_context(self.job.quiet("between batches", limit_s))
        for context in contexts:
            self._between.enter_context(context)

    def end_between(self) -> None:
        self._between.close()

    def teardown(self) -> None:
        """The generation is over; the model stays where it is, and so does the group, which is elastic's to end."""
        self.end_between()
        self._model = None
        self.optimizers, self.lr_scheduler_configs, self._loss = [], [], None


class _SameOnAllRanks:
    """The sampler that Lightning has wrapped to take each rank's share of it; its order is a function of (seed, epoch).

    The ranks' global generators differ, so the shares would be those of different orders.
    """

    def __init__(self, wrapper: DistributedSamplerWrapper, seed: int) -> None:
        self._wrapper, self._seed = wrapper, seed
        self._sampler = wrapper.dataset._sampler

    def __iter__(self) -> Iterator[int]:
        # The order is drawn within a batch, whose other random numbers are the rank's own.
        with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            return iter(drawn(self._sampler, self._seed, self._wrapper.epoch))

    def __len__(self) -> int:
        return len(self._sampler)


class _Runs(_Launcher):
    """Runs `Trainer.fit` in `elastic.run`; the Trainer's other functions in this process alone."""

    is_interactive_compatible = False

    def __init__(self, strategy: ElasticStrategy) -> None:
        self._strategy = strategy

    def kill(self, signum: int) -> None:
        """There are no processes of its own."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any) -> Any:
        if trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        given = inspect.signature(function).bind(*args, **kwargs)
        model, strategy, limits = given.arguments["model"], self._strategy, trainer.fit_loop
        forward = vars(model).get("forward")

        def setup(job: Job) -> State:
            data = {name: given.arguments.get(name) for name in ("train_dataloaders", "val_dataloaders", "datamodule")}
            trainer._data_connector.attach_data(model, **data)
            return strategy.build(trainer, model, job)

        def train(job: Job, state: State) -> None:
            strategy.job, strategy.state = job, state
            _renew(trainer, limits, state)
            if state.step:
                given.arguments["ckpt_path"] = None  # the state is further than the file
            try:
                function(*given.args, **given.kwargs)
            finally:
                trainer._teardown()
                vars(model).pop("forward", None)  # patched by a step that did not end
                if forward is not None:
                    model.forward = forward

        try:
            with _once(trainer, model):
                run(setup, train)
        finally:
            strategy.job = strategy.state = None
        return None


class _EpochLoop(_TrainingEpochLoop):
    """Commits each optimizer step before anything that only some ranks may complete."""

    after_recovery = False
    """What follows the last commit has to run again."""

    def advance(self, data_fetcher: Any) -> None:
        trainer, strategy = self.trainer, self.trainer.strategy
        strategy.end_between()
        late = _checkpoints(trainer)
        if self.after_recovery:
            self.after_recovery = self.val_loop.restarting = trainer.fit_loop._restarting = False
            # What follows this batch may look at what was logged in it, as a ModelCheckpoint that monitors the loss.
            trainer._logger_connector._callback_metrics.update(_copied(strategy.state.trainer.get("metrics", {})))
            # A file that was saved before the recovery is saved again under its own name, not as a further version.
            strategy.between_batches(_shadowed(late, "file_exists", lambda *_, **__: False))
            self._finish_batch(late, data_fetcher)
            return
        before = self.batch_progress.total.ready
        seed_turn(word(strategy.seed, 1, before, trainer.global_rank))
        with _shadowed(late, "on_train_batch_end", lambda *_, **__: None):  # `_finish_batch` has their part
            super().advance(data_fetcher)
        if self.batch_progress.total.ready > before:  # else it has only found its place in a file's counters
            strategy.stepped(trainer)
        strategy.between_batches()
        self._finish_batch(late, data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        """It has been called in `advance`."""

    def _finish_batch(self, late: list[Checkpoint], data_fetcher: Any) -> None:
        """What follows the commit, with random numbers of its own: it may run again after a recovery."""
        seed_everything(self.trainer.strategy.seed, 2, self.batch_progress.total.ready, self.trainer.global_rank)
        self._checkpointed(late)
        super().on_advance_end(data_fetcher)

    def _checkpointed(self, callbacks: list[Checkpoint]) -> None:
        """The checkpoint callbacks' part of the end of a batch, which is collective. Their files are as Lightning's:
        written before the batch counts as completed."""
        progress = self.batch_progress
        for count in (progress.total, progress.current):
            count.completed -= 1
        try:
            for callback in callbacks:
                module = self.trainer.lightning_module
                callback.on_train_batch_end(self.trainer, module, None, None, self.batch_idx)
        finally:
            for count in (progress.total, progress.current):
                count.completed += 1

    def _broadcast_sigterm_tensor(self) -> None:
        """SIGTERM is elastic's: a node that is drained has left the group when its workers get it."""


def _renew(trainer: Trainer, limits: Any, state: State) -> None:
    """Fresh loops, with the counters of the last commit, and a Trainer as at the beginning of `fit`."""
    loop = _FitLoop(trainer, min_epochs=limits.min_epochs, max_epochs=limits.max_epochs)
    loop.epoch_loop = _EpochLoop(trainer, min_steps=limits.min_steps, max_steps=limits.max_steps)
    trainer.fit_loop = loop
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    trainer.training = True
    trainer.should_stop = False
    if state.step:
        loop.load_state_dict(_copied(state.trainer["loops"]))
        loop.epoch_loop.after_recovery = True
        trainer.should_stop = state.trainer["should_stop"]


@contextmanager
def _once(trainer: Trainer, model: LightningModule) -> Iterator[None]:
    """Have Lightning not repeat, in each generation, what `ElasticStrategy.build` has done; nor handle signals."""

    def nothing(*_: Any, **__: Any) -> None: ...

    with ExitStack() as undo:
        undo.enter_context(_shadowed([trainer._data_connector], "prepare_data", nothing))
        undo.enter_context(_shadowed([trainer._signal_connector], "register_signal_handlers", nothing))
        builds = trainer.strategy.build

        def build(*args: Any) -> State:
            state = builds(*args)
            data = [] if trainer.datamodule is None else [trainer.datamodule]
            undo.enter_context(_shadowed([model, *data], "setup", nothing))
            undo.enter_context(_shadowed([model], "configure_model", nothing))
            return state

        undo.enter_context(_shadowed([trainer.strategy], "build", build))
        yield


@contextmanager
def _shadowed(holders: Sequence[Any], name: str, value: Any) -> Iterator[None]:
    """`value` in place of a method of these objects."""
    before = [(holder, vars(holder).get(name)) for holder in holders]
    for holder in holders:
        vars(holder)[name] = value
    try:
        yield
    finally:
        for holder, own in before:
            vars(holder).pop(name, None)
            if own is not None:
                vars(holder)[name] = own


def _checkpoints(trainer: Trainer) -> list[Checkpoint]:
    return [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)]


def _refuse(trainer: Trainer) -> None:
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if why := REFUSED.get(kind.__name__):
                raise MisuseValueError(
                    f"the callback {type(callback).__name__} cannot be used with ElasticStrategy: {why}"
                )


def _copied(value: Any) -> Any:
    """A copy that no later change of a callback reaches; tensors are cloned."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    return value
