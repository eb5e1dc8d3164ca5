"""A state in plain torch's form: `state_dict()` of each module and optimizer, by part, from tensor names and JSON.

Only types that `torch.load(weights_only=True)` reads are built. Anything else keeps its form from the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .json_values import decode

Tensors = Mapping[str, torch.Tensor]


def plain(tensors: Tensors, extra: Mapping[str, Any]) -> dict[str, Any]:
    """`{"step": 40, "model": {…}, "optimizer": {…}, …}`. `extra` is `State.extra()` of the same state."""
    kinds, result = extra.get("kinds", {}), {"step": extra["step"]}
    for part, rest in extra["parts"].items():
        inner = tensors_named(rest)
        mine = {
            name.removeprefix(f"{part}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{part}.") and name not in inner
        }
        kind = kinds.get(part) or _kind(mine, rest)
        if kind == "optimizer":
            result[part] = _optimizer(mine, rest, tensors)
        elif kind == "module":
            tied = {
                alias.removeprefix(f"{part}."): tensors[first]
                for alias, first in extra.get("tied", {}).items()
                if alias.startswith(f"{part}.")
            }
            result[part] = {**mine, **tied, **{key: _decoded(item, tensors) for key, item in (rest or {}).items()}}
        else:
            result[part] = _decoded(rest, tensors)
    return result


def _kind(mine: Tensors, rest: Any) -> str:
    """Kind of a part, for a checkpoint that does not record it."""
    if isinstance(rest, dict) and rest.keys() >= {"groups", "on", "state"}:
        return "optimizer"
    return "module" if mine else "object"


def _optimizer(mine: Tensors, rest: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    first = 0
    for group in rest["groups"]:
        options = _decoded(group["options"], tensors)
        groups.append({**options, "params": list(range(first, first + group["params"]))})
        first += group["params"]
    state: dict[Any, Any] = {}
    for name, tensor in mine.items():
        if name.startswith("state."):  # others belong to an inner optimizer
            index, _, key = name.removeprefix("state.").partition(".")
            state.setdefault(int(index), {})[key] = tensor
    for index, held in rest["state"].items():
        state.setdefault(int(index), {}).update(_decoded(held, tensors))
    state.update(_decoded(rest.get("common", {}), tensors))
    found: dict[str, Any] = {"state": state, "param_groups": groups}
    for place, inner in rest.get("inner", {}).items():
        theirs = {name.removeprefix(f"{place}."): t for name, t in mine.items() if name.startswith(f"{place}.")}
        found[place] = _optimizer(theirs, inner, tensors)
    return found


def tensors_named(value: Any) -> set[str]:
    """Names of the tensors in a value of a state as JSON."""
    match value:
        case {"$tensor": str(name)}:
            return {name}
        case dict():
            return {name for item in value.values() for name in tensors_named(item)}
        case list():
            return {name for item in value for name in tensors_named(item)}
    return set()


def _decoded(value: Any, tensors: Tensors) -> Any:
    return decode(value, lambda name, _: tensors[name], {}, plain=True)
