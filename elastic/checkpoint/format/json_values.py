"""Decodes what `elastic.worker.state.parts.json_codec` encodes: state other than tensors, as JSON."""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]
Codecs = Mapping[type, Codec]
"""type -> (function to an encodable value, function back)."""

FACTORIES: dict[str, Any] = {"": None} | {
    kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)
}
"""Supported factories of a defaultdict. Others are refused: a function cannot be saved."""

NUMBERS: dict[type, str] = {int: "$int", float: "$float"}
"""Type -> its key, as of the following ones; these are written as text."""
SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
MAPPINGS: dict[type, str] = {dict: "$dict", collections.Counter: "$counter", collections.OrderedDict: "$ordered"}
"""Written as pairs."""
_TYPES: dict[str, Any] = {key: kind for kind, key in (NUMBERS | SEQUENCES | MAPPINGS).items()}
_PLAIN = {**_TYPES, "$frozenset": set, "$counter": dict}


def decode(value: Any, tensors: Callable[[str, str], torch.Tensor], codecs: Codecs, *, plain: bool = False) -> Any:
    """The value. `tensors(name, device type)` returns the tensor of that name. Raises ValueError for a type without
    `convert`. `plain`: only types that `torch.load(weights_only=True)` reads are built, others stay as they are."""

    def sub(item: Any) -> Any:
        return decode(item, tensors, codecs, plain=plain)

    match value:
        case list():
            return [sub(item) for item in value]
        case {"$tensor": str(name)}:
            return tensors(name, value.get("on", ""))
        case {"$bytes": str(text)}:
            return base64.b64decode(text)
        case {"$numpy": str(code), "value": str(text)} if not plain:
            return np.frombuffer(base64.b64decode(text), dtype=code)[0]
        case {"$default": str(name), "items": list(pairs)}:
            content = {sub(key): sub(item) for key, item in pairs}
            return content if plain else collections.defaultdict(FACTORIES[name], content)
        case {"$as": str(name), "value": inner} if not plain:
            for kind, (_, from_json) in codecs.items():
                if name_of(kind) == name:
                    return from_json(sub(inner))
            raise ValueError(f"the state holds a {name}, and this State has no `convert` for it")
        case dict() if (written := (_PLAIN if plain else _TYPES).get(key := next(iter(value), ""))) is not None:
            content = value[key]
            if key in MAPPINGS.values():
                return written({sub(name): sub(item) for name, item in content})
            return written(map(sub, content) if key in SEQUENCES.values() else content)
        case dict():
            return {key: sub(item) for key, item in value.items()}
    return value


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
