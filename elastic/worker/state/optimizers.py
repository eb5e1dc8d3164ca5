"""Observes what optimizers do to the state: hooks before and after each step of each optimizer, in the state or not."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic.worker.link.misuse import MisuseRuntimeError, MisuseTypeError
from elastic.worker.state.guards.optimizer_marks import OptimizerMarks
from elastic.worker.state.guards.watch import versions
from elastic.worker.state.parts.described import storage_of
from elastic.worker.torch_internals import torch_private

SHARDED = "ZeroRedundancyOptimizer"

_owners: weakref.WeakSet[Optimizers] = weakref.WeakSet()


class Optimizers:
    """Marks the state as changing when an optimizer begins to apply gradients, and rejects optimizers that are not part
    of it.

    An optimizer that is given a closure runs the forward and the backward within its step. A rank may wait there for
    the others while nothing has changed yet, so the state is marked when the closure has returned; before it where the
    optimizer changes its own state first.
    """

    def __init__(
        self, changing: Callable[[], None], parts: Mapping[str, Any], params: Callable[[], Iterable[tuple[str, Any]]]
    ) -> None:
        """`changing` is called before parameters change. `parts`: the parts of the state by name. `params`: the
        current parameters of the state by name."""
        self._changing = changing
        self._parts = parts
        self._params = params
        self._unkept = UnsavedAttributes()
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._waits: torch.optim.Optimizer | None = None
        self._early: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Early] = weakref.WeakKeyDictionary()
        self._strangers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._own_refs: list[weakref.ref[torch.optim.Optimizer]] = []
        """As `_known`: a WeakSet is slow to go through, and each commit does."""
        self._group_counts: list[int] = []
        self._schedulers_made = 0
        self._stray: dict[torch.optim.lr_scheduler.LRScheduler, int] = {}
        """Those of optimizers of the state that no part has, and their position when they were found."""
        self.refuses = False
        """Set in training: an optimizer that is not part of the state is rejected. Before, it only marks the state
        as changing."""

    def listen(self) -> None:
        """From here on every optimizer of the process is checked. Raises TypeError if one of the state steps a
        parameter that no part holds, or has state of a kind that is not kept."""
        for name, part in self._parts.items():
            if isinstance(part.value, torch.optim.Optimizer):
                _refuse_more(name, part.value)
                _refuse_unkept(name, part.value, [other.value for other in self._parts.values() if other is not part])
        _owners.add(self)
        _hook_once()

    def look_for_unkept(self) -> None:
        """Say which attributes change in an optimizer's steps and are not kept. At the first commits of a process."""
        held = {n: part.value for n, part in self._parts.items() if isinstance(part.value, torch.optim.Optimizer)}
        if warning := self._unkept.look(held):
            print(f"elastic: {warning}", file=sys.stderr, flush=True)

    def regrouped(self) -> bool:
        """Whether an optimizer of the state has another number of parameter groups than at the last call."""
        before = self._group_counts
        self._group_counts = [len(each.param_groups) for ref in self._own_refs if (each := ref()) is not None]
        return before != self._group_counts and bool(before)

    def refuse_schedulers(self) -> None:
        """Raises RuntimeError if a scheduler that no part keeps steps the rates of an optimizer of the state. At each
        commit."""
        if self._schedulers_made != torch_private.schedulers.count:
            self._schedulers_made = torch_private.schedulers.count
            stray = (each for each in torch_private.schedulers() if getattr(each, "optimizer", None) in self._known)
            held = [part.value for part in self._parts.values() if part.kind == "object"]
            self._stray = {each: each.last_epoch for each in stray if not _reaches(held, each, SCHEDULER_DEPTH)}
        for each, epoch in self._stray.items() if self._stray else ():
            if self.refuses and each.last_epoch != epoch:
                raise MisuseRuntimeError(_stray_scheduler(type(each).__name__))

    def own(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is part of the state."""
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._own_refs.append(weakref.ref(optimizer))
            # torch calls hooks in the order of registration: those that the script has registered by now run first.
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(given):
            self._changing()
            return None
        self._waits = optimizer
        early = self._early.setdefault(optimizer, _Early())
        early.begin(optimizer)

        def closure(*inner: Any, **options: Any) -> Any:
            if early.changed():
                self._changing()
            result = given(*inner, **options)
            self._waits = None
            self._changing()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), dict(kwargs)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if early := self._early.get(optimizer):
            early.end()
        if self._waits is optimizer:  # the closure was never called
            self._waits = None
            self._changing()

    def meets(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of this process is about to step. Raises RuntimeError if it steps parameters of the state, is
        not part of the state and `refuses` is set."""
        if optimizer in self._known:
            return
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._strangers.get(optimizer) == count:
            return
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        name, param = next(((n, p) for n, p in self._params() if id(p) in stepped), ("", None))
        if param is None:
            self._strangers[optimizer] = count
        elif self._within(optimizer):
            self.own(optimizer)  # torch calls the hooks of this optimizer next, including these
        elif self.refuses:
            raise MisuseRuntimeError(refusal(optimizer, name, param))
        else:
            self._changing()

    def _within(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a part of the state wraps it and keeps its state; a scheduler holds its optimizer but does not
        keep its state."""
        return any(
            (held is optimizer or any(inner is optimizer for inner in _attributes(held))) and _keeps(part.value)
            for part in self._parts.values()
            for held in _attributes(part.value)
        )


def _refuse_unkept(name: str, optimizer: torch.optim.Optimizer, others: Iterable[Any]) -> None:
    """Raises TypeError if `optimizer`, part `name`, steps a parameter that none of the `others` holds."""
    stepped = [
        (number, index, param)
        for number, group in enumerate(optimizer.param_groups)
        for index, param in enumerate(group["params"])
    ]
    for depth in (0, 3):  # into the attributes of other objects only if it must be: these may be long
        kept = {_memory(tensor) for other in others for tensor in _tensors_of(other, depth)}
        stepped = [each for each in stepped if _memory(each[2]) not in kept]
        if not stepped:
            return
    number, index, param = stepped[0]
    raise MisuseTypeError(
        f"state.{name} steps a parameter of shape {tuple(param.shape)} (number {index} of its group {number}) that no "
        f"other part of the state holds: it would be lost with a process, and the replicas would differ unseen. Return "
        f"the module that has it from setup() with the rest, State(…, criterion=criterion), and wrap that with job.ddp "
        f"as well, or leave the parameter out of the optimizer"
    )


def _refuse_more(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises TypeError if `state_dict()` of `optimizer`, part `name`, has entries beyond those that are kept. One that
    wraps others is kept with the state of each, whatever its own `state_dict()` contains."""
    inner = [item for held in _attributes(optimizer) for item in (held, *_items(held))]
    if any(isinstance(item, torch.optim.Optimizer) for item in inner):
        return
    if more := sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"})):
        raise MisuseTypeError(
            f"state.{name} ({type(optimizer).__name__}) has more in its state_dict() than state and param_groups: "
            f"{', '.join(more)}. That would be lost with a process. Keep it in optimizer.state, under a name, or in "
            f"the options of a parameter group"
        )


def _items(held: Any) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()


def _memory(tensor: torch.Tensor) -> int:
    """Identifies the tensor's memory, which views share."""
    return storage_of(tensor) or id(tensor)


def _tensors_of(value: Any, depth: int) -> Iterable[torch.Tensor]:
    """The tensors that a part is, or has as a module, or within `depth` levels of containers and attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif depth and not isinstance(value, torch.optim.Optimizer):
        for item in _attributes(value):
            yield from _tensors_of(item, depth - 1)


class _Early:
    """Whether an optimizer changes its state before it calls the closure, as one that counts its steps first does. That
    is found out in its first steps; the first of all may only create the state."""

    def __init__(self) -> None:
        self._looks = EARLY_LOOKS
        self._before: OptimizerMarks | None = None
        self._changes = False

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Its step begins, or that of its base class within it."""
        if self._looks and self._before is None:
            self._looks -= 1
            self._before = OptimizerMarks(optimizer)
            self._before.take()

    def changed(self) -> bool:
        """Its closure is called."""
        if self._before is not None:
            self._changes = self._before.changed()
            self._before = None
        return self._changes

    def end(self) -> None:
        self._before = None


EARLY_LOOKS = 3


def _keeps(value: Any) -> bool:
    """Whether `value` is an optimizer, or its `state_dict()` contains an optimizer's."""
    return isinstance(value, torch.optim.Optimizer) or (hasattr(value, "state_dict") and _found(value.state_dict()))


def _found(state: Any) -> bool:
    if isinstance(state, dict):
        return state.keys() >= {"state", "param_groups"} or any(map(_found, state.values()))
    return isinstance(state, list | tuple) and any(map(_found, state))


def _reaches(held: Any, target: object, depth: int) -> bool:
    """Whether `target` is `held`, or within `depth` levels of containers and attributes."""
    level, seen = [held], set[int]()
    for _ in range(depth + 1):
        if any(each is target for each in level):
            return True
        seen.update(map(id, level))
        level = [item for each in level if not isinstance(each, _LARGE) for item in _attributes(each)]
        level = [item for item in level if id(item) not in seen]
    return False


_LARGE = torch.nn.Module | torch.optim.Optimizer | torch.Tensor
SCHEDULER_DEPTH = 5
"""Of a scheduler below the list of parts: in a wrapper, in the list of a SequentialLR."""


def _attributes(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    return list(getattr(value, "__dict__", {}).values())


def refusal(optimizer: torch.optim.Optimizer, name: str, param: object) -> str:
    """Error text: why `optimizer` may not step `param`, called `name`, and what to do instead."""
    if type(param).__name__ == "DTensor":
        return sharded_module(name, "DTensor")
    kind = type(optimizer).__name__
    if is_sharded(optimizer):
        return sharded(kind)
    return (
        f"{kind} steps state.{name} and is not part of the state: what it keeps would be lost with a process, and a "
        f"half-done step would go unseen. Build it in setup(), return it with the rest, State(…, optimizer=optimizer), "
        f"and step state.optimizer in train()"
    )


def _stray_scheduler(kind: str) -> str:
    return (
        f"{kind} steps the learning rates of an optimizer of the state and is not part of the state: after a failure "
        "train() would make a new one, which begins at its start. Build it in setup(), return it with the rest, "
        "State(…, scheduler=scheduler), and step state.scheduler in train(), before job.commit()"
    )


def sharded_module(name: str, found: str) -> str:
    return (
        f"state.{name} is sharded ({found}): each rank has a part of the parameters only. Call elastic.run(setup, "
        f"train, sharded=True), so that setup() runs in the formed group and each rank restores its own part, see "
        f"docs/sharded.md; or leave out fully_shard (or tensor parallelism) and wrap the whole module with job.ddp in "
        f"train()"
    )


def is_sharded(optimizer: object) -> bool:
    """Whether each rank holds only a part of its state."""
    return any(kind.__name__ == SHARDED for kind in type(optimizer).__mro__)


def sharded(kind: str) -> str:
    return (
        f"{kind} keeps a part of its state on each rank, and elastic restores a replacement from one survivor: the "
        f"dead rank's part would be lost. Use the optimizer that it wraps, such as torch.optim.AdamW, with job.ddp"
    )


@functools.cache
def _hook_once() -> None:
    register_optimizer_step_pre_hook(_any_optimizer)


def _any_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for owner in list(_owners):
        owner.meets(optimizer)


KEPT = frozenset({"state", "param_groups", "defaults"})


class UnsavedAttributes:
    """Attributes of an optimizer that change in its steps, and that its `state_dict()` lacks: a replacement would begin
    with those of `setup`, and the replicas would drift apart unseen, as with a counter or a generator that decides when
    a preconditioner is updated. Call `look` at each of the first commits."""

    def __init__(self) -> None:
        self._then: dict[str, object] = {}
        self._said: set[str] = set()

    def look(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> str:
        """What has changed since the last call, as a warning that names part and attribute; '' if nothing has."""
        now = {
            f"{part}.{name}": token
            for part, optimizer in optimizers.items()
            for name, value in vars(optimizer).items()
            if name not in KEPT and (token := _token(value)) is not None
        }
        changed = {name for name, token in now.items() if self._then.get(name, token) != token} - self._said
        self._then = now
        self._said |= changed
        if not changed:
            return ""
        return (
            f"state.{', state.'.join(sorted(changed))} changes in the optimizer's steps and is no part of its "
            "state_dict(): a replacement would begin with another value, and the replicas could drift apart. Keep it "
            "in optimizer.state or in the options of a parameter group"
        )


def _token(value: Any) -> object:
    """Equal as long as `value` is; None for what is not looked at, or has nothing to compare, as `SystemRandom`."""
    # No commit ends for want of a warning.
    with contextlib.suppress(RuntimeError, TypeError):
        match value:
            case bool() | int() | float() | str():
                return repr(value)
            case torch.Tensor():
                return id(value), *versions([value])
            case random.Random():
                return hash(value.getstate())
            case torch.Generator():
                return value.get_state().numpy().tobytes()
            case np.random.Generator():
                return repr(value.bit_generator.state)
    return None
