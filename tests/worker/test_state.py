"""The state: what it is made of, how it is taken apart and put together, and when it may be trusted."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import pathlib
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from elastic.checkpoint.format.json_values import decode
from elastic.contract.worker.tensor_table import TensorInfo
from elastic.worker.link.misuse import MisuseAttributeError, MisuseTypeError, found_in
from elastic.worker.state.parts.json_codec import CannotEncodeError, encode
from elastic.worker.state.state import State


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
    for here, (_, there) in zip(target.adopt(source.table(), extra), source.tensors(), strict=True):
        here.copy_(there)
    target.filled()


def same(a: State, b: State) -> bool:
    walked: dict[str, Any] = {}
    a.tensors(walked)
    return (
        walked == a.extra() == b.extra()
        and a.table() == b.table()
        and all(torch.equal(x, y) for (_, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True))
    )


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_state_comes_in_the_order_that_pruning_has_left_in_its_module() -> None:
    """`prune.remove` puts the weight back behind the bias: a replacement, whose `setup` has not pruned, ended with
    "another order", and so did the job."""
    source, target = trained(steps=1), trained(steps=1)
    prune.l1_unstructured(source.model[0], "weight", 0.5)
    prune.remove(source.model[0], "weight")
    copy(source, target)
    assert same(source, target)
    assert [*dict(target.model.named_parameters())] == [*dict(source.model.named_parameters())]
    assert [id(p) for p in target.optimizer.param_groups[0]["params"][:2]] == [
        id(target.model[0].weight),
        id(target.model[0].bias),
    ]
    train(source)
    train(target)
    assert same(source, target)


def test_parts_and_plain_values_are_attributes() -> None:
    state = State(model=nn.Linear(2, 2), best=math.inf, seen=["a"])
    state.best = 1.5
    state.seen.append("b")
    assert (state.best, state.seen, state.step, state.clean()) == (1.5, ["a", "b"], 0, True)
    with pytest.raises(MisuseAttributeError, match=r"no part 'bets': did you mean 'best'\?"):
        state.bets = 2
    with pytest.raises(AttributeError, match="no part 'models'") as asked:
        _ = state.models
    assert found_in(asked.value) is None, "a script may ask, and what fails in its handler is no misuse"
    with pytest.raises(MisuseAttributeError, match="stays the object"):
        state.model = nn.Linear(2, 2)
    with pytest.raises(MisuseAttributeError, match="cannot be set"):
        state.step = 3
    with pytest.raises(ValueError, match="name is taken"):
        State(step=3)


def test_state_refuses_values_json_cannot_hold_and_names_the_remedy() -> None:
    class Color(enum.Enum):
        RED = 1

    with pytest.raises(CannotEncodeError, match=r"state\.options\.path is PosixPath.*convert=\{pathlib\.PurePath"):
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


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Meter:
    total: float = 0.0
    n: int = 0


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value", [Color.RED, Meter(1.5, 2), Pair(1, 2.5), pathlib.Path("/x"), collections.deque([1, 2, 3], maxlen=2)]
)
def test_the_conversion_that_is_advised_is_right(value: Any) -> None:
    with pytest.raises(CannotEncodeError) as caught:
        State(value=value)
    advised = re.search(r"State\(…, convert=(\{.*\})\)$", str(caught.value))
    assert advised is not None
    convert = eval(advised[1], globals())
    kept, other = State(convert=convert, value=value), State(convert=convert, value=None)
    copy(kept, other)
    assert other.value == value
    assert type(other.value) is type(value)
    if isinstance(value, collections.deque):
        assert other.value.maxlen == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_has_a_better_place_than_a_conversion_is_told_it() -> None:
    net = nn.Linear(1, 1)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for value, advice in (
        (np.zeros(3), r"torch\.from_numpy"),
        ([net], r"nn\.ModuleList"),
        ([torch.optim.SGD(net.parameters(), 0.1)], r"first=optimizer"),
        (nested, r"state\.value is nested Tensor.*nested\.unbind\(\)"),
    ):
        with pytest.raises(CannotEncodeError, match=advice):
            State(value=value)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(7), lambda g: torch.rand(2, generator=g).tolist()),
        (lambda: np.random.default_rng(7), lambda g: [*g.random(2), int(g.integers(9, dtype=np.int32))]),
        (lambda: random.Random(7), lambda g: [g.random(), g.gauss(0, 1)]),
    ],
)
def test_generators_go_back_to_the_commit_and_come_to_a_newcomer(
    make: Callable[[], Any], draw: Callable[[Any], Any]
) -> None:
    state, other = State(noise=make()), State(noise=make())
    draw(state.noise)
    state.committed(1)
    state.turned()
    copy(state, other)
    first = draw(state.noise)
    with pytest.raises(RuntimeError, match=r"state\.noise was changed"):
        state.turned()
    assert state.rewind() is None
    assert draw(state.noise) == draw(other.noise) == first


def test_a_generator_may_be_converted_in_another_way() -> None:
    state = State(convert={random.Random: (lambda r: r.getstate()[1][0], random.Random)}, noise=random.Random(7))
    assert isinstance(state.extra()["parts"]["noise"]["value"], int)


def test_tensors_that_are_not_dense_are_refused() -> None:
    with pytest.raises(TypeError, match=r"state\.odd.*only dense"):
        State(odd=torch.eye(3).to_sparse())


class Quantised(torch.Tensor):
    """As torchao's optimizer states are: the bytes lie in other tensors."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_tensors_whose_bytes_lie_elsewhere_are_refused() -> None:
    with pytest.raises(TypeError, match=r"state\.odd is a Quantised.*only dense"):
        State(odd=Quantised(torch.zeros(3, dtype=torch.uint8)))


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
    assert sum(info.nbytes for info in state.table()) == sum(t.numel() * t.element_size() for _, t in state.tensors())


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


