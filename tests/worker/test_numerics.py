"""Which rank differs."""

from __future__ import annotations

import pytest
import torch

from elastic.worker.checks.numerics import Fingerprint, outliers
from elastic.worker.job import job_steps
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.state import State


def test_outliers_are_the_ranks_that_differ_from_the_majority() -> None:
    assert outliers([5, 5, 5]) == ()
    assert outliers([5, 7, 5]) == (1,)
    assert outliers([5, 7, 5, 9, 5]) == (1, 3)
    assert outliers([5, 7]) == (0, 1)  # nobody can say which of two is right
    assert outliers([5, 7, 7, 5]) == (0, 1, 2, 3)
    assert outliers([5]) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
def test_every_bit_is_looked_at_once_a_round(dtype: torch.dtype) -> None:
    tensors = [
        torch.zeros(7, dtype=dtype),
        torch.zeros((), dtype=dtype),
        torch.zeros(0),
        torch.zeros(3, 5, dtype=dtype).T,
    ]
    fingerprint = Fingerprint(tensors, window_bytes=10)
    rounds = fingerprint.checks_per_round
    before = [fingerprint.of(check) for check in range(rounds)]
    assert all(0 <= value < 2**63 for value in before)
    assert [fingerprint.of(check + rounds) for check in range(rounds)] == before
    for tensor in (tensors[0], tensors[1], tensors[3]):
        for place in torch.nonzero(torch.ones_like(tensor)):
            tensor[tuple(place)] = 1
            after = [fingerprint.of(check) for check in range(rounds)]
            assert 1 <= sum(a != b for a, b in zip(after, before, strict=True)) <= 2, (dtype, place)
            tensor[tuple(place)] = 0


def test_a_tensor_that_was_replaced_since_the_last_check_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    digests: list[int] = []
    monkeypatch.setattr(job_steps, "disagreeing", lambda digest, **_: digests.append(digest) or ())
    job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Link(), fingerprint_every_steps=1)
    state = State(model=torch.nn.Linear(1, 1), mean=torch.zeros(4))
    job.enter(rank=0, world_size=2, generation=1, checkpoint_scheduler=None, state=state)
    job._compare_replicas(state)
    state.mean = torch.ones(4)
    job._compare_replicas(state)
    assert digests[0] != digests[1]
