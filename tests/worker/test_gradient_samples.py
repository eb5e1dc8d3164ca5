"""Samples of gradients: what they contain, what they cost while none is due, and that they change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic.contract.worker.messages import MAX_MESSAGE_BYTES, GradientSample, encode
from elastic.worker.checks.first_bad import FirstBad
from elastic.worker.checks.gradient_samples import ROWS, GradientSampler
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state import state as elastic_state


class State:
    def __init__(self, *modules: nn.Module) -> None:
        self._modules = list(modules)

    def modules(self) -> list[nn.Module]:
        return self._modules

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return []


class Bucket:
    def __init__(self, held: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._held = held

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for parameter, _ in self._held]

    def gradients(self) -> list[torch.Tensor]:
        return [gradient for _, gradient in self._held]


def sampled(
    model: nn.Module, own: dict[str, torch.Tensor], mean: dict[str, torch.Tensor], **more: Any
) -> list[GradientSample]:
    sent: list[GradientSample] = []
    sampler, state = GradientSampler(1, sent.append), State(model)
    sampler.begin(0)
    named = dict(model.named_parameters())
    sampler.own(Bucket([(named[name], gradient) for name, gradient in own.items()]))
    for name, gradient in mean.items():
        named[name].grad = gradient
    sampler.applied(state)
    sampler.committed(state, generation=1, step=1, rank=0, **({"empty": False} | more))
    return sent


def test_a_sample_has_own_and_mean_gradient_and_weights_of_each_parameter() -> None:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 2.0)
    model.bias.requires_grad_(False)
    (sample,) = sampled(model, {"weight": torch.tensor([[3.0, 4.0]])}, {"weight": torch.tensor([[0.6, 0.8]])})
    weight, bias = sample.rows
    assert (weight.name, weight.own, weight.trained, weight.bad) == ("weight", 5.0, True, False)
    assert weight.mean == pytest.approx(1.0)
    assert weight.weight == pytest.approx(8**0.5)
    assert (bias.own, bias.mean, bias.trained) == (None, None, False)
    assert sample.gradients
    assert sample.weights


def test_gradients_that_are_not_finite_are_marked_and_can_be_sent() -> None:
    (sample,) = sampled(
        nn.Linear(1, 1), {"weight": torch.tensor([[float("nan")]])}, {"bias": torch.tensor([float("inf")])}
    )
    assert [(row.own, row.mean, row.bad) for row in sample.rows] == [(None, None, True), (None, None, True)]
    encode(sample)


def test_digests_are_equal_for_equal_gradients_and_weights_alone() -> None:
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    one, other = ({"weight": torch.full((2, 2), value)} for value in (1.0, 1.0000001))
    (a,), (b,), (c,) = sampled(model, one, {}), sampled(model, one, {}), sampled(model, other, {})
    assert a.gradients == b.gradients != c.gradients
    assert a.weights == c.weights
    with torch.no_grad():
        model.bias[0] += 1e-6
    (d,) = sampled(model, one, {})
    assert d.weights != a.weights


def test_a_rank_without_samples_in_the_step_has_no_gradients_of_its_own() -> None:
    (sample,) = sampled(nn.Linear(1, 1), {"weight": torch.ones(1, 1)}, {}, empty=True)
    assert sample.gradients == ""
    assert sample.rows[0].own is None


def test_sparse_empty_and_half_gradients_have_norms() -> None:
    model = nn.Embedding(4, 1, sparse=True)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 3]]), torch.tensor([[3.0], [4.0]]), (4, 1), check_invariants=True
    )
    (sample,) = sampled(model, {"weight": sparse}, {})
    assert sample.rows[0].own == 5.0
    (half,) = sampled(nn.Linear(1, 1).to(torch.bfloat16), {"weight": torch.full((1, 1), 2.0, dtype=torch.bfloat16)}, {})
    assert half.rows[0].own == 2.0


def test_weights_in_8_bits_have_norms_and_end_no_search() -> None:
    """Frozen ones, as of a base model below LoRA's layers. torch computes next to nothing in these types."""
    model = nn.Linear(2, 1, bias=False)
    model.weight = nn.Parameter(torch.tensor([[3.0, 4.0]]).to(torch.float8_e4m3fn), requires_grad=False)
    (sample,) = sampled(model, {}, {})
    assert sample.rows[0].weight == 5.0
    found = FirstBad()
    found.watch([nn.Identity()])
    assert "finite" in found.description(Batch([5, 6], torch.ones(2, 2).to(torch.float8_e4m3fn)))


def test_a_sample_of_many_parameters_fits_into_messages() -> None:
    model = nn.Module()
    for number in range(2 * ROWS + 1):
        model.register_parameter(f"{number:04}_{'x' * 200}", nn.Parameter(torch.zeros(1)))
    parts = sampled(model, {}, {})
    assert [(part.part, part.parts, len(part.rows)) for part in parts] == [(0, 3, ROWS), (1, 3, ROWS), (2, 3, 1)]
    assert all(len(encode(part)) < MAX_MESSAGE_BYTES for part in parts)


