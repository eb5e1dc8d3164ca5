"""`job.ddp(compress=…, hook=…)`: the mean over the samples, however the gradients are exchanged."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forming import formed
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from elastic.contract.worker.beat import PAGE_BYTES, BeatPage, Doing
from elastic.recovery.hangs.stillness import standing
from elastic.worker.comm import comm_hooks
from elastic.worker.comm.errors import GroupAborted
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.state import State
from elastic.worker.torch_internals import torch_private

CPU = torch.device("cpu")
SIZES = (5, 2)
"""Samples of each rank."""


def hook(state: Any, bucket: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (("bf61", None), ValueError, "compress='bf61': 'bf16', 'fp16' or None"),
        (("bf16", hook), ValueError, "compress and hook exclude each other"),
        ((None, "fp16"), TypeError, "hook is str"),
    ],
)
def test_wrong_arguments_are_refused_with_the_right_ones(given: Any, error: type[Exception], said: str) -> None:
    job = Job(name="j", device=CPU, local_rank=0, link=Link())
    with pytest.raises(error, match=said):
        job.ddp(nn.Linear(1, 1), compress=given[0], hook=given[1])


class Bucket:
    def __init__(self, device: str = "cpu", *, last: bool = False) -> None:
        self._device, self._last = device, last

    def buffer(self) -> torch.Tensor:
        return torch.ones(2, device=self._device)

    def is_last(self) -> bool:
        return self._last


@pytest.mark.parametrize("exchange", ["plain", "cast"])
def test_what_runs_in_gloos_thread_does_not_keep_the_group(monkeypatch: pytest.MonkeyPatch, exchange: str) -> None:
    """A thread of the group would otherwise destroy it, join itself and end the process (SIGABRT)."""

    class Fake:
        pass

    sum_of_ranks: torch.futures.Future[Any] = torch.futures.Future()
    monkeypatch.setattr(comm_hooks, "_summed", lambda tensor, group: sum_of_ranks)
    group = Fake()
    chosen = comm_hooks.plain if exchange == "plain" else functools.partial(comm_hooks.cast, torch.bfloat16)
    hook = comm_hooks.GradientHook(
        chosen,
        group,
        weight=lambda: 0.5,
        on_contributed=list,
        on_received=list,
        on_failed=list,  # type: ignore[arg-type]
        ends_with_backward=False,  # else nothing of ours runs there
    )
    result = hook(Bucket())
    kept = weakref.ref(group)
    del hook, group
    assert kept() is None
    sum_of_ranks.set_result([torch.full((2,), 3.0)])
    assert result.wait().tolist() == [3.0, 3.0]


@pytest.mark.parametrize(("device", "waits"), [("cpu", False), ("meta", True)])
def test_rank_waits_for_the_others_until_the_guard_where_a_backward_does_not(
    monkeypatch: pytest.MonkeyPatch, device: str, waits: bool
) -> None:
    """On a GPU a backward returns with the sums in flight: a rank that then reads its loss waits for the others, and
    the rank that holds them up is a hang only if another one is seen to wait."""
    at_end: list[Any] = []
    monkeypatch.setattr(torch_private, "at_end_of_backward", at_end.append)
    page = BeatPage(memoryview(bytearray(PAGE_BYTES)))
    page.clear(0.0)
    done: torch.futures.Future[Any] = torch.futures.Future()
    hook = comm_hooks.GradientHook(
        lambda bucket, weight, group: (done, lambda future: future.value()),
        object(),  # type: ignore[arg-type]
        weight=lambda: 1.0,
        on_contributed=lambda: page.write(Doing.EXCHANGING, 1.0),
        on_received=lambda: page.write(Doing.COMPUTING, 2.0),
        on_failed=list,
    )
    hook(Bucket(device, last=True))
    while at_end:
        at_end.pop(0)()
    assert standing(page.read(), "S", None, 100.0).waits is waits
    done.set_result(torch.ones(1))


def build() -> State:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def options(kind: str) -> dict[str, Any]:
    match kind:
        case "bf16" | "fp16":
            return {"compress": kind}
        case "torch":
            return {"hook": default_hooks.allreduce_hook}
        case "torch fp16":
            return {"hook": default_hooks.fp16_compress_hook, "hook_state": dist.group.WORLD}
        case _:
            return {}


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(SIZES[rank], 12, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(rank: int, world_size: int, port: int, kinds: list[str], steps: int) -> Any:
    """For each kind and step: (relative error of the gradient, digest of it, relative error of the sum so far)."""
    group = formed(rank, world_size, port)
    found = {}
    for kind in kinds:
        state = build()
        job = Job(name="j", device=CPU, local_rank=rank, link=Link())
        job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None)
        state.begin()
        model, lone = job.ddp(state.model, **options(kind)), copy.deepcopy(state.model)
        rows = []
        applied = exact = torch.zeros(())
        for step in range(steps):
            job._gradient_weight.begin(SIZES[rank] / sum(SIZES))
            model.zero_grad()
            model(data(rank, step)).square().mean().backward()
            lone.zero_grad()
            lone(torch.cat([data(r, step) for r in range(world_size)])).square().mean().backward()
            got = torch.cat([p.grad.flatten() for p in state.model.parameters()])
            want = torch.cat([p.grad.flatten() for p in lone.parameters()])
            applied, exact = applied + got, exact + want
            rows.append([off(got, want), got.double().sum().item(), off(applied, exact)])
        found[kind] = rows
        del model
    group.close()
    return found


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


LIMITS = {"plain": 1e-6, "torch": 1e-6, "bf16": 1e-2, "fp16": 1e-3, "torch fp16": 1e-3}


@pytest.fixture(scope="module")
def exchanged() -> list[dict[str, Any]]:
    return run_ranks(gradients, world_size=2, kinds=[*LIMITS], steps=30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIMITS)
def test_the_gradient_is_the_mean_over_the_samples(exchanged: list[dict[str, Any]], kind: str) -> None:
    """5 and 2 samples: a mean over the ranks would be off by a third."""
    first, second = (rank[kind] for rank in exchanged)
    assert first == second, "bit-identical on all ranks"
    assert max(row[0] for row in first) < LIMITS[kind]
    if kind not in ("plain", "torch"):
        assert min(row[0] for row in first) > 1e-7, "nothing was compressed"


def fails(rank: int, world_size: int, port: int, kinds: list[str]) -> Any:
    """Rank 1 leaves; rank 0 catches what its backward raises, and steps: (weights changed, what that raises)."""
    _group = formed(rank, world_size, port)
    made = []
    for kind in kinds:
        state = build()
        job = Job(name="j", device=CPU, local_rank=rank, link=Link())
        state.watch_optimizers(job.guard())
        job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None)
        state.begin()
        made.append((job, state, job.ddp(state.model, **options(kind))))
    dist.barrier()
    if rank:
        return None
    said = []
    for _, state, model in made:
        before = json.dumps([p.tolist() for p in state.model.parameters()])
        with contextlib.suppress(RuntimeError):
            model(data(0, 0)).sum().backward()
        try:
            state.optimizer.step()
        except GroupAborted as error:
            said.append(str(error))
        assert json.dumps([p.tolist() for p in state.model.parameters()]) == before
    return said


@pytest.mark.slow
def test_gradients_of_a_failed_exchange_are_not_applied() -> None:
    said, _ = run_ranks(fails, world_size=2, kinds=["bf16", "torch fp16"])
    assert [text[:31] for text in said] == ["an exchange between the ranks h"] * 2


def test_a_hook_that_returns_no_future_is_named() -> None:
    class Bucket:
        def buffer(self) -> torch.Tensor:
            return torch.ones(2)

    class Pair:
        def size(self) -> int:
            return 2

    with pytest.raises(TypeError, match=r"hook returned NoneType: return a torch\.futures\.Future"):
        comm_hooks.own(hook, None, Bucket(), 0.5, Pair())  # type: ignore[arg-type]
