"""What a training job carries from step to step: everything that must survive, and nothing else."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..checkpoint.dtypes import code_of, nbytes_of
from ..core.source import Version
from ..core.tensors import Table, TensorInfo
from .parts import ModulePart, ObjectPart, OptimizerPart, Part, ValuePart
from .tree import Codecs

FORMAT = 1
"""Of `State.extra`."""


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
        for name, value in parts.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"state.{name}: this name is taken; choose another")
            self._parts[name] = self._part(name, value)
        self.extra()  # refuses now, and not at the first checkpoint, what cannot be kept
        self.table()

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
            return ModulePart(name, value, self._codecs)
        if isinstance(value, torch.optim.Optimizer):
            value.register_step_pre_hook(self._before_step)
            return OptimizerPart(name, value, self._codecs)
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
        """One more step is final."""
        if not self._whole:
            raise RuntimeError("commit of a state that was only half received")
        self._step += 1
        # Never backwards: a job that went on from another job's checkpoint counts its generations anew.
        self._commit_generation = max(self._commit_generation, generation)
        self._changing = False
        self._established = True

    def changing(self) -> None:
        """The state is being changed from here until the next commit. Optimizers say so by themselves.

        For whoever changes parameters in another way, such as by a CUDA graph that has the optimizer's step in it. May
        not return, like `Job.commit`.
        """
        if self._guard is not None:
            self._guard()
        self._changing = True

    def watch_optimizers(self, guard: Callable[[], None] | None) -> None:
        """`guard` is called before each optimizer step, and raises where the gradients are not to be applied.

        After an abort CUDA goes on running what was queued: gradients whose all-reduce was not seen to complete on
        this rank may be anything. What `guard` raises leaves the state clean.
        """
        self._guard = guard

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self.changing()

    # ── what it holds ───────────────────────────────────────────────────────────────────────────────────────

    def tensors(self) -> list[tuple[TensorInfo, torch.Tensor]]:
        """All tensors, detached, sharing the state's own storage; the order is the same on every rank.

        Weights that modules share (tied) come once, under their first name.
        """
        seen: set[object] = set()
        found: list[tuple[TensorInfo, torch.Tensor]] = []
        for part in self._parts.values():
            for name, tensor in part.tensors():
                if isinstance(part, ModulePart):
                    place = _place(tensor)
                    if place in seen:
                        continue
                    seen.add(place)
                found.append((_info(name, tensor), tensor.detach()))
        return found

    def volatile(self) -> set[str]:
        """Names of the tensors that may change with no optimizer of the state saying so: a forward changes buffers."""
        optimizers = [part for part in self._parts.values() if isinstance(part, OptimizerPart)]
        stepped = {id(p) for part in optimizers for group in part.value.param_groups for p in group["params"]}
        found = {name for part in self._parts.values() for name, t in part.tensors() if id(t) not in stepped}
        for part in optimizers:
            found = {name for name in found if not name.startswith(f"{part.name}.state.")}
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
        }

    # ── taking in another one ───────────────────────────────────────────────────────────────────────────────

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
        self._compare(table, modules_only=True)
        for info in table:
            by_part[_part_of(info)][info.name] = info
        self._whole = False
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
        """Drop what a backward that was cut short has left in `.grad`: the next one would add to it."""
        for part in self._parts.values():
            if isinstance(part.value, torch.nn.Module | torch.optim.Optimizer):
                part.value.zero_grad(set_to_none=True)

    def _compare(self, table: Table, *, modules_only: bool) -> None:
        def relevant(info: TensorInfo) -> bool:
            return not modules_only or isinstance(self._parts.get(_part_of(info)), ModulePart)

        mine = [info for info in self.table() if relevant(info)]
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


def _info(name: str, tensor: torch.Tensor) -> TensorInfo:
    if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor).__name__ == "DTensor":
        raise TypeError(
            f"state.{name} is a {type(tensor).__name__} of layout {tensor.layout}: only dense, whole tensors"
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
