"""A GradScaler and an optimizer whose step has raised: the step that is done again changes the weights as it should."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from elastic.worker.state.state import State
from elastic.worker.torch_internals import torch_private


class Training:
    """Four steps with a scaler, of which the third is begun `attempts` times before it succeeds."""

    def __init__(self, optimizers: int, *, fused: bool, kept: bool, unscales: bool = False) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        options: dict[str, Any] = {"lr": 0.01, "fused": fused}
        held = [torch.optim.SGD([param], **options) for param in list(self.net.parameters())[:optimizers]]
        self.unscales, self.ends_in = unscales, -1
        self.optimizers = held
        parts: dict[str, Any] = {f"optimizer{number}": each for number, each in enumerate(held)}
        self.state = State(model=self.net, **parts, **({"scaler": self.scaler} if kept else {}))
        self.state.watch_optimizers(self.guard)

    def guard(self) -> None:
        if self.ends_in == 0:
            raise RuntimeError("the generation has ended")
        self.ends_in -= 1

    def step(self, number: int) -> None:
        self.net.zero_grad()
        self.scaler.scale(self.net(torch.full((2, 4), number + 1.0)).square().mean()).backward()
        for optimizer in self.optimizers:
            if self.unscales:
                self.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(optimizer)
        self.scaler.update()
        self.state.committed(1)

    def run(self, *, attempts: int) -> list[float]:
        self.state.forget_gradients()
        self.state.begin()
        for number in range(4):
            for _ in range(attempts if number == 2 else 0):
                self.ends_in = 0
                with pytest.raises(RuntimeError, match="has ended"):
                    self.step(number)
                self.ends_in = -1
                assert self.state.rewind() is None
                self.state.forget_gradients()
                self.state.begin()
            self.step(number)
        return torch.cat([param.detach().flatten() for param in self.net.parameters()]).tolist()


@pytest.mark.parametrize("kept", [True, False], ids=["in the state", "outside"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("unscales", [True, False], ids=["clipped", "not clipped"])
def test_a_step_that_is_done_again_divides_its_gradients_once(kept: bool, fused: bool, unscales: bool) -> None:
    undisturbed = Training(1, fused=fused, kept=kept, unscales=unscales).run(attempts=0)
    assert Training(1, fused=fused, kept=kept, unscales=unscales).run(attempts=2) == undisturbed


def test_of_a_state_that_is_to_be_replaced_the_marks_are_dropped_too() -> None:
    """The first of two optimizers has stepped: this rank receives the state of another one."""
    training = Training(2, fused=False, kept=True)
    training.ends_in = 1
    with pytest.raises(RuntimeError, match="has ended"):
        training.step(0)
    assert not training.state.clean()
    training.ends_in = -1
    training.state.rewind()
    training.state.forget_gradients()
    training.step(0)  # "step() has already been called" if anything was left


class Holder:
    """Reaches its scaler through a closure."""

    def __init__(self, scaler: Any, *, saves: str) -> None:
        self.scaler = lambda: scaler
        self.saves = saves
        self.calls = 0

    def state_dict(self) -> Any:
        self.calls += 1
        held = {"calls": self.calls}
        if self.saves == "all":
            held["amp"] = self.scaler().state_dict()
        if self.saves == "the tensor":
            held["amp"] = self.scaler()._scale
        return held

    def load_state_dict(self, held: Any) -> None:
        self.calls = held["calls"]
        if self.saves == "all":
            self.scaler().load_state_dict(held["amp"])


class Module(nn.Module):
    def __init__(self, scaler: Any) -> None:
        super().__init__()
        self.scaler = scaler


class Attribute:
    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.n = 0

    def state_dict(self) -> Any:
        return {"n": self.n}

    def load_state_dict(self, held: Any) -> None:
        self.n = held["n"]


class Saving(Module):
    def get_extra_state(self) -> Any:
        return self.scaler.state_dict()

    def set_extra_state(self, held: Any) -> None:
        self.scaler.load_state_dict(held)


KEPT = ["in the state", "saved by an object", "saved by an object as a tensor", "saved by a module", "not used yet"]
LOST = ["outside", "attribute of a module", "attribute of an object", "object that counts"]


@pytest.mark.parametrize("how", KEPT + LOST)
def test_a_scaler_that_no_part_saves_begins_as_on_a_replacement(how: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    net = nn.Linear(1, 1)
    parts: dict[str, Any] = {
        "in the state": lambda: scaler,
        "saved by an object": lambda: Holder(scaler, saves="all"),
        "saved by an object as a tensor": lambda: Holder(scaler, saves="the tensor"),
        "saved by a module": lambda: Saving(scaler),
        "attribute of a module": lambda: Module(scaler),
        "attribute of an object": lambda: Attribute(scaler),
        "object that counts": lambda: Holder(scaler, saves=""),
    }
    state = State(model=net, **({"part": parts[how]()} if how in parts else {}))
    if how == "not used yet":
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    else:
        scaler.scale(torch.ones(1))
        scaler.update(2.0)
    state.forget_gradients()
    expected = 8.0 if how in LOST else 2.0
    assert scaler.get_scale() == expected
    assert scaler.scale(torch.ones(1)).item() == expected


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizers_own_attribute_of_a_scalers_name_is_left(fused: bool) -> None:
    class Scales(torch.optim.SGD):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.grad_scale, self.found_inf = 2.0, "nowhere"

    net = nn.Linear(1, 1)
    optimizer = Scales(net.parameters(), lr=0.1, fused=fused)
    State(model=net, optimizer=optimizer).forget_gradients()
    assert (optimizer.grad_scale, optimizer.found_inf) == (2.0, "nowhere")


class OwnScaler(torch.amp.GradScaler):
    pass


def test_every_scaler_of_the_process_is_known() -> None:
    made = [torch.amp.GradScaler("cpu"), OwnScaler("cpu", init_scale=8.0)]
    made += [copy.deepcopy(made[1]), pickle.loads(pickle.dumps(made[1]))]
    known = {id(each) for each in torch_private.scalers()}
    assert known >= {id(each) for each in made}
    assert [type(each) for each in made[1:]] == [OwnScaler] * 3
    assert made[1].get_scale() == made[3].get_scale() == 8.0
    gone = weakref.ref(made.pop())
    gc.collect()
    assert gone() is None


def test_a_scaler_that_the_script_has_frozen_begins_as_on_a_replacement() -> None:
    """`gc.freeze()` hides it from the garbage collector's lists."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    scaler.update(2.0)
    gc.freeze()
    try:
        State(model=nn.Linear(1, 1)).forget_gradients()
    finally:
        gc.unfreeze()
    assert scaler.get_scale() == 8.0


def test_a_state_that_does_not_save_a_scaler_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look calls `state_dict()` of the script's objects, on the way of a recovery."""

    class Slow(Attribute):
        looks = 0

        def state_dict(self) -> Any:
            self.looks += 1
            return {"n": 0}

    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    monkeypatch.setattr(torch_private, "scalers", lambda: [scaler])
    part = Slow(scaler)
    state = State(part=part)
    part.looks = 0
    state.forget_gradients()
    assert part.looks == 2
