"""The containers in which collated samples come: those of torch's pytree, dataclasses, and mappings such as
transformers' BatchEncoding."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate, get_worker_info

from elastic.worker.torch_internals.torch_private import collates_tensors_by_stack, pytree


def collated(samples: list[Any]) -> Any:
    """`default_collate(samples)`, with its errors."""
    first = samples[0]
    # In a loader's process the batch is made in shared memory: left to torch.
    if type(first) is tuple and get_worker_info() is None and _plain(first) and collates_tensors_by_stack():
        try:
            return [torch.stack(column) for column in zip(*samples, strict=True)]
        except (TypeError, ValueError, RuntimeError):
            pass
    return default_collate(samples)


def _plain(items: tuple[object, ...]) -> bool:
    for item in items:  # no call for each: it is run for every batch
        if type(item) is not torch.Tensor or item.layout is not torch.strided or item.is_nested:
            return False
    return True


_PLAIN = (int, float, str, bytes, type(None))


def opened(node: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """(what `node` contains, the function that makes one like it of other contents); None if it is no container."""
    children, spec = pytree.tree_flatten(node, is_leaf=lambda inner: inner is not node)
    if not (len(children) == 1 and children[0] is node):
        return children, lambda inner: pytree.tree_unflatten(inner, spec)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        return [getattr(node, name) for name in names], functools.partial(_with_fields, node, names)
    if isinstance(node, Mapping):
        keys = list(node)
        return [node[key] for key in keys], functools.partial(_with_items, node, keys)
    return None


def moved(data: Any, device: torch.device) -> Any:
    """`data`, which is on the CPU, with its tensors on `device`."""
    if device.type == "cpu":
        return data
    # Of a PackedSequence a part stays on the CPU.
    return _mapped(data, lambda tensor: tensor.to(device, non_blocking=True))


def copied(data: Any) -> Any:
    """`data` with tensors of its own."""
    return _mapped(data, copy.deepcopy)


def _mapped(data: Any, function: Callable[[Any], Any]) -> Any:
    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor | PackedSequence):
            return function(item)
        if isinstance(item, _PLAIN):
            return item
        found = opened(item)  # a container that pytree does not know
        return item if found is None else found[1]([_mapped(inner, function) for inner in found[0]])

    return pytree.tree_map(leaf, data, is_leaf=lambda node: isinstance(node, PackedSequence))


def _with_fields(node: Any, names: list[str], values: list[Any]) -> Any:
    made = copy.copy(node)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # also of a frozen one
    return made


def _with_items(node: Mapping[Any, Any], keys: list[Any], values: list[Any]) -> Any:
    items = dict(zip(keys, values, strict=True))
    if not isinstance(node, MutableMapping):
        return type(node)(items)  # type: ignore[call-arg]  # as default_collate makes them
    made = copy.copy(node)
    made.update(items)
    return made
