"""Reading tensors out of a process's memory; here the process is this one."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from elastic.worker.state.handover import pull
from elastic.worker.state.parts.described import Described


def tensors(fill: float) -> list[torch.Tensor]:
    large = torch.full((3 << 20,), fill)
    small = [torch.full((n,), fill, dtype=torch.bfloat16) for n in range(1, 700)]
    return [small[0], large, *small[1:], torch.full((), fill), torch.full((2, 3), fill, dtype=torch.complex64)]


def pointers(held: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in held]


def sizes(held: list[torch.Tensor]) -> list[int]:
    return [tensor.nbytes for tensor in held]


def test_every_byte_arrives_and_the_digests_agree() -> None:
    source, target = tensors(2), tensors(1)
    with pull.open_to_readers(pointers(source)) as window:
        assert pull.can_read(window)
        found = pull.pull(target, window.addresses, sizes(source), window.pid)
    assert all(torch.equal(a, b) for a, b in zip(source, target, strict=True))
    assert found == pull.digests(pointers(source), sizes(source))
    source[1][-1] += 1
    assert found != pull.digests(pointers(source), sizes(source))


def test_into_tensors_that_are_not_dense() -> None:
    source = [torch.randn(1500, 1000), torch.randn(4, 5), torch.randn(7)]
    target = [torch.zeros(1000, 1500).t(), torch.zeros(5, 4).t(), torch.zeros(7)]
    with pull.open_to_readers(pointers(source)) as window:
        found = pull.pull(target, window.addresses, sizes(source), window.pid)
    assert all(torch.equal(a, b) for a, b in zip(source, target, strict=True))
    assert found == pull.digests(pointers(source), sizes(source))


def test_another_process_is_not_taken_for_the_source() -> None:
    with pull.open_to_readers([]) as window:
        pass
    stranger = pull.Window(os.getpid(), "11" * 16, window.secret_address, ())
    gone = pull.Window(1 << 22, window.secret, window.secret_address, ())
    nowhere = pull.Window(os.getpid(), window.secret, 8, ())
    assert [pull.can_read(w) for w in (stranger, gone, nowhere)] == [False] * 3


def test_a_source_that_goes_away_is_a_communication_error() -> None:
    with pytest.raises(dist.DistNetworkError, match="process 4194304, the source of the state, is gone"):
        pull.pull(tensors(0), [8] * 702, sizes(tensors(0)), 1 << 22)


def test_pull_stops_when_its_check_raises() -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise TimeoutError

    source, target = tensors(2), tensors(1)
    with pull.open_to_readers(pointers(source)) as window, pytest.raises(TimeoutError):
        pull.pull(target, window.addresses, sizes(source), window.pid, check)


def test_only_tensors_that_lie_as_in_a_file_have_an_address() -> None:
    dense = torch.randn(3, 4)
    assert Described("dense", dense).address == dense.data_ptr()
    odd = [dense.t(), torch.empty(0), torch.ones(3, dtype=torch.complex64).conj()]
    assert [Described("odd", tensor).address for tensor in odd] == [0, 0, 0]


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        (torch.ones(2, 2), lambda t: t.t_()),
        (torch.ones(2, 2).t(), lambda t: t.t_()),
        (torch.ones(4, 2), lambda t: t.resize_(2, 4)),
        (torch.ones(4), lambda t: setattr(t, "data", torch.ones(4))),
        (torch.ones(4), lambda t: setattr(t, "data", t.view(torch.int32))),
        (torch.ones(4, dtype=torch.complex64), lambda t: setattr(t, "data", t.conj())),
        (torch.ones(1, dtype=torch.complex64).imag, lambda t: setattr(t, "data", torch._neg_view(t))),
        (torch.empty(0), lambda t: None),  # it may be on another device now, which its address does not show
    ],
)
def test_a_tensor_that_lies_otherwise_now_is_described_anew(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], object]
) -> None:
    described = Described("it", tensor)
    assert described.still(tensor) == (tensor.numel() > 0)
    change(tensor)
    assert not described.still(tensor)
