"""The state: what it is made of, how it is taken apart and put together, and when it may be trusted."""

from __future__ import annotations

import collections
import enum
import json
import math
import pathlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic.core.tensors import TensorInfo
from elastic.worker.state import State
from elastic.worker.tree import CannotEncodeError, decode, encode


def model(seed: int = 0, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def trained(seed: int = 0, steps: int = 2, **more: Any) -> State:
    net = model(seed)
    state = State(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.1), **more)
    for _ in range(steps):
        train(state)
    return state


def train(state: State) -> None:
    torch.manual_seed(state.step)
    state.model(torch.randn(5, 4)).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.committed(1)


def copy(source: State, target: State) -> None:
    extra = json.loads(json.dumps(source.extra()))
    target.adopt(source.table(), extra)
    for (_, here), (_, there) in zip(target.tensors(), source.tensors(), strict=True):
        here.copy_(there)
    target.filled()


def same(a: State, b: State) -> bool:
    return (
        a.extra() == b.extra()
        and a.table() == b.table()
        and all(torch.equal(x, y) for (_, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True))
    )


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_parts_and_plain_values_are_attributes() -> None:
    state = State(model=nn.Linear(2, 2), best=math.inf, seen=["a"])
    state.best = 1.5
    state.seen.append("b")
    assert (state.best, state.seen, state.step, state.clean()) == (1.5, ["a", "b"], 0, True)
    with pytest.raises(AttributeError, match=r"no part 'bets': did you mean 'best'\?"):
        state.bets = 2
    with pytest.raises(AttributeError, match="no part 'models'"):
        _ = state.models
    with pytest.raises(AttributeError, match="stays the object"):
        state.model = nn.Linear(2, 2)
    with pytest.raises(AttributeError, match="cannot be set"):
        state.step = 3
    with pytest.raises(ValueError, match="name is taken"):
        State(step=3)


def test_what_json_cannot_hold_is_refused_at_once_with_the_way_out() -> None:
    class Color(enum.Enum):
        RED = 1

    with pytest.raises(CannotEncodeError, match=r"state\.options\.path is PosixPath.*convert=\{PosixPath"):
        State(options={"path": pathlib.Path("/x")})
    state = State(best=1)
    with pytest.raises(CannotEncodeError):
        state.best = object()
    assert state.best == 1
    converted = State(
        convert={pathlib.Path: (str, pathlib.Path), Color: (lambda c: c.name, lambda n: Color[n])},
        folder=pathlib.Path("/x"),
        colors=[Color.RED],
    )
    other = State(
        convert={pathlib.Path: (str, pathlib.Path), Color: (lambda c: c.name, lambda n: Color[n])},
        folder=pathlib.Path("/"),
        colors=[],
    )
    copy(converted, other)
    assert (other.folder, other.colors) == (pathlib.Path("/x"), [Color.RED])


def test_tensors_that_are_not_dense_are_refused() -> None:
    with pytest.raises(TypeError, match=r"state\.odd.*only dense"):
        State(odd=torch.eye(3).to_sparse())


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.tuples(inner, inner)
        | st.sets(st.integers())
        | st.builds(collections.Counter, st.lists(st.integers()))
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_survive_json_exactly(value: Any) -> None:
    def none(name: str, device: str) -> torch.Tensor:
        raise AssertionError(name)

    again = decode(json.loads(json.dumps(encode(value, "x", {}, {}), allow_nan=False)), none, {})
    assert again == value
    assert type(again) is type(value)


def test_nan_survives() -> None:
    encoded = json.dumps(encode([math.nan, -math.inf], "x", {}, {}), allow_nan=False)
    again = decode(json.loads(encoded), lambda *_: torch.empty(0), {})
    assert math.isnan(again[0])
    assert again[1] == -math.inf


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_table_names_everything_once_in_a_fixed_order() -> None:
    state = trained()
    names = [info.name for info in state.table()]
    assert names[0] == "model.0.weight"
    assert "model.1.running_mean" in names
    assert "optimizer.state.0.exp_avg" in names
    assert len(set(names)) == len(names)
    assert names == [info.name for info in trained(seed=3).table()]
    assert state.nbytes() == sum(t.numel() * t.element_size() for _, t in state.tensors())


def test_tied_weights_come_once() -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    net["head"].weight = net["embed"].weight
    state = State(model=net, also=net["head"])
    assert [info.name for info in state.table()] == ["model.embed.weight"]


