"""What a training job carries from step to step: everything that must survive, and nothing else."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..checkpoint.dtypes import code_of, nbytes_of
from ..core.source import Version
from ..core.tensors import Table, TensorInfo
from . import collector
from .modes import Modes
from .optimizers import Optimizers, is_sharded, sharded, sharded_module
from .parts import ModulePart, ObjectPart, OptimizerPart, Part, ScalerPart, ValuePart
from .point import Point
from .tree import Codecs, tensors_named
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
        self._point = Point(self._parts)
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

    @collector.paused()
    def tensors(self) -> list[tuple[TensorInfo, torch.Tensor]]:
        """All tensors, detached, sharing the state's own storage; the order is the same on every rank.

        Weights that modules share (tied) come once, under their first name.
        """
        first: dict[object, str] = {}
        tied: dict[str, str] = {}
        found: list[tuple[TensorInfo, torch.Tensor]] = []
        described: dict[str, Described] = {}
        for part in self._parts.values():
            module = isinstance(part, ModulePart)
            for name, tensor in part.tensors():
                was = self._described.get(name)
                if was is None or not was.still(tensor):
                    was = Described(name, tensor)
                described[name] = was
                if module and (known := first.setdefault(was.place, name)) != name:
                    tied[name] = known
                    continue
                found.append((was.info, tensor.detach()))
        self._tied, self._described = tied, described
        return found

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
        return {
            "format": FORMAT,
            "step": self._step,
            "commit_generation": self._commit_generation,
            "parts": {name: part.extra() for name, part in self._parts.items()},
            "kinds": {name: part.kind for name, part in self._parts.items()},
            "tied": self._tied,
        }

    # ── taking in another one ───────────────────────────────────────────────────────────────────────────────

    @collector.paused()
    def adopt(self, table: Table, extra: Mapping[str, Any]) -> None:
        """Make ready to receive: afterwards `tensors()` has exactly `table`, to be filled, then call `filled()`.

        Not clean from here until then. Storage that fits stays where it is. Raises ValueError naming the first thing
        that does not match; the state is then not usable unless the mismatch was found before anything was touched.
        """
        if extra.get("format") != FORMAT:
            raise ValueError(f"the state that came has format {extra.get('format')}, this elastic reads {FORMAT}")
        theirs = extra["parts"]
        if list(theirs) != list(self._parts):
            raise ValueError(f"this state has the parts {_listed(self._parts)}, the one that came {_listed(theirs)}")
        strangers = [info.name for info in table if _part_of(info) not in self._parts]
        if strangers:
            raise ValueError(f"{strangers[0]} belongs to no part of this state: {_listed(self._parts)}")
        by_part: dict[str, dict[str, TensorInfo]] = {name: {} for name in self._parts}
        made = tensors_named([theirs[name] for name, part in self._parts.items() if isinstance(part, ModulePart)])
        self._compare(tuple(info for info in table if info.name not in made), modules_only=True)
        for info in table:
            by_part[_part_of(info)][info.name] = info
        self._whole = False
        self._point.drop()
        for name, part in self._parts.items():
            part.adopt(by_part[name], theirs[name])
        self._compare(table, modules_only=False)
        self._coming = int(extra["commit_generation"]), int(extra["step"])

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

    def _compare(self, table: Table, *, modules_only: bool) -> None:
        def relevant(info: TensorInfo) -> bool:
            return not modules_only or isinstance(self._parts.get(_part_of(info)), ModulePart)

        made = tensors_named([part.extra() for part in self._parts.values() if isinstance(part, ModulePart)])
        mine = [info for info in self.table() if relevant(info) and not (modules_only and info.name in made)]
        theirs = [info for info in table if relevant(info)]
        if mine == theirs:
            return
        ours, came = {info.name: info for info in mine}, {info.name: info for info in theirs}
        for name in [*ours, *came]:
            if ours.get(name) != came.get(name):
                raise ValueError(
                    f"{name} is {_described(ours.get(name))} here and {_described(came.get(name))} in the state "
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


class Described:
    """A tensor's entry in the table, made once: with thousands of tensors that is most of what a snapshot costs."""

    __slots__ = ("_address", "_dtype", "_stride", "_tensor", "info", "place")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.info = _info(name, tensor)
        self.place = _place(tensor)
        self._tensor = weakref.ref(tensor)
        self._address, self._stride, self._dtype = tensor.data_ptr(), tensor.stride(), tensor.dtype

    def still(self, tensor: torch.Tensor) -> bool:
        """Whether it is that very tensor, where and as it was."""
        return (
            self._tensor() is tensor
            and self._address == tensor.data_ptr()
            and self.info.shape == tensor.shape
            and self._stride == tensor.stride()
            and self._dtype is tensor.dtype
        )


def _info(name: str, tensor: torch.Tensor) -> TensorInfo:
    odd = "quantised" if tensor.is_quantized else "sparse" if tensor.layout is not torch.strided else ""
    if odd or type(tensor).__name__ == "DTensor":
        raise TypeError(
            f"state.{name} is {odd or 'a DTensor'} ({type(tensor).__name__}, {tensor.layout}, {tensor.dtype}): only "
            f"dense tensors that are whole on each rank can be kept; keep it dense (tensor.to_dense(), "
            f"tensor.dequantize()) in the state and make the other form of it where it is used"
        )
    return TensorInfo(name, code_of(tensor.dtype), tuple(tensor.shape), nbytes_of(tensor))


def _part_of(info: TensorInfo) -> str:
    return info.name.partition(".")[0]


def _place(tensor: torch.Tensor) -> object:
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()


def _described(info: TensorInfo | None) -> str:
    return "missing" if info is None else f"{info.dtype} {list(info.shape)}"


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "nothing"