def test_samples_are_due_at_the_interval_and_at_the_step_that_was_requested_or_the_next() -> None:
    sampler = GradientSampler(4, lambda sample: None)
    assert [step + 1 for step in range(12) if (sampler.begin(step), sampler.on)[1]] == [4, 8, 12]
    sampler = GradientSampler(0, lambda sample: None)
    sampler.begin(0)
    assert not sampler.on
    sampler.asked_at = 5
    sampler.begin(3)
    assert not sampler.on
    sampler.begin(6)  # the order came late
    assert sampler.on
    sampler.committed(State(nn.Linear(1, 1)), generation=1, step=7, rank=0, empty=False)
    sampler.begin(7)
    assert not sampler.on


class Batch:
    def __init__(self, indices: list[int], data: Any) -> None:
        self.indices, self.data = indices, data


class Spoils(nn.Module):
    def __init__(self, *places: int) -> None:
        super().__init__()
        self._places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for at in self._places:
            x[at] = float("nan")
        return x


def test_the_first_layer_that_is_not_finite_and_its_samples_are_named() -> None:
    model, found = nn.Sequential(nn.Linear(2, 2), Spoils(1), nn.Linear(2, 1)), FirstBad()
    found.watch([model])
    model(torch.ones(3, 2))
    assert found.description(Batch([70, 80, 90], torch.ones(3, 2))) == "first in layer 1 (Spoils), for sample 80"
    found.begin()
    model(torch.ones(2, 2))  # two micro-batches of one step
    model(torch.ones(2, 2))
    assert found.description(Batch([1, 2, 3, 4], torch.ones(4, 2))) == "first in layer 1 (Spoils), for samples 2, 4"
    found.off()
    model(torch.ones(3, 2))
    assert not found.on
    assert found.description(None) == ""


def test_samples_that_are_not_finite_themselves_are_named_without_hooks() -> None:
    data = torch.ones(3, 2)
    data[2, 0] = float("inf")
    assert FirstBad().description(Batch([5, 6, 7], {"x": data})) == "the data of sample 7 are not finite themselves"
    assert FirstBad().description(Batch([5, 6], torch.ones(2, 2))) == "this rank had samples 5, 6"


def test_finite_outputs_of_all_layers_point_to_the_loss() -> None:
    model, found = nn.Linear(1, 1), FirstBad()
    found.watch([model])
    model(torch.ones(1, 1))
    assert (
        found.description(None)
        == "the outputs of all layers without inner ones are finite: look at what follows them, and at the loss"
    )


def test_a_job_without_debug_sets_no_hook_and_reads_no_gradient() -> None:
    job = Job(name="j", device=torch.device("cpu"), local_rank=0, link=Link())
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None)
    assert not job.sampler.on
    assert not job._first_bad.on


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_and_sparse_layers_are_left_out_of_the_search() -> None:
    """TorchScript takes no hooks: refused, the job would fail where it goes back after a bad loss."""
    found = FirstBad()
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)), Spoils(0))
    found.watch([model, torch.jit.script(nn.Linear(1, 1))])
    model(torch.ones(2, 2))
    assert "Spoils" in found.description(None)
    sparse = torch.ones(2, 2).to_sparse()
    assert FirstBad().description(Batch([5, 6], {"x": sparse})) == "this rank had samples 5, 6"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscales", [True, False])
def test_norms_are_those_of_the_loss_whatever_a_scaler_multiplies_it_by(fused: bool, unscales: bool) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    state = elastic_state.State(model=model, optimizer=optimizer)
    sent: list[GradientSample] = []
    sampler, scaler = GradientSampler(1, sent.append), torch.amp.GradScaler("cpu", init_scale=1024.0)
    state.watch_optimizers(lambda: sampler.applied(state))
    sampler.begin(0)
    scaler.scale(model(torch.tensor([[3.0, 4.0]])).sum()).backward()
    assert model.weight.grad is not None
    sampler.own(Bucket([(model.weight, model.weight.grad)]))
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update(1.0)
    sampler.committed(state, generation=1, step=1, rank=0, empty=False)
    (row,) = sent[0].rows
    assert (row.own, row.mean) == (5.0, 5.0)


def test_of_two_scalers_each_divides_the_gradients_that_it_has_scaled() -> None:
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    state = elastic_state.State(one=models[0], two=models[1], first=optimizers[0], second=optimizers[1])
    sent: list[GradientSample] = []
    sampler = GradientSampler(1, sent.append)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in models]
    state.watch_optimizers(lambda: sampler.applied(state))
    for step in range(2):
        sampler.begin(step)
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):  # the second is first used later
            scaler.scale(model(torch.tensor([[3.0, 4.0]])).sum()).backward()
            assert model.weight.grad is not None
            sampler.own(Bucket([(model.weight, model.weight.grad)]))
            scaler.step(optimizer)
            scaler.update(1024.0)
            optimizer.zero_grad()
        sampler.committed(state, generation=1, step=step + 1, rank=0, empty=False)
    assert [row.own for sample in sent for row in sample.rows] == [5.0] * 4