def test_tensors_share_the_states_storage_and_need_no_gradient() -> None:
    net = nn.Linear(2, 2)
    state = State(model=net)
    (_, weight), _ = state.tensors()
    weight.fill_(7)
    assert net.weight.eq(7).all()
    assert not weight.requires_grad


def test_a_newcomer_takes_over_everything_and_steps_on_alike() -> None:
    source, target = trained(seed=0, steps=3), trained(seed=1, steps=0)
    pointers = [p.data_ptr() for p in target.model.parameters()]
    copy(source, target)
    assert same(source, target)
    assert target.version == (1, 3)
    assert target.established
    train(source)
    train(target)
    assert same(source, target)
    assert [p.data_ptr() for p in target.model.parameters()] == pointers


def test_surplus_optimizer_state_is_dropped() -> None:
    """Going back to before the first step: the moments of later steps must go."""
    source, target = trained(seed=0, steps=0), trained(seed=1, steps=3)
    copy(source, target)
    assert not target.optimizer.state
    train(source)
    train(target)
    assert same(source, target)


def test_optimizer_options_follow_also_those_that_are_tensors() -> None:
    def build(lr: float) -> State:
        net = model()
        groups = [
            {"params": net[0].parameters(), "lr": torch.tensor(lr)},
            {"params": net[2].parameters(), "lr": 2 * lr},
        ]
        return State(optimizer=torch.optim.Adam(groups, foreach=False, capturable=False), model=net)

    source, target = build(0.5), build(0.1)
    source.optimizer.param_groups[1]["betas"] = (0.5, 0.6)
    source.optimizer.param_groups[0]["note"] = "warm"
    target.optimizer.param_groups[0]["stale"] = 1
    copy(source, target)
    first, second = target.optimizer.param_groups
    assert torch.equal(first["lr"], torch.tensor(0.5))
    assert (second["lr"], second["betas"], first["note"]) == (1.0, (0.5, 0.6), "warm")
    assert "stale" not in first


def test_lbfgs_keeps_lists_of_tensors() -> None:
    def build(steps: int) -> State:
        net = model(seed=steps)
        state = State(model=net, optimizer=torch.optim.LBFGS(net.parameters(), max_iter=3))
        for _ in range(steps):
            state.optimizer.step(lambda: closure(state))
            state.committed(1)
        return state

    def closure(state: State) -> torch.Tensor:
        state.optimizer.zero_grad()
        loss = state.model(torch.ones(5, 4)).square().sum()
        loss.backward()
        return loss

    source, target = build(3), build(0)
    copy(source, target)
    assert same(source, target)


@pytest.mark.parametrize("name", ["MultiStepLR", "OneCycleLR", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau"])
def test_schedulers(name: str) -> None:
    options: dict[str, Any] = {
        "MultiStepLR": {"milestones": [1, 1, 3]},
        "OneCycleLR": {"max_lr": 1.0, "total_steps": 10},
        "CosineAnnealingWarmRestarts": {"T_0": 3},
        "ReduceLROnPlateau": {"patience": 0},
    }[name]

    def build(steps: int) -> State:
        state = trained(steps=steps)
        scheduler = getattr(torch.optim.lr_scheduler, name)(state.optimizer, **options)
        both = State(model=state.model, optimizer=state.optimizer, scheduler=scheduler)
        for _ in range(steps):
            tick(both)
        return both

    def tick(state: State) -> None:
        train(state)
        state.scheduler.step(*([2.0] if name == "ReduceLROnPlateau" else []))

    source, target = build(2), build(0)
    copy(source, target)
    for _ in range(3):
        tick(source)
        tick(target)
        assert [g["lr"] for g in source.optimizer.param_groups] == [g["lr"] for g in target.optimizer.param_groups]
    assert same(source, target)


def test_average_models_scalers_and_bare_tensors() -> None:
    def build(seed: int) -> State:
        net = model(seed)
        ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        ema.update_parameters(net)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (seed + 1))
        return State(
            model=net, ema=ema, scaler=scaler, noise=torch.full((3,), float(seed)), nested={"t": [torch.ones(2)]}
        )

    source, target = build(1), build(0)
    noise = target.noise
    copy(source, target)
    assert same(source, target)
    assert target.noise is not None
    assert noise.eq(1).all(), "a tensor that fits is filled where it lies"
    assert target.scaler.get_scale() == 4.0


def test_a_modules_own_extra_state() -> None:
    class Counting(nn.Linear):
        calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, held: Any) -> None:
            self.calls = held["calls"]

    source, target = State(model=Counting(2, 2)), State(model=Counting(2, 2))
    source.model.calls = 5
    copy(source, target)
    assert target.model.calls == 5


