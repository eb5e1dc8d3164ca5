"""The kinds of things a `State` is made of, and how each gives out and takes in its tensors.

Taking in has two halves: `adopt` makes storage for exactly the tensors that will come (what exists and fits is kept,
so that parameters stay the objects that DDP and the optimizer hold), and `filled` is called when their bytes are in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..checkpoint.dtypes import dtype_of
from ..core.tensors import TensorInfo
from .tree import Codecs, decode, encode

Named = list[tuple[str, torch.Tensor]]
Infos = Mapping[str, TensorInfo]
"""By full name, the part's own name included."""


class Part(Protocol):
    value: Any

    def tensors(self) -> Named: ...
    def extra(self) -> Any: ...
    def adopt(self, infos: Infos, extra: Any) -> None: ...
    def filled(self) -> None: ...
    def to(self, device: torch.device) -> None: ...


class ModulePart:
    """Parameters and persistent buffers, where they lie."""

    def __init__(self, name: str, value: torch.nn.Module, codecs: Codecs) -> None:
        self.name = name
        self.value = value
        self._codecs = codecs

    def tensors(self) -> Named:
        held = self.value.state_dict(keep_vars=True)
        return [(f"{self.name}.{key}", item) for key, item in held.items() if isinstance(item, torch.Tensor)]

    def extra(self) -> Any:
        held = self.value.state_dict(keep_vars=True)
        rest = {key: item for key, item in held.items() if not isinstance(item, torch.Tensor)}
        return {key: encode(item, f"{self.name}.{key}", {}, self._codecs) for key, item in rest.items()}

    def adopt(self, infos: Infos, extra: Any) -> None:
        if extra:  # a module's own get_extra_state
            values = {key: decode(item, _no_tensor, self._codecs) for key, item in extra.items()}
            self.value.load_state_dict(values, strict=False)

    def filled(self) -> None:
        pass

    def to(self, device: torch.device) -> None:
        before = list(self.value.parameters())
        self.value.to(device)
        if any(a is not b for a, b in zip(before, self.value.parameters(), strict=True)):
            raise RuntimeError(
                f"state.{self.name} cannot move to {device} without new parameters; the optimizer has the old"
            )


class ObjectPart:
    """Anything with state_dict and load_state_dict; what it returns is JSON but for tensors."""

    def __init__(self, name: str, value: Any, codecs: Codecs) -> None:
        self.name = name
        self.value = value
        self._codecs = codecs
        self._coming: dict[str, torch.Tensor] | None = None
        self._coming_extra: Any = None

    def tensors(self) -> Named:
        return list((self._coming if self._coming is not None else self._encoded()[1]).items())

    def extra(self) -> Any:
        return self._encoded()[0]

    def adopt(self, infos: Infos, extra: Any) -> None:
        mine = self._encoded()[1]
        coming: dict[str, torch.Tensor] = {}

        def target(name: str, device: str) -> torch.Tensor:
            if name not in infos:
                raise ValueError(f"{name} is named by the state that came, but is not in its table")
            coming[name] = _fitting(mine.get(name), infos[name], device)
            return coming[name]

        self._coming_extra = decode(extra, target, self._codecs)
        self._coming = coming

    def filled(self) -> None:
        if self._coming is not None:
            self._put(self._coming_extra)
            self._coming = self._coming_extra = None

    def to(self, device: torch.device) -> None:
        pass  # its own affair; most hold no tensors

    def _encoded(self) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        return encode(self._get(), self.name, tensors, self._codecs), tensors

    def _get(self) -> Any:
        return self.value.state_dict()

    def _put(self, held: Any) -> None:
        self.value.load_state_dict(held)


class ValuePart(ObjectPart):
    """A plain value, kept as an attribute of the state."""

    def _get(self) -> Any:
        return self.value

    def _put(self, held: Any) -> None:
        self.value = held