def test_an_optimizers_state_comes_in_the_order_in_which_it_was_made() -> None:
    """A hash over it, or the bytes of `torch.save`, are the same on survivors and replacements."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.state["steps"] = {"b": 1, "a": 2}  # type: ignore[index]
            for param in reversed(self.param_groups[0]["params"]):
                self.state[param].update(zeta=torch.ones(2), count=3, alpha=torch.ones(3))

    def order(optimizer: torch.optim.Optimizer) -> list[Any]:
        numbers = {param: number for number, param in enumerate(optimizer.param_groups[0]["params"])}
        return [(numbers.get(key, key), list(held)) for key, held in optimizer.state.items()]

    for kind, options in ((torch.optim.AdamW, {}), (Counting, {"lr": 0.1}), (Counting, {"lr": 0.1, "momentum": 0.9})):
        source, target = ({"model": nn.Linear(3, 3)} for _ in range(2))
        for each in (source, target):
            each["state"] = State(model=each["model"], optimizer=kind(each["model"].parameters(), **options))
        source["model"](torch.ones(1, 3)).sum().backward()
        source["state"].optimizer.step()
        copy(source["state"], target["state"])
        assert order(target["state"].optimizer) == order(source["state"].optimizer)
        copy(source["state"], target["state"])  # into tensors that are there
        assert order(target["state"].optimizer) == order(source["state"].optimizer)


def test_surplus_optimizer_state_is_dropped() -> None:
    """Going back to before the first step: the moments of later steps must go."""
    source, target = trained(seed=0, steps=0), trained(seed=1, steps=3)
    copy(source, target)
    assert not target.optimizer.state
    train(source)
    train(target)
    assert same(source, target)


def test_optimizer_options_are_transferred_including_tensors() -> None:
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
    with pytest.raises(
        ValueError, match=r"groups of \[2\] parameters as setup\(\) builds it, and of \[6\] in the state"
    ):
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
    assert (state.clean(), state.version) == (True, (4, 2))
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
        raise RuntimeError("the group was aborted")

    state.watch_optimizers(guard)
    state.model(torch.randn(5, 4)).sum().backward()
    running = ("running_mean", "running_var", "num_batches_tracked")
    with pytest.raises(RuntimeError, match="aborted"):
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


def test_state_move_keeps_parameter_objects_or_raises() -> None:
    state = trained()
    params = list(state.model.parameters())
    state.to("cpu")
    assert all(a is b for a, b in zip(params, state.model.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r"state\.model cannot move to meta"):
        state.to("meta")


# ── what a module makes for the occasion, and what cannot be kept ───────────────────────────────────────────


class Packed(nn.Linear):
    """Extra state that is a tensor, made anew at each call, as TransformerEngine does it."""

    scale = 1.0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.scale, 2.0])

    def set_extra_state(self, held: torch.Tensor) -> None:
        self.scale = float(held[0])


class Converting(nn.Linear):
    """Saves a converted copy, as quantisers and metrics do."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}halves"] = self.weight.detach() / 2
        destination[f"{prefix}history"] = [torch.ones(2), {"n": 3}]
        destination[f"{prefix}bias"] = self.bias

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[f"{prefix}halves"] * 2)
        self.history = state_dict[f"{prefix}history"]


