"""Faults in a training process, at named places of its loop, by torch's public hooks: the script stays as it is.

A step is one that `job.commit` has made, in a script that calls `elastic.run`; in any other script one
`optimizer.step()` of this process. The hooks cost a comparison each until a fault of this rank is due.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import parent_process
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from elastic.worker.job.job import Job

from .faults import Call, Fail, Hang, InProcess, Kill, Place, Plan, RankFault
from .history import NODE_ENV, PLAN_ENV, claim, struck

_COLLECTIVES = """all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all all_to_all_single barrier
    broadcast broadcast_object_list gather reduce reduce_scatter reduce_scatter_tensor scatter send recv"""
_FOREVER_S = 10**8


class Injector:
    """The faults of one process, and what it writes down of its steps."""

    def __init__(self, path: str) -> None:
        self._path, self._read_at = path, 0
        self.job: Job | None = None
        self.state: Any = None
        self._steps = 0
        self._pending: list[InProcess] = []
        self._process = f"{os.environ.get(NODE_ENV) or os.uname().nodename}.{os.getpid()}"
        self._read()
        os.makedirs(self._record, exist_ok=True)

    def _read(self) -> None:
        """The plan may grow while the job runs."""
        if (read_at := os.stat(self._path).st_mtime_ns) != self._read_at:
            plan, self._read_at = Plan.read(self._path), read_at
            self._record = plan.record
            past = [known.fault for known in struck(plan.record)]
            self._pending = [f for f in plan.faults if isinstance(f, RankFault) and f not in past]

    @property
    def rank(self) -> int:
        if self.job is not None:
            return self.job.rank
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self._steps if self.state is None else int(self.state.step)

    def due(self, place: Place) -> InProcess | None:
        if not self._pending:
            return None
        here = (place, self.step, self.rank)
        return next((f for f in self._pending if (f.place, f.step, f.rank) == here), None)

    def at(self, place: Place) -> None:
        if (fault := self.due(place)) is not None:
            self._pending.remove(fault)
            node, _, pid = self._process.rpartition(".")
            if claim(self._record, fault, pid=int(pid), node=node):
                strike(fault)

    def stepped(self, step: int, generation: int, world_size: int) -> None:
        """This rank has done step number `step`, counted from 0: written down; and the plan is read again."""
        line = {"step": step, "generation": generation, "rank": self.rank, "world_size": world_size}
        with open(f"{self._record}/commits.{self._process}.jsonl", "a") as file:
            file.write(json.dumps(line | {"at_s": time.monotonic()}) + "\n")
        self._read()

    def optimizer_stepped(self) -> None:
        """The end of a step, where no job.commit says so."""
        if self.job is None:
            self.at("commit")
            self._steps += 1
            restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            self.stepped(self._steps - 1, restarts + 1, dist.get_world_size() if dist.is_initialized() else 1)


def strike(fault: InProcess) -> None:
    """Do it, to this process."""
    match fault:
        case Kill():
            os.kill(os.getpid(), getattr(signal, fault.signal))
            time.sleep(0.5)  # a signal to oneself may take a moment
        case Fail(error="SystemExit"):
            sys.exit(int(fault.message) if fault.message.isdigit() else fault.message)
        case Fail():
            raise getattr(builtins, fault.error)(fault.message)
        case Hang(inside="c"):
            ctypes.PyDLL(None).sleep(int(fault.for_s or _FOREVER_S))  # unlike CDLL it does not release the lock
        case Hang():
            end_s = time.monotonic() + (fault.for_s or _FOREVER_S)
            while time.monotonic() < end_s:
                pass
        case Call():
            module, _, function = fault.function.partition(":")
            getattr(sys.modules.get(module) or importlib.import_module(module), function)()
        case _:
            if fault.for_s is not None:  # nobody in this process could
                code = f"import os, time; time.sleep({fault.for_s}); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
                subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)


_injector: Injector | None = None
_looked_in = 0  # the process that has looked for a plan


def injector() -> Injector | None:
    """That of this process; None in one that is no rank, or that no plan is named for."""
    global _injector, _looked_in
    if _looked_in != os.getpid():  # forked from one with hooks: a worker, or a loader of data
        _looked_in, path = os.getpid(), os.environ.get(PLAN_ENV)
        _injector = Injector(path) if path and parent_process() is None else None
    return _injector


def at(place: Place) -> None:
    if (own := injector()) is not None:
        own.at(place)


def install(*, here: bool = True) -> None:
    """Once per process, before the script begins. `here`: faults strike this process, not only those forked from it."""
    global _looked_in
    _looked_in = 0 if here else os.getpid()
    register_module_forward_pre_hook(_before_forward)
    register_optimizer_step_pre_hook(lambda *_: at("optimizer"))
    register_optimizer_step_post_hook(lambda *_: own.optimizer_stepped() if (own := injector()) else None)
    _around(torch.Tensor, "backward", _backward)
    _around(DataLoader, "__iter__", _fetched)
    _around(Job, "batches", _fetched)
    _around(Job, "streams", _fetched)
    _around(Job, "enter", _enter)
    _around(Job, "commit", _commit)
    _around(DistributedDataParallel, "register_comm_hook", _register_comm_hook)
    for name in _COLLECTIVES.split():
        _around(dist, name, _collective)


def _around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """From now on `owner.name(…)` is `call(original, …)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return call(original, *args, **options)

    setattr(owner, name, wrapped)


def _before_forward(module: torch.nn.Module, _: object) -> None:
    at("forward")
    if isinstance(module, DistributedDataParallel) and (own := injector()) and own.due("collective"):
        with contextlib.suppress(RuntimeError):  # it has one: this, or the script's own, which is wrapped
            module.register_comm_hook(None, allreduce_hook)  # as without a hook


def _collective(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    at("collective")
    return original(*args, **options)


def _register_comm_hook(original: Callable[..., Any], model: Any, state: object, hook: Callable[..., Any]) -> None:
    original(model, state, functools.update_wrapper(functools.partial(_collective, hook), hook))


def _backward(original: Callable[..., Any], loss: torch.Tensor, *args: Any, **options: Any) -> None:
    if (own := injector()) is not None and own.due("backward") is not None:
        _last_parameter(loss).register_hook(lambda _: own.at("backward"))  # type: ignore[no-untyped-call]
    original(loss, *args, **options)


def _last_parameter(loss: torch.Tensor) -> torch.Tensor:
    """The tensor furthest from the loss that gets a gradient: those of the others are exchanged by then."""
    nodes, seen, last = [loss.grad_fn], set[object](), loss
    while nodes:
        below = dict.fromkeys(node for each in nodes if each for node, _ in each.next_functions if node)
        nodes = [node for node in below if node not in seen]
        seen.update(nodes)
        last = next((getattr(node, "variable") for node in nodes if hasattr(node, "variable")), last)  # noqa: B009
    return last


def _fetched(original: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Any]:
    batches: Iterator[Any] = original(*args, **options)
    return batches if injector() is None else _announced(batches)


def _announced(batches: Iterator[Any]) -> Iterator[Any]:
    at("data")
    for batch in batches:
        yield batch
        at("data")


def _enter(original: Callable[..., Any], job: Job, **fields: Any) -> None:
    original(job, **fields)
    if (own := injector()) is not None:
        own.job, own.state = job, fields.get("state")


def _commit(original: Callable[..., Any], job: Job, state: Any, *args: Any, **options: Any) -> None:
    own, before = injector(), state.step
    if own is not None:
        own.at("commit")
    try:
        original(job, state, *args, **options)
    finally:  # at the end of a generation it raises, but the step is committed all the same
        if own is not None and state.step == before + 1:
            own.stepped(before, job.generation, job.world_size)
