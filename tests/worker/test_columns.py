"""Micro-batches and joined streams keep what belongs to one sample together, of tensors and of texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from elastic.worker.data.batches import batches
from elastic.worker.data.columns import cut, joined
from elastic.worker.data.streams import streams


class Texts:
    """Each sample in a tensor and as a text."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.tensor([float(i)]), "text": str(i), "pair": (str(i), f"{i}b"), "label": i}


def aligned(data: Any, size: int) -> list[int]:
    """The samples, after a look at each column."""
    numbers = [int(x) for x in data["x"].flatten()]
    assert len(numbers) == size
    assert list(data["text"]) == [str(number) for number in numbers]
    assert [list(column) for column in data["pair"]] == [[f"{n}{end}" for n in numbers] for end in ("", "b")]
    assert data["label"].tolist() == numbers
    return numbers


@pytest.mark.parametrize("batch_size", [2, 5, 6])
def test_a_micro_batch_has_the_texts_of_its_samples(batch_size: int) -> None:
    state = SimpleNamespace(step=0)
    for batch in batches(Texts(12), state, batch_size=batch_size, micro_batch=2, rank=0, world_size=1, shuffle=False):
        assert [n for part in batch.parts() for n in aligned(part.data, part.size)] == list(batch.indices)
        state.step += 1


def test_a_tensor_without_the_samples_in_its_first_dimension_is_not_cut() -> None:
    state = SimpleNamespace(step=0)
    by_time = lambda samples: torch.stack([sample["x"] for sample in samples], dim=1)  # noqa: E731
    batch = next(batches(Texts(4), state, batch_size=4, micro_batch=2, rank=0, world_size=1, collate=by_time))
    with pytest.raises(TypeError, match=r"shape \[1, 4\] in a batch of 4 samples"):
        next(batch.parts())


def test_arrays_are_cut_and_joined_as_tensors_are() -> None:
    """Also beside a list in a tuple of as many columns as there are samples."""
    texts, labels = cut((["a", "b"], np.array([0, 1])), 2, 0, 1)
    assert (texts, labels.tolist()) == (["a"], [0])
    whole = joined([{"id": np.array([0, 1]), "at": np.array(5)}, {"id": np.array([2, 3]), "at": np.array(6)}], 2)
    assert whole["id"].tolist() == [0, 1, 2, 3]
    assert [int(at) for at in whole["at"]] == [5, 6]
    own = cut([np.array([1, 2]), np.array([3])], 2, 1, 2, own=True)
    assert [a.tolist() for a in own] == [[3]], "arrays of any length"


def test_lists_of_any_length_are_cut_by_sample_and_the_rest_belongs_to_all() -> None:
    data = {"ids": [[1, 2, 3], [4], []], "scale": torch.tensor(2.0), "name": "abc", "boxes": [None, None, "x"]}
    want = {"ids": [[4], []], "scale": torch.tensor(2.0), "name": "abc", "boxes": [None, "x"]}
    assert cut(data, 3, 1, 3, own=True) == want


@pytest.mark.parametrize("each", [1, 2, 3])
def test_joined_streams_have_the_texts_of_their_samples(each: int) -> None:
    parts = [default_collate([Texts(99)[10 * n + i] for i in range(each)]) for n in range(3)]
    assert aligned(joined(parts, each), 3 * each) == [10 * n + i for n in range(3) for i in range(each)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_rank_with_several_streams_has_texts_as_one_with_a_single_stream(world_size: int) -> None:
    pytest.importorskip("torchdata")
    for rank in range(world_size):
        state = SimpleNamespace(step=0, streams={"step": 0, "states": {}})
        make = lambda n, count: [Texts(99)[10 * n + i] for i in range(4)]  # noqa: E731
        options: dict[str, Any] = {"count": 3, "batch_size": 6, "steps": 1}
        batch = next(iter(streams(make, state, rank=rank, world_size=world_size, **options)))
        aligned(batch.data, batch.size)