def test_state_dict_entries_made_on_demand_are_loaded_by_their_module() -> None:
    for build in (Packed, Converting):
        torch.manual_seed(1)
        source = State(model=nn.Sequential(build(2, 2), nn.Linear(2, 2)))
        torch.manual_seed(2)
        target = State(model=nn.Sequential(build(2, 2), nn.Linear(2, 2)))
        source.model[0].scale = 5.0
        copy(source, target)
        assert same(source, target)
        assert torch.equal(source.model(torch.ones(1, 2)), target.model(torch.ones(1, 2)))
        assert build is Converting or target.model[0].scale == 5.0
        assert build is Packed or target.model[0].history[1] == {"n": 3}


def test_state_transfer_covers_tensors_that_cannot_be_written_in_place() -> None:
    def build(content: float) -> State:
        net = nn.Linear(2, 2)
        net.register_buffer("mask", torch.full((1,), content).expand(5))
        with torch.inference_mode():
            net.register_buffer("found", torch.full((3,), content))
        return State(model=net, scales=torch.full((1,), content).expand(5))

    source, target = build(1.0), build(2.0)
    copy(source, target)
    assert same(source, target)


def test_buffer_that_modules_share_stays_shared_when_it_cannot_be_written_in_place() -> None:
    def build(content: float) -> State:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        mask = torch.full((1,), content).expand(5)
        for layer in net:
            layer.register_buffer("mask", mask)
        return State(model=net)

    source, target = build(1.0), build(2.0)
    copy(source, target)
    assert same(source, target)
    assert target.model[0].mask is target.model[1].mask
    assert bool((target.model[1].mask == 1.0).all())


def test_tensor_that_nothing_here_holds_is_refused() -> None:
    source, target = (State(model=nn.Sequential(Packed(2, 2))) for _ in range(2))
    silent = {**source.extra(), "parts": {"model": {}}}
    assert any(info.name == "model.0._extra_state" for info in source.table())
    with pytest.raises(ValueError, match=r"model\.0\._extra_state is missing here"):
        target.adopt(source.table(), silent)


