"""Survivors and replacements enter `train` in the modes of `setup`, and their loop with what it had changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

import elastic


def _state() -> elastic.State:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)  # frozen by the script
    return elastic.State(model=model, critic=torch.nn.Linear(1, 1), seen=0)


def test_an_evaluation_that_was_cut_short_is_over() -> None:
    state = _state()
    state.forget_gradients()
    state.model.eval()
    state.forget_gradients()
    assert all(module.training for module in state.model.modules())


def test_module_modes_set_by_setup_are_restored() -> None:
    state = _state()
    state.model[1].eval()
    state.forget_gradients()
    state.model.train()
    state.model.requires_grad_(True)
    state.forget_gradients()
    assert [module.training for module in state.model] == [True, False, True]
    assert not any(param.requires_grad for param in state.model[0].parameters())
    assert all(param.requires_grad for param in state.model[2].parameters())


def test_a_network_that_was_frozen_for_half_a_step_wants_gradients_again() -> None:
    state = _state()
    state.forget_gradients()
    state.critic.requires_grad_(False)
    state.forget_gradients()
    assert all(param.requires_grad for param in state.critic.parameters())


def test_modules_that_came_later_keep_their_modes() -> None:
    state = _state()
    state.forget_gradients()
    state.model.append(torch.nn.Dropout(0.1).eval())
    state.forget_gradients()
    assert [module.training for module in state.model] == [True, True, True, False]


def test_global_torch_modes_are_reset_for_survivors() -> None:
    """Otherwise the survivors' first backward fails, for no mistake of theirs."""
    state = _state()
    state.forget_gradients()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    try:
        state.forget_gradients()
        assert torch.is_grad_enabled()
        assert torch.get_default_dtype() is torch.float32
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)


def _optimized() -> elastic.State:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def _enter(state: elastic.State) -> None:
    state.forget_gradients()
    state.begin()


def _step(state: elastic.State, change: Callable[[elastic.State], None] = lambda _: None) -> None:
    """One turn of a loop over `job.batches`."""
    state.loop_begins()
    change(state)
    state.optimizer.step()
    state.committed(1)


def _freeze(state: elastic.State) -> None:
    """As a loop does at some step, once and for all."""
    state.model[0].requires_grad_(False)
    state.model[1].eval()


def _modes(state: elastic.State) -> list[tuple[bool, list[bool]]]:
    return [(inner.training, [param.requires_grad for param in inner.parameters()]) for inner in state.model]


def _replacement(source: elastic.State) -> elastic.State:
    state, extra = _optimized(), dict[str, Any]()
    found = source.tensors(extra)
    came = state.adopt(tuple(info for info, _ in found), json.loads(json.dumps(extra)))
    for mine, (_, theirs) in zip(came, found, strict=True):
        mine.copy_(theirs)
    state.filled()
    return state


FREE = [(True, [True, True]), (True, []), (True, [True, True])]
FROZEN = [(True, [False, False]), (False, []), (True, [True, True])]


def _trained() -> elastic.State:
    state = _optimized()
    _enter(state)
    _step(state)
    _step(state, _freeze)
    _step(state)
    return state


def test_a_survivor_keeps_what_the_loop_has_frozen() -> None:
    """Otherwise it would train on what an undisturbed run does not, and no step would be said lost."""
    state = _trained()
    for _ in range(2):  # and again, after the next failure
        state.loop_begins()
        state.model.eval()  # an evaluation in the step that is cut short
        state.model.requires_grad_(True)
        assert state.rewind() is None
        _enter(state)
        assert _modes(state) == FREE, "the script's way into the loop, which wraps the model, is as the first time"
        state.loop_begins()
        assert _modes(state) == FROZEN
        _step(state)


def test_a_replacement_gets_what_the_loop_has_frozen() -> None:
    state = _replacement(_replacement(_trained()))
    _enter(state)
    assert _modes(state) == FREE
    _step(state)
    assert _modes(state) == FROZEN


def test_what_the_loop_has_unfrozen_again_is_not_frozen() -> None:
    source = _trained()
    _step(source, lambda state: state.model.requires_grad_(True) and None)
    state = _replacement(source)
    _enter(state)
    _step(state)
    assert _modes(state) == [(True, [True, True]), (False, []), (True, [True, True])]


def test_what_is_frozen_before_the_loop_is_left_to_the_script() -> None:
    """Training in two loops: a failure at the last commit of the first one freezes nothing in the second."""
    state = _optimized()
    _enter(state)
    _freeze(state)
    _step(state)
    assert "modes" not in state.extra()
    _enter(state)
    _step(state)
    assert _modes(state) == FREE


def test_a_loop_of_the_scripts_own_enters_with_the_modes_of_setup() -> None:
    state = _optimized()
    _enter(state)
    _freeze(state)
    state.optimizer.step()
    state.committed(1)
    _enter(state)
    assert _modes(state) == FREE


def _on_entry(state: elastic.State) -> list[bool]:
    assert state.rewind() is None
    _enter(state)
    return [param.requires_grad for param in state.model[0].parameters()]


def test_what_the_loop_has_unfrozen_wants_gradients_when_the_model_is_wrapped() -> None:
    """DDP sums the gradients of parameters that want some when it is built: of others each rank would apply its own."""
    state = _optimized()
    state.model[0].requires_grad_(False)  # by setup
    _enter(state)
    _step(state)
    assert _on_entry(state) == [False, False]
    _step(state, lambda state: state.model.requires_grad_(True) and None)
    for _ in range(2):
        assert _on_entry(state) == [True, True]
        _step(state)
        assert _modes(state) == FREE
    _step(state, lambda state: state.model[0].requires_grad_(False) and None)
    assert _on_entry(state) == [False, False], "frozen again"


def _only(state: elastic.State, trained: int) -> None:
    for number in (0, 2):
        state.model[number].requires_grad_(number == trained)


def test_what_is_set_between_two_loops_is_left_to_the_script() -> None:
    """Each epoch a loop of its own, and the halves of the model trained in turn: a failure in the evaluation after an
    epoch, or a resume from its checkpoint, must not train the other half for a whole epoch."""
    state = _optimized()
    _enter(state)
    for trained in (0, 2):
        _only(state, trained)
        _step(state)
    for entered in (state, _replacement(state)):
        assert entered.rewind() is None
        _enter(entered)
        _only(entered, 0)
        entered.loop_begins()
        assert [entered.model[number].weight.requires_grad for number in (0, 2)] == [True, False]


def test_what_a_loop_has_frozen_for_good_stays_so_over_the_loops_after_it() -> None:
    state = _trained()
    _step(state)  # another loop
    assert state.rewind() is None
    _enter(state)
    state.loop_begins()
    assert _modes(state) == FROZEN
