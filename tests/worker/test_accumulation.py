"""Gradient accumulation as people write it: one exchange a step, and the gradient of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.forming import formed
from support.pairs import Pairs, columns
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn

from elastic.worker.comm import comm_hooks
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.state import State

MICRO, STEPS, BATCH = 3, 3, 12
FORMS = ("parts", "no_sync", "accelerate", "flag", "lightning")


class Accelerator:
    """The part of accelerate's Accelerator that accumulates: `accumulate(model)` and `backward`, as in its 1.15."""

    def __init__(self, steps: int) -> None:
        self.gradient_accumulation_steps, self._step, self.sync_gradients = steps, 0, True

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        self._step += 1
        self.sync_gradients = self._step % self.gradient_accumulation_steps == 0
        with contextlib.nullcontext() if self.sync_gradients else model.no_sync():  # type: ignore[operator]
            yield

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.gradient_accumulation_steps).backward()


def chunks(batch: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(batch.x.chunk(MICRO), batch.y.chunk(MICRO), strict=True))


def backward(form: str, model: Any, batch: Any, accelerator: Accelerator) -> None:
    match form:
        case "parts":
            for part in batch.parts():
                F.mse_loss(model(part.x), part.y).backward()
        case "no_sync":
            *first, last = chunks(batch)
            with model.no_sync():
                for x, y in first:
                    (F.mse_loss(model(x), y) / MICRO).backward()
            (F.mse_loss(model(last[0]), last[1]) / MICRO).backward()
        case "accelerate":
            for x, y in chunks(batch):
                with accelerator.accumulate(model):
                    accelerator.backward(F.mse_loss(model(x), y))
        case "flag":  # minGPT, nanoGPT
            for number, (x, y) in enumerate(chunks(batch)):
                model.require_backward_grad_sync = number == MICRO - 1
                (F.mse_loss(model(x), y) / MICRO).backward()
        case "lightning":  # the forward of the last one inside too
            for number, (x, y) in enumerate(chunks(batch)):
                with contextlib.nullcontext() if number == MICRO - 1 else model.no_sync():
                    loss = F.mse_loss(model(x), y) / MICRO
                    loss.backward()


def train(job: Job, state: State, form: str) -> tuple[list[list[float]], int]:
    """(the gradient of each step, exchanges of gradients in all)."""
    counted = []
    real = comm_hooks.GradientHook.__call__

    def counting(hook: comm_hooks.GradientHook, bucket: Any) -> Any:
        counted.append(1)
        return real(hook, bucket)

    model = job.ddp(state.model, bucket_cap_mb=100)
    comm_hooks.GradientHook.__call__ = counting  # type: ignore[method-assign]
    accelerator, found = Accelerator(MICRO), []
    for batch in job.batches(Pairs(), state, batch_size=BATCH, steps=STEPS, micro_batch=2, shuffle=False):
        state.model.zero_grad()
        backward(form, model, batch, accelerator)
        found.append(torch.cat([p.grad.flatten() for p in state.model.parameters()]).tolist())
        job.commit(state)
    comm_hooks.GradientHook.__call__ = real  # type: ignore[method-assign]
    return found, len(counted)


def build() -> State:
    torch.manual_seed(0)
    return State(model=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double())


def on_ranks(rank: int, world_size: int, port: int) -> Any:
    group = formed(rank, world_size, port)
    found = {}
    for form in FORMS:
        job = Job(name="j", device=torch.device("cpu"), local_rank=rank, link=Link())
        job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None)
        state = build()
        state.begin()
        found[form] = train(job, state, form)
        dist.barrier()
    group.close()
    return found


@pytest.fixture(scope="module")
def accumulated() -> list[dict[str, Any]]:
    return run_ranks(on_ranks, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_accumulation_exchanges_once_a_step_and_gives_the_whole_batchs_gradient(
    accumulated: list[dict[str, Any]], form: str
) -> None:
    state = build()
    want = []
    for step in range(STEPS):
        samples = [Pairs()[i] for i in range(step * BATCH, (step + 1) * BATCH)]
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        state.model.zero_grad()
        F.mse_loss(state.model(x), y).backward()
        want.append(torch.cat([p.grad.flatten() for p in state.model.parameters()]).tolist())
    for rank in accumulated:
        gradients, exchanges = rank[form]
        assert exchanges == STEPS
        assert gradients == [pytest.approx(step, rel=1e-10) for step in want]


# ── a loop over micro-batches that is not the one of its step ───────────────────────────────────────────────


def alone(rank: int = 0, world_size: int = 1) -> tuple[Job, State, nn.Module]:
    torch.manual_seed(0)
    net = nn.Linear(4, 1, dtype=torch.float64)
    job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Link())
    state = State(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    state.watch_optimizers(job.guard())
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None)
    state.begin()
    return job, state, job.ddp(net)


