"""Whether the ranks have the same state where nothing else makes it so: a parameter that an optimizer steps and whose
gradients `job.ddp` does not exchange, and an optimizer that keeps a part of its state on each rank.

One number of each rank goes with the plan that the ranks exchange for their snapshots anyway. Only where these numbers
differ, which every rank then knows, the ranks exchange more to find the names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from . import shared_values
from .comm.ddp import GradientWeight
from .state.state import State

ELEMENTS = 1 << 16
"""Elements that are looked at, over all parameters that are compared; at least one of each."""

DIGEST_BITS = 48
"""Of a digest: the sum over all ranks fits an int64."""

NAMES = 3
"""Names in one error."""

Rows = dict[str, str]
"""Name -> what must be the same on all ranks."""


class Replicas:
    """One per process. All ranks call `enter`, `digest` and `refuse` at the same points."""

    def __init__(self, gradients: GradientWeight, *, only_say: bool = False) -> None:
        """`only_say`: a difference is printed, and is no error."""
        self._gradients = gradients
        self._only_say = only_say
        self._exchanges = 0
        self._said = False
        self._rows: tuple[Rows, Rows] = {}, {}

    def enter(self) -> None:
        """A generation begins."""
        self._exchanges, self._said = 0, False

    def digest(self, state: State) -> int:
        """To be exchanged after a commit; the same on all ranks whose state is alike. 0 if this is not the 1st, 2nd,
        4th, 8th, … call of a generation: what is wrong is wrong from the beginning, or for long."""
        self._exchanges += 1
        if self._said or self._exchanges & (self._exchanges - 1):
            return 0
        self._rows = _values(_unexchanged(state, self._gradients.exchanged)), _table(state)
        found = xxhash.xxh3_64()
        for rows in self._rows:
            for name, token in rows.items():
                found.update(f"{name} {token}\n".encode())
        return found.intdigest() >> (64 - DIGEST_BITS)

    def refuse(self, *, rank: int, world_size: int, step: int) -> None:
        """The digests differ. All ranks call. Raises RuntimeError, the same on all of them, that names what differs;
        prints it instead if nothing is known to exchange gradients in this generation, or with `only_say`."""
        values, table = (_differing(rows, rank, world_size) for rows in self._rows)
        if table[0]:
            told, error = _table_text(step, *table), True
        else:
            told, error = _values_text(step, *values), self._gradients.exchanges
        if error and not self._only_say:
            raise RuntimeError(told)
        self._said = True
        if rank == 0:
            print(f"elastic: {told}", file=sys.stderr, flush=True)


def _unexchanged(state: State, exchanged: set[int]) -> dict[str, torch.Tensor]:
    """The parameters that an optimizer of the state may step and that are not in `exchanged`, by name."""
    return {
        name: param
        for name, param in state.stepped()
        if id(param) not in exchanged and param.requires_grad and param.numel() and param.layout is torch.strided
    }


def _values(params: Mapping[str, torch.Tensor]) -> Rows:
    """A hash of some elements of each, evenly spread. One copy from each device."""
    each = max(1, ELEMENTS // max(1, len(params)))
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, param in params.items():
        flat = param.detach().reshape(-1)
        sample = flat[:: -(-flat.numel() // each)].contiguous().view(torch.uint8)
        by_device.setdefault(param.device, []).append((name, sample))
    found: Rows = {}
    for samples in by_device.values():
        whole, start = torch.cat([sample for _, sample in samples]).cpu().numpy().tobytes(), 0
        for name, sample in samples:
            stop = start + sample.numel()
            found[name] = xxhash.xxh3_64_hexdigest(whole[start:stop])
            start = stop
    return found


def _table(state: State) -> Rows:
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in state.optimizer_tensors()}


def _differing(rows: Rows, rank: int, world_size: int) -> tuple[list[str], list[int]]:
    """(the first names whose rows differ from rank 0's on any rank, the ranks on which they do); the same on all."""
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "device": torch.device("cpu")}
    first: Rows = shared_values.broadcast_value(rows, **place)
    mine = [name for name in {**first, **rows} if first.get(name) != rows.get(name)][:NAMES]
    everywhere: Sequence[list[str]] = shared_values.gather(mine, **place)
    names = dict.fromkeys(name for theirs in everywhere for name in theirs)
    return list(names)[:NAMES], [other for other, theirs in enumerate(everywhere) if theirs]


def _values_text(step: int, names: Sequence[str], ranks: Sequence[int]) -> str:
    return (
        f"state.{', state.'.join(names)} differs between the ranks after step {step} "
        f"({_listed(ranks)} from rank 0): an optimizer steps it, and nothing averages its gradients, so that each rank "
        "applies its own. Wrap its module in train(), criterion = job.ddp(state.criterion), or put it into the module "
        "that job.ddp wraps. After unfreezing a parameter call job.ddp again: it exchanges what wants gradients then"
    )


def _table_text(step: int, names: Sequence[str], ranks: Sequence[int]) -> str:
    return (
        f"state.{', state.'.join(names)} is not the same tensor on each rank after step {step} ({_listed(ranks)} "
        "against rank 0): the optimizer keeps a part of its state on each rank, and a rank that is lost would take "
        "its part with it, as elastic restores a replacement from one other rank. Use the form of the optimizer that "
        "runs on all parameters on each rank, with job.ddp"
    )


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
