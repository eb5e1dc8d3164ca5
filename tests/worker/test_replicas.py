"""Parameters and optimizer state that nothing makes the same on all ranks, named at the first exchange."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.arenas import NoBackend
from support.forming import formed
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.checkpoint.interval import IntervalRule
from elastic.worker.checks import replicas
from elastic.worker.checks.replicas import ELEMENTS
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.state.state import State

CPU = torch.device("cpu")


class Sharded(torch.optim.Optimizer):
    """As Muon's original distributed class: rank r keeps the momentum of parameters r, r + W, …"""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            owner = number % dist.get_world_size()
            if owner == dist.get_rank():
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                param.sub_(momentum.add_(param.grad), alpha=self.param_groups[0]["lr"])
            dist.broadcast(param, owner)


class Replay:
    """Samples that a rank has seen, as in reinforcement learning."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.seen = held["seen"]


def build(kind: type[torch.optim.Optimizer]) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    criterion = nn.Linear(3, 1, bias=False)
    if kind is Sharded:
        return State(model=model, optimizer=Sharded(model.parameters()))
    model[0].requires_grad_(False)
    return State(
        model=model,
        criterion=criterion,
        optimizer=kind([*model.parameters(), *criterion.parameters()], lr=0.01),
        best=None,
        replay=Replay(),
    )


def step(job: Job, state: State, model: Any, criterion: Any, how: str) -> None:
    if how.startswith("used on rank 0 only"):
        with contextlib.nullcontext() if job.rank == 0 else torch.no_grad():
            made = criterion(torch.full((2, 3), 1.0))
        loss = made.sum() + model(torch.full((2, 4), 1.0)).square().mean()
    else:
        with model.no_sync() if how == "in no_sync" else contextlib.nullcontext():
            loss = criterion(model(torch.full((2, 4), 1.0 + job.rank))).square().mean()
    if how == "weighted":
        loss = job.weighted(loss * 2, 2)
    loss.backward()
    if how == "unwrapped penalty":
        state.model(torch.full((2, 4), 2.0 - job.rank)).square().mean().backward()
    if how == "alike penalty" or (how == "penalty of nothing on rank 0" and job.rank == 0):
        (sum(param.square().sum() for param in state.model.parameters()) * (how == "alike penalty")).backward()
    if how in ("by hand", "no job.ddp, by hand"):
        for param in (p for group in state.optimizer.param_groups for p in group["params"] if p.grad is not None):
            dist.all_reduce(param.grad)
    if how.endswith("noise after the exchange"):
        for param in state.model[1].parameters():
            param.grad += job.rank * torch.rand_like(param)
    state.optimizer.step()
    state.optimizer.zero_grad()
    if how.endswith("renormalised rows") and job.rank:
        with torch.no_grad():
            state.model[1].weight[0] *= 0.5
    if how.endswith("best on rank 0 only") and not job.rank:
        state.best = {"weight": torch.zeros(2) + state.step}
    if how.endswith("samples of its own"):
        state.replay.ranks_differ = "as is known" in how
        state.replay.seen.append(torch.full((3,), 1.0 + job.rank))
    if how.endswith("a hidden state of its own"):
        state.best = torch.full((3,), 1.0 + job.rank)
    if "averaged" in how:
        with torch.no_grad():
            for param in state.criterion.parameters():
                dist.all_reduce(param)
                param /= job.world_size
    job.commit(state)


def train(job: Job, how: str, steps: int, backend: NoBackend | None = None) -> State:
    state = build(Sharded if how == "sharded" else torch.optim.AdamW)
    scheduler = CheckpointScheduler(backend or NoBackend(), IntervalRule(every_steps=1), shared=True)
    scheduler.enter(RankPosition(job.rank, job.world_size, 0, 1), 0)
    job.enter(rank=job.rank, world_size=job.world_size, generation=1, checkpoint_scheduler=scheduler, state=state)
    state.watch_optimizers(job.guard())
    state.begin()
    wraps = "no job.ddp" not in how and how != "weighted"
    model = job.ddp(state.model) if wraps else state.model
    if how == "module in place of its wrapper":
        model = state.model
    criterion = nn.Identity() if how == "sharded" else state.criterion
    if how.startswith("wrapped") or "penalty" in how:
        criterion = job.ddp(criterion)
    if how == "in no_sync" or "in place of" in how:
        criterion = nn.Identity()
    if how == "in the optimizer only":
        criterion = nn.Identity()
    if how == "frozen for good":
        state.criterion.requires_grad_(False)
    for number in range(steps):
        if how.endswith("a rate of its own"):
            state.optimizer.param_groups[0]["lr"] = 0.01 / (1 + job.rank)
        if how.startswith("unfrozen"):
            criterion = nn.Identity()
            if number == 2:
                state.model[0].requires_grad_(True)
                model = job.ddp(state.model) if "again" in how else model
        step(job, state, model, criterion, how)
    return state


def on_ranks(rank: int, world_size: int, port: int, *, how: str, steps: int, ignore: bool = False) -> list[Any]:
    """[error, committed steps, what elastic has printed]"""
    group = formed(rank, world_size, port)
    job = Job(name="j", device=CPU, local_rank=rank, link=Link(), ignore_bad_numbers=ignore)
    job.rank, job.world_size = rank, world_size
    said, error, state = io.StringIO(), "", None
    with contextlib.redirect_stderr(said):
        try:
            state = train(job, how, steps)
        except RuntimeError as raised:
            error = str(raised)
    group.close()
    lines = [line for line in said.getvalue().splitlines() if line.startswith("elastic:")]
    return [error, state.step if state else 0, "\n".join(lines)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "name"),
    [
        # Adam's first step is the gradient's sign alone, and the same on all ranks here.
        ("unwrapped", "state.criterion.weight differs between the ranks after step 2 (ranks 1, 2 from rank 0)"),
        ("weighted", "state.model.1.weight"),
        ("module in place of its wrapper", "state.model.1.weight, state.model.1.bias differs between the ranks"),
        ("in no_sync", "state.model.1.weight, state.model.1.bias differs between the ranks"),
        ("unwrapped penalty", "state.model.1.weight, state.model.1.bias differs between the ranks"),
        ("unfrozen later", "state.model.0.weight, state.model.0.bias differs between the ranks after step 4"),
        ("sharded", "state.optimizer.state.0.momentum"),
        # Adam's state of it is on rank 0 only.
        ("used on rank 0 only", "state.criterion.weight differs between the ranks after step 1"),
    ],
)
def test_what_no_exchange_makes_alike_is_refused_by_name_on_all_ranks(how: str, name: str) -> None:
    found = run_ranks(on_ranks, world_size=3, how=how, steps=6)
    assert found[0][0] == found[1][0] == found[2][0]
    assert name in found[0][0]
    assert "job.ddp" in found[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "wrapped",
        "by hand",
        "no job.ddp, by hand",
        "unfrozen again",
        "in the optimizer only",
        "frozen for good",
        "alike penalty",
        "penalty of nothing on rank 0",
    ],
)
def test_replicas_that_are_alike_train_on(how: str) -> None:
    assert run_ranks(on_ranks, world_size=2, how=how, steps=5) == [["", 5, ""]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no job.ddp at all", "differs between the ranks after step"),
        ("used on rank 0 only, no job.ddp", "state.criterion.weight differs between the ranks after step 1"),
        ("used on rank 0 only, averaged, no job.ddp", "the parameter was stepped on some ranks only"),
    ],
)
def test_where_nothing_is_known_to_exchange_gradients_it_is_said_once(how: str, said: str) -> None:
    """Ranks that average their weights now and then, and have not all used each layer yet."""
    first, second = run_ranks(on_ranks, world_size=2, how=how, steps=5)
    assert first[:2] == second[:2] == ["", 5]
    assert first[2].count(said) == first[2].count("elastic:") == 1
    assert second[2] == ""


@pytest.mark.slow
def test_a_rate_that_each_rank_sets_by_itself_is_refused() -> None:
    for error, _, _ in run_ranks(on_ranks, world_size=2, how="wrapped, a rate of its own", steps=3):
        assert "state.optimizer.param_groups[0]['lr'] is not the same on each rank after step 1" in error
        assert "State(…, scheduler=…)" in error


@pytest.mark.slow
def test_a_value_that_one_rank_alone_keeps_is_said_once() -> None:
    first, second = run_ranks(on_ranks, world_size=2, how="wrapped, best on rank 0 only", steps=5)
    assert first[:2] == second[:2] == ["", 5]
    assert first[2].count("state.best is not the same on each rank after step 1 (rank 1 from rank 0)") == 1
    assert first[2].count("elastic:") == 1
    assert second[2] == ""


@pytest.mark.slow
def test_an_object_of_which_the_ranks_differences_are_known_is_not_named() -> None:
    first, second = run_ranks(on_ranks, world_size=2, how="wrapped, as is known, samples of its own", steps=5)
    assert first == second == ["", 5, ""]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "name"), [("samples", "replay"), ("a hidden state", "best")])
def test_what_each_rank_keeps_of_its_own_in_a_value_or_an_object_is_said_once(how: str, name: str) -> None:
    first, second = run_ranks(on_ranks, world_size=2, how=f"wrapped, {how} of its own", steps=5)
    assert first[:2] == second[:2] == ["", 5]
    assert first[2].count(f"state.{name} is not the same on each rank after step 1 (rank 1 from rank 0)") == 1
    assert first[2].count("elastic:") == 1
    assert second[2] == ""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["noise after the exchange", "renormalised rows"])
def test_what_a_rank_changes_by_itself_is_said_once_though_its_gradients_are_exchanged(how: str) -> None:
    """It may be the hardware that rounds differently: no error."""
    first, *others = run_ranks(on_ranks, world_size=3, how=f"wrapped, {how}", steps=9)
    assert first[:2] == ["", 9]
    assert first[2].count("elastic:") == 1
    assert "state.model.1.weight" in first[2]
    assert "differs between the ranks after step" in first[2]
    assert "though its gradients are exchanged" in first[2]
    assert others == [["", 9, ""]] * 2


def saved(rank: int, world_size: int, port: int, *, how: str) -> list[int]:
    """The steps that are saved, of three."""
    group, backend = formed(rank, world_size, port), NoBackend()
    job = Job(name="j", device=CPU, local_rank=rank, link=Link())
    job.rank, job.world_size = rank, world_size
    with contextlib.redirect_stderr(io.StringIO()):
        train(job, how, 3, backend)
    group.close()
    return [part.step for part in backend.parts]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "wrapped, noise after the exchange"])
def test_no_checkpoint_is_left_out_for_what_is_only_said(how: str) -> None:
    """A generation that ends before its second one would have none."""
    assert run_ranks(saved, world_size=2, how=how) == [[1, 2, 3]] * 2


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that is made, which no other one shares its memory with."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last", "conjugate"])
def test_no_parameter_is_copied_as_a_whole_to_be_compared(layout: str) -> None:
    """A copy of a large table, on a device that is nearly full, would be out of memory."""
    plain = torch.arange(2.0 * ELEMENTS * 8).reshape(8, 16, 2, -1)
    values = plain.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) if layout == "transposed" else plain
    values = plain.to(memory_format=torch.channels_last) if layout == "channels last" else values
    values = torch.complex(values, values).conj() if layout == "conjugate" else values
    same = torch.complex(plain, -plain).resolve_conj() if layout == "conjugate" else plain
    expected = replicas._values({"p": nn.Parameter(same)})
    with Largest() as largest:
        assert replicas._values({"p": nn.Parameter(values)}) == expected
    assert 0 < largest.numel <= 8 * ELEMENTS


def test_a_parameter_is_compared_by_its_values_whatever_its_layout() -> None:
    small = torch.complex(torch.rand(2, 3), torch.rand(2, 3))
    for plain, other in ((small.conj().resolve_conj(), small.conj()), (small.imag.neg(), small.conj().imag)):
        assert replicas._values({"p": nn.Parameter(other)}) == replicas._values({"p": nn.Parameter(plain)})
    assert replicas._values({"p": nn.Parameter(torch.tensor(1.0))})


@pytest.mark.slow
def test_a_job_that_ignores_bad_numbers_is_told_and_trains_on() -> None:
    first, second = run_ranks(on_ranks, world_size=2, how="unwrapped", steps=5, ignore=True)
    assert first[:2] == second[:2] == ["", 5]
    assert "state.criterion.weight differs" in first[2]


def drifts(rank: int, world_size: int, port: int, *, weights: bool) -> str:
    """What the fingerprint says of a model whose BatchNorm is each rank's own, by `sync_buffers=False`."""
    group = formed(rank, world_size, port)
    job = Job(name="j", device=CPU, local_rank=rank, link=Link(), fingerprint_every_steps=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None, state=state)
    state.begin()
    wrapped = job.ddp(state.model, sync_buffers=False)
    try:
        for _ in range(2):
            wrapped(torch.randn(8, 4) * (rank + 1)).square().sum().backward()
            state.optimizer.step()
            if weights and rank:
                with torch.no_grad():
                    model[0].weight[0, 0] += 1.0
            job.commit(state)
    except FloatingPointError as error:
        return str(error)
    finally:
        group.close()
    return ""


@pytest.mark.slow
def test_buffers_that_are_each_ranks_own_are_no_drift() -> None:
    assert run_ranks(drifts, world_size=2, weights=False) == ["", ""]
    assert "drift at step 1" in run_ranks(drifts, world_size=2, weights=True)[0]
