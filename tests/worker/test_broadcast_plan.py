"""How tensors are cut into slices, and read in row-major order whatever their strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.worker.state.handover import broadcast

SHAPES = st.lists(st.integers(0, 5), max_size=4)


@given(SHAPES, st.randoms(use_true_random=False), st.data())
def test_row_major_order_of_any_strides(shape: list[int], random: object, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).permute(order)
    start = data.draw(st.integers(0, tensor.numel()))
    count = data.draw(st.integers(0, tensor.numel() - start))
    read = [value for piece in broadcast.row_major(tensor, start, count) for value in piece.flatten().tolist()]
    assert read == tensor.flatten().tolist()[start : start + count]


@settings(deadline=None)
@given(st.lists(st.tuples(SHAPES, st.sampled_from([torch.float32, torch.bool, torch.complex64, torch.bfloat16]))))
def test_broadcast_plan_has_every_byte_in_exactly_one_slice(kinds: list[tuple[list[int], torch.dtype]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "SLICE_BYTES", 256)
        patch.setattr(broadcast, "SMALL_BYTES", 64)
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]
        slices = broadcast.plan(tensors)
    for part, own in zip(slices, broadcast._own_memory(slices, tensors), strict=True):
        assert (own is None) == (len(part.segments) > 1)
        if own is not None:
            (segment,) = part.segments
            tensor = tensors[segment.tensor]
            start = tensor.data_ptr() + segment.start * tensor.element_size()
            assert (own.data_ptr(), own.numel()) == (start, part.nbytes)
    taken = sorted((s.tensor, s.start, s.elements) for part in slices for s in part.segments)
    for index, tensor in enumerate(tensors):
        end = 0
        for _, start, count in (t for t in taken if t[0] == index):
            assert start == end
            end += count
        assert end == tensor.numel()
    assert all(part.nbytes <= 256 for part in slices)
    for part in slices:
        ends = 0
        for segment in part.segments:
            assert segment.offset >= ends
            assert segment.offset % broadcast.ALIGN == 0
            ends = segment.offset + segment.elements * tensors[segment.tensor].element_size()
        assert ends == part.nbytes


@pytest.mark.parametrize("how", [broadcast.digest, broadcast.word_sum])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_digest_changes_with_each_byte(how: Callable[[torch.Tensor], int], offset: int) -> None:
    data = torch.arange(1001, dtype=torch.int32).view(torch.uint8)[offset:]
    digest = how(data)
    for at in (0, 7, 2000, data.numel() - 1):
        data[at] ^= 1
        assert how(data) != digest
        data[at] ^= 1
    assert how(data) == digest
