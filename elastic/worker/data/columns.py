"""Cuts and joins collated samples: tensors along the first dimension, lists and arrays with one entry per sample."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..torch_private import pytree


def cut(data: Any, size: int, start: int, stop: int) -> Any:
    """Samples [start, stop) of `data`, which has `size`. A tensor of one number and what has no entry per
    sample belong to all samples.

    Raises TypeError for a tensor whose first dimension is another one: its samples cannot be told apart.
    """

    def piece(column: Any) -> Any:
        if isinstance(column, torch.Tensor) and column.ndim:
            if len(column) != size:
                raise TypeError(
                    f"batch.parts(): a tensor of shape {list(column.shape)} in a batch of {size} samples: each tensor "
                    "that collate makes needs the samples in its first dimension to be cut into micro-batches"
                )
            return column[start:stop]
        return column[start:stop] if _by_sample(column, size) else column

    return pytree.tree_map(piece, data, is_leaf=functools.partial(_by_sample, size=size))


def joined(parts: Sequence[Any], each: int) -> Any:
    """Batches of `each` samples as one: of what is neither a tensor nor has one entry per sample, a list."""
    if len(parts) == 1:
        return parts[0]
    by_sample = functools.partial(_by_sample, size=each)
    columns, spec = zip(*(pytree.tree_flatten(part, is_leaf=by_sample) for part in parts), strict=True)

    def whole(column: tuple[Any, ...]) -> Any:
        if isinstance(column[0], torch.Tensor):
            return torch.cat(column)
        if isinstance(column[0], np.ndarray) and by_sample(column[0]):
            return np.concatenate(column)
        return list(itertools.chain.from_iterable(column)) if by_sample(column[0]) else list(column)

    return pytree.tree_unflatten(list(map(whole, zip(*columns, strict=True))), spec[0])


def _by_sample(node: Any, size: int) -> bool:
    """Whether `node` is a list or array with one entry per sample: texts, as `default_collate` leaves them, or lists of
    any length. Not a list of columns, which are tensors, arrays or such lists themselves."""
    if isinstance(node, np.ndarray):
        return node.ndim > 0 and len(node) == size
    if not isinstance(node, (list, tuple)) or len(node) != size:
        return False
    inner = [item for item in node if isinstance(item, (list, tuple)) or (isinstance(item, np.ndarray) and item.ndim)]
    mixed = len({isinstance(item, np.ndarray) for item in inner}) > 1
    if len(inner) == size and (mixed or all(len(item) == size for item in inner)):
        return False
    return not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(node))