def test_strides_of_new_optimizer_state_follow_the_parameter() -> None:
    def build() -> State:
        weight = nn.Parameter(torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last))
        return State(p=nn.ParameterList([weight]), optimizer=torch.optim.SGD([weight], momentum=0.9))

    source, target = build(), build()
    source.p[0].grad = torch.ones_like(source.p[0])
    source.optimizer.step()
    source.committed(1)
    copy(source, target)
    buffer = target.optimizer.state[target.p[0]]["momentum_buffer"]
    assert buffer.stride() == target.p[0].stride()


# ── mismatches ──────────────────────────────────────────────────────────────────────────────────────────────


def test_another_model_is_refused_by_name_and_nothing_is_touched() -> None:
    source = trained()
    with pytest.raises(ValueError, match="has the parts model, the one that came model, optimizer"):
        State(model=model()).adopt(source.table(), source.extra())
    net = model(width=5)
    target = State(model=net, optimizer=torch.optim.AdamW(net.parameters()))
    with pytest.raises(ValueError, match=r"model\.0\.weight is F32 \[8, 5\] here and F32 \[8, 4\] in the state"):
        target.adopt(source.table(), source.extra())
    assert target.clean()


def test_other_parameter_groups_are_refused() -> None:
    source = trained()
    net = model()
    target = State(model=net, optimizer=torch.optim.AdamW(list(net.parameters())[:2]))
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters here, \[6\] in the state"):
        target.adopt(source.table(), source.extra())


def test_a_newer_format_is_refused() -> None:
    state = trained()
    with pytest.raises(ValueError, match="format 2"):
        state.adopt(state.table(), state.extra() | {"format": 2})


def test_a_table_that_names_too_much_is_refused() -> None:
    source, target = trained(), trained(seed=1)
    surplus = (*source.table(), TensorInfo("optimizer.state.99.exp_avg", "F32", (1,), 4))
    with pytest.raises(ValueError, match=r"optimizer\.state\.99"):
        target.adopt(surplus, source.extra())
    assert not target.clean()
    with pytest.raises(ValueError, match="stranger"):
        trained().adopt((TensorInfo("stranger.x", "F32", (1,), 4),), source.extra())


# ── when it may be trusted ──────────────────────────────────────────────────────────────────────────────────


def test_dirty_from_the_optimizers_step_to_the_commit() -> None:
    state = trained(steps=0)
    seen = []
    state.optimizer.register_step_post_hook(lambda *_: seen.append(state.clean()))
    train(state)
    assert seen == [False]
    assert state.clean()
    state.optimizer.step()
    assert not state.clean()
    state.committed(4)
    assert (state.clean(), state.step, state.commit_generation) == (True, 2, 4)
    state.changing()
    assert not state.clean()


def test_generations_never_go_backwards() -> None:
    """A new job counts its generations from one; on top of a checkpoint of generation 9 its steps are newer still."""
    source, target = trained(), trained(seed=1, steps=0)
    source.committed(9)
    copy(source, target)
    target.committed(1)
    assert target.version == (9, 4)
    assert target.version > source.version


def test_the_guard_runs_first_and_leaves_the_state_clean() -> None:
    state = trained(steps=1)
    before = [t.clone() for _, t in state.tensors()]

    def guard() -> None:
        raise RuntimeError("the group was let go of")

    state.watch_optimizers(guard)
    state.model(torch.randn(5, 4)).sum().backward()
    running = ("running_mean", "running_var", "num_batches_tracked")
    with pytest.raises(RuntimeError, match="let go"):
        state.optimizer.step()
    assert state.clean()
    for (info, now), then in zip(state.tensors(), before, strict=True):
        assert torch.equal(now, then) or info.name.endswith(running), info.name
    state.watch_optimizers(None)
    state.optimizer.step()


def test_half_received_is_not_clean_and_cannot_be_committed() -> None:
    source, target = trained(), trained(seed=1)
    target.adopt(source.table(), source.extra())
    assert not target.clean()
    assert target.version == (1, 2)
    with pytest.raises(RuntimeError, match="half received"):
        target.committed(2)
    with pytest.raises(RuntimeError, match="without adopt"):
        trained().filled()
    copy(source, target)
    assert target.clean()


def test_moving_keeps_parameters_or_says_that_it_cannot() -> None:
    state = trained()
    params = list(state.model.parameters())
    state.to("cpu")
    assert all(a is b for a, b in zip(params, state.model.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r"state\.model cannot move to meta"):
        state.to("meta")
