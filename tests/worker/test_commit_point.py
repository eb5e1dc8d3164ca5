"""Back to the last commit: what is put back, what is noticed, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.guards.optimizer_marks import WINDOW as COMPARED
from elastic.worker.state.guards.optimizer_marks import OptimizerMarks
from elastic.worker.state.guards.watch import WINDOW, TensorWatch, _Window
from elastic.worker.state.state import State


def norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2)))


def build(net: nn.Module | None = None, **more: Any) -> State:
    net = net or norm()
    state = State(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.1), **more)
    state.begin()
    return state


def forward(state: State) -> None:
    torch.manual_seed(state.step)
    state.model(torch.randn(5, 4)).square().sum().backward()


def step(state: State) -> None:
    forward(state)
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.committed(1)


def bits(state: State) -> list[bytes]:
    return [tensor.numpy().tobytes() for _, tensor in state.tensors()]


# ── what is put back ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("size", "there"), [(20_000, 3), (200_000, 4)])
def test_counters_that_numpy_changes_never_go_back_behind_the_commit(size: int, there: int) -> None:
    """No version counter tells of it. What a failure cuts off is undone up to 1 MiB, and stays beyond that."""
    net = nn.Linear(4, 2)
    net.register_buffer("seen", torch.zeros(size, dtype=torch.int64))
    net.register_buffer("mask", torch.zeros(8 * size, dtype=torch.bool))
    state = build(net, counts=torch.zeros(size, dtype=torch.int64))

    def count() -> None:
        np.add.at(state.counts.numpy(), [5], 1)
        np.add.at(net.seen.numpy(), [5], 1)
        net.mask.numpy()[state.step] = True

    for _ in range(3):
        count()
        step(state)
    count()
    assert state.rewind() is None
    assert (int(state.counts[5]), int(net.seen[5]), int(net.mask.sum())) == (there, there, there)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_rewind_restores_buffers_changed_by_a_forward(steps: int) -> None:
    """Running statistics and the vectors of spectral_norm: the step is taken again, from what the commit left."""
    state = build()
    for _ in range(steps):
        step(state)
    before = bits(state)
    forward(state)
    assert bits(state) != before
    assert state.rewind() is None
    assert state.clean()
    assert bits(state) == before


def test_a_step_taken_again_comes_to_the_same_bits() -> None:
    undisturbed, disturbed = build(), build()
    for number in range(4):
        step(undisturbed)
        if number % 2:
            forward(disturbed)
            disturbed.rewind()
            disturbed.forget_gradients()
        step(disturbed)
    assert bits(undisturbed) == bits(disturbed)


class Counting(nn.Linear):
    """Extra state that each forward changes and uses."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.calls = {"n": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["n"] += 1
        return super().forward(x) * self.calls["n"]

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, held: Any) -> None:
        self.calls = held