@pytest.mark.parametrize("build", [lambda: nn.LazyLinear(2), lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False))])
def test_lazy_modules_are_refused_until_they_have_a_shape(build: Any) -> None:
    net = build()
    with pytest.raises(TypeError, match=r"state\.model\..* has no shape yet: run one forward"):
        State(model=net)
    net(torch.zeros(3, 4))
    State(model=net)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_a_torchscript_module() -> None:
    torch.manual_seed(0)
    net = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    state = State(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    state.begin()
    for _ in range(2):
        train(state)
    state.turned()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net(torch.randn(4, 4))
    assert state.rewind() is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


class Odd(torch.optim.SGD):
    """Keeps state under names of its own."""

    def __init__(self, params: Any, **held: Any) -> None:
        super().__init__(params, lr=0.1)
        self.held = held

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["global"] = {"k": 3, "t": torch.ones(2)}
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update({"a.b": torch.full_like(param, 2.0), "c.d": 7, **self.held})


def test_state_of_an_optimizer_under_names_of_its_own() -> None:
    def build() -> State:
        net = nn.Linear(2, 2)
        return State(model=net, optimizer=Odd(net.parameters()))

    source, target = build(), build()
    source.model(torch.ones(1, 2)).sum().backward()
    source.optimizer.step()
    source.committed(1)
    copy(source, target)
    assert same(source, target)
    held = target.optimizer.state[target.model.weight]
    assert (held["c.d"], float(held["a.b"][0, 0])) == (7, 2.0)
    assert target.optimizer.state["global"]["k"] == 3
    assert torch.equal(target.optimizer.state["global"]["t"], torch.ones(2))


class Lookahead(torch.optim.Optimizer):
    """As timm's: the slow weights lie in the inner optimizer's state, and `state_dict()` is the inner one's."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self._base_optimizer = base
        self.param_groups = base.param_groups
        for group in self.param_groups:
            group["lookahead_step"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            for param in group["params"]:
                slow = self._base_optimizer.state[param].setdefault("slow_buffer", param.clone())
                param.copy_(slow.lerp_(param, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return self._base_optimizer.state_dict()


class Sharp(torch.optim.Optimizer):
    """As SAM: perturbs the parameters and steps back; `state_dict()` lacks the inner optimizer's state."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer]) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = base(self.param_groups, lr=0.1)  # type: ignore[call-arg]
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["old"] = param.clone()
        self.base_optimizer.step()


class Several(torch.optim.Optimizer):
    """A list of optimizers, each with parameters of its own."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        super().__init__([{"params": [p for o in inner for g in o.param_groups for p in g["params"]]}], {})
        self.inner = list(inner)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.inner:
            optimizer.step()


def lookahead(net: nn.Module) -> torch.optim.Optimizer:
    return Lookahead(torch.optim.AdamW(net.parameters(), lr=0.1))


def sharp(net: nn.Module) -> torch.optim.Optimizer:
    return Sharp(net.parameters(), torch.optim.AdamW)


def several(net: nn.Module) -> torch.optim.Optimizer:
    first, *others = net.parameters()
    return Several(torch.optim.AdamW([first], lr=0.1), torch.optim.SGD(others, lr=0.1, momentum=0.9))


@pytest.mark.parametrize("wrapped", [lookahead, sharp, several])
def test_the_state_of_an_optimizer_within_an_optimizer_is_kept(wrapped: Any) -> None:
    def build() -> State:
        net = model()
        return State(model=net, optimizer=wrapped(net))

    source, target = build(), build()
    for _ in range(3):
        train(source)
    copy(source, target)
    assert same(source, target)
    for state in (source, target):
        for _ in range(2):
            train(state)
    assert same(source, target)
    assert all(torch.equal(a, b) for a, b in zip(source.model.parameters(), target.model.parameters(), strict=True))
    for inner, other in zip(_inner(source.optimizer), _inner(target.optimizer), strict=True):
        assert inner.state_dict()["state"].keys() == other.state_dict()["state"].keys() != set()


def _inner(optimizer: Any) -> list[torch.optim.Optimizer]:
    return [v for held in vars(optimizer).values() for v in (held if isinstance(held, list) else [held])
            if isinstance(v, torch.optim.Optimizer)]  # fmt: skip


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"lock": object()}, r"state\.optimizer\.state\.0\.lock is object, which JSON cannot hold"),
        ({"sparse": torch.eye(2).to_sparse()}, r"state\.optimizer\.state\.0\.sparse .* only dense"),
    ],
)
def test_state_that_cannot_be_transferred_is_refused_at_the_first_commit(held: Any, said: str) -> None:
    """And not at the first failure, when it is too late."""
    net = nn.Linear(2, 2)
    state = State(model=net, optimizer=Odd(net.parameters(), **held))
    net(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    with pytest.raises(TypeError, match=said):
        state.committed(1)
    assert state.step == 0


def test_entries_that_are_no_text_are_refused_by_name() -> None:
    net = nn.Linear(2, 2)
    state = State(model=net, optimizer=Odd(net.parameters()))
    state.optimizer.state[net.weight][3] = 1
    with pytest.raises(TypeError, match=r"state\.optimizer\.state\.0 has an entry 3"):
        state.table()
    state.optimizer.state.clear()
    state.optimizer.state[("a", 1)] = 1
    with pytest.raises(TypeError, match=r"state\.optimizer keeps state under \('a', 1\)"):
        state.table()


def test_a_value_that_became_something_else_is_refused_at_the_commit() -> None:
    state = State(seen=[1])
    for _ in range(4):
        state.committed(1)
    state.seen.append(object())
    with pytest.raises(CannotEncodeError, match=r"state\.seen\.1 is object"):
        state.committed(1)


def test_containers_and_numbers_keep_their_types() -> None:
    import numpy as np

    value = {
        "counts": collections.defaultdict(int, {"a": 1}),
        "lists": collections.defaultdict(list, {3: [1]}),
        "none": collections.defaultdict(None, {"x": 1}),
        "ordered": collections.OrderedDict([("b", 1), ("a", (2, frozenset({1, 2})))]),
        "numpy": [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True)],
        "bytes": b"\x00\xff",
        "$odd": {1: 2},
    }
    again = decode(json.loads(json.dumps(encode(value, "x", {}, {}), allow_nan=False)), lambda *_: torch.empty(0), {})
    assert again == value
    assert [type(item) for item in again.values()] == [type(item) for item in value.values()]
    assert [type(item) for item in again["numpy"]] == [type(item) for item in value["numpy"]]
    again["counts"]["new"] += 1
    again["lists"]["new"].append(1)
    assert type(again["ordered"]["a"][1]) is frozenset
    with pytest.raises(CannotEncodeError, match="defaultdict"):
        encode(collections.defaultdict(lambda: 1), "x", {}, {})


def test_a_trained_tensor_remains_the_tensor_that_the_optimizer_steps() -> None:
    def build(start: float) -> State:
        weight = torch.full((2,), start, requires_grad=True)
        return State(weight=weight, optimizer=torch.optim.SGD([weight], lr=0.1))

    source, target = build(1.0), build(2.0)
    weight = target.weight
    copy(source, target)
    assert target.weight is weight
    assert weight.requires_grad
    assert torch.equal(weight, torch.ones(2))


def test_sharded_modules_are_refused_with_the_way_out() -> None:
    kind = type("FSDPModule", (nn.Linear,), {})
    with pytest.raises(TypeError, match=r"state\.model is sharded \(FSDPModule\).*job\.ddp"):
        State(model=nn.Sequential(kind(2, 2)))
    state = State(model=nn.Sequential(nn.Linear(2, 2)))
    state.model[0].__class__ = kind  # as `fully_shard` does it, in `train`
    with pytest.raises(TypeError, match="is sharded"):
        state.committed(1)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.eye(3).to_sparse(), r"state\.odd is sparse .* only dense"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            r"state\.odd is quantised .* only dense",
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"odd is nested"),
        (lambda: torch.empty(3, device="meta"), r"state\.odd has no elements yet \(device meta\): .*to_empty"),
        (
            lambda: torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            r"state\.odd is of torch\.float4_e2m1fn_x2, which no .* tensor\.view\(torch\.uint8\)",
        ),
    ],
)
def test_state_refuses_tensors_without_elements_of_their_own_by_kind(make: Any, said: str) -> None:
    with pytest.raises(MisuseTypeError, match=said):
        State(odd=make())
    layer = nn.Module()
    layer.register_buffer("odd", make())
    with pytest.raises(MisuseTypeError, match=said.replace("state", "state\\.layer")):
        State(layer=layer)


def test_a_part_name_with_a_dot_is_refused() -> None:
    """Its tensors could not be told from those of another part, which showed only when a replacement came."""
    with pytest.raises(ValueError, match=r"state\.model\.head: no dot"):
        State(**{"model": nn.Linear(1, 1), "model.head": nn.Linear(1, 1)})


def test_optimizer_entries_whose_paths_are_alike_are_not_mixed_up() -> None:
    states = []
    for _ in range(2):
        model = nn.Linear(1, 1)
        states.append(State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    source, target = states
    held = source.optimizer.state[source.model.weight]
    held["a.b"], held["a"] = torch.tensor([5.0]), {"b": torch.tensor([6.0])}
    extra: dict[str, Any] = {}
    found = source.tensors(extra)
    for mine, (_, theirs) in zip(target.adopt(tuple(info for info, _ in found), extra), found, strict=True):
        mine.copy_(theirs)
    target.filled()
    came = target.optimizer.state[target.model.weight]
    assert (came["a.b"].item(), came["a"]["b"].item()) == (5.0, 6.0)


def _grow_buffer(state: State) -> None:
    state.model.register_buffer("mask", torch.ones(3))


def _grow_group(state: State) -> None:
    state.optimizer.add_param_group({"params": list(state.model[0].parameters())})


def _grow_shape(state: State) -> None:
    state.model[0].bias = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    ("grow", "name"),
    [
        (_grow_buffer, "state.model.mask was missing when training began, and is F32 [3] now"),
        (_grow_shape, "state.model.0.bias was F32 [1] when training began, and is F32 [4] now"),
        (_grow_group, "state.optimizer was groups of [2] parameters when training began"),
    ],
)
def test_what_a_replacement_could_not_receive_is_refused_before_there_is_one(
    grow: Callable[[State], None], name: str
) -> None:
    """Found at the first failure, it cost all of the state: no replacement could be made, from no checkpoint either."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    state = State(model=model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))
    state.begin()
    grow(state)
    with pytest.raises(TypeError, match=re.escape(name)):
        state.committed(1)
    state.begin()
    extra: dict[str, Any] = {}
    table = tuple(info for info, _ in state.tensors(extra))
    with pytest.raises(TypeError, match=re.escape(name)):
        state.refuse_growth(table, extra)


class Observed(nn.Module):
    """As an observer of quantisation-aware training: its statistics have their shape from its first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("least", torch.zeros(1))
        self.register_buffer("tied", self.least)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.least.resize_(x.shape[1]).copy_(x.amin(0))  # type: ignore[operator]
        return self.inner(x)


def test_a_buffer_may_get_its_shape_in_training() -> None:
    states = []
    for _ in range(2):
        model = Observed()
        states.append(State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    source, target = states
    for state in states:
        state.begin()
    source.model(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    source.optimizer.step()
    source.committed(1)
    copy(source, target)
    assert target.model.least.tolist() == [1.0, 2.0, 3.0]
    assert target.model.tied is target.model.least
    source.model(torch.ones(1, 3))
    assert source.rewind() is None
    assert source.model.least.tolist() == [1.0, 2.0, 3.0]


def test_a_buffer_of_another_type_is_refused() -> None:
    one, other = Observed(), Observed()
    other.least = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"model\.least is F32 \[1\] here and I64 \[1\]"):
        State(model=one).adopt(State(model=other).table(), State(model=other).extra())


def test_a_parameter_group_that_is_added_late_is_refused_at_once() -> None:
    """As layers are unfrozen after some steps. A failure before the next snapshot ended the job in a crash loop."""
    model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1))
    state = State(model=model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))
    state.begin()
    for _ in range(4):
        train(state)
    _grow_group(state)
    with pytest.raises(TypeError, match=r"state\.optimizer was groups of \[2\] parameters when training began"):
        state.committed(1)
    assert state.step == 4


class Margin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def both(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for module in modules for param in module.parameters()])


def test_a_parameter_that_only_the_optimizer_holds_is_refused() -> None:
    """A replacement would step its own, with the others' moments: the replicas would differ unseen."""
    net, criterion = model(), Margin()
    with pytest.raises(
        TypeError, match=r"state\.optimizer steps a parameter of shape \(3,\) \(number 6 of its group 0\)"
    ):
        State(model=net, optimizer=both(net, criterion))
    with pytest.raises(TypeError, match=r"state\.second steps a parameter"):
        State(model=net, first=both(net), second=both(criterion))


def test_a_parameter_that_any_part_holds_is_accepted() -> None:
    class Trainer:
        def __init__(self, criterion: Margin) -> None:
            self.losses = {"margin": [criterion.scale]}

        def state_dict(self) -> dict[str, Any]:
            return {"scale": self.losses["margin"][0].detach().clone()}

        def load_state_dict(self, held: dict[str, Any]) -> None:
            self.losses["margin"][0].data.copy_(held["scale"])

    net, criterion = model(), Margin()
    State(model=net, criterion=criterion, optimizer=both(net, criterion))
    State(model=net, scales=[criterion.scale], optimizer=both(net, criterion))
    State(model=net, trainer=Trainer(criterion), optimizer=both(net, criterion))
    flat = nn.Parameter(next(net.parameters()).data.view(-1))  # one that shares its memory
    State(model=net, optimizer=torch.optim.SGD([flat], lr=0.1))


class Counting(torch.optim.SGD):
    """Keeps a number in an attribute, as optimizers with a schedule of their own do."""

    calls = 0

    def zero_grad(self) -> None:  # type: ignore[override]  # as in NVIDIA's apex
        super().zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}


def test_an_optimizer_with_state_of_another_kind_is_refused() -> None:
    net = model()
    with pytest.raises(TypeError, match=r"state\.optimizer \(Counting\) has more in its state_dict\(\).*: calls\. "):
        State(model=net, optimizer=Counting(net.parameters(), lr=0.1))


def test_gradients_of_an_optimizer_whose_zero_grad_takes_no_argument_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Counting, "state_dict")
    net = model()
    state = State(model=net, optimizer=Counting(net.parameters(), lr=0.1))
    net(torch.ones(2, 4)).sum().backward()
    state.forget_gradients()
    assert all(param.grad is None for param in net.parameters())
