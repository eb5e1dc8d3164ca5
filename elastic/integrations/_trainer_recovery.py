"""What a Trainer commits, and how it is brought back to that at the beginning of a generation."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from elastic.worker.data.seeds import seed_turn, word
from elastic.worker.job.job import Job
from elastic.worker.link.misuse import MisuseTypeError

from . import _data
from ._schedule import Schedule

OF_THE_PROCESS = ("is_local_process_zero", "is_world_process_zero")
"""Fields of TrainerState that say which rank this is: no state, and another value on each rank."""


@dataclass
class Generation:
    """What belongs to one generation of a Trainer."""

    job: Job
    kept: Any
    """The elastic.State."""
    steps: _data.Steps
    sampler: Any
    sizes: list[int]
    """Samples in the micro-batches of the current step."""
    resumed: dict[str, Any] | None
    """Contents of `kept.trainer` at the beginning, if there was a step before."""
    ignore_keys: Any = None
    loader: Any = None
    """Of this rank's micro-batches."""
    part: int = 0
    committed: int = 0
    loss: Any = None
    """Of the current step, on this rank."""
    read: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """Holds what the stock loop reads at its beginning."""
    finish: tuple[Any, ...] = ()


UNLIKE = (
    "after step {step} the state of the callback {names} is not the same on each rank ({ranks} from rank 0). A process "
    "that is replaced gets that of another rank, so what one rank alone counts is lost with it: let state() return "
    "only what is alike on all ranks, such as what follows from the TrainerState and the metrics"
)


