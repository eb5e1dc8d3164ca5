"""Batches are those of torch's `default_collate`, for any samples, and so are its errors."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from elastic.worker.data.containers import collated
from elastic.worker.torch_internals import torch_private

Pair = namedtuple("Pair", "x y")
ROW = torch.arange(6.0).view(2, 3)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.mark.parametrize(
    "samples",
    [
        [(ROW, torch.tensor(3)), (ROW + 1, torch.tensor(4))],
        [(ROW.t(), ROW.half())] * 3,
        [(ROW, 1.5, "a"), (ROW, 2.5, "b")],
        [ROW, ROW + 1],
        [[ROW, ROW]] * 2,
        [Pair(ROW, ROW)] * 2,
        [{"x": ROW, "y": 1}] * 2,
        [((ROW, ROW), ROW)] * 2,
        [(torch.nn.Parameter(ROW), ROW)] * 2,
        [()] * 2,
    ],
)
def test_a_batch_is_that_of_torch(samples: list[Any]) -> None:
    assert same(collated(samples), default_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [(ROW, ROW), (ROW,)],
        [(ROW, ROW), (ROW[:1], ROW)],
        [(ROW, ROW), (1, ROW)],
        [(ROW.to_sparse(), ROW)] * 2,
        [(object(), ROW)] * 2,
    ],
)
def test_an_error_is_that_of_torch(samples: list[Any]) -> None:
    with pytest.raises(Exception) as theirs:
        default_collate(samples)
    with pytest.raises(theirs.type) as ours:
        collated(samples)
    assert str(ours.value) == str(theirs.value)


def test_a_function_that_the_script_has_registered_for_tensors_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(batch: Any, *, collate_fn_map: Any) -> torch.Tensor:
        return torch.stack(list(batch)).sum(0)

    monkeypatch.setitem(torch_private.collate.default_collate_fn_map, torch.Tensor, summed)
    assert torch.equal(collated([(ROW, ROW), (ROW, ROW)])[0], ROW + ROW)
