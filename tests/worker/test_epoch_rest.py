"""A data loader that goes on in the middle of an epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from elastic.integrations import _versions
from elastic.integrations._epoch_rest import skipped


class Counted(torch.utils.data.Dataset[int]):
    """Notes what is read."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@given(count=st.integers(1, 30), size=st.integers(1, 7), drop=st.booleans(), data=st.data())
def test_rest_of_an_epoch_is_its_end_and_the_next_epoch_is_whole(
    count: int, size: int, drop: bool, data: st.DataObject
) -> None:
    made = lambda: DataLoader(Counted(count), batch_size=size, drop_last=drop)  # noqa: E731
    whole = batches(made())
    skip = data.draw(st.integers(0, len(whole)))
    loader = skipped(made(), skip)
    assert len(loader) == len(whole), "Lightning counts the batches of the whole epoch"
    assert batches(loader) == whole[skip:]
    assert batches(loader) == whole
    again = skipped(skipped(loader, 1), skip)  # the same loader in a further generation
    assert batches(again) == whole[skip:]


def test_nothing_is_read_in_vain_where_there_are_indices() -> None:
    dataset = Counted(10)
    assert batches(skipped(DataLoader(dataset, batch_size=3), 2)) == [[6, 7, 8], [9]]
    assert dataset.read == [6, 7, 8, 9]


def test_loader_that_begins_again_within_an_epoch_skips_its_part_of_the_last_round() -> None:
    """A shorter loader beside a longer one: 3 batches, 7 of them are committed."""
    assert batches(skipped(DataLoader(Counted(9), batch_size=3), 7)) == [[3, 4, 5], [6, 7, 8]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(7))


class Own(BatchSampler):
    pass


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), batch_size=2),
        DataLoader(Counted(7), batch_sampler=Own(range(7), 2, False)),
    ],
)
def test_loader_without_indices_is_read_up_to_there(loader: Any) -> None:
    whole = batches(loader)
    rest = skipped(loader, 2)
    assert batches(rest) == whole[2:] == [[4, 5], [6]]
    assert batches(rest) == whole
    assert rest.batch_size == loader.batch_size, "the rest is as it was"
    assert batches(skipped(rest, 1)) == whole[1:]


def test_missing_or_other_version_is_named_with_the_cure() -> None:
    assert _versions.complaint("lightning", "2.6.6", "2.6", "2.7") == ""
    missing = _versions.complaint("lightning", None, "2.6", "2.7")
    assert "needs lightning>=2.6,<2.7, which is not installed: pip install 'elasticd[lightning]'" in missing
    assert "and 2.7.0 is installed" in _versions.complaint("lightning", "2.7.0", "2.6", "2.7")