class History:
    """Trainer's log and the callbacks' states, as JSON. Each rank has measured its own times of an evaluation, and
    callbacks are compared by `Recovery.compare`."""

    ranks_differ = True
    """For `checks.replicas`."""

    def __init__(self, text: str = "", callbacks: str = "") -> None:
        self.text = text
        self.callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text, **({"callbacks": self.callbacks} if self.callbacks else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text, self.callbacks = state["text"], state.get("callbacks", "")


class Recovery(TrainerCallback):  # type: ignore[misc]
    """Brings a Trainer to the committed step at the beginning of a generation, and knows what to commit."""

    def __init__(
        self, trainer: Any, optimizer: Any, schedule: Schedule, scaler: Any, model_init: Callable[..., Any] | None
    ) -> None:
        self.trainer = trainer
        self.optimizer = optimizer
        self.schedule = schedule
        self.scaler = scaler
        self.model_init = model_init
        self._logged = -1
        self._commits = 0

    def enter(self, run: Generation) -> None:
        trainer = self.trainer
        trainer.create_accelerator_and_postprocess()
        if trainer.args.fsdp:
            trainer.accelerator.prepare = self._prepared
        if self.scaler is not None:
            trainer.accelerator.scaler = self.scaler
        trainer.model_init = None  # the model is there
        trainer.__dict__.pop("_eval_dataloaders", None)  # of another world
        trainer.model_wrapped = trainer.model
        trainer.optimizer = self.optimizer
        trainer.lr_scheduler = self.schedule.made or self._made(run)
        trainer._created_lr_scheduler = False
        self._logged, self._commits = -1, 0
        run.committed = trainer._step_in(run)
        trainer.remove_callback(type(self))
        trainer.add_callback(self)  # behind those that the script has added
        if run.resumed is not None:
            kept = run.kept.history.callbacks
            _put_back(trainer, json.loads(kept) if kept else run.resumed.get("callbacks", {}))

    def _prepared(self, *objects: Any) -> Any:
        """In place of `Accelerator.prepare`: `setup` has sharded model and optimizer."""
        accelerator = self.trainer.accelerator
        if objects[0] is not self.trainer.model:
            return type(accelerator).prepare(accelerator, *objects)
        accelerator._models.append(objects[0])
        return objects[0], accelerator.prepare_optimizer(objects[1])

    def _made(self, run: Generation) -> Any:
        trainer = self.trainer
        max_steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]

        def make() -> Any:
            trainer.lr_scheduler = None
            return trainer.create_scheduler(num_training_steps=max_steps, optimizer=self.optimizer)

        return self.schedule.make(make, self.optimizer)

    def leave(self) -> None:
        self.trainer.model_init = self.model_init
        if (hook := getattr(self.trainer, "neftune_hook_handle", None)) is not None:
            hook.remove()

    def hold(self, kept: Any, grad_norm: Any, learning_rate: Any) -> None:
        """Put everything of the Trainer but its tensors into `kept`, as JSON; its log only if that has grown."""
        trainer = self.trainer
        state = {f.name: getattr(trainer.state, f.name) for f in dataclasses.fields(trainer.state)}
        log = state.pop("log_history")
        state.pop("stateful_callbacks")
        for name in OF_THE_PROCESS:
            state.pop(name, None)
        should_log = trainer.control.should_log
        record = {
            "state": state,
            "control": trainer.control.state()["args"],
            "total_loss": trainer._total_loss_scalar,
            "initial_step": trainer._initial_global_step,
            "logged_step": trainer._globalstep_last_logged,
            "learning_rate": learning_rate if should_log else None,
            "grad_norm": float(grad_norm) if should_log and grad_norm is not None else None,
        }
        if len(log) != self._logged:
            self._logged, kept.history.text = len(log), json.dumps(log)
        kept.history.callbacks = json.dumps(_callbacks_now(trainer))
        kept.trainer = json.dumps(record)

    def compare(self, run: Generation) -> None:
        """Say of which callbacks the states differ between the ranks, after the 1st, 2nd, 4th, 8th, … commit of a
        generation until some do. All ranks call."""
        self._commits += 1
        if run.job.world_size == 1 or self._commits <= 0 or self._commits & (self._commits - 1):
            return
        states = json.loads(run.kept.history.callbacks)
        own = {name: xxhash.xxh3_64_hexdigest(json.dumps(each).encode()) for name, each in states.items()}
        first, *others = run.job.gather(own)
        unlike = {rank: [n for n in {**first, **each} if first.get(n) != each.get(n)]
                  for rank, each in enumerate(others, 1) if each != first}  # fmt: skip
        if not unlike:
            return
        self._commits = -sys.maxsize
        if run.job.rank == 0:
            names = ", ".join(dict.fromkeys(name for theirs in unlike.values() for name in theirs))
            ranks = f"rank{'s' * (len(unlike) > 1)} {', '.join(map(str, unlike))}"
            text = UNLIKE.format(names=names, step=run.kept.step, ranks=ranks)
            print(f"elastic: {text}", file=sys.stderr, flush=True)

    # ── called by the stock loop ────────────────────────────────────────────────────────────────────────────

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run = self.trainer._run
        if run is not None:
            seed_turn(word(args.seed, 1, state.global_step, run.job.rank))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Do again what follows a commit: logs, evaluation, checkpoint, and the end of the epoch."""
        trainer = self.trainer
        run = trainer._run
        if run is None or run.resumed is None:
            return None
        run.read.close()  # now: a worker that is killed later would leave it behind
        record = run.resumed
        exportable = [*_exportable(trainer), trainer.control]
        state.stateful_callbacks = TrainerState(stateful_callbacks=exportable).stateful_callbacks
        if record.get("done"):
            return None
        trainer.control = TrainerControl(**record["control"])
        self._losses(run, record)
        rest: tuple[Any, ...] = (trainer.model_wrapped, None, state.epoch, run.ignore_keys, time.time())
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, record["grad_norm"], *rest, learning_rate=record["learning_rate"]
        )
        ended = run.steps.samples is not None and state.global_step % run.steps.per_epoch == 0
        if ended or trainer.control.should_epoch_stop or trainer.control.should_training_stop:
            trainer.control = trainer.callback_handler.on_epoch_end(args, state, trainer.control)
            trainer._maybe_log_save_evaluate(trainer._tr_loss, record["grad_norm"], *rest)
        return trainer.control

    def _losses(self, run: Generation, record: dict[str, Any]) -> None:
        """The losses and operations since the last log. A rank that replaces another takes the mean of the others."""
        trainer = self.trainer
        totals = torch.zeros(3, dtype=torch.float64, device=run.job.device)
        own = trainer._own
        if own is not None and own[0] != run.kept.step:
            own = None  # a rollback has undone some of these steps: they are done again
        if own is not None:
            totals = torch.stack([torch.ones_like(totals[0]), own[1].to(totals), totals[0] + own[2]])
        if dist.is_initialized():
            dist.all_reduce(totals)
        ranks, loss, flos = totals.tolist()
        # Of one type on all ranks: they are gathered, and gloo ends a process whose tensor has another size.
        trainer.current_flos = float(own[2] if own else flos / max(ranks, 1))
        if not ranks:
            return  # from a checkpoint, or rolled back: as Trainer does, the window begins here
        trainer._tr_loss = own[1].clone() if own else torch.full_like(trainer._tr_loss, loss / ranks)
        trainer._total_loss_scalar = record["total_loss"]
        trainer._globalstep_last_logged = record["logged_step"]
        trainer._initial_global_step = record["initial_step"]


@contextlib.contextmanager
def resume_folder(kept: Any) -> Iterator[str | None]:
    """A folder with the TrainerState, from which the stock loop resumes; None at the first step."""
    if not kept.trainer:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="elastic-trainer-") as folder:
        state = {
            **json.loads(kept.trainer)["state"],
            "log_history": json.loads(kept.history.text),
            "stateful_callbacks": {},
        }
        TrainerState(**state).save_to_json(os.path.join(folder, "trainer_state.json"))
        yield folder


def _exportable(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ExportableState)]


def states_now(trainer: Any) -> list[tuple[Any, dict[str, Any]]]:
    """(callback, its state) for each that has one."""
    return [(callback, copy.deepcopy(callback.state())) for callback in _exportable(trainer)]


def begin_anew(trainer: Any) -> None:
    """The callbacks are as before training again: so are those of a process that is new."""
    for callback, began in trainer._began:
        state = copy.deepcopy(began)
        _load(callback, state.get("args", {}), state)


def _began(trainer: Any, callback: Any) -> dict[str, Any]:
    return next((state.get("args", {}) for each, state in trainer._began if each is callback), {})


def _callbacks_now(trainer: Any) -> dict[str, Any]:
    """class name -> states of the callbacks of that class, as Trainer keeps them. Of the arguments those that training
    has changed: the others are the script's to choose, also when a job is started again."""
    states: dict[str, Any] = {}
    for callback in _exportable(trainer):
        state, began = callback.state(), _began(trainer, callback)
        changed = {k: v for k, v in state.get("args", {}).items() if k not in began or began[k] != v}
        states.setdefault(type(callback).__name__, []).append({**state, "args": changed})
    return states


def listed(states: Any) -> list[Any]:
    return list(states) if isinstance(states, list) else [states]


def _put_back(trainer: Any, held: dict[str, Any]) -> None:
    """Load the callbacks' states into the callbacks that are there: the stock Trainer puts new ones in their places,
    made of the arguments in their states, and a script may hold on to these."""
    left = {name: listed(states) for name, states in held.items()}
    for callback in _exportable(trainer):
        if states := left.get(type(callback).__name__):
            state = states.pop(0)
            _load(callback, {**_began(trainer, callback), **state.get("args", {})}, state)


def _load(callback: Any, args: dict[str, Any], state: dict[str, Any]) -> None:
    if args != callback.state().get("args", {}):
        vars(callback).update(vars(_made_of(type(callback), args)))
    for name, value in state.get("attributes", {}).items():
        setattr(callback, name, value)


def _made_of(kind: Any, args: dict[str, Any]) -> Any:
    try:
        return kind(**args)
    except TypeError as error:
        raise MisuseTypeError(
            f"the callback {kind.__name__} cannot be made of the args that its state() returns: {error}. Return all "
            'that its __init__ needs, or keep what changes under "attributes"'
        ) from error
