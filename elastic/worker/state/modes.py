"""Modules' training modes and parameters' requires_grad: in no state dict.

A loop switches them within a step: for an evaluation, or a GAN's frozen half. If the generation ends there, a survivor
would enter `train` again with dropout off or a network frozen, and a replacement would not. The same holds for
`torch.set_grad_enabled(False)` before an evaluation, and for the default dtype of new tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Modes:
    """The current flags of these modules and of torch."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        found = list(modules)
        self._training = [(inner, inner.training) for module in found for inner in module.modules()]
        self._wanted = [(param, param.requires_grad) for module in found for param in module.parameters()]
        self._grad, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()

    def put_back(self) -> None:
        """Restore them. Modules and parameters added since keep theirs."""
        torch.set_grad_enabled(self._grad)
        torch.set_default_dtype(self._dtype)
        for module, training in self._training:
            module.training = training
        for param, wanted in self._wanted:
            if param.requires_grad != wanted and param.is_leaf:
                param.requires_grad_(wanted)
