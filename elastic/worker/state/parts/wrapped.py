"""Optimizers within optimizers: Lookahead, SAM and similar ones step another optimizer, which has its own state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from elastic.checkpoint.format.json_values import Codecs

from .parts import Infos, Named, OptimizerPart, OptimizerTensors


class WrappedOptimizerPart(OptimizerPart):
    """An optimizer and the optimizers that it holds, whose state is `optimizer.<attribute>.state.<index>.<key>`.

    It is taken from the optimizers themselves, as for any other: what a wrapper's `state_dict()` contains differs from
    library to library, and some leave the inner optimizer's state out.
    """

    def __init__(self, name: str, value: torch.optim.Optimizer, codecs: Codecs) -> None:
        super().__init__(name, value, codecs)
        self._inner = {key: optimizer_part(f"{name}.{key}", held, codecs) for key, held in inner_optimizers(value)}

    def held(self) -> tuple[Named, Any]:
        tensors, extra = super().held()
        inner = {key: part.held() for key, part in self._inner.items()}
        for theirs, _ in inner.values():
            tensors = tensors + theirs
        return tensors, {**extra, "inner": {key: theirs for key, (_, theirs) in inner.items()}}

    def make(self, infos: Infos, devices: Mapping[str, str]) -> None:
        """Creates nothing: `adopt` builds the wrapper's tensors with those of the inner optimizers."""

    def adopt(self, infos: Infos, extra: Any, made: OptimizerTensors | None = None) -> Mapping[str, torch.Tensor]:
        came = extra.get("inner", {})
        if set(came) != set(self._inner):
            raise ValueError(
                f"{self.name} holds {_listed(self._inner)} here, and {_listed(came)} in the state that came"
            )
        tensors: dict[str, torch.Tensor] = {}
        for key, part in self._inner.items():
            tensors.update(part.adopt(infos, came[key]))
        return {**tensors, **super().adopt(infos, extra)}

    def to(self, device: torch.device) -> None:
        super().to(device)
        for part in self._inner.values():
            part.to(device)

    def groups(self) -> list[dict[str, Any]]:
        groups = super().groups()
        for part in self._inner.values():
            known = set(map(id, groups))
            groups = groups + [group for group in part.groups() if id(group) not in known]
        return groups


def optimizer_part(name: str, value: torch.optim.Optimizer, codecs: Codecs) -> OptimizerPart:
    kind = WrappedOptimizerPart if any(True for _ in inner_optimizers(value)) else OptimizerPart
    return kind(name, value, codecs)


def inner_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Optimizers that are attributes of `optimizer`, or items of a list, tuple or dict that is one, each with its path.

    Not those whose `state` the wrapper exposes as its own.
    """
    optimizers: list[torch.optim.Optimizer] = [optimizer]
    for name, value in vars(optimizer).items():
        items: Iterable[tuple[Any, Any]] = [(None, value)]
        if isinstance(value, list | tuple):
            items = enumerate(value)
        elif isinstance(value, dict):
            items = list(value.items())  # of `state` the keys are tensors: to write them out takes a millisecond each
        for place, item in items:
            if not isinstance(item, torch.optim.Optimizer) or any(item is known for known in optimizers):
                continue
            optimizers.append(item)
            if item.state is not optimizer.state:
                yield name if place is None else f"{name}.{place}", item


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "no other optimizer"
