"""Modules' training modes and parameters' requires_grad: in no state dict.

A loop switches them within a step: for an evaluation, or a GAN's frozen half. If the generation ends there, a survivor
would enter `train` again with dropout off or a network frozen, and a replacement would not. So `train` is entered with
those that `setup` has left, as the first time. A loop may also change them for good: it freezes a part of the model at
some step. What it had changed by the last commit belongs to the state, and is changed again before its first batch;
parameters that it has unfrozen want gradients from the start, as DDP sums those alone that do when it is built. What
the script sets between two loops is its own to set again.

`torch.set_grad_enabled(False)` before an evaluation and the default dtype of new tensors are reset too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic.worker.state.guards.optimizer_marks import with_inner
from elastic.worker.torch_internals import torch_private

Flags = list[bool]
"""`training` of each module, then `requires_grad` of each parameter."""

_TRAINING = operator.attrgetter("training")
_WANTED = operator.attrgetter("requires_grad")


class Modes:
    """The flags of these modules and of torch."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], hooks: Hooks | None = None) -> None:
        """`modules` by the name of their part, as `setup` has left them. `hooks`: to be put back as well."""
        self._hooks = hooks
        inner = [(_joined(part, path), m) for part, module in modules.items() for path, m in module.named_modules()]
        params = [(_joined(part, key), p) for part, module in modules.items() for key, p in module.named_parameters()]
        self._names = [("training", name) for name, _ in inner] + [("requires_grad", name) for name, _ in params]
        self._modules, self._params = [module for _, module in inner], [param for _, param in params]
        self._setup = self._now()
        self._begun: Flags | None = None
        """At the first batch of this generation, before `changes` was applied, and what was set between loops since;
        None: none was taken."""
        self._last: Flags | None = None
        """At the last commit of this generation."""
        self.changes: dict[str, dict[str, bool]] = {}
        """By the last commit, what the loop had changed since its first batch: kind -> name -> value."""
        self._grad, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()

    def put_back(self) -> None:
        """`train` is about to be entered: restore those of `setup`. Modules and parameters added since keep theirs."""
        if self._hooks is not None:
            self._hooks.put_back()
        torch.set_grad_enabled(self._grad)
        torch.set_default_dtype(self._dtype)
        self._set([flag or free for flag, free in zip(self._setup, self._unfrozen(), strict=True)])
        self._begun = self._last = None

    def loop_begins(self) -> None:
        """A loop asks for its first batch."""
        now = self._now()
        if self._begun is not None:
            rows = zip(self._begun, self._last or now, now, strict=True)
            self._begun = [begun if before == after else after for begun, before, after in rows]
            return
        self._begun = [flag and not free for flag, free in zip(now, self._unfrozen(), strict=True)]
        if self.changes:
            pairs = zip(self._names, self._begun, strict=True)
            self._set([self.changes.get(kind, {}).get(name, flag) for (kind, name), flag in pairs])

    def commit(self) -> None:
        """A step has been committed."""
        if self._begun is None:
            return  # a loop of the script's own, of which it is not known where it begins
        self._last, self.changes = self._now(), {}
        if self._last != self._begun:
            for (kind, name), before, after in zip(self._names, self._begun, self._last, strict=True):
                if before != after:
                    self.changes.setdefault(kind, {})[name] = after

    def adopt(self, changes: Mapping[str, Any]) -> None:
        """The state that comes was committed with these changes."""
        self.changes = {kind: dict(held) for kind, held in changes.items()}

    def _unfrozen(self) -> list[bool]:
        """Of each flag, whether it is of a parameter that the loop had want gradients that it did not want before."""
        changes = self.changes.get("requires_grad", {})
        return [kind == "requires_grad" and changes.get(name, False) for kind, name in self._names]

    def _set(self, flags: Flags) -> None:
        for module, mode in zip(self._modules, flags, strict=False):
            module.training = mode
        for param, want in zip(self._params, flags[len(self._modules) :], strict=True):
            if param.requires_grad != want and param.is_leaf:
                param.requires_grad_(want)

    def _now(self) -> Flags:
        return [*map(_TRAINING, self._modules), *map(_WANTED, self._params)]


def _joined(part: str, path: str) -> str:
    return f"{part}.{path}" if path else part


class Hooks:
    """The hooks of modules, parameters and optimizers as `setup` has left them: in no state dict.

    What `train` registers on objects of the state (a hook on a gradient, on a forward, on an optimizer's step) it
    registers again at its next entry, on the same objects in a survivor and on new ones in a replacement. So they go
    back to those of `setup` first, as everything that `train` makes belongs to one entry.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        found = {id(each): each for module in modules for each in (*module.modules(), *module.parameters())}
        self._objects: list[Any] = [*found.values(), *(inner for each in optimizers for inner in with_inner(each))]
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
                    kept = {key: hook for key, hook in hooks.items() if _is_kept(hook)}
                    hooks.clear()
                    hooks.update({**setup, **kept})


def _is_kept(hook: Any) -> bool:
    """Of an optimizer within a part, which elastic comes to know at its first step; of FSDP2, which makes some at the
    first forward, once: they bring the parameters back from their unsharded form for a state dict."""
    return str(getattr(hook, "__module__", "")).startswith(("elastic.", "torch.distributed.fsdp."))
