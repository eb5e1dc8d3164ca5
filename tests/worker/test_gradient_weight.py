"""The weight of a backward: of which batch it is, of which part of it, and what the gradients hold already."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from support.forming import formed
from support.pairs import Pairs, columns
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn

from elastic.worker.comm.ddp import GradientWeight
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.state import State


def alone(rank: int = 0, world_size: int = 1, lr: float = 0.1) -> tuple[Job, State, nn.Module, nn.Module]:
    """(job, state, model, other model), as `job.ddp` gives them."""
    torch.manual_seed(0)
    net, other = (nn.Linear(4, 1, dtype=torch.float64) for _ in range(2))
    job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Link())
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=lr) for name, m in (("opt", net), ("opt_other", other))}
    state = State(model=net, other=other, **optimizers)
    state.watch_optimizers(job.guard())
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None, state=state)
    state.begin()
    return job, state, job.ddp(net), job.ddp(other)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch.x), batch.y)


# ── an optimizer within a loop over parts ───────────────────────────────────────────────────────────────────


def test_an_optimizer_that_steps_in_the_last_part_leaves_its_weight() -> None:
    job, state, _, _ = alone(rank=1, world_size=2)
    batch = next(job.batches(Pairs(), state, batch_size=12, micro_batch=2))
    for number, part in enumerate(batch.parts()):
        if number == 2:
            state.opt_other.step()
            assert job._gradient_weight() == part.weight == pytest.approx(2 / 12)
    assert job._gradient_weight() == 0.5, "after the loop it is that of the batch"


def test_a_loop_that_was_left_in_its_last_part_is_over_when_its_generator_is() -> None:
    job, state, _, _ = alone(rank=1, world_size=2)
    batch = next(job.batches(Pairs(), state, batch_size=12, micro_batch=2))
    kept = batch.parts()
    for _ in range(3):
        next(kept)
    assert job._gradient_weight() == pytest.approx(2 / 12)
    kept.close()  # type: ignore[attr-defined]
    assert job._gradient_weight() == 0.5


def test_a_loop_over_parts_that_is_closed_late_leaves_the_weight_of_the_one_that_follows() -> None:
    job, state, _, _ = alone(rank=1, world_size=2)
    batch = next(job.batches(Pairs(), state, batch_size=12, micro_batch=2))
    old, new = batch.parts(), batch.parts()
    for _ in range(3):
        next(old)
    state.opt.step()
    for _ in range(3):
        next(new)
    old.close()  # type: ignore[attr-defined]
    assert job._gradient_weight() == pytest.approx(2 / 12)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_next_batch_does_not_complete_a_loop_over_parts_that_was_left(weighted: bool) -> None:
    job, state, model, _ = alone(rank=1, world_size=2)
    first = next(job.batches(Pairs(), state, batch_size=12, micro_batch=2))
    for part in first.parts():
        value = loss(model, part)
        (job.weighted(value, total=torch.tensor(6.0)) if weighted else value).backward()
        break
    second = next(job.batches(Pairs(), state, batch_size=7))
    with pytest.raises(RuntimeError, match="left before its end"):
        state.opt.step()
    state.opt.zero_grad()
    state.opt.step()
    assert job._gradient_weight._weight == second.weight != first.weight


def last_part_skipped(rank: int, world_size: int, port: int, before: bool) -> Any:
    """What the optimizer's step raises where the script runs no backward in the last part: `before` the loop's end."""
    group = formed(rank, world_size, port)
    job, state, model, _ = alone(rank, world_size)
    batch, said = next(job.batches(Pairs(), state, batch_size=12, micro_batch=2)), []
    for number, part in enumerate(batch.parts()):
        if number < 2:
            loss(model, part).backward()
        elif before:
            said.append(stepped(state))
    if not before:
        said.append(stepped(state))
    state.opt.zero_grad()
    job.commit(state)
    loss(model, next(job.batches(Pairs(), state, batch_size=12))).backward()
    said.append(stepped(state))
    group.close()
    return said


def stepped(state: State) -> str:
    try:
        state.opt.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_without_a_backward_in_the_last_part_nothing_is_applied(before: bool) -> None:
    for skipped, after in run_ranks(last_part_skipped, world_size=2, before=before):
        assert "no backward has run in the last part of batch.parts()" in skipped
        assert not after, "the next step is whole"


def lone_backwards(rank: int, world_size: int, port: int, case: str) -> Any:
    """What the script is told, where a model has not one backward in the last part of the batch."""
    group = formed(rank, world_size, port)
    job, state, model, other = alone(rank, world_size)
    loaded, said = job.batches(Pairs(), state, batch_size=12, micro_batch=2), []
    if case == "of before":
        loss(other, next(loaded)).backward()
        state.opt_other.step()  # its gradients are dropped before its next backward, as a GAN's
        job.commit(state)
    if case == "wrapped again":
        model = job.ddp(state.model)  # as after unfreezing a parameter
    try:
        for number, part in enumerate(next(loaded).parts()):
            (loss(model, part) * (math.inf if case == "not finite" else 1.0)).backward()
            match case:
                case "of the module":
                    loss(state.other, part).backward()  # as a GAN's critic in its generator's loss
                case "two" | "not finite":
                    loss(model, part).backward()
                case "not finite here" if number == 2:  # on one rank, as the loss of a part without samples
                    (loss(model, part) * (math.nan if rank else 1.0)).backward()
                    said.append("the sums are not finite" * (not state.model.weight.grad.isfinite().all()))
                case "none" | "none, and a step" if number < 2:
                    loss(other, part).backward()
                case "none, and a step":
                    state.opt.step()
        said.append(stepped(state))
    except RuntimeError as error:
        said.append(str(error))
    group.close()
    return said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("two", "a second backward in the last part"),
        ("not finite", ""),  # the critic's step was skipped, as by a GradScaler, before the generator's backward
        ("not finite here", "the sums are not finite"),  # no rank raises while another waits for its sums
        ("none", "no backward has run in the last part"),
        ("none, and a step", "no backward has run in the last part"),
        ("of before", ""),
        ("of the module", ""),
        ("wrapped again", ""),
    ],
)
def test_each_model_has_one_backward_in_the_last_part(case: str, told: str) -> None:
    """Sums that are exchanged a second time have weights that do not add up to 1, and those of a model without any are
    this rank's own."""
    for said in run_ranks(lone_backwards, world_size=2, case=case):
        assert told in said
        assert bool(told) == bool(said), said


