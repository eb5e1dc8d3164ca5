"""In how many buckets `job.ddp` exchanges the gradients: on CPUs in one, as long as they fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.forming import formed
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn
from worker.test_gradient_weight import alone

from elastic.worker.comm.ddp_models import BUCKET_MB, bucket_options

MIB = 1 << 20


def layers(*mib: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A parameter of each of these sizes, in MiB."""
    with torch.device(device):
        return nn.ParameterList(torch.empty(size * MIB // dtype.itemsize, dtype=dtype) for size in mib)


def buckets(rank: int, world_size: int, port: int, options: dict[str, Any]) -> list[float]:
    """MiB in each bucket, the one that is exchanged first at the front."""
    group = formed(rank, world_size, port)
    job, _, _, _ = alone(rank, world_size)
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    model = job.ddp(net, **options)
    found = [bucket.buffer().nbytes / MIB for bucket in model.reducer._get_zeros_like_grad_buckets()]
    group.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [4.0]),
        ({"find_unused_parameters": True}, [4.0]),
        ({"static_graph": True}, [4.0]),
        ({"bucket_cap_mb": 2}, [2.0, 2.0]),
        ({"bucket_cap_mb": None}, [1.0, 3.0]),
    ],
    ids=str,
)
def test_gradients_that_fit_are_in_one_bucket(options: dict[str, Any], expected: list[float]) -> None:
    for found in run_ranks(buckets, world_size=2, options=options):
        assert sorted(found) == expected


def test_only_gradients_on_cpus_that_fit_are_put_into_one_bucket() -> None:
    one = {"bucket_cap_mb": BUCKET_MB}
    assert bucket_options(layers(1), {}) == one
    assert bucket_options(layers(BUCKET_MB - 1, 1), {}) == one
    assert bucket_options(layers(BUCKET_MB, 1), {}) == {}, "more than one bucket in any case"
    assert bucket_options(layers(BUCKET_MB - 1, 1, dtype=torch.float64), {}) == one
    assert bucket_options(layers(1, device="meta"), {}) == {}, "on a GPU the exchange runs beside the backward"


def test_frozen_parameters_do_not_count() -> None:
    model = layers(BUCKET_MB, 1)
    model[0].requires_grad_(False)  # type: ignore[operator]
    assert bucket_options(model, {}) == {"bucket_cap_mb": BUCKET_MB}


@pytest.mark.parametrize("given", [{"bucket_cap_mb": 3}, {"bucket_cap_mb_list": [1, 2]}], ids=str)
def test_the_script_decides(given: dict[str, Any]) -> None:
    assert bucket_options(layers(1), given) == {}


def test_a_lazy_module_is_left_to_ddp_which_refuses_it() -> None:
    assert bucket_options(nn.LazyLinear(3), {}) == {}