def test_a_second_loop_over_the_parts_of_a_step_is_refused() -> None:
    """It would weight the gradients of the first again."""
    job, state, model = alone()
    loaded = job.batches(Pairs(), state, batch_size=8, micro_batch=2)
    batch = next(loaded)
    for part in batch.parts():
        F.mse_loss(model(part.x), part.y).backward()
    with pytest.raises(RuntimeError, match=r"a second loop over batch\.parts\(\) in one step"):
        next(batch.parts())
    state.optimizer.step()
    for part in batch.parts():  # of another model, as a GAN's generator
        F.mse_loss(model(part.x), part.y).backward()
    state.optimizer.zero_grad()
    for part in batch.parts():
        F.l1_loss(model(part.x), part.y).backward()


def test_a_loop_over_parts_that_is_left_before_its_end_is_not_applied() -> None:
    job, state, model = alone()
    batch = next(job.batches(Pairs(), state, batch_size=8, micro_batch=2))
    for _, part in zip(range(4), batch.parts(), strict=False):
        F.mse_loss(model(part.x), part.y).backward()
    with pytest.raises(RuntimeError, match=r"zip\(batch\.parts\(\), masks\)"):
        state.optimizer.step()


def test_after_the_loop_over_batches_no_rank_counts_as_empty() -> None:
    job, state, _ = alone()
    for _ in job.batches(Pairs(), state, batch_size=60, epochs=1):
        job._gradient_weight.begin(0.0)  # as on a rank without samples in the last batch
        state.optimizer.step()
        job.commit(state)
    assert not job._gradient_weight.empty


def left_early(rank: int, world_size: int, port: int) -> Any:
    """(what the optimizer's step raised, whether the weights are those of the beginning), with and without
    `weighted`."""
    group = formed(rank, world_size, port)
    found = []
    for weighted in (False, True):
        job, state, model = alone(rank, world_size)
        before = state.model.weight.detach().clone()
        batch = next(job.batches(Pairs(), state, batch_size=8, micro_batch=2))
        for part in batch.parts():
            loss = F.mse_loss(model(part.x), part.y)
            (job.weighted(loss, 2) if weighted else loss).backward()
            break
        try:
            state.optimizer.step()
            said = ""
        except RuntimeError as error:
            said = str(error)
        found.append([said, bool(torch.equal(before, state.model.weight))])
    group.close()
    return found


@pytest.mark.slow
def test_gradients_of_a_rank_alone_are_not_applied_where_a_loop_over_parts_was_left_early() -> None:
    """The ranks exchange them in the last backward: without it the replicas would drift apart."""
    for results in run_ranks(left_early, world_size=2):
        for said, as_before in results:
            assert "left before its end" in said
            assert as_before


def own_loop_after(rank: int, world_size: int, port: int) -> Any:
    """The gradient of a backward after the last batch was dropped within its parts, for each way to leave its loop."""
    group = formed(rank, world_size, port)
    found = []
    for way in ("to the end", "next", "uncommitted"):
        job, state, model = alone(rank, world_size)
        loaded = job.batches(Pairs(), state, batch_size=8, micro_batch=2, steps=1)
        batch = next(loaded)
        for part in batch.parts():
            F.mse_loss(model(part.x), part.y).backward()
            break  # as for a part that is NaN
        state.optimizer.zero_grad()
        if way != "uncommitted":
            job.commit(state)
        if way == "to the end":
            next(loaded, None)
        loaded.close()  # type: ignore[attr-defined]
        if way == "uncommitted":
            job.commit(state)
        model(torch.full((1, 4), float(rank), dtype=torch.float64)).sum().backward()
        found.append(state.model.weight.grad.flatten().tolist())
    group.close()
    return found


@pytest.mark.slow
def test_gradients_are_exchanged_after_a_loop_over_parts_that_was_left_early() -> None:
    for found in run_ranks(own_loop_after, world_size=2):
        assert found == [[0.5] * 4] * 3