class OptimizerPart:
    """Per-parameter tensors as `optimizer.state.<index>.<key>`; everything else as JSON.

    A newcomer's optimizer has no state before its first step: it is made here, with its parameter's memory layout.
    """

    def __init__(self, name: str, value: torch.optim.Optimizer, codecs: Codecs) -> None:
        self.name = name
        self.value = value
        self._codecs = codecs

    def tensors(self) -> Named:
        found: dict[str, torch.Tensor] = {}
        self._walk(found)
        return list(found.items())

    def extra(self) -> Any:
        return self._walk({})

    def adopt(self, infos: Infos, extra: Any) -> None:
        params = self._params()
        counts, came = [len(g["params"]) for g in self.value.param_groups], [g["params"] for g in extra["groups"]]
        if counts != came:
            raise ValueError(f"{self.name} has parameter groups of {counts} parameters here, {came} in the state")
        mine = dict(self.tensors())

        def target(name: str, device: str) -> torch.Tensor:
            return _fitting(mine.get(name), infos[name], device)

        for group, held in zip(self.value.param_groups, extra["groups"], strict=True):
            options = decode(held["options"], target, self._codecs)
            for key in [key for key in group if key != "params" and key not in options]:
                del group[key]
            group.update(options)
        fresh: dict[Any, dict[Any, Any]] = {}
        prefix = f"{self.name}.state."
        for name, info in infos.items():
            index, _, key = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and "." not in key:
                if int(index) >= len(params):
                    raise ValueError(f"{name}: there are only {len(params)} parameters here")
                param = params[int(index)]
                device = extra["on"].get(key, param.device.type)
                fresh.setdefault(param, {})[key] = _fitting(mine.get(name), info, device, like=param)
        for index, held in extra["state"].items():
            param = params[int(index)]
            fresh.setdefault(param, {}).update(decode(held, target, self._codecs))
        self.value.state.clear()
        self.value.state.update(fresh)

    def filled(self) -> None:
        pass

    def to(self, device: torch.device) -> None:
        for param, held in self.value.state.items():
            for key, item in held.items():
                if isinstance(item, torch.Tensor) and (key != "step" or item.device.type != "cpu"):
                    held[key] = item.to(param.device)

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.value.param_groups for param in group["params"]]

    def _walk(self, tensors: dict[str, torch.Tensor]) -> Any:
        groups = []
        for number, group in enumerate(self.value.param_groups):
            options = {key: item for key, item in group.items() if key != "params"}
            encoded = encode(options, f"{self.name}.groups.{number}", tensors, self._codecs)
            groups.append({"params": len(group["params"]), "options": encoded})
        on: dict[str, str] = {}
        rest: dict[str, Any] = {}
        for index, param in enumerate(self._params()):
            held = self.value.state.get(param, {})
            path = f"{self.name}.state.{index}"
            for key in sorted(held, key=str):
                item = held[key]
                if isinstance(item, torch.Tensor):
                    tensors[f"{path}.{key}"] = item.detach()
                    if item.device.type != param.device.type:
                        on[key] = item.device.type
                else:
                    rest.setdefault(str(index), {})[key] = encode(item, f"{path}.{key}", tensors, self._codecs)
        if strangers := [key for key in self.value.state if not isinstance(key, torch.Tensor)]:
            raise TypeError(f"state.{self.name} keeps state under {strangers[0]!r}, which belongs to no parameter")
        return {"groups": groups, "on": on, "state": rest}


def _fitting(
    mine: torch.Tensor | None, info: TensorInfo, device: str, like: torch.Tensor | None = None
) -> torch.Tensor:
    """`mine` if the bytes of `info` can go straight into it, else new storage on a device of that type."""
    dtype = dtype_of(info.dtype)
    if mine is not None and mine.dtype == dtype and tuple(mine.shape) == info.shape and mine.device.type == device:
        return mine
    if like is not None and tuple(like.shape) == info.shape and like.device.type == device:
        return torch.empty_like(like, dtype=dtype, requires_grad=False).detach()
    where = like.device if like is not None and like.device.type == device else torch.device(device)
    return torch.empty(info.shape, dtype=dtype, device=where)


def _no_tensor(name: str, device: str) -> torch.Tensor:
    raise ValueError(f"{name}: tensors in a module's extra state are not supported; register them as buffers")