class Buffer(nn.Linear):
    """A buffer that becomes another tensor with each forward, as `self.total = self.total + 1` makes it."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + 1
        return super().forward(x)


def test_extra_state_and_buffers_that_are_replaced_go_back() -> None:
    for net, what in ((Counting(), lambda m: m.calls["n"]), (Buffer(), lambda m: float(m.total))):
        state = build(net)
        step(state)
        forward(state)
        assert what(net) == 2
        assert state.rewind() is None
        assert what(net) == 1


def test_plain_values_schedules_and_options_go_back() -> None:
    net = norm()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = State(
        model=net,
        optimizer=optimizer,
        scheduler=scheduler,
        count=0,
        seen=[],
        tables={"t": torch.zeros(2)},
        bare=torch.zeros(2),
    )
    state.begin()
    bare = state.bare
    optimizer.step()
    scheduler.step()
    state.count += 1
    state.seen.append("a")
    state.tables["t"] += 1
    state.bare += 1
    state.committed(1)
    state.count += 1
    state.seen.append("b")
    state.tables["t"] += 1
    state.bare.data += 1
    optimizer.param_groups[0]["lr"] *= 0.1
    optimizer.param_groups[0]["note"] = 1
    scheduler.last_epoch += 1
    assert state.rewind() is None
    assert (state.count, state.seen, float(state.tables["t"][0]), float(bare[0])) == (1, ["a"], 1.0, 1.0)
    assert state.bare is bare
    assert (optimizer.param_groups[0]["lr"], "note" in optimizer.param_groups[0], scheduler.last_epoch) == (
        0.5,
        False,
        1,
    )


def test_options_of_an_optimizer_are_copied_again_only_when_they_may_have_changed() -> None:
    state = build(nn.Linear(2, 2))
    group = state.optimizer.param_groups[0]

    def copied() -> object:
        state.committed(1)
        return state._point._rests["optimizer"]

    first = copied()
    assert copied() is first
    group["lr"] = group["lr"] * 2
    second = copied()
    assert second is not first
    assert copied() is second
    group["tags"] = [1]
    assert copied() is not copied(), "a list may change in place"
    group["tags"].append(2)
    assert state._point.differs() == "optimizer"
    assert state.rewind() is None
    assert group["tags"] == [1]
    del group["tags"]
    assert state._point.differs() == "optimizer"


def test_a_scaler_forgets_the_step_that_was_cut_short() -> None:
    net = nn.Linear(4, 2)
    state = build(net, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))

    def scaled() -> None:
        state.scaler.scale(net(torch.ones(1, 4)).sum()).backward()
        state.scaler.unscale_(state.optimizer)

    scaled()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.committed(1)
    scaled()
    assert state.rewind() is None
    state.forget_gradients()
    scaled()  # "unscale_() has already been called" if anything was left of the other one
    assert state.scaler.get_scale() == 8.0


class NativeScaler:
    """As timm, MAE and DeiT have one."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def __call__(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)


def test_a_scaler_within_another_object_forgets_the_step_that_was_cut_short() -> None:
    """Else the step that is done again finds its gradients unscaled already, and applies them 65536 times too large."""
    net = nn.Linear(4, 2)
    state = State(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), scaler=NativeScaler())
    state.begin()

    def ended() -> None:
        raise RuntimeError("the generation has ended")

    state.scaler(net(torch.ones(1, 4)).sum(), state.optimizer)
    state.committed(1)
    state.optimizer.zero_grad()
    state.watch_optimizers(ended)
    with pytest.raises(RuntimeError, match="has ended"):
        state.scaler(net(torch.ones(1, 4)).sum(), state.optimizer)
    assert state.rewind() is None
    state.watch_optimizers(None)
    state.forget_gradients()
    state.begin()
    before = net.weight.detach().clone()
    state.scaler(net(torch.ones(1, 4)).sum(), state.optimizer)
    assert torch.allclose(before - net.weight, torch.full_like(before, 0.1))