def whole_after_parts(rank: int, world_size: int, port: int) -> Any:
    """The gradient of the whole batch, of which rank 1 has less, after one in parts: applied, dropped, or added to."""
    group = formed(rank, world_size, port)
    found = []
    for before in ("applied", "dropped", "kept"):
        job, state, model = alone(rank, world_size)
        for group_of in state.optimizer.param_groups:
            group_of["lr"] = 0.0
        batch = next(job.batches(Pairs(), state, batch_size=7, micro_batch=2, shuffle=False))
        for part in batch.parts():
            F.mse_loss(model(part.x), part.y).backward()
            if before == "dropped":
                state.optimizer.zero_grad()
                break
        if before != "kept":
            state.optimizer.step()
            state.optimizer.zero_grad()
        F.mse_loss(model(batch.x), batch.y).backward()
        found.append(state.model.weight.grad.flatten().tolist())
    group.close()
    return found


@pytest.mark.slow
def test_a_backward_of_the_whole_batch_after_its_parts_has_the_weight_of_the_batch() -> None:
    """As a GAN's second model, or a penalty on top of the loss; it had the weight of the last part."""
    _, state, model = alone()
    x, y = columns(7)
    F.mse_loss(model(x), y).backward()
    once = state.model.weight.grad.flatten()
    want = [pytest.approx((factor * once).tolist(), rel=1e-10) for factor in (1, 1, 2)]
    for found in run_ranks(whole_after_parts, world_size=2):
        assert found == want


def test_after_a_loop_over_batches_that_was_left_no_rank_has_its_weight() -> None:
    job, state, _ = alone()
    for _ in job.batches(Pairs(), state, batch_size=60, epochs=1):
        job._gradient_weight.begin(0.0)  # as on a rank without samples in this batch
        state.optimizer.step()
        job.commit(state)
        assert job._gradient_weight.empty, "a number that is added up behind the commit is still that of this step"
        break
    assert not job._gradient_weight.empty


def test_a_batch_whose_loop_is_gone_has_its_weight_until_it_is_committed() -> None:
    job, state, _ = alone()
    batch = next(job.batches(Pairs(), state, batch_size=8, epochs=1))
    assert job._gradient_weight() == batch.weight == 1.0
    job._gradient_weight.begin(0.25)  # as on one of four ranks
    assert job._gradient_weight() == 0.25
    job.commit(state)
    assert job._gradient_weight._weight is None


def test_a_loop_that_is_closed_late_leaves_the_weight_of_the_one_that_follows() -> None:
    job, state, _ = alone()
    first = job.batches(Pairs(), state, batch_size=8, epochs=1)
    next(first)
    job.commit(state)
    second = job.batches(Pairs(), state, batch_size=8, epochs=1)
    next(second)
    first.close()  # type: ignore[attr-defined]  # a generator, dropped with the traceback that held it
    assert job._gradient_weight._weight == 1.0


def test_two_loops_in_one_step_are_refused_where_one_weight_cannot_serve_both() -> None:
    job, state, _ = alone(rank=1, world_size=2)
    both = zip(
        job.batches(Pairs(), state, batch_size=8, steps=10),
        job.batches(Pairs(), state, batch_size=16, steps=10),
        strict=True,
    )
    for labelled, unlabelled in both:  # half of each
        assert labelled.weight == unlabelled.weight
        job.commit(state)
        if state.step == 2:
            break
    both = zip(
        job.batches(Pairs(), state, batch_size=8, steps=10),
        job.batches(Pairs(), state, batch_size=7, steps=10),
        strict=True,
    )
    next(both)
    with pytest.raises(RuntimeError, match=r"has 0\.5 and 0\.4286 of the samples"):
        job._gradient_weight()
    del both
    job.commit(state)
    next(job.batches(Pairs(), state, batch_size=7))  # to look at a sample: its loop is gone
    loop = job.batches(Pairs(), state, batch_size=8)
    next(loop)
    assert job._gradient_weight() == 0.5


def test_a_loop_that_is_closed_late_leaves_the_weight_of_one_that_has_just_taken_its_first_batch() -> None:
    """A garbage collection may close it at any instruction, also before the new loop's batch has reached the script."""
    job, state, _ = alone(rank=1, world_size=2)
    old = job.batches(Pairs(), state, batch_size=7)
    next(old)
    job.commit(state)
    job.enter(rank=1, world_size=2, generation=2, checkpoint_scheduler=None)
    waited = job._link.waited
    job._link.waited = lambda data_s: (old.close(), waited(data_s))[1]  # type: ignore[attr-defined,method-assign]
    batch = next(new := job.batches(Pairs(), state, batch_size=8))
    assert job._gradient_weight._weight == batch.weight == 0.5
    new.close()  # type: ignore[attr-defined]