def refused_together(rank: int, world_size: int, port: int, case: str) -> str:
    """What a rank is told of a batch of 5 in micro-batches of 2, of which rank 0 has two and rank 1 one."""
    group = formed(rank, world_size, port)
    job, state, model, _ = alone(rank, world_size)
    batch, said = next(job.batches(Pairs(), state, batch_size=5, micro_batch=2)), ""
    try:
        if case == "held":
            loss(model, batch).backward()
        for part in batch.parts():
            loss(model, part).backward()
            if case == "two" and part.indices[-1] == batch.indices[-1]:
                loss(model, part).backward()
        state.opt.step()
    except RuntimeError as error:
        said = str(error)
    group.close()
    return said


@pytest.mark.slow
@pytest.mark.parametrize(("case", "told"), [("two", "a second backward"), ("held", "an earlier backward"), ("", "")])
def test_what_is_refused_of_a_loop_over_parts_is_refused_on_ranks_that_have_one_part_only(case: str, told: str) -> None:
    """That rank applied and committed the step, and its state was the newest when the job went on."""
    for said in run_ranks(refused_together, world_size=2, case=case):
        assert told in said
        assert bool(told) == bool(said), said


def skipped_gan(rank: int, world_size: int, port: int, none: bool) -> Any:
    """What a GAN is told whose critic's step a GradScaler skips, and whose critic's gradients are dropped then; and the
    generator's gradient."""
    group = formed(rank, world_size, port)
    job, state, critic, generator = alone(rank, world_size, lr=0.0)
    scaler, said = torch.amp.GradScaler("cpu", init_scale=1.0), ""
    batch = next(job.batches(Pairs(), state, batch_size=11, micro_batch=2, shuffle=False))
    try:
        for number, part in enumerate(batch.parts()):
            scaler.scale(loss(critic, part) * math.inf).backward()
            if number == 2:
                scaler.step(state.opt)
                state.opt.zero_grad(set_to_none=none)
            scaler.scale(loss(generator, part) + critic(part.x).mean()).backward()
        scaler.step(state.opt_other)
        scaler.update()
    except RuntimeError as error:
        said = str(error)
    group.close()
    return said, state.other.weight.grad.flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("none", [True, False])
