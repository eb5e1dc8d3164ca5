"""Whether a received state fits this worker's modules."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...checkpoint.plain import tensors_named
from ...contract.tensor_table import TensorInfo
from .parts import Part

Survey = tuple[list[tuple[TensorInfo, torch.Tensor]], dict[str, Any]]
"""The tensors of the parts that are modules, and what else they hold as JSON, by part."""


def reorder(survey: Survey, infos: Mapping[str, Mapping[str, TensorInfo]], parts: Mapping[str, Part]) -> bool:
    """Put the tensors of modules into the order of `infos`: a parameter that is taken out of its module and put back,
    as pruning does, comes last there, and DDP and checkpoints go by the order. Returns whether any was in another
    place; `survey` is then outdated. Modules that hold other tensors than those of `infos` are left alone."""
    mine, came = [info.name for info, _ in survey[0]], [name for part in survey[1] for name in infos[part]]
    if mine == came or set(mine) != set(came):
        return False
    slots = {slot.name: slot for part in survey[1] for slot in parts[part].slots()}
    for slot in (slots[name] for name in came if name in slots):
        slot.holder[slot.key] = slot.holder.pop(slot.key)
    return True


def own_tensors(
    survey: Survey, infos: Mapping[str, Mapping[str, TensorInfo]], extras: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The modules' own tensors by name, if they are those that come: `infos` and `extras` are by part. Raises
    ValueError, and changes nothing."""
    held, ours = survey
    made = tensors_named(list(ours.values()))
    own = [(info, tensor) for info, tensor in held if info.name not in made]
    made = tensors_named([extras[part] for part in ours])
    _compare(
        [info for info, _ in own],
        [info for part in ours for info in infos[part].values() if info.name not in made],
    )
    return {info.name: tensor for info, tensor in own}


def _compare(mine: Sequence[TensorInfo], came: Sequence[TensorInfo]) -> None:
    """Raises ValueError naming the first difference."""
    if len(mine) == len(came) and all(map(operator.eq, mine, came)):
        return
    here, there = {info.name: info for info in mine}, {info.name: info for info in came}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise mismatch(name, here.get(name), there.get(name))
    raise ValueError("the tensors here are in another order than in the state that came")


def mismatch(name: str, here: TensorInfo | None, came: TensorInfo | None) -> ValueError:
    return ValueError(
        f"{name} is {_described(here)} here and {_described(came)} in the state that came: setup() must build the same "
        f"on every rank"
    )


def _described(info: TensorInfo | None) -> str:
    return "missing" if info is None else f"{info.dtype} {list(info.shape)}"