def test_a_loop_without_batches_leaves_the_weight_of_the_one_around_it() -> None:
    job, state, _ = alone(rank=1, world_size=2)
    for batch in job.batches(Pairs(), state, batch_size=7, steps=1):
        assert not list(job.batches(Pairs(), state, batch_size=8, steps=0))
        assert job._gradient_weight._weight == batch.weight
        job.commit(state)


def two_by_next(job: Job, state: State, *, sizes: tuple[int, int], between: bool = False) -> str:
    """What a backward raises if two batches were taken by `next(job.batches(…))` in one step."""
    weight = job._gradient_weight  # what the exchange of each backward asks
    _first = next(job.batches(Pairs(), state, batch_size=sizes[0]))
    if between:
        weight()
    _second = next(job.batches(Pairs(), state, batch_size=sizes[1]))
    try:
        weight()
    except RuntimeError as error:
        job.enter(rank=1, world_size=2, generation=2, checkpoint_scheduler=None)
        return str(error)
    state.optimizer.step()
    job.commit(state)
    return ""


def test_two_batches_by_next_in_one_step_are_refused_where_one_weight_cannot_serve_both() -> None:
    job, state, _ = alone(rank=1, world_size=2)
    assert not two_by_next(job, state, sizes=(8, 16))
    assert not two_by_next(job, state, sizes=(8, 7), between=True), "the backward of the first had its weight"
    said = two_by_next(job, state, sizes=(8, 7))
    assert "0.4286 and 0.5 of the samples" in said
    assert not two_by_next(job, state, sizes=(8, 8)), "nothing is left of that step"
    next(job.batches(Pairs(), state, batch_size=7))  # to look at a sample
    for _ in job.batches(Pairs(), state, batch_size=8, steps=4):
        job._gradient_weight()
        state.optimizer.step()
        job.commit(state)


def test_a_batch_to_look_at_whose_loop_is_kept_is_named_with_the_way_out() -> None:
    """It cannot be told from the first step of two zipped loops."""
    job, state, _ = alone(rank=2, world_size=3)
    probe = job.batches(Pairs(), state, batch_size=32)
    next(probe)
    loop = job.batches(Pairs(), state, batch_size=64, steps=3)
    next(loop)
    with pytest.raises(RuntimeError, match=r"only to look at, .*close\(\)"):
        job._gradient_weight()
    job.commit(state)
    assert job._gradient_weight() == next(loop).weight, "a step later"

    job, state, _ = alone(rank=2, world_size=3)
    probe = job.batches(Pairs(), state, batch_size=32)
    next(probe)
    probe.close()  # type: ignore[attr-defined]
    loop = job.batches(Pairs(), state, batch_size=64)
    assert next(loop).weight == job._gradient_weight()


def test_of_two_loops_a_rank_has_samples_of_both_or_of_none() -> None:
    """Tokens of a rank without samples do not count in `job.total`, and those of the other batch would not either."""
    job, state, _ = alone(rank=1, world_size=2)
    both = zip(
        job.batches(Pairs(), state, batch_size=8, steps=10),
        job.batches(Pairs(), state, batch_size=1, steps=10),
        strict=True,
    )
    with pytest.raises(RuntimeError, match="two loops over batches"):
        next(both)


def zipped(rank: int, world_size: int, port: int, weighted: bool) -> Any:
    """The gradient of two batches of unlike shares, or what the backward raised."""
    group = formed(rank, world_size, port)
    job, state, model = alone(rank, world_size)
    loops = [job.batches(Pairs(), state, batch_size=size, shuffle=False) for size in (7, 5)]
    one, other = (next(loop) for loop in loops)
    try:
        if weighted:
            job.weighted(F.mse_loss(model(one.x), one.y, reduction="sum"), one.size).backward()
            job.weighted(F.mse_loss(model(other.x), other.y, reduction="sum"), other.size).backward()
        else:
            (F.mse_loss(model(one.x), one.y) + F.mse_loss(model(other.x), other.y)).backward()
    except RuntimeError as error:
        return str(error)
    finally:
        group.close()
    return state.model.weight.grad.flatten().tolist()


@pytest.mark.slow
def test_two_loops_whose_losses_have_their_own_weights_are_right_and_others_are_refused() -> None:
    _, state, model = alone()
    for size in (7, 5):
        x, y = columns(size)
        F.mse_loss(model(x), y).backward()
    want = pytest.approx(state.model.weight.grad.flatten().tolist(), rel=1e-10)
    assert run_ranks(zipped, world_size=2, weighted=True) == [want, want]
    for said in run_ranks(zipped, world_size=2, weighted=False):
        assert "two loops over batches in one step" in said
