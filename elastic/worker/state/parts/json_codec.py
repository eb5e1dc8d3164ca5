"""Encodes state other than tensors as JSON, and decodes it, exactly; tensors inside it become names in the table.

Nothing is pickled, so loading cannot run code. Types that JSON lacks are written as an object with one key that begins
with ``$``: ``{"$tuple": [1, 2]}``.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from elastic.worker.link.misuse import MisuseTypeError

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]
Codecs = Mapping[type, Codec]
"""type -> (function to an encodable value, function back)."""

_FACTORIES: dict[str, Any] = {"": None} | {
    kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)
}
"""Supported factories of a defaultdict. Others are refused: a function cannot be saved."""

_BIG = 1 << 53
"""Integers from this magnitude on are written as text: not every JSON reader keeps them exactly."""


class CannotEncodeError(MisuseTypeError):
    """A value has no exact form in JSON. The message names its path and the remedies."""

    def __init__(self, path: str, value: Any) -> None:
        self.path, self.kind = path, f"{'nested ' * _is_nested(value)}{type(value).__name__}"
        super().__init__(f"state.{path} is {self.kind}, which JSON cannot hold: {_cure(value)}")


def _cure(value: Any) -> str:
    """What to put in its place."""
    kind, convert = type(value).__name__, "say how to convert it: State(…, convert={{{}: ({}, {})}})".format
    match value:
        case np.ndarray():
            return "keep a tensor, torch.from_numpy(…), and take its .numpy() where it is used"
        case torch.Tensor():
            return "keep the list of its tensors, list(nested.unbind()), and nest them where they are used"
        case torch.nn.Module():
            return (
                "a module is a part of its own, State(…, name=module); several are one nn.ModuleList or nn.ModuleDict"
            )
        case torch.optim.Optimizer():
            return "each optimizer is a part of its own: State(…, first=optimizer, second=other)"
        case collections.deque():
            return convert("collections.deque", "list", f"lambda held: collections.deque(held, {value.maxlen})")
        case enum.Enum():
            return convert(kind, "lambda each: each.name", f"{kind}.__getitem__")
        case pathlib.PurePath():
            return convert("pathlib.PurePath", "str", "pathlib.Path")
        case tuple() if hasattr(value, "_asdict"):
            return convert(kind, "tuple", f"{kind}._make")
    if dataclasses.is_dataclass(value):
        return convert(kind, "dataclasses.asdict", f"lambda held: {kind}(**held)")
    own = "leave it out, make it an object with state_dict() and load_state_dict(), or "
    return own + convert(kind, "to_json", "from_json")


def _is_nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


# One test per type of value, here and in `decode`: two lists, to be compared.
def encode(value: Any, path: str, tensors: dict[str, torch.Tensor], codecs: Codecs) -> Any:  # noqa: C901
    """JSON for `value`; its tensors are added to `tensors` by path. Raises CannotEncodeError."""

    def sub(item: Any, name: object) -> Any:
        return encode(item, f"{path}.{name}", tensors, codecs)

    for kind, (to_json, _) in codecs.items():
        if isinstance(value, kind):
            return {"$as": _name(kind), "value": sub(to_json(value), "value")}
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise CannotEncodeError(path, value)
        while tensors.get(path, value) is not value:  # {"a.b": …, "a": {"b": …}}: two tensors, one path
            path += "'"
        tensors[path] = value
        return {"$tensor": path, "on": value.device.type}
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$numpy": value.dtype.str, "value": base64.b64encode(value.tobytes()).decode()}
    if kind in (type(None), bool, str):
        return value
    if kind is int:
        return value if abs(value) < _BIG else {"$int": str(value)}
    if kind is list:
        return [sub(item, i) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [sub(item, i) for i, item in enumerate(value)]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind in (set, frozenset):
        return {f"${kind.__name__}": [sub(item, i) for i, item in enumerate(sorted(value, key=repr))]}
    if kind is collections.Counter:
        return {"$counter": _pairs(value, sub)}
    if kind is collections.OrderedDict:
        return {"$ordered": _pairs(value, sub)}
    if kind is collections.defaultdict and _FACTORIES.get(_name_of(value.default_factory)) is value.default_factory:
        return {"$default": _name_of(value.default_factory), "items": _pairs(value, sub)}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: sub(item, key) for key, item in value.items()}
        return {"$dict": _pairs(value, sub)}
    raise CannotEncodeError(path, value)


def decode(value: Any, tensors: Callable[[str, str], torch.Tensor], codecs: Codecs) -> Any:  # noqa: C901
    """The inverse of `encode`. `tensors(name, device type)` returns the tensor of that name. Raises ValueError for a
    type without `convert`."""

    def sub(item: Any) -> Any:
        return decode(item, tensors, codecs)

    match value:
        case list():
            return [sub(item) for item in value]
        case {"$tensor": str(name), "on": str(device)}:
            return tensors(name, device)
        case {"$int": str(digits)}:
            return int(digits)
        case {"$float": str(text)}:
            return float(text)
        case {"$tuple": list(items)}:
            return tuple(sub(item) for item in items)
        case {"$bytes": str(text)}:
            return base64.b64decode(text)
        case {"$set": list(items)}:
            return {sub(item) for item in items}
        case {"$frozenset": list(items)}:
            return frozenset(sub(item) for item in items)
        case {"$numpy": str(code), "value": str(text)}:
            return np.frombuffer(base64.b64decode(text), dtype=code)[0]
        case {"$ordered": list(pairs)}:
            return collections.OrderedDict((sub(key), sub(item)) for key, item in pairs)
        case {"$default": str(name), "items": list(pairs)}:
            return collections.defaultdict(_FACTORIES[name], ((sub(key), sub(item)) for key, item in pairs))
        case {"$counter": list(pairs)}:
            return collections.Counter({sub(key): sub(item) for key, item in pairs})
        case {"$dict": list(pairs)}:
            return {sub(key): sub(item) for key, item in pairs}
        case {"$as": str(name), "value": inner}:
            for kind, (_, from_json) in codecs.items():
                if _name(kind) == name:
                    return from_json(sub(inner))
            raise ValueError(f"the state holds a {name}, and this State has no `convert` for it")
        case dict():
            return {key: sub(item) for key, item in value.items()}
    return value


def _name_of(factory: Any) -> str:
    return "" if factory is None else getattr(factory, "__name__", "")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _pairs(value: Mapping[Any, Any], sub: Callable[[Any, object], Any]) -> list[list[Any]]:
    return [[sub(key, f"key {i}"), sub(item, key)] for i, (key, item) in enumerate(value.items())]
