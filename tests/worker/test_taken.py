"""Objects whose `load_state_dict` does not take all that their `state_dict` returns are named at a restore."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.worker.state.state import State


class Kept:
    """Takes everything, except what `spoil` changes afterwards."""

    def __init__(self, spoil: Callable[[dict[str, Any]], None] = lambda held: None) -> None:
        self.spoil = spoil
        self.held: dict[str, Any] = {
            "count": 0,
            "rate": 0.1,
            "best": math.nan,
            "seen": {3: 1, 1: 2},
            "names": ("a", "b"),
            "often": collections.Counter("aab"),
            "mean": torch.zeros(3),
            "past": [torch.zeros(2), torch.zeros(1, dtype=torch.int64)],
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, held: dict[str, Any]) -> None:
        held = copy.deepcopy(held)
        self.spoil(held)
        self.held = held


def trained(spoil: Callable[[dict[str, Any]], None] = lambda held: None) -> State:
    state = State(part=Kept(spoil))
    state.part.held.update(count=5, mean=torch.ones(3), seen={3: 2, 1: 2, 7: 1})
    state.part.held["past"][0] = torch.full((4,), 2.0)
    return state


def sent(source: State, spoil: Callable[[dict[str, Any]], None]) -> None:
    state, extra = State(part=Kept(spoil)), {}  # type: ignore[var-annotated]
    came = source.tensors(extra)
    for mine, (_, theirs) in zip(state.adopt(tuple(info for info, _ in came), extra), came, strict=True):
        mine.copy_(theirs)
    state.filled()


def other_order(held: dict[str, Any]) -> None:
    held["seen"] = dict(sorted(held["seen"].items()))
    for key in list(held):
        held[key] = held.pop(key)


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "ignored": (lambda held: held.update(count=0), "part.count is 0 after it was loaded, and was given as 5"),
    "dropped": (lambda held: held.pop("rate"), "part.rate is missing after state.part was loaded"),
    "another key": (lambda held: held.update(loads=1), "part.loads is new after state.part was loaded"),
    "cast": (
        lambda held: held.update(mean=held["mean"].to(torch.float64)),
        "part.mean is torch.float64 [3] after it was loaded, and was given as torch.float32 [3]",
    ),
    "cut": (
        lambda held: held["past"].__setitem__(0, torch.zeros(2)),
        "part.past.0 is torch.float32 [2] after it was loaded, and was given as torch.float32 [4]",
    ),
    "other elements": (lambda held: held["mean"].zero_(), "part.mean has other elements after it was loaded"),
    "no tensor": (lambda held: held.update(mean=0.0), "part.mean"),
    "fewer": (lambda held: held["past"].pop(), "part.past"),
}  # type: ignore[dict-item]


@pytest.mark.parametrize("how", SPOILT)
def test_what_an_object_does_not_take_is_named(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    spoil, said = SPOILT[how]
    sent(trained(), spoil)
    text = capfd.readouterr().err
    assert f"elastic: state.{said}" in text
    assert text.count("elastic:") == 1


def test_a_survivor_that_goes_back_to_its_commit_is_told_too(capfd: pytest.CaptureFixture[str]) -> None:
    state = trained(lambda held: held.pop("rate"))
    state.begin()
    state.part.held["count"] += 1
    assert state.rewind() is None
    assert "elastic: state.part.rate is missing after state.part was loaded" in capfd.readouterr().err


@pytest.mark.parametrize("spoil", [lambda held: None, other_order])
def test_an_object_that_takes_everything_is_not_named(
    spoil: Callable[[dict[str, Any]], None], capfd: pytest.CaptureFixture[str]
) -> None:
    sent(trained(), spoil)
    assert capfd.readouterr().err == ""


def test_torchs_schedulers_and_scaler_take_everything(capfd: pytest.CaptureFixture[str]) -> None:
    schedules = torch.optim.lr_scheduler

    def build(steps: int) -> State:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        made: dict[str, Any] = {
            "cosine": schedules.CosineAnnealingLR(optimizer, 10),
            "warm": schedules.CosineAnnealingWarmRestarts(optimizer, 3),
            "slow": schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            "one": schedules.OneCycleLR(optimizer, 0.1, total_steps=20),
            "chain": schedules.SequentialLR(
                optimizer, [schedules.LinearLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)], [3]
            ),
            "chained": schedules.ChainedScheduler([schedules.LinearLR(optimizer)], optimizer),
            "plateau": schedules.ReduceLROnPlateau(optimizer),
        }
        for _ in range(steps):
            optimizer.step()
            for schedule in made.values():
                schedule.step(*([1.0] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
        return State(model=model, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu"), **made)

    source, state, extra = build(5), build(0), {}  # type: ignore[var-annotated]
    came = source.tensors(extra)
    capfd.readouterr()
    for mine, (_, theirs) in zip(state.adopt(tuple(info for info, _ in came), extra), came, strict=True):
        mine.copy_(theirs)
    state.filled()
    assert state.cosine.last_epoch == 5
    assert "elastic:" not in capfd.readouterr().err


@pytest.mark.parametrize("takes", [True, False])
def test_a_modules_extra_state_that_is_not_taken_is_named(takes: bool, capfd: pytest.CaptureFixture[str]) -> None:
    class Counting(torch.nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count, "mean": torch.full((2,), float(self.count))}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"] if takes else 0

    source, state, extra = State(model=Counting(1, 1)), State(model=Counting(1, 1)), {}  # type: ignore[var-annotated]
    source.model.count = 3
    came = source.tensors(extra)
    for mine, (_, theirs) in zip(state.adopt(tuple(info for info, _ in came), extra), came, strict=True):
        mine.copy_(theirs)
    state.filled()
    said = "state.model._extra_state.count is 0 after it was loaded, and was given as 3"
    assert (said in capfd.readouterr().err) is not takes
