"""A survivor enters `train` in the modes in which `setup` left its modules."""

from __future__ import annotations

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