def test_a_gans_critic_whose_gradients_were_dropped_has_no_second_backward(none: bool) -> None:
    _, state, _, _ = alone()
    x, y = columns(11)
    F.mse_loss(state.other(x), y).backward()
    want = pytest.approx(state.other.weight.grad.flatten().tolist(), rel=1e-10)
    assert run_ranks(skipped_gan, world_size=2, none=none) == [["", want], ["", want]]


def two_optimizers(rank: int, world_size: int, port: int) -> Any:
    """The second model's gradient, where the first model's optimizer steps within the last part."""
    group = formed(rank, world_size, port)
    job, state, model, other = alone(rank, world_size, lr=0.0)
    batch = next(job.batches(Pairs(), state, batch_size=11, micro_batch=2, shuffle=False))
    for number, part in enumerate(batch.parts()):
        loss(model, part).backward()
        if number == 2:
            state.opt.step()
        loss(other, part).backward()
    state.opt_other.step()
    group.close()
    return state.other.weight.grad.flatten().tolist()


@pytest.mark.slow
def test_two_optimizers_that_step_within_the_last_part_have_the_batchs_gradient() -> None:
    """The first one's step gave the second model's exchange the weight of the whole batch."""
    _, state, _, _ = alone()
    x, y = columns(11)
    F.mse_loss(state.other(x), y).backward()
    want = pytest.approx(state.other.weight.grad.flatten().tolist(), rel=1e-10)
    assert run_ranks(two_optimizers, world_size=2) == [want, want]


# ── gradients that exist before a loop over parts ───────────────────────────────────────────────────────────

HELD = r"gradients that an earlier backward has left: .*zero_grad\(\)"


def test_gradients_that_were_exchanged_before_a_loop_over_parts_are_not_weighted_again() -> None:
    job, state, model, _ = alone(rank=1, world_size=2)
    batch = next(job.batches(Pairs(), state, batch_size=8, micro_batch=2))
    state.opt.step()
    loss(model, batch).backward()
    job._gradient_weight()  # as the exchange of that backward asks
    with pytest.raises(RuntimeError, match=HELD):
        next(batch.parts())
    state.opt.step()
    for part in batch.parts():  # they were applied, and are dropped within the loop
        if part.indices == batch.indices[:2]:
            state.opt.zero_grad()
        loss(model, part).backward()
    state.opt.step()


def test_gradients_of_the_whole_batch_before_a_loop_over_parts_are_refused_standalone_too() -> None:
    job, state, model, _ = alone()
    batch = next(job.batches(Pairs(), state, batch_size=8, micro_batch=2))
    loss(model, batch).backward()
    with pytest.raises(RuntimeError, match=HELD):
        next(batch.parts())
    state.opt.zero_grad(set_to_none=False)
    next(batch.parts())


