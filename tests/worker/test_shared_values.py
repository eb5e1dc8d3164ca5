"""`job.broadcast`: rank 0's value on all ranks, exactly, or an error on all ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.forming import formed
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture

from elastic.contract.worker.tensor_table import TensorInfo
from elastic.worker.comm.errors import is_communication_error
from elastic.worker.comm.group import Group
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.handover import shared_values

CPU = torch.device("cpu")


def there_and_back(value: Any) -> Any:
    raw, tensors = shared_values.pack(value, CPU)
    header = msgspec.json.decode(raw, type=shared_values.ValueHeader)
    made = shared_values.empty(header, CPU)
    for to, source in zip(made, tensors, strict=True):
        to.copy_(source)
    return shared_values.unpack(header, made)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=20
)


def typed(value: Any) -> Any:
    """With the types, as True == 1 == 1.0."""
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    return type(value), repr(value)


@given(VALUES)
def test_any_plain_value_arrives_with_its_types(value: Any) -> None:
    try:
        came = there_and_back(value)
    except ValueError:
        assert "surrogate" in repr(value) or any("\ud800" <= c <= "\udfff" for c in str(value))
        return
    assert typed(came) == typed(value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
def test_a_tensor_arrives_with_dtype_and_shape(dtype: torch.dtype) -> None:
    for tensor in (torch.ones(()), torch.ones(0, 3), torch.arange(12).reshape(3, 4).t()):
        came = there_and_back({"a": [tensor.to(dtype)]})["a"][0]
        assert came.dtype is dtype
        assert torch.equal(came, tensor.to(dtype))


def test_tensors_whose_paths_are_alike_are_not_mixed_up() -> None:
    came = there_and_back(
        {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 1: torch.tensor(3), "1": torch.tensor(4)}
    )
    assert (came["a.b"], came["a"]["b"], came[1], came["1"]) == (1, 2, 3, 4)


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [0, Odd()]}, r"value\.a\.1 is Odd; send None"),
        ([torch.ones(2).to_sparse()], r"value\.0 is Tensor \(torch.sparse_coo\)"),
        (torch.ones(2, device="meta"), "value lies on meta"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        shared_values.pack(value, CPU)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="contains itself"):
        shared_values.pack(value, CPU)


def test_a_text_of_many_megabytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_values, "MAX_HEADER_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="it takes 2 MiB as JSON, 1 MiB at most"):
        shared_values.pack("x" * (2 << 20), CPU)


@pytest.mark.parametrize(("shape", "nbytes"), [((2,), 9), ((-2, -4), 64)])
def test_a_header_that_contradicts_itself_allocates_nothing(shape: tuple[int, ...], nbytes: int) -> None:
    header = shared_values.ValueHeader(table=(TensorInfo("value", "F64", shape, nbytes),), devices=("cpu",))
    with pytest.raises(ValueError, match="takes no"):
        shared_values.empty(header, CPU)


def test_broadcast_in_setup_is_refused() -> None:
    job = Job(name="j", device=CPU, local_rank=0, link=Link())
    with pytest.raises(RuntimeError, match=r"job\.broadcast belongs in train"):
        job.broadcast(1)


def test_alone_the_value_is_checked_and_returned() -> None:
    job = Job(name="j", device=CPU, local_rank=0, link=Link())
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None)
    value = {"a": torch.ones(2)}
    assert job.broadcast(value) is value
    with pytest.raises(TypeError, match="value is Odd"):
        job.broadcast(Odd())


# ── real ranks ──────────────────────────────────────────────────────────────────────────────────────────────


def entered(rank: int, world_size: int, port: int) -> tuple[Group, Job]:
    group = formed(rank, world_size, port)
    job = Job(name="j", device=CPU, local_rank=rank, link=Link())
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None)
    return group, job


def sends(rank: int, world_size: int, port: int) -> Any:
    group, job = entered(rank, world_size, port)
    value = {"vocabulary": ["a", "b"], 3: (1.5, None, b"x"), "big": torch.arange(3_000_000), "seen": Counter("aab")}
    got = job.broadcast(value if rank == 0 else "not this")
    refused = ""
    try:
        job.broadcast(Odd() if rank == 0 else None)
    except TypeError as error:
        refused = str(error)
    after = job.broadcast([rank + 7])
    group.close()
    return [got["vocabulary"], got[3] == (1.5, None, b"x"), int(got["big"].sum()), got["seen"]["a"], refused, after]


@pytest.mark.slow
def test_all_ranks_have_rank_0s_value_or_its_error() -> None:
    for rank, got in enumerate(run_ranks(sends, world_size=3)):
        *same, refused, after = got
        assert same == [["a", "b"], True, 3_000_000 * 2_999_999 // 2, 2]
        assert "cannot be sent: value is Odd" in refused
        assert refused.endswith(" (on rank 0)") == (rank > 0)
        assert after == [7]


def gathers(rank: int, world_size: int, port: int) -> Any:
    group, job = entered(rank, world_size, port)
    value = {"rank": rank, "data": [torch.arange(rank * 3, dtype=torch.int16), torch.eye(2).t()], "text": "ü" * rank}
    got = job.gather(value)
    same = [[v["rank"], v["data"][0].tolist(), str(v["data"][0].dtype), v["data"][1].tolist(), v["text"]] for v in got]
    refused = ""
    try:
        job.gather(Odd() if rank == 1 else None)
    except TypeError as error:
        refused = str(error)
    after = job.gather(rank)
    group.close()
    return [same, refused, after]


@pytest.mark.slow
def test_all_ranks_have_every_ranks_value_or_the_error_of_one() -> None:
    for same, refused, after in run_ranks(gathers, world_size=3):
        eye = [[1.0, 0.0], [0.0, 1.0]]
        assert same == [[r, list(range(3 * r)), "torch.int16", eye, "ü" * r] for r in range(3)]
        assert "value is Odd" in refused
        assert refused.endswith("(on rank 1)")
        assert after == [0, 1, 2]


def loses_one(rank: int, world_size: int, port: int) -> Any:
    group, job = entered(rank, world_size, port)
    job.broadcast(torch.ones(10))
    dist.barrier()
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(3.0, group.abort, ["a rank died"]).start()
    try:
        job.broadcast({"n": 1})
    except RuntimeError as error:
        lost = is_communication_error(error)
    else:
        lost = False
    group.abort("a rank died")
    group.close()
    return lost


@pytest.mark.slow
def test_a_lost_rank_raises_on_all() -> None:
    """Also on rank 0, which is no neighbour of the lost one."""
    assert run_ranks(loses_one, world_size=3) == [True, True, {"died": signal.SIGKILL}]


def test_one_rank_alone_gathers_a_copy_as_several_do() -> None:
    value = {"seen": [1, 2], "data": torch.eye(2).t(), "none": torch.zeros(0, 3, dtype=torch.int64)}
    (got,) = shared_values.gather(value, rank=0, world_size=1, device=CPU)
    value["seen"].append(3)  # type: ignore[attr-defined]
    value["data"].add_(1)  # type: ignore[attr-defined]
    assert got["seen"] == [1, 2]
    assert torch.equal(got["data"], torch.eye(2))
    assert (got["none"].shape, got["none"].dtype) == ((0, 3), torch.int64)
    assert shared_values.gather(None, rank=0, world_size=1, device=CPU) == [None]
    with pytest.raises(TypeError, match="cannot be sent"):
        shared_values.gather(object(), rank=0, world_size=1, device=CPU)
