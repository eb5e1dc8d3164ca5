"""What `setup` has built: a replacement builds the same, and can receive nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from elastic.checkpoint.format.plain import tensors_named
from elastic.contract.worker.tensor_table import Table, TensorInfo
from elastic.worker.misuse import MisuseTypeError


class Built:
    """The tensors that the modules hold, and the parameter groups of the optimizers, as training began."""

    def __init__(self, table: Table, extra: Mapping[str, Any], buffers: Collection[str]) -> None:
        """`table` and `extra` as `State.tensors` gives them. `buffers`: names of those whose shape may change, as that
        of an observer's statistics does in its first forward."""
        self._buffers = buffers
        self._tensors = self._fixed(table, extra)
        self._groups = _groups(extra)

    def refuse_others(self, table: Table, extra: Mapping[str, Any]) -> None:
        """Raises TypeError, with the name of the first difference, if a replacement could not receive this state."""
        tensors = self._fixed(table, extra)
        if tensors != self._tensors:
            name = next(n for n in {**self._tensors, **tensors} if tensors.get(n) != self._tensors.get(n))
            raise MisuseTypeError(
                _refusal(f"state.{name}", _described(self._tensors.get(name)), _described(tensors.get(name)))
            )
        for name, counts in _groups(extra).items():
            if counts != self._groups.get(name):
                was, now = (f"groups of {c} parameters" for c in (self._groups.get(name), counts))
                raise MisuseTypeError(_refusal(f"state.{name}", was, now))

    def _fixed(self, table: Table, extra: Mapping[str, Any]) -> dict[str, TensorInfo]:
        own = _own(table, extra)
        return {n: TensorInfo(n, i.dtype, (), 0) if n in self._buffers else i for n, i in own.items()}


def _described(info: TensorInfo | None) -> str:
    return "missing" if info is None else f"{info.dtype} {list(info.shape)}"


def _refusal(name: str, was: str, now: str) -> str:
    return (
        f"{name} was {was} when training began, and is {now} now: a replacement builds its state by setup() and could "
        "not receive this one, nor could it be loaded from a checkpoint. Let setup() build all that the state holds at "
        "any time, or make a buffer persistent=False"
    )


def _own(table: Table, extra: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The modules' own tensors, without those that a module makes for its `state_dict`."""
    modules = {name for name, kind in extra["kinds"].items() if kind == "module"}
    made = tensors_named([extra["parts"][name] for name in modules])
    return {i.name: i for i in table if i.name.partition(".")[0] in modules and i.name not in made}


def _groups(extra: Mapping[str, Any]) -> dict[str, list[int]]:
    """Optimizer -> number of parameters in each of its groups."""
    found = {name: extra["parts"][name] for name, kind in extra["kinds"].items() if kind == "optimizer"}
    return {name: [group["params"] for group in held.get("groups", ())] for name, held in found.items()}
