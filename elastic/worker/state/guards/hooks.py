"""Hooks of modules, parameters and optimizers: in no state dict.

What `train` registers on objects of the state (a hook on a gradient, on a forward, on an optimizer's step) it registers
again at its next entry, on the same objects in a survivor and on new ones in a replacement. So they go back to those of
`setup` first, as everything that `train` makes belongs to one entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from elastic.worker.torch_internals import torch_private

from .optimizer_marks import with_inner


class Hooks:
    """The hooks as `setup` has left them."""

    def __init__(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        held: dict[int, Any] = {}
        for module in modules:
            for each in (*module.modules(), *module.parameters()):
                held.setdefault(id(each), each)
        self._objects: list[Any] = [*held.values(), *(inner for each in optimizers for inner in with_inner(each))]
        self._setup = {
            (number, name): dict(hooks)
            for number, each in enumerate(self._objects)
            for name, hooks in torch_private.hooks_of(each)
        }

    def put_back(self) -> None:
        """`train` is about to be entered. Objects added since keep theirs."""
        for number, each in enumerate(self._objects):
            for name, hooks in torch_private.hooks_of(each):
                setup = self._setup.get((number, name), {})
                if hooks.keys() != setup.keys():
                    ours = {key: hook for key, hook in hooks.items() if _is_ours(hook)}
                    hooks.clear()
                    hooks.update({**setup, **ours})


def _is_ours(hook: Any) -> bool:
    """Of an optimizer within a part, which elastic comes to know at its first step."""
    return str(getattr(hook, "__module__", "")).startswith("elastic.")
