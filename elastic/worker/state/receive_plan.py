"""Whether a received state fits this worker's modules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from elastic.checkpoint.format.plain import tensors_named
from elastic.contract.structs import replace
from elastic.contract.worker.tensor_table import Table, TensorInfo
from elastic.worker.link.misuse import MisuseTypeError
from elastic.worker.state.parts.boxes import Accepted, box_of, is_sharded
from elastic.worker.state.parts.parts import OptimizerPart, OptimizerTensors, Part
from elastic.worker.torch_internals.torch_private import is_flattened

from .optimizers import sharded_module


def refuse_sharded(name: str, module: torch.nn.Module) -> None:
    """Raises TypeError if each rank has a part of the parameters only, and the job does not say so; for torch's first
    FSDP, whose parameters are no DTensors, in any case."""
    kinds = {kind.__name__ for inner in module.modules() for kind in type(inner).__mro__}
    if "FullyShardedDataParallel" in kinds or any(map(is_flattened, module.parameters())):
        raise MisuseTypeError(
            f"state.{name} is wrapped by FullyShardedDataParallel, whose parts have no names of their own: shard it by "
            "torch.distributed.fsdp.fully_shard (FSDP2) in setup(), and call elastic.run(setup, train, sharded=True)"
        )
    if Accepted.sharded:
        return
    if "FSDPModule" in kinds or any(map(is_sharded, module.parameters())):
        raise MisuseTypeError(sharded_module(name, "FSDPModule" if "FSDPModule" in kinds else "DTensor"))


def refuse_other_boxes(part: OptimizerPart) -> None:
    """Raises TypeError for what an optimizer keeps sharded in another way than the parameter that it is for: a
    replacement makes it like the parameter."""
    for param, entries in part.value.state.items():
        for key, item in entries.items() if isinstance(param, torch.Tensor) and is_sharded(param) else ():
            if is_sharded(item) and (item.shape != param.shape or box_of(item) != box_of(param)):
                raise MisuseTypeError(
                    f"state.{part.name} keeps {key} of shape {list(item.shape)} for a parameter of shape "
                    f"{list(param.shape)}, each of them sharded: it cannot be made again for a replacement. Take an "
                    "optimizer whose state has its parameters' shapes, such as AdamW"
                )


def refuse_lazy(name: str, module: torch.nn.Module) -> None:
    """Raises TypeError if a tensor has no shape yet."""
    held = [*module.named_parameters(), *module.named_buffers()]
    if found := next((key for key, tensor in held if torch.nn.parameter.is_lazy(tensor)), ""):
        raise MisuseTypeError(f"state.{name}.{found} has no shape yet: run one forward of the lazy module in setup()")


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


class InitialLayout:
    """The tensors that the modules hold, and the parameter groups of the optimizers, as training began."""

    def __init__(self, table: Table, extra: Mapping[str, Any], buffers: Collection[str]) -> None:
        """`table` and `extra` as `State.tensors` gives them. `buffers`: names of those whose shape may change, as that
        of an observer's statistics does in its first forward."""
        self._buffers = buffers
        self._tensors = self._fixed(table, extra)
        self._groups = _groups(extra)

    def refuse_others(self, table: Table, extra: Mapping[str, Any]) -> None:
        """Raises TypeError, with the name of the first difference, if a replacement could not receive this state."""
        tensors = self._fixed(table, extra)
        if tensors != self._tensors:
            name = next(n for n in {**self._tensors, **tensors} if tensors.get(n) != self._tensors.get(n))
            raise MisuseTypeError(
                _refusal(f"state.{name}", _described(self._tensors.get(name)), _described(tensors.get(name)))
            )
        for name, counts in _groups(extra).items():
            if counts != self._groups.get(name):
                was, now = (f"groups of {c} parameters" for c in (self._groups.get(name), counts))
                raise MisuseTypeError(_refusal(f"state.{name}", was, now))

    def _fixed(self, table: Table, extra: Mapping[str, Any]) -> dict[str, TensorInfo]:
        own = _own(table, extra)
        return {n: TensorInfo(n, i.dtype, (), 0) if n in self._buffers else i for n, i in own.items()}


def _refusal(name: str, was: str, now: str) -> str:
    return (
        f"{name} was {was} when training began, and is {now} now: a replacement builds its state by setup() and could "
        "not receive this one, nor could it be loaded from a checkpoint. Let setup() build all that the state holds at "
        "any time, or make a buffer persistent=False"
    )


