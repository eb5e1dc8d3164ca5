"""Encodes state other than tensors as JSON, exactly; tensors inside it become names in the table.

Nothing is pickled, so loading cannot run code. Types that JSON lacks are written as an object with one key that begins
with ``$``: ``{"$tuple": [1, 2]}``.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import enum
import math
import pathlib
from typing import Any

import numpy as np
import torch

from elastic.checkpoint.format.json_values import FACTORIES, MAPPINGS, NUMBERS, SEQUENCES, Codecs, name_of
from elastic.worker.link.misuse import MisuseTypeError

_BIG = 1 << 53
"""Integers from this magnitude on are written as text: not every JSON reader keeps them exactly."""


class CannotEncodeError(MisuseTypeError):
    """A value has no exact form in JSON. The message names its path and the remedies."""

    def __init__(self, path: str, value: Any) -> None:
        nested = isinstance(value, torch.Tensor) and value.is_nested
        self.path, self.kind = path, f"{'nested ' * nested}{type(value).__name__}"
        super().__init__(f"state.{path} is {self.kind}, which JSON cannot hold: {_fix(value)}")


def _fix(value: Any) -> str:
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
        case str() if type(value) is str:
            return "it has characters of no Unicode text (surrogates): keep its bytes, os.fsencode(name)"
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


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor], codecs: Codecs) -> Any:
    """JSON for `value`; its tensors are added to `tensors` by path. Raises CannotEncodeError."""

    def sub(item: Any, name: object) -> Any:
        return encode(item, f"{path}.{name}", tensors, codecs)

    for kind, (to_json, _) in codecs.items():
        if isinstance(value, kind):
            return {"$as": name_of(kind), "value": sub(to_json(value), "value")}
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise CannotEncodeError(path, value)
        while tensors.get(path, value) is not value:  # {"a.b": …, "a": {"b": …}}: two tensors, one path
            path += "'"
        tensors[path] = value
        return {"$tensor": path, "on": value.device.type}
    kind = type(value)
    if kind in (type(None), bool) or (kind is float and math.isfinite(value)) or (kind is str and _is_text(value)):
        return value
    if kind in NUMBERS:
        return value if kind is int and abs(value) < _BIG else {NUMBERS[kind]: repr(value)}
    if kind is list or kind in SEQUENCES:
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        encoded = [sub(item, i) for i, item in enumerate(items)]
        return encoded if kind is list else {SEQUENCES[kind]: encoded}
    if kind is dict and all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
        return {key: sub(item, key) for key, item in value.items()}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$numpy": value.dtype.str, "value": base64.b64encode(value.tobytes()).decode()}
    factory = value.default_factory if kind is collections.defaultdict else None
    name = "" if factory is None else getattr(factory, "__name__", "")
    if (kind not in MAPPINGS and kind is not collections.defaultdict) or FACTORIES.get(name) is not factory:
        raise CannotEncodeError(path, value)
    pairs = [[sub(key, f"key {i}"), sub(item, key)] for i, (key, item) in enumerate(value.items())]
    return {MAPPINGS[kind]: pairs} if kind in MAPPINGS else {"$default": name, "items": pairs}


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: the name of a file whose bytes are none has surrogates in their place."""
    if value.isascii():
        return True
    with contextlib.suppress(UnicodeEncodeError):
        return bool(value.encode())
    return False