def own_before_parts(rank: int, world_size: int, port: int, how: str) -> str:
    """What a loop over parts raises after a backward that was not exchanged."""
    group = formed(rank, world_size, port)
    job, state, model, _ = alone(rank, world_size)
    for batch in job.batches(Pairs(), state, batch_size=8, micro_batch=2, steps=2):
        try:
            if state.step:  # after an optimizer's step, so that gradients may have been applied
                with model.no_sync() if how == "no_sync" else contextlib.nullcontext():  # type: ignore[operator]
                    loss(model if how == "no_sync" else state.model, batch).backward()
            for part in batch.parts():
                loss(model, part).backward()
        except RuntimeError as error:
            group.close()
            return str(error)
        state.opt.step()
        state.opt.zero_grad()
        job.commit(state)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["no_sync", "module"])
def test_gradients_that_were_not_exchanged_before_a_loop_over_parts_are_not_weighted_by_it(how: str) -> None:
    """They had the weight of the last part."""
    for said in run_ranks(own_before_parts, world_size=2, how=how):
        assert re.search(HELD, said)


def test_gradients_before_a_loop_over_parts_are_refused_standalone_in_each_step() -> None:
    job, state, model, _ = alone()
    loaded = job.batches(Pairs(), state, batch_size=8, micro_batch=2)
    for part in next(loaded).parts():
        loss(model, part).backward()
    state.opt.step()
    state.opt.zero_grad()
    job.commit(state)
    batch = next(loaded)
    loss(model, batch).backward()
    with pytest.raises(RuntimeError, match=HELD):
        next(batch.parts())


def test_a_copy_of_a_batch_with_other_data_is_cut_as_the_batch_is() -> None:
    job, state, _, _ = alone()
    batch = next(job.batches(Pairs(), state, batch_size=8, micro_batch=2))
    doubled = msgspec.structs.replace(batch, data=[2 * batch.x, batch.y])
    assert torch.cat([part.x for part in doubled.parts()]).equal(2 * batch.x)


@pytest.mark.parametrize("micro_batch", [2, None])
def test_a_batch_of_an_earlier_step_is_not_cut_again(micro_batch: int | None) -> None:
    job, state, model, _ = alone()
    loaded = job.batches(Pairs(), state, batch_size=8, micro_batch=micro_batch)
    used = next(loaded)
    for _ in range(2):  # one model after the other
        for part in used.parts():
            loss(model, part).backward()
        state.opt.step()
        state.opt.zero_grad()
    job.commit(state)
    with pytest.raises(RuntimeError, match="not taken in this step"):
        next(used.parts())
    next(next(loaded).parts())
    with pytest.raises(RuntimeError, match="not taken in this step"):
        next(used.parts())


def test_gradients_kept_over_a_commit_are_not_weighted_again() -> None:
    job, state, model, other = alone()
    loaded = job.batches(Pairs(), state, batch_size=8, micro_batch=2)
    for part in next(loaded).parts():
        loss(model, part).backward()
        loss(other, part).backward()
    job.commit(state)
    batch = next(loaded)
    with pytest.raises(RuntimeError, match=HELD):
        next(batch.parts())
    state.opt.zero_grad()  # a GAN after a step that GradScaler has skipped: its second model's are dropped later
    for part in batch.parts():
        loss(model, part).backward()
    state.opt.step()


def test_sums_may_be_kept_over_a_commit() -> None:
    """Each exchange of them leaves those of earlier steps what they are."""
    job, state, model, other = alone()
    loaded = job.batches(Pairs(), state, batch_size=8, micro_batch=2)
    for _ in range(3):
        for part in next(loaded).parts():
            job.weighted((loss(model, part) + loss(other, part)) * 2, total=torch.tensor(8.0)).backward()
        job.commit(state)
    state.opt.step()


def test_the_next_generation_holds_no_gradients() -> None:
    weight = GradientWeight()
    weight.take(0.5, object())
    weight()
    weight.detach_all()
    assert not weight._held


# ── batches by next(job.batches(…)) ─────────────────────────────────────────────────────────────────────────