def _own(table: Table, extra: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The modules' own tensors, without those that a module makes for its `state_dict`."""
    modules = {name for name, kind in extra["kinds"].items() if kind == "module"}
    made = tensors_named([extra["parts"][name] for name in modules])
    return {i.name: i for i in table if i.name.partition(".")[0] in modules and i.name not in made}


def _groups(extra: Mapping[str, Any]) -> dict[str, list[int]]:
    """Optimizer -> number of parameters in each of its groups."""
    found = {name: extra["parts"][name] for name, kind in extra["kinds"].items() if kind == "optimizer"}
    return {name: [group["params"] for group in held.get("groups", ())] for name, held in found.items()}


FAILURES = (ValueError, TypeError, RuntimeError, AssertionError)
"""Of tensors for another model, or for a device that is not here or is full: torch raises any of these."""


class ReceivePlan(msgspec.Struct, frozen=True):
    """What can be found out, and made, before a state comes. It changes nothing."""

    held: Sequence[tuple[TensorInfo, torch.Tensor]]
    """The tensors of the parts that are modules."""
    extras: Mapping[str, Any]
    """What else they hold, as JSON, by part."""
    table: Table | None = None
    """The table of the state that is expected."""
    infos: Mapping[str, Mapping[str, TensorInfo]] = {}
    """Its entries, by part and name."""
    made: dict[str, OptimizerTensors] = {}
    """What optimizers need for it, by part."""

    def expecting(
        self, table: Table, parts: Mapping[str, Part], made: Mapping[str, OptimizerTensors] | None = None
    ) -> ReceivePlan:
        """One for `table`, with what has been made for it. Raises ValueError for an entry of no part."""
        if self.table is table:
            return self
        infos: dict[str, dict[str, TensorInfo]] = {name: {} for name in parts}
        for info in table:
            name = info.name
            if (held := infos.get(name.partition(".")[0])) is None:
                raise ValueError(f"{name} belongs to no part of this state: {listed(parts)}")
            held[name] = info
        return replace(self, table=table, infos=infos, made=dict(made or {}))

    def prepared(self, table: Table, devices: Sequence[str], parts: Mapping[str, Part]) -> ReceivePlan:
        """One for `table`, whose tensors are on `devices`, with storage for what optimizers do not have yet. Unchanged
        where that fails: if this table comes, `State.adopt` says why, and knows more of it."""
        on = {info.name: device for info, device in zip(table, devices, strict=True)}
        try:
            fitting = self.expecting(table, parts)
            optimizers = [part for part in parts.values() if isinstance(part, OptimizerPart)]
            made = {part.name: part.make(fitting.infos[part.name], on) for part in optimizers}
        except FAILURES:
            return self
        return replace(fitting, made={name: each for name, each in made.items() if each is not None})

    def adopted(self, part: Part, extra: Any) -> Mapping[str, torch.Tensor]:
        """What `part.adopt` returns for its entries and `extra`."""
        infos = self.infos[part.name]
        if isinstance(part, OptimizerPart):
            return part.adopt(infos, extra, self.made.get(part.name))
        return part.adopt(infos, extra)


def reorder(plan: ReceivePlan, parts: Mapping[str, Part]) -> bool:
    """Put the tensors of modules into the order of the table: a parameter that is taken out of its module and put back,
    as pruning does, comes last there, and DDP and checkpoints go by the order. Returns whether any was in another
    place; `plan` is then outdated. Modules that hold other tensors than those that come are left alone."""
    mine, came = [info.name for info, _ in plan.held], [name for part in plan.extras for name in plan.infos[part]]
    if mine == came or set(mine) != set(came):
        return False
    slots = {slot.name: slot for part in plan.extras for slot in parts[part].slots()}
    for slot in (slots[name] for name in came if name in slots):
        slot.holder[slot.key] = slot.holder.pop(slot.key)
    return True


def own_tensors(
    plan: ReceivePlan, extras: Mapping[str, Any], buffers: Callable[[], Container[str]]
) -> dict[str, torch.Tensor]:
    """The modules' tensors by name. Raises ValueError, and changes nothing, if the table of the received state has
    others; those that are `buffers` may have other shapes there. `extras`: the JSON contents of that state, by part."""
    held, ours = plan.held, plan.extras
    made = tensors_named(list(ours.values()))
    own = [(info, tensor) for info, tensor in held if info.name not in made]
    made = tensors_named([extras[part] for part in ours])
    _compare(
        [info for info, _ in own],
        [info for part in ours for info in plan.infos[part].values() if info.name not in made],
        buffers,
    )
    return {info.name: tensor for info, tensor in own}


def _compare(ours: Sequence[TensorInfo], came: Sequence[TensorInfo], buffers: Callable[[], Container[str]]) -> None:
    """Raises ValueError naming the first difference."""
    if len(ours) == len(came) and all(map(operator.eq, ours, came)):
        return
    here, there, resized = {info.name: info for info in ours}, {info.name: info for info in came}, buffers()
    for name in [*here, *there]:
        one, other = here.get(name), there.get(name)
        if one != other and not (one and other and one.dtype == other.dtype and name in resized):
            raise mismatch(name, one, other)
    if list(here) != list(there):
        raise ValueError("the tensors here are in another order than in the state that came")


def mismatch(name: str, here: TensorInfo | None, came: TensorInfo | None) -> ValueError:
    return ValueError(
        f"{name} is {_described(here)} here and {_described(came)} in the state that came: setup() must build the same "
        f"on every rank"
    )


def _described(info: TensorInfo | None) -> str:
    if info is None:
        return "missing"
    box = f" at {list(info.at)} of {list(info.of)}" if info.of else ""
    return f"{info.dtype} {list(info.shape)}{box}"