def test_rewind_restores_parameters_known_to_change_in_a_forward() -> None:
    """`max_norm` renormalises rows in the forward."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(4, 3, max_norm=0.1), nn.Linear(3, 1))
    state = build(net)

    def look_up() -> None:
        net(torch.tensor([0, 1])).sum().backward()

    for _ in range(2):
        look_up()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.committed(1)
    before = bits(state)
    look_up()
    assert bits(state) != before
    assert state.rewind() is None
    assert bits(state) == before


def test_commit_point_tracks_tensors_too_large_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for itself, and all together."""
    for name, limit in (("COPIED_BYTES", 100), ("TOTAL_BYTES", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(f"elastic.worker.state.commit_point.{name}", limit)
            net = nn.Module()
            for number in range(4):
                net.register_buffer(f"b{number}", torch.zeros(10 + 20 * (number == 3)))
            state = State(model=net)
            state.begin()
            net.b0.add_(1)
            assert state.rewind() is None
            assert float(net.b0[0]) == 0.0
            net.b3.add_(1)
            assert state.rewind() == "model.b3"
            assert not state.clean()


def test_an_average_of_the_weights_is_copied_up_to_a_limit_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it is watched: at each commit a copy of all would cost as much memory as the model, and time."""

    class Average:
        def __init__(self) -> None:
            self.shadow = [torch.zeros(10) for _ in range(6)]

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, held: dict[str, Any]) -> None:
            self.shadow = held["shadow"]

    monkeypatch.setattr("elastic.worker.state.commit_point.TOTAL_BYTES", 100)
    average = Average()
    state = State(average=average)
    state.begin()
    state.committed(1)
    average.shadow[1] += 1
    assert state.rewind() is None
    assert float(average.shadow[1][0]) == 0.0
    average.shadow[5] += 1
    assert state.rewind() == "average"
    assert not state.clean()


class Average:
    """Replaces its tensors at each update; `copies`: changes them in place, and its state_dict() has copies."""

    def __init__(self, copies: bool) -> None:
        self.shadow = {"w": torch.ones(10)}
        self.copies = copies

    def update(self) -> None:
        self.shadow = {"w": self.shadow["w"].mul_(0.5) if self.copies else self.shadow["w"] * 0.5}

    def state_dict(self) -> dict[str, Any]:
        return {key: tensor.clone() if self.copies else tensor for key, tensor in self.shadow.items()}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.shadow = dict(held)


@pytest.mark.parametrize("limit", ["COPIED_BYTES", "TOTAL_BYTES"])
@pytest.mark.parametrize("copies", [False, True])
def test_tensors_too_large_to_copy_go_back_if_they_are_replaced(
    limit: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object of the commit is still there, and watched: it is put back."""
    monkeypatch.setattr(f"elastic.worker.state.commit_point.{limit}", 30)
    state = build(nn.Linear(4, 2), ema=Average(copies), large=torch.ones(10), small=torch.ones(3))
    step(state)
    state.turned()
    for _ in range(2):
        state.ema.update()
        state.large = state.large * 0.5
        state.small = state.small * 0.5
        assert state.rewind() is None
        assert state.clean()
        assert [float(t[0]) for t in (state.ema.shadow["w"], state.large, state.small)] == [1.0, 1.0, 1.0]
        state.begin()


@pytest.mark.parametrize("copies", [False, True])
def test_tensors_too_large_to_copy_are_noticed_if_replaced_after_the_commit(
    copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.worker.state.commit_point.COPIED_BYTES", 30)
    state = build(nn.Linear(4, 2), ema=Average(copies), large=torch.ones(10))
    step(state)
    state.large = state.large.clone()
    state.turned()
    state.ema.update()
    with pytest.raises(RuntimeError, match=r"state\.ema was changed"):
        state.turned()
    step(state)
    state.large = state.large * 0.5
    with pytest.raises(RuntimeError, match=r"state\.large was changed"):
        state.turned()


@pytest.mark.parametrize("change", [False, True])
def test_buffers_and_values_that_cannot_be_written_in_place(change: bool) -> None:
    net = nn.Linear(4, 2)
    net.register_buffer("mask", torch.ones(1).expand(5))
    with torch.inference_mode():
        net.register_buffer("found", torch.ones(5))
    state = build(net, masks={"mask": torch.ones(1).expand(5)})
    step(state)
    if change:
        with torch.inference_mode():
            net.found.zero_()  # type: ignore[operator]
        net.mask.untyped_storage().fill_(0)  # type: ignore[operator]
    assert state.rewind() is None
    assert net.mask.tolist() == net.found.tolist() == [1.0] * 5  # type: ignore[operator]


def test_commit_point_detects_changes_in_values_without_plain_equality() -> None:
    state = build(nn.Linear(4, 2), seen=[np.arange(4)], convert={np.ndarray: (lambda a: a.tolist(), np.array)})
    step(state)
    state.turned()
    state.seen[0][1] = 9
    with pytest.raises(RuntimeError, match=r"state\.seen was changed between job\.commit"):
        state.turned()
    assert state.rewind() is None
    assert state.seen[0].tolist() == [0, 1, 2, 3]


# ── what is noticed ─────────────────────────────────────────────────────────────────────────────────────────


def manual(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1


def foreach(net: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_add_(list(net.parameters()), 0.1)


def data(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data.add_(0.1)


def numpy(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.detach().numpy()[...] += 1


def other_storage(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data + 1


def vector(net: nn.Module) -> None:
    nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in net.parameters())), net.parameters())


def replaced(net: nn.Module) -> None:
    net.weight = nn.Parameter(torch.zeros(2, 4))  # type: ignore[assignment]


def taken_out(net: nn.Module) -> None:
    del net._parameters["weight"]


CHANGES: list[Callable[[nn.Module], None]] = [manual, foreach, data, numpy, other_storage, vector, replaced, taken_out]


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_something_else_has_changed_are_noticed(change: Callable[[nn.Module], None]) -> None:
    state = build(nn.Linear(4, 2))
    step(state)
    change(state.model)
    assert state.clean(), "no optimizer has stepped"
    assert state.rewind() in ("model.weight", "model.bias", "a parameter")
    assert not state.clean()


def test_an_average_beside_the_model_is_watched_too() -> None:
    net = nn.Linear(4, 2)
    average = torch.optim.swa_utils.AveragedModel(net)
    state = build(net, average=average)
    step(state)
    average.update_parameters(net)
    assert state.rewind() == "average.module.weight"
    assert not state.clean()


def test_commit_point_treats_nan_and_moved_storage_as_unchanged() -> None:
    net = nn.Linear(4, 2)
    state = build(net)
    step(state)
    state.changing()
    with torch.no_grad():
        net.weight.fill_(float("nan"))
    state.committed(1)
    net.weight.data = net.weight.data.clone()  # as an LSTM's weights after `flatten_parameters`
    assert state.rewind() is None
    assert state.clean()


def test_with_very_many_tensors_a_change_of_all_is_noticed() -> None:
    tensors = [torch.zeros(3) for _ in range(2 * WINDOW + 5)]
    watch = TensorWatch()
    for _ in range(4):
        watch.take(tensors)
        assert watch.changed(tensors) == []
    for tensor in tensors:
        tensor.data.add_(1)
    assert watch.changed(tensors)
    watch.take(tensors)
    places = [1, WINDOW + 1, 2 * WINDOW + 1]
    for place in places:  # one of each window, and only one window is sampled
        tensors[place].add_(1)
    assert watch.changed(tensors) == places


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex128, torch.bool, torch.float8_e4m3fn])
def test_tensors_of_any_kind_can_be_watched(dtype: torch.dtype) -> None:
    dense = torch.zeros(4, 6).to(dtype)
    kinds = [dense, dense.t(), dense[:0], torch.zeros((), dtype=dtype), dense[:, ::2], torch.empty(3, device="meta")]
    watch = TensorWatch()
    watch.take(kinds)
    assert watch.changed(kinds) == []
    dense.data.view(torch.uint8 if dtype.itemsize == 1 else dtype).fill_(1)
    assert 0 in watch.changed(kinds)


def test_half_changed_stays_half_changed() -> None:
    state = build()
    step(state)
    forward(state)
    state.optimizer.step()
    assert state.rewind() is None
    assert not state.clean()


# ── after the commit ────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_after_the_commit_is_refused_by_name_with_the_cure() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = State(model=net, optimizer=optimizer, scheduler=scheduler, best=0.0, norm=nn.BatchNorm1d(3))

    def turn(change: Callable[[], Any]) -> str:
        state.begin()
        optimizer.step()
        state.committed(1)
        state.turned()
        optimizer.zero_grad()
        change()
        with pytest.raises(RuntimeError, match=r"between job\.commit\(\) and the next batch") as caught:
            state.turned()
        return str(caught.value).split(" ")[0]

    assert turn(scheduler.step) == "state.optimizer"
    assert turn(lambda: scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": 7})) == "state.scheduler"
    assert turn(lambda: setattr(state, "best", 1.0)) == "state.best"
    assert turn(lambda: manual(net)) == "state.model.weight"
    assert turn(lambda: state.norm(torch.randn(4, 3))).startswith("state.norm.")


EPOCH = 3  # steps


def enter(state: State) -> Job:
    """`train` is entered, in a process of its own."""
    job = Job(name="j", device=torch.device("cpu"), local_rank=0, link=Link())
    state.forget_gradients()
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None, state=state)
    state.begin()
    return job


def scheduled() -> State:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    return State(model=net, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))


def epochs(job: Job, state: State, first: int, within: bool, fails_at: int = -1) -> None:
    """An epoch after the other, each a loop of its own; the schedule makes a step per epoch, `within` the last step of
    it or between the loops. Ends in the middle of step `fails_at`."""
    for epoch in range(first, 3):
        for batch in job.batches(list(torch.ones(4 * EPOCH, 4)), state, batch_size=4, epochs=epoch + 1):
            state.model(batch.data).sum().backward()
            if state.step == fails_at:
                return
            state.optimizer.step()
            state.optimizer.zero_grad()
            if within and (state.step + 1) % EPOCH == 0:
                state.scheduler.step()
            job.commit(state)
        if not within:
            state.scheduler.step()


def test_a_change_between_two_loops_is_refused_as_one_between_two_batches() -> None:
    """A failure in the first step of the second loop would undo it, and nothing would do it again."""
    state = scheduled()
    with pytest.raises(RuntimeError, match=r"state\.optimizer was changed between job\.commit\(\) and the next batch"):
        epochs(enter(state), state, 0, within=False)
    assert state.step == EPOCH


class Averaging(torch.optim.SGD):
    """As schedulefree's optimizers: the weights are swapped for their average, and back, by arithmetic."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.average = [param.detach() * 0.3 for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def _mix(self, weight: float) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for param, average in zip(params, self.average, strict=True):
            param.lerp_(average, weight)

    def eval(self) -> None:
        self._mix(1 - 1 / 0.9)

    def train(self) -> None:
        self._mix(1 - 0.9)


def test_weights_that_an_optimizer_swaps_by_arithmetic_are_refused_at_the_first_swap_after_a_commit() -> None:
    """Swapped back they differ in the last digit of a few, which no sample shows each time."""
    net = nn.Linear(600, 600, bias=False)
    state = State(model=net, optimizer=Averaging(net.parameters()))
    state.begin()
    for number in range(2):
        state.optimizer.eval()  # before the step they may be
        state.optimizer.train()
        net(torch.ones(1, 600)).sum().backward()
        state.optimizer.step()
        state.committed(1)
        if number == 0:
            state.turned()
    state.optimizer.eval()
    state.optimizer.train()
    with pytest.raises(RuntimeError, match=r"state\.model\.weight was changed between job\.commit"):
        state.turned()


@pytest.mark.parametrize("again", [False, True])
def test_a_schedule_that_steps_before_the_last_commit_of_its_epoch_survives_a_failure(again: bool) -> None:
    """Whether the epochs that are done are passed over (`again`: entered, and without a batch) or not."""
    state = scheduled()
    epochs(enter(state), state, 0, within=True, fails_at=EPOCH)
    assert state.rewind() is None
    epochs(enter(state), state, 0 if again else state.step // EPOCH, within=True)
    assert state.optimizer.param_groups[0]["lr"] == 0.5**3


def test_what_is_set_before_the_first_loop_of_an_entry_is_not_refused() -> None:
    state = scheduled()
    epochs(enter(state), state, 0, within=True, fails_at=EPOCH)
    assert state.rewind() is None
    job = enter(state)
    state.optimizer.param_groups[0]["lr"] = 0.25
    epochs(job, state, 0, within=True)
    assert state.step == 3 * EPOCH


def test_commit_point_accepts_weights_swapped_for_an_evaluation_and_back() -> None:
    """Between the commit and the next batch, and back again: neither refused nor taken for changed later."""
    net = nn.Linear(4, 2)
    state = build(net)
    step(state)
    kept = [parameter.detach().clone() for parameter in net.parameters()]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        for parameter, content in zip(net.parameters(), kept, strict=True):
            parameter.copy_(content)
    state.turned()
    assert state.rewind() is None
    assert state.clean()


def test_commit_point_accepts_buffers_and_values_swapped_for_an_evaluation_and_back() -> None:
    """A whole state dict is loaded and the one before loaded again: BatchNorm's statistics with it."""
    state = build(norm(), scales=[torch.zeros(3)])
    step(state)
    kept = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    for held in ({name: tensor * 0 for name, tensor in kept.items()}, kept):
        state.model.load_state_dict(held)
        state.scales[0] += 1 if held is not kept else -1
    state.turned()
    state.model[1].running_mean.add_(1)
    with pytest.raises(RuntimeError, match=r"state\.model\.1\.running_mean was changed"):
        state.turned()


def test_commit_point_treats_fresh_tensors_with_equal_values_as_unchanged() -> None:
    class Fresh:
        value = 1.0

        def state_dict(self) -> dict[str, Any]:
            return {"t": torch.full((2,), self.value), "d": {"x": float("nan")}}

        def load_state_dict(self, held: dict[str, Any]) -> None:
            self.value = float(held["t"][0])

    fresh = Fresh()
    state = build(fresh=fresh)
    step(state)
    state.turned()
    fresh.value = 2.0
    with pytest.raises(RuntimeError, match=r"state\.fresh"):
        state.turned()
    assert state.rewind() is None
    assert fresh.value == 1.0


# ── optimizers ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def training() -> Iterator[State]:
    state = build(nn.Linear(4, 2))
    state.watch_optimizers(lambda: None)
    yield state
    state.watch_optimizers(None)


def test_optimizer_outside_the_state_is_refused_before_its_step(training: State) -> None:
    stranger = torch.optim.SGD(training.model.parameters(), lr=0.1)
    forward(training)
    before = bits(training)
    with pytest.raises(
        RuntimeError, match=r"SGD steps state\.model\.weight and is not part of the state.*Build it in setup"
    ):
        stranger.step()
    assert bits(training) == before
    assert training.clean()


def test_optimizers_of_other_parameters_go_on(training: State) -> None:
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": [training.model.weight]})
    with pytest.raises(RuntimeError, match="is not part of the state"):
        optimizer.step()


def test_optimizer_outside_the_state_marks_it_changed_when_not_training() -> None:
    state = build(nn.Linear(4, 2))
    torch.optim.SGD(state.model.parameters(), lr=0.1).step()
    assert not state.clean()


class Wrapper:
    """As libraries wrap an optimizer: not one itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.optimizer.state_dict()}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(held["inner"])


def test_an_optimizer_within_a_part_of_the_state_marks_it() -> None:
    net = nn.Linear(4, 2)
    state = State(model=net, optimizer=Wrapper(torch.optim.SGD(net.parameters(), lr=0.1)))
    state.watch_optimizers(lambda: None)
    state.begin()
    for _ in range(2):
        seen = []

        def closure() -> float:
            seen.append(state.clean())  # noqa: B023
            return 0.0

        state.optimizer.optimizer.step(closure)
        assert seen == [True]
        assert not state.clean()
        state.committed(1)
    state.watch_optimizers(None)


class Forgetful(nn.Linear):
    """As a module that builds its optimizer itself: no state dict of a module has an optimizer in it."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.optimizer = torch.optim.Adam(self.parameters())


def test_a_part_that_holds_an_optimizer_and_does_not_keep_its_state_is_not_enough() -> None:
    net = nn.Linear(4, 2)
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.Adam(net.parameters()), 2)
    both = torch.optim.lr_scheduler.ChainedScheduler([schedule])
    own = Forgetful()
    for state, optimizer in (
        (State(model=net, scheduler=schedule), schedule.optimizer),
        (State(model=net, scheduler=both), schedule.optimizer),
        (State(model=own), own.optimizer),
    ):
        state.watch_optimizers(lambda: None)
        with pytest.raises(RuntimeError, match=r"Adam steps state\.model\.weight and is not part of the state"):
            optimizer.step()
        state.watch_optimizers(None)


def test_a_closure_runs_before_anything_changes(training: State) -> None:
    """A rank that waits for the others within its closure has a whole state."""
    seen = []

    def closure() -> torch.Tensor:
        seen.append(training.clean())
        training.optimizer.zero_grad()
        loss = training.model(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    for give in (lambda: training.optimizer.step(closure), lambda: training.optimizer.step(closure=closure)):
        assert isinstance(give(), torch.Tensor)
        assert not training.clean()
        training.committed(1)
    assert seen == [True, True]


def test_a_closure_that_fails_leaves_the_state_whole(training: State) -> None:
    def closure() -> float:
        raise RuntimeError("Connection closed by peer")

    before = bits(training)
    with pytest.raises(RuntimeError, match="closed by peer"):
        training.optimizer.step(closure)
    assert training.rewind() is None
    assert training.clean()
    assert bits(training) == before


def test_lbfgs_is_changing_from_its_second_evaluation_on() -> None:
    net = nn.Linear(4, 2)
    state = State(model=net, optimizer=torch.optim.LBFGS(net.parameters(), max_iter=3))
    seen = []

    def closure() -> torch.Tensor:
        seen.append(state.clean())
        state.optimizer.zero_grad()
        loss = net(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    state.optimizer.step(closure)
    assert seen[0]
    assert len(seen) > 1
    assert not any(seen[1:])


def test_an_optimizer_that_steps_before_its_closure_is_noticed() -> None:
    """As SAM: it goes uphill first, and then asks for the gradients there."""

    class Uphill(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1.0)
            closure()

    def fails() -> None:
        raise RuntimeError("Connection closed by peer")

    net = nn.Linear(4, 2)
    state = State(model=net, optimizer=Uphill(net.parameters(), lr=0.1))
    state.begin()
    with pytest.raises(RuntimeError):
        state.optimizer.step(fails)
    assert state.rewind() == "model.weight"
    assert not state.clean()


def _momentum(optimizer: Any) -> None:
    """As a correction of the momentum where the learning rate is changed."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param]["momentum_buffer"].mul_(0.1)


def _momentum_replaced(optimizer: Any) -> None:
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param]["momentum_buffer"] = optimizer.state[param]["momentum_buffer"] * 0.1


def _momentum_dropped(optimizer: Any) -> None:
    optimizer.state.clear()


def _number(optimizer: Any) -> None:
    optimizer.state["held"]["calls"] += 1


def _number_within(optimizer: Any) -> None:
    optimizer.state["held"]["list"].append(1)


OUTSIDE_STEP: list[Callable[[Any], None]] = [
    _momentum,
    _momentum_replaced,
    _momentum_dropped,
    _number,
    _number_within,
]


@pytest.mark.parametrize("change", OUTSIDE_STEP)
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizers_state_that_changes_outside_its_step_is_noticed(
    change: Callable[[Any], None], wrapped: bool
) -> None:
    """Its tensors are not copied, so what has changed them cannot be undone."""

    def stepped() -> State:
        net = nn.Linear(4, 2)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        outer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        outer.inner = optimizer
        state = State(model=net, optimizer=outer if wrapped else optimizer)
        state.begin()
        for _ in range(2):
            forward(state)
            optimizer.step()
            optimizer.state["held"] = {"calls": 5, "list": [torch.ones(1)]}
            state.committed(1)
        return state

    state = stepped()
    state.turned()
    change(state.optimizer.inner if wrapped else state.optimizer)
    assert state.rewind() == "optimizer.state"
    assert not state.clean()
    state = stepped()
    change(state.optimizer.inner if wrapped else state.optimizer)
    with pytest.raises(RuntimeError, match=r"state\.optimizer\S* was changed between job\.commit"):
        state.turned()


def test_the_state_of_each_of_many_parameters_is_compared_in_turn() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2 * COMPARED + 5)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    sum(weights).backward()  # type: ignore[union-attr]
    optimizer.step()
    marks, found = OptimizerMarks(optimizer), set()
    for _ in range(3):
        marks.take()
        for place, weight in enumerate(weights):
            optimizer.state[weight]["momentum_buffer"].add_(1.0)
            found |= {place} if marks.changed() else set()
            marks._round -= 1
            marks.take()
    assert found == set(range(len(weights)))


@pytest.mark.parametrize("commits", [3, 4])
def test_a_look_at_the_state_of_a_parameter_that_has_none_is_no_change(commits: int) -> None:
    """It creates an empty entry, after as many as are compared at once."""
    weights = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(COMPARED + 1)])
    state = State(model=weights, optimizer=torch.optim.Adam(weights, lr=0.1))
    state.begin()
    for weight in weights[:-1]:
        weight.grad = torch.ones(1)
    for _ in range(commits):
        state.optimizer.step()
        state.committed(1)
    assert not state.optimizer.state[weights[COMPARED]]
    state.turned()
    assert state.rewind() is None


def test_an_optimizers_state_that_does_not_change_is_no_change() -> None:
    """Nor are a look at it, which creates an empty entry, an optimizer's first entries that are empty, and NaN."""
    for optimizer in (torch.optim.AdamW, torch.optim.LBFGS):
        net = nn.Linear(4, 2)
        state = State(model=net, optimizer=optimizer(net.parameters()))
        state.begin()
        state.optimizer.state["held"] = {"calls": 0}
        assert not state.optimizer.state[net.weight]
        assert state.rewind() is None
        for _ in range(2):

            def closure() -> torch.Tensor:
                loss = net(torch.ones(1, 4)).sum()  # noqa: B023
                loss.backward()
                return loss

            state.optimizer.step(closure)
            state.optimizer.state["held"] = {"least": float("nan"), "none": None}
            state.committed(1)
            state.optimizer.state["held"] = {"least": float("nan"), "none": None}
            assert state.optimizer.state[net.bias] is not None
            state.optimizer.state_dict()
            state.turned()
            assert state.rewind() is None
            assert state.clean()


class _Counting(torch.optim.SGD):
    """Changes its own state first, and then asks for the gradients."""

    def step(self, closure: Any = None) -> Any:
        held = self.state["global"]  # type: ignore[index]
        held["steps"] = held.get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(("kind", "clean"), [(_Counting, False), (torch.optim.SGD, True)])
@pytest.mark.parametrize("steps", [1, 5])
def test_an_optimizer_whose_own_state_changes_before_its_closure_is_noticed(
    kind: type[torch.optim.Optimizer], clean: bool, steps: int
) -> None:
    """A kill within the closure left the count of a step that is taken again on survivors said to be whole."""
    net = nn.Linear(4, 2)
    state = State(model=net, optimizer=kind(net.parameters(), lr=0.1, momentum=0.9))  # type: ignore[call-arg]
    state.begin()

    def closure() -> torch.Tensor:
        state.optimizer.zero_grad()
        loss = net(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    def fails() -> None:
        raise RuntimeError("Connection closed by peer")

    for _ in range(steps):
        state.optimizer.step(closure)
        state.committed(1)
    with pytest.raises(RuntimeError):
        state.optimizer.step(fails)
    assert state.rewind() is None
    assert state.clean() == clean


def test_a_tensor_on_a_device_that_has_another_shape_or_type_now_counts_as_changed() -> None:
    window = _Window([7], [torch.ones(3, device="meta")])
    assert window.differing((b"", [torch.ones(5, device="meta")])) == {7}
    assert window.differing((b"", [])) == {7}
