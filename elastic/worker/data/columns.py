"""Cuts and joins collated samples: tensors along the first dimension, lists and arrays with one entry per sample.

What `default_collate` makes is told apart by its form alone: it leaves texts in a list, and nothing else. What a
script's own function makes is not, where a list happens to have as many entries as the batch has samples; there the
outermost list has one entry per sample, a tuple at the top and tensors with a row per sample are columns, and what
may be either is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from elastic.worker.link.misuse import MisuseTypeError, MisuseValueError

from .containers import opened

_PLAIN = (str, bytes, int, float, complex, type(None))


def cut(data: Any, size: int, start: int, stop: int, *, own: bool = False) -> Any:
    """Samples [start, stop) of `data`, which has `size`, at least 2. `own`: of a `collate` of the script's own. A
    tensor of one number and what has no entry per sample belong to all samples.

    Raises TypeError for a tensor whose first dimension is another one, for an object that holds tensors and is no
    container, and for a list that may be one of samples or of columns: its samples cannot be told apart.
    """

    def piece(node: Any, *, top: bool = False) -> Any:
        if isinstance(node, torch.Tensor):
            return _rows(node, size, start, stop) if node.ndim else node
        if isinstance(node, np.ndarray):
            return node[start:stop] if node.ndim and len(node) == size else node
        if _is_list(node) and (_own_samples(node, size, top=top) if own else _is_texts(node, size)):
            return node[start:stop]
        if isinstance(node, PackedSequence) or (container := opened(node)) is None:
            if hasattr(node, "to") or (top and not isinstance(node, _PLAIN)):
                raise MisuseTypeError(
                    f"batch.parts(): {type(node).__name__} has no samples that could be cut into micro-batches: let "
                    "collate return tensors, in a dict, tuple or dataclass"
                )
            return node
        inner, rebuilt = container
        return rebuilt([piece(child) for child in inner])

    return piece(data, top=True)


def joined(parts: Sequence[Any], each: int) -> Any:
    """Batches of `each` samples, all of `default_collate`, as one: of what has no entry per sample, a list.

    Raises ValueError or TypeError for batches of unlike form.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, np.ndarray) and first.ndim and len(first) == each:
        return np.concatenate(parts)
    if _is_list(first) and _is_texts(first, each):
        return list(itertools.chain.from_iterable(parts))
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            raise MisuseValueError(
                f"job.streams: a stream's samples have the keys {', '.join(map(str, first))}, those of another one "
                f"{next(', '.join(map(str, part)) for part in parts if part.keys() != first.keys())}"
            )
        parts = [{key: part[key] for key in first} for part in parts]
    containers = [opened(part) for part in parts]
    if containers[0] is None:
        return list(parts)
    columns = zip(*([] if each is None else each[0] for each in containers), strict=True)
    return containers[0][1]([joined(column, each) for column in columns])


def _rows(tensor: torch.Tensor, size: int, start: int, stop: int) -> torch.Tensor:
    if len(tensor) != size:
        raise MisuseTypeError(
            f"batch.parts(): a tensor of shape {list(tensor.shape)} in a batch of {size} samples: each tensor "
            "that collate makes needs the samples in its first dimension to be cut into micro-batches"
        )
    if tensor.is_nested:
        return torch.nested.as_nested_tensor(list(tensor.unbind())[start:stop], layout=tensor.layout)
    return tensor[start:stop]


def _is_list(node: Any) -> bool:
    """A list or tuple, without names for its entries."""
    return isinstance(node, (list, tuple)) and not hasattr(node, "_fields")


def _is_column(node: Any) -> bool:
    """Whether `node` may have one entry per sample, or entries that have."""
    return isinstance(node, (torch.Tensor, np.ndarray, list, tuple, Mapping))


def _is_texts(node: Sequence[Any], size: int) -> bool:
    return len(node) == size and not any(map(_is_column, node))


def _own_samples(node: Sequence[Any], size: int, *, top: bool) -> bool:
    """Whether `node`, of a script's own collate, has one entry per sample. Raises TypeError if that cannot be told."""
    if len(node) != size:
        return False
    columns = [each for each in node if _is_column(each)]
    fit = all(_fits(each, size) for each in columns)
    if top and isinstance(node, tuple) and columns:
        if fit or _holds_tensors(node):
            return False
        raise _unclear(node, size)
    if fit and all(isinstance(each, torch.Tensor) and each.ndim not in (0, 3) for each in node):
        return False  # stacked; three images of three channels may be samples
    alike = len({(type(each), getattr(each, "dtype", None), getattr(each, "ndim", None)) for each in node}) == 1
    if fit and len(columns) == size and not alike:
        return False
    # As `list(zip(*samples))` and `default_collate` leave columns; lists in a list, such as tokens, are samples.
    zipped = isinstance(node, list) and isinstance(node[0], tuple)
    if _holds_tensors(node) or (fit and len(columns) == size and (zipped or isinstance(node[0], np.ndarray))):
        raise _unclear(node, size)
    return True


def _fits(node: Any, size: int) -> bool:
    """Whether what `_is_column` has found may be a column of `size` samples."""
    return isinstance(node, Mapping) or getattr(node, "ndim", 1) == 0 or len(node) == size


def _holds_tensors(node: Any) -> bool:
    if isinstance(node, torch.Tensor):
        return True
    found = opened(node)
    return found is not None and any(map(_holds_tensors, found[0]))


def _unclear(node: Sequence[Any], size: int) -> MisuseTypeError:
    return MisuseTypeError(
        f"batch.parts(): a {type(node).__name__} of {len(node)} times {type(node[0]).__name__} in a batch of {size} "
        "samples may be a list of samples or of columns: let collate return columns in a dict, with tensors stacked"
    )