def test_a_batch_that_a_backward_has_used_does_not_count_beside_the_next_one() -> None:
    for first_steps in (True, False):
        job, state, _, _ = alone(rank=1, world_size=2)
        weight = job._gradient_weight  # what the exchange of each backward asks
        first = next(job.batches(Pairs(), state, batch_size=8))
        assert weight() == weight() == first.weight, "asked for each bucket"
        if first_steps:
            state.opt.step()
        second = next(job.batches(Pairs(), state, batch_size=7))
        assert weight() == weight() == second.weight
        state.opt_other.step()
        job.commit(state)


def test_a_batch_whose_loop_was_left_after_its_backward_does_not_count_either() -> None:
    job, state, _, _ = alone(rank=1, world_size=2)
    for _ in job.batches(Pairs(), state, batch_size=8):
        job._gradient_weight()
        break
    second = next(job.batches(Pairs(), state, batch_size=7))
    assert job._gradient_weight() == second.weight
    state.opt.step()


def test_an_optimizers_step_ends_the_batches_before_it() -> None:
    """As of a model that the script exchanges on its own."""
    for within in (False, True):
        job, state, _, _ = alone(rank=1, world_size=2)
        loop = job.batches(Pairs(), state, batch_size=8)
        next(loop)
        if within:
            state.opt.step()
        loop.close()  # type: ignore[attr-defined]
        if not within:
            state.opt.step()
        second = next(job.batches(Pairs(), state, batch_size=7))
        assert job._gradient_weight() == second.weight
        state.opt_other.step()


@pytest.mark.parametrize("sizes", [(8, 1), (1, 8)])
def test_terms_of_two_batches_of_which_a_rank_has_samples_of_one_are_not_added_up(sizes: tuple[int, int]) -> None:
    """Whether this rank counts would be one answer for both."""
    job, state, _, _ = alone(rank=1, world_size=2)
    both = [next(job.batches(Pairs(), state, batch_size=size)) for size in sizes]
    assert sorted(batch.size for batch in both) == [0, 4]
    with pytest.raises(RuntimeError, match="two loops over batches"):
        job.total(both[0].size)
    with pytest.raises(RuntimeError, match="two loops over batches"):
        job.weighted(torch.ones((), requires_grad=True), total=torch.ones(()))


@pytest.mark.parametrize("sizes", [(8, 1), (1, 8)])
def test_terms_of_two_batches_one_after_the_other_are_added_up(sizes: tuple[int, int]) -> None:
    job, state, _, _ = alone(rank=1, world_size=2)
    found = []
    for size in sizes:
        next(job.batches(Pairs(), state, batch_size=size))
        one = torch.ones((), requires_grad=True)
        job.weighted(one, total=torch.ones(())).backward()
        found.append(one.grad.item())  # type: ignore[union-attr]
    assert found == [0.0 if size == 1 else 2.0 for size in sizes]


def test_a_batch_to_look_at_of_which_a_rank_has_no_sample_is_not_in_the_way_of_a_loop() -> None:
    job, state, _, _ = alone(rank=1, world_size=2)
    assert not next(job.batches(Pairs(), state, batch_size=1)).size
    next(job.batches(Pairs(), state, batch_size=2))
    for batch in job.batches(Pairs(), state, batch_size=8, steps=2):
        job.weighted(torch.ones((), requires_grad=True), total=torch.ones(()))
        assert not job._gradient_weight.empty
        assert batch.size == 4
        state.opt.step()
        job.commit(state)


def test_a_batch_to_look_at_within_a_loop_is_named_with_the_way_out() -> None:
    """It cannot be told from one whose loss is added to that of the loop's batch."""
    job, state, _, _ = alone(rank=1, world_size=2)
    for _ in job.batches(Pairs(), state, batch_size=8, steps=1):
        probe = job.batches(Pairs(), state, batch_size=7)
        next(probe)
        probe.close()  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"only to look at, take it before the loop, not within"):
            job._gradient_weight()
        break
