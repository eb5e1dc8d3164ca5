"""What a training job carries from step to step: everything that must survive, and nothing else."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..core.state_source import Version
from ..core.tensors import Table, TensorInfo
from . import gc_pause
from .commit_point import CommitPoint
from .described import Described
from .json_codec import Codecs, tensors_named
from .modes import Modes
from .optimizers import Optimizers, is_sharded, sharded, sharded_module
from .parts import ModulePart, ObjectPart, OptimizerPart, Part, ScalerPart, ValuePart
from .wrapped import optimizer_part

FORMAT = 1
"""Of `State.extra`."""

PROVEN_COMMITS = 2
"""At the first commits of a process all is encoded once, as for a replacement: what cannot be is refused there."""


class State:
    """The parts of a job's state, by name.

        elastic.State(model=model, optimizer=optimizer, scheduler=scheduler, best_loss=math.inf)

    A part is a module, an optimizer, anything with ``state_dict`` and ``load_state_dict``, or a plain value (numbers,
    text, lists, dicts, tensors). Plain values are attributes: ``state.best_loss = 1.5``. What JSON cannot hold is
    refused when the state is built, unless `convert` says how: ``{SomeType: (to_json, from_json)}``.

    Main thread only.
    """

    def __init__(self, *, convert: Codecs | None = None, **parts: Any) -> None:
        self._parts: dict[str, Part] = {}
        self._codecs = dict(convert or {})
        self._step = 0
        self._commit_generation = 0
        self._changing = False
        self._whole = True
        self._established = False
        self._coming: tuple[int, int] | None = None
        self._guard: Callable[[], None] | None = None
        self._proven = 0
        self._described: dict[str, Described] = {}
        self._tied: dict[str, str] = {}
        """Further place of a tensor that modules share -> the name that it has in the table; as `tensors` found it."""
        self._point = CommitPoint(self._parts)
        self._optimizers = Optimizers(self.changing, self._parts, self._parameters)
        self._modes: Modes | None = None
        for name, value in parts.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"state.{name}: this name is taken; choose another")
            self._parts[name] = self._part(name, value)
        self.table()  # refuses now, and not at the first checkpoint, what cannot be kept
        self.extra()
        self._optimizers.listen()

    # ── attributes ──────────────────────────────────────────────────────────────────────────────────────────

    def __getattr__(self, name: str) -> Any:
        if (part := self.__dict__.get("_parts", {}).get(name)) is not None:
            return part.value
        raise AttributeError(self._unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif isinstance(self._parts.get(name), ValuePart):
            part = self._part(name, value)
            part.extra()
            self._parts[name] = part
        elif name in self._parts:
            raise AttributeError(f"state.{name} stays the object it was built with: load into it instead")
        elif hasattr(type(self), name):
            raise AttributeError(f"state.{name} cannot be set")
        else:
            raise AttributeError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._parts, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "parts are named when it is built, State(…, name=value)"
        return f"the state has no part {name!r}: {hint}"

    def _part(self, name: str, value: Any) -> Part:
        if isinstance(value, torch.nn.Module):
            _refuse_sharded(name, value)
            _refuse_lazy(name, value)
            return ModulePart(name, value, self._codecs)
        if isinstance(value, torch.optim.Optimizer):
            if is_sharded(value):
                raise TypeError(f"state.{name}: {sharded(type(value).__name__)}")
            self._optimizers.own(value)
            return optimizer_part(name, value, self._codecs)
        if isinstance(value, torch.amp.GradScaler):
            return ScalerPart(name, value, self._codecs)
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return ObjectPart(name, value, self._codecs)
        return ValuePart(name, value, self._codecs)

    # ── where it stands ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def step(self) -> int:
        """Optimizer steps committed."""
        return self._step

    @property
    def commit_generation(self) -> int:
        """Generation in which the last step was committed, or the set-up handed out; 0: never, or alone."""
        return self._commit_generation

    @property
    def version(self) -> Version:
        """(commit_generation, step): two clean states with the same version are bit-identical."""
        return self._commit_generation, self._step

    @property
    def established(self) -> bool:
        """The state is the job's (a step was committed, or it was received), not merely built by `setup`."""
        return self._established

    def clean(self) -> bool:
        """Whether this is a whole state: not between an optimizer's step and the commit, not half received."""
        return self._whole and not self._changing

    def committed(self, generation: int) -> None:
        """One more step is final.

        Raises CannotEncodeError and TypeError for what could not be handed to a replacement later: the step is not
        committed then.
        """
        if not self._whole:
            raise RuntimeError("commit of a state that was only half received")
        if self._proven < PROVEN_COMMITS:
            self._prove()
        self._point.take()
        self._step += 1
        # Never backwards: a job that went on from another job's checkpoint counts its generations anew.
        self._commit_generation = max(self._commit_generation, generation)
        self._changing = False
        self._established = True

    def begin(self) -> None:
        """A generation is about to train: the state as it is now is what the first step begins with."""
        self._point.drop()
        self._point.take()

    def turned(self) -> None:
        """The loop asks for its next batch. Raises RuntimeError for what was changed after the commit.

        A generation may end in the commit, and what follows it in the loop is then left out.
        """
        if not self._changing and (name := self._point.differs()) is not None:
            raise RuntimeError(
                f"state.{name} was changed between job.commit() and the next batch: a failure in between would leave "
                f"the change out. Make it before job.commit(), or after the next batch was taken"
            )

    def rewind(self) -> str | None:
        """The generation has ended, perhaps in the middle of a step: go back to the last commit, where possible.

        Buffers, plain values, schedules and options become what they were. Returns the name of a parameter that was
        changed with no optimizer of the state saying so; the state is then not clean.
        """
        if not self.clean():
            return None
        if (name := self._point.changed()) is not None:
            self._changing = True
            return name
        self._point.put_back()
        return None

    def changing(self) -> None:
        """The state is being changed from here until the next commit. Optimizers say so by themselves.

        For code that changes parameters in another way, such as a CUDA graph that has the optimizer's step in it. All
        ranks call it at the same place. May not return, like `Job.commit`.
        """
        if self._guard is not None:
            self._guard()
        if not self._changing:
            self._point.before_step()
        self._changing = True

    def watch_optimizers(self, guard: Callable[[], None] | None) -> None:
        """`guard` is called before each optimizer step, and raises where the gradients are not to be applied.

        After an abort CUDA goes on running what was queued: gradients whose all-reduce was not seen to complete on
        this rank may be anything. What `guard` raises leaves the state clean.
        """
        self._guard = guard
        self._optimizers.refuses = guard is not None

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for part in self._parts.values():
            for slot in part.slots():
                if (tensor := slot.holder[slot.key]) is not None and not slot.is_buffer:
                    yield slot.name, tensor
            if isinstance(part, ValuePart):
                leaves = pytree.tree_leaves(part.value)
                yield from ((part.name, leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _prove(self) -> None:
        """What it has now can be encoded. An optimizer has its state after its first step, or its second."""
        self._proven += 1
        for part in self._parts.values():
            if isinstance(part, ModulePart):
                _refuse_sharded(part.name, part.value)
        self.extra()
        self.table()

    # ── what it holds ───────────────────────────────────────────────────────────────────────────────────────

    @gc_pause.paused()
    def tensors(self, extra: dict[str, Any] | None = None) -> list[tuple[TensorInfo, torch.Tensor]]:
        """All tensors, detached, sharing the state's own storage; the order is the same on every rank.

        Weights that modules share (tied) come once, under their first name. What `extra` returns is put into `extra`,
        from the same walk. Raises CannotEncodeError.
        """
        parts: dict[str, Any] | None = None if extra is None else {}
        found, self._tied, self._described = self._walk(self._parts.values(), parts)
        if extra is not None:
            extra.update(self._with(parts))
        return found

    def _walk(
        self, parts: Iterable[Part], extras: dict[str, Any] | None
    ) -> tuple[list[tuple[TensorInfo, torch.Tensor]], dict[str, str], dict[str, Described]]:
        """The tensors of `parts`, those that are tied, and what is known of each; `extras` is filled by part."""
        first: dict[object, str] = {}
        tied: dict[str, str] = {}
        found: list[tuple[TensorInfo, torch.Tensor]] = []
        described: dict[str, Described] = {}
        for part in parts:
            if extras is None:
                tensors = part.tensors()
            else:
                tensors, extras[part.name] = part.held()
            module = isinstance(part, ModulePart)
            for name, tensor in tensors:
                was = self._described.get(name)
                if was is None or not was.still(tensor):
                    was = Described(name, tensor)
                described[name] = was
                if module and (known := first.setdefault(was.place(tensor), name)) != name:
                    tied[name] = known
                    continue
                found.append((was.info, tensor.detach()))
        return found, tied, described

    def volatile(self) -> set[str]:
        """Names of the tensors that may change with no optimizer of the state saying so: a forward changes buffers."""
        optimizers = [part for part in self._parts.values() if isinstance(part, OptimizerPart)]
        stepped = {id(p) for part in optimizers for group in part.groups() for p in group["params"]}
        found = {name for part in self._parts.values() for name, t in part.tensors() if id(t) not in stepped}
        for part in optimizers:
            found = {name for name in found if not (name.startswith(f"{part.name}.") and ".state." in name)}
        return found

    def table(self) -> Table:
        return tuple(info for info, _ in self.tensors())

    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.table())

    def extra(self) -> dict[str, Any]:
        """Everything that is no tensor, as JSON: hyper-parameters, schedules, plain values, the version.

        Raises CannotEncodeError.
        """
        return self._with({name: part.extra() for name, part in self._parts.items()})

    def _with(self, parts: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": self._step,
            "commit_generation": self._commit_generation,
            "parts": parts,
            "kinds": {name: part.kind for name, part in self._parts.items()},
            "tied": self._tied,
        }

    # ── taking in another one ───────────────────────────────────────────────────────────────────────────────

    @gc_pause.paused()
    def adopt(self, table: Table, extra: Mapping[str, Any]) -> list[torch.Tensor]:
        """Make ready to receive; returns what `tensors()` then has, exactly `table`. Fill it, then call `filled()`.

        Not clean from here until then. Storage that fits stays where it is. Raises ValueError naming the first thing
        that does not match; the state is then not usable unless the mismatch was found before anything was touched.
        """
        if extra.get("format") != FORMAT:
            raise ValueError(f"the state that came has format {extra.get('format')}, this elastic reads {FORMAT}")
        theirs = extra["parts"]
        if list(theirs) != list(self._parts):
            raise ValueError(f"this state has the parts {_listed(self._parts)}, the one that came {_listed(theirs)}")
        by_part: dict[str, dict[str, TensorInfo]] = {name: {} for name in self._parts}
        for info in table:
            if (held := by_part.get(_part_of(info))) is None:
                raise ValueError(f"{info.name} belongs to no part of this state: {_listed(self._parts)}")
            held[info.name] = info
        self._compare_modules(by_part, theirs)
        self._whole = False
        self._point.drop()
        for name, part in self._parts.items():
            part.adopt(by_part[name], theirs[name])
        found = self.tensors()
        _compare([info for info, _ in found], table)
        self._coming = int(extra["commit_generation"]), int(extra["step"])
        return [tensor for _, tensor in found]

    def filled(self) -> None:
        """The bytes of all tensors are in: the state is whole, and at the step of what was adopted."""
        if self._coming is None:
            raise RuntimeError("filled() without adopt()")
        for part in self._parts.values():
            part.filled()
        self._commit_generation, self._step = self._coming
        self._coming = None
        self._whole = True
        self._changing = False
        self._established = True

    def establish(self, generation: int) -> None:
        """What `setup` built here becomes the job's state: it is about to be handed to all."""
        self._commit_generation = max(self._commit_generation, generation)
        self._established = True

    def to(self, device: torch.device | str) -> None:
        """Move modules and optimizer state to `device`: a standby that gets its place. Parameters keep identity."""
        for part in self._parts.values():
            part.to(torch.device(device))

    def forget_gradients(self) -> None:
        """`train` is about to be entered: drop what a step that was cut short has left behind.

        Gradients, because the next backward would add to them; and from the second time on the modules' `training` and
        the parameters' `requires_grad` become what they were the first time, as they are in a replacement.
        """
        for part in self._parts.values():
            if isinstance(part.value, torch.nn.Module | torch.optim.Optimizer):
                part.value.zero_grad(set_to_none=True)
        if self._modes is None:
            self._modes = Modes(p.value for p in self._parts.values() if isinstance(p.value, torch.nn.Module))
        self._modes.put_back()

    def _compare_modules(self, by_part: Mapping[str, Mapping[str, TensorInfo]], extras: Mapping[str, Any]) -> None:
        """What modules have of their own is what came, before anything is touched. Raises ValueError."""
        modules = [part for part in self._parts.values() if isinstance(part, ModulePart)]
        ours: dict[str, Any] = {}
        held, _, described = self._walk(modules, ours)
        self._described.update(described)
        made = tensors_named(list(ours.values()))
        mine = [info for info, _ in held if info.name not in made]
        made = tensors_named([extras[part.name] for part in modules])
        _compare(mine, [info for part in modules for info in by_part[part.name].values() if info.name not in made])


def _compare(mine: Sequence[TensorInfo], came: Sequence[TensorInfo]) -> None:
    """Raises ValueError naming the first difference."""
    if len(mine) == len(came) and all(map(operator.eq, mine, came)):
        return
    here, there = {info.name: info for info in mine}, {info.name: info for info in came}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise ValueError(
                f"{name} is {_described(here.get(name))} here and {_described(there.get(name))} in the state "
                f"that came: setup() must build the same on every rank"
            )
    raise ValueError("the tensors here are in another order than in the state that came")


def _refuse_sharded(name: str, module: torch.nn.Module) -> None:
    """Raises TypeError."""
    kinds = {kind.__name__ for inner in module.modules() for kind in type(inner).__mro__}
    found = next((kind for kind in ("FSDPModule", "FullyShardedDataParallel") if kind in kinds), "")
    if not found:
        found = "DTensor" if any(type(p).__name__ == "DTensor" for p in module.parameters()) else ""
    if found:
        raise TypeError(sharded_module(name, found))


def _refuse_lazy(name: str, module: torch.nn.Module) -> None:
    """Raises TypeError."""
    held = [*module.named_parameters(), *module.named_buffers()]
    if found := next((key for key, tensor in held if torch.nn.parameter.is_lazy(tensor)), ""):
        raise TypeError(f"state.{name}.{found} has no shape yet: run one forward of the lazy module in setup()")


def _part_of(info: TensorInfo) -> str:
    return info.name.partition(".")[0]


def _described(info: TensorInfo | None) -> str:
    return "missing" if info is None else f"{info.dtype} {list(info.shape)}"


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "nothing"
