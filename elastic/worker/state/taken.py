"""Whether an object has taken what its `load_state_dict` was given: its `state_dict()` must then be the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .copies import equal

COMPARED_BYTES = 16 * 1024 * 1024
"""The elements of tensors are compared up to this size in all; of the others type and shape."""

Held = tuple[Any, Mapping[str, torch.Tensor]]
"""Everything but tensors as JSON, and the tensors by name."""


def told(name: str, given: Held, now: Held) -> None:
    """Print the first difference for part `name`, if there is one. No error: an object may well count its loads."""
    if not (found := next(differences(name, given, now), "")):
        return
    print(
        f"elastic: state.{found}: load_state_dict() of state.{name} does not take all that its state_dict() contains. "
        "This rank goes on with another value than the other ranks, and the replicas may drift apart. Let "
        "load_state_dict() restore each key that state_dict() returns, or leave the key out of both",
        file=sys.stderr,
        flush=True,
    )


def differences(name: str, given: Held, now: Held) -> Iterator[str]:
    """What differs, as texts that begin with the name."""
    yield from _plain(name, given[0], now[0])
    room = COMPARED_BYTES
    for path, tensor in given[1].items():
        here = now[1].get(path)
        if here is None or here is tensor:
            continue  # where it is missing, its place in the JSON differs
        if (here.dtype, here.shape) != (tensor.dtype, tensor.shape):
            yield f"{path} is {_form(here)} after it was loaded, and was given as {_form(tensor)}"
        elif (room := room - tensor.nbytes) >= 0 and not equal(here.detach().cpu(), tensor.detach().cpu()):
            yield f"{path} has other elements after it was loaded than were given"


def _plain(path: str, given: Any, now: Any) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(now, dict):
        if "$tensor" in given and "$tensor" in now:
            return  # the tensors are compared by name; it may lie on another device
        for key in [*given, *(key for key in now if key not in given)]:
            inner = path if key.startswith("$") else f"{path}.{key}"
            if key not in now or key not in given:
                yield f"{inner} is {'missing' if key in given else 'new'} after state.{path} was loaded"
            elif key in ("$dict", "$counter"):
                yield from _plain(inner, sorted(given[key], key=repr), sorted(now[key], key=repr))
            else:
                yield from _plain(inner, given[key], now[key])
    elif isinstance(given, list) and isinstance(now, list) and len(given) == len(now):
        for place, (before, after) in enumerate(zip(given, now, strict=True)):
            yield from _plain(f"{path}.{place}", before, after)
    elif type(given) is not type(now) or given != now:
        yield f"{path} is {_short(now)} after it was loaded, and was given as {_short(given)}"


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
