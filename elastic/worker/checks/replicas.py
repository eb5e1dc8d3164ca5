"""Whether the ranks have the same state where nothing else makes it so: a parameter that an optimizer steps and whose
gradients `job.ddp` does not exchange, or that was stepped with gradients of one rank alone, and an optimizer that keeps
a part of its state on each rank. Of parameters whose gradients are exchanged some are looked at as well: a rank may
change them by itself.

Two numbers of each rank go with the plan that the ranks exchange for their snapshots anyway. Only where one of them
differs, which every rank then knows, the ranks exchange more to find the names.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from elastic.checkpoint.format.plain import tensors_named
from elastic.worker.comm.ddp import GradientWeight
from elastic.worker.link.misuse import MisuseRuntimeError
from elastic.worker.state.handover import shared_values
from elastic.worker.state.parts.boxes import is_sharded, local, mesh_size
from elastic.worker.state.state import State

ELEMENTS = 1 << 16
"""Elements that are looked at, over all parameters that are compared; at least one of each."""

DIGEST_BITS = 63
"""Of a digest: it fits an int64, and so does its negative."""

WINDOW = 1024
"""So many parameters are compared at one time though their gradients are exchanged; of more, others the next time."""

NAMES = 3
"""Names in one error."""

SINGLE = ("value", "generator", "object")
"""Kinds of parts of which one rank gives its own to those that are replaced."""

Rows = dict[str, str]
"""Name -> what must be the same on all ranks."""


class Replicas:
    """One per process. All ranks call `enter`, `digest` and `refuse` at the same points."""

    def __init__(self, gradients: GradientWeight, *, only_say: bool = False) -> None:
        """`only_say`: a difference is printed, and is no error."""
        self._gradients = gradients
        self._only_say = only_say
        self.enter()

    def enter(self) -> None:
        """A generation begins."""
        self._exchanges = 0
        self._warned = self._warned_drift = self._warned_plain = False

    def _window(self, state: State) -> dict[str, torch.Tensor]:
        """The same parameters on all ranks; none once it was said that some differ."""
        if self._warned_drift:
            return {}
        found = list(_compared(state).items())
        start = self._exchanges.bit_length() * WINDOW % max(1, len(found))
        return dict((found[start:] + found[:start])[:WINDOW])

    def digest(self, state: State) -> tuple[int, int]:
        """To be exchanged after a commit; the same on all ranks whose state is alike: of what is an error where it
        differs, and of what is only said. 0 if this is not the 1st, 2nd, 4th, 8th, … call of a generation: what is
        wrong is wrong from the beginning, or for long."""
        self._exchanges += 1
        if self._warned or self._exchanges & (self._exchanges - 1):
            return 0, 0
        if state.is_sharded:
            rows, unlike_here = self._parts(state), 1 + dist.get_rank()
            everyone = _gathered([rows[0], rows[1], *(_digest(each) for each in rows[2:])])
            return unlike_here if _unlike(everyone) else 0, unlike_here if _drifted(everyone) else 0
        unexchanged = _unexchanged(state, self._gradients.exchanged)
        only_warned = {**_values(self._window(state)), **({} if self._warned_plain else _plain(state))}
        return _digest({**_values(unexchanged), **_table(state), **_rates(state)}), _digest(only_warned)

    def refuse(self, state: State, *, rank: int, world_size: int, step: int) -> None:
        """The digests of `state` differ. All ranks call. Raises RuntimeError, the same on all, that names what differs;
        prints it instead with `only_say`, or if nothing is known to exchange gradients in this generation, unless an
        optimizer's tensor has another shape or type on a rank. A parameter whose gradients are exchanged is named, and
        is no error: nodes with unlike hardware may round its last digits differently."""
        if state.is_sharded:
            self._refuse_parts(state, step)
            return
        unexchanged = set(_unexchanged(state, self._gradients.exchanged))
        # Of all parameters: one rank may have seen gradients of its own where another one has not.
        values = _differing(_values(_compared(state)), rank, world_size, unexchanged)
        table = _differing(_table(state), rank, world_size)
        drift = values if values.names else _differing(_values(self._window(state)), rank, world_size, unexchanged)
        # State that a rank lacks may be that of parameters which it has not stepped yet: their values then differ too.
        if (rates := _differing(_rates(state), rank, world_size)).names:
            text, error = rates.text(RATES, step), self._gradients.exchanges
        elif table.names and (table.unlike or not values.own):
            reason = SHARDED + STEPPED_ON_SOME * (not table.unlike)
            text, error = table.text(reason, step), table.unlike or self._gradients.exchanges
        elif values.own:
            text, error = values.text(UNEXCHANGED, step), self._gradients.exchanges
        elif drift.names and not self._warned_drift:
            text, error = drift.text(DRIFTS, step), False
        elif not self._warned_plain and (plain := _differing(_plain(state), rank, world_size)).names:
            self._warned_plain = True
            if rank == 0:
                print(f"elastic: {plain.text(PLAIN, step)}", file=sys.stderr, flush=True)
            return
        else:
            return
        if error and not self._only_say:
            raise MisuseRuntimeError(text)
        self._warned_drift = True
        self._warned = bool(rates.names or table.names or values.own)
        if rank == 0:
            print(f"elastic: {text}", file=sys.stderr, flush=True)

    def _parts(self, state: State) -> tuple[int, int, Rows, Rows, Rows]:
        """Where each rank has a part: (its key, the names of its tensors, what must be alike on all ranks that have
        tensors of these names, what else must be on those of its key, and what should be there)."""
        extra: dict[str, Any] = {}
        whole = {i.name: t for i, t in state.tensors(extra) if not i.of and t.numel() and t.layout is torch.strided}
        by_key, volatile = state.buffers() | tensors_named(extra), state.volatile()
        frozen = {name: tensor for name, tensor in whole.items() if name in volatile - by_key}
        rest = {name: tensor for name, tensor in whole.items() if name in by_key}
        parts = {name: param for name, param in state.stepped() if is_sharded(param) and local(param).numel()}
        # Over a mesh of one rank nothing is exchanged: each rank that holds the whole trains it for itself.
        alone = {name: local(param) for name, param in parts.items() if mesh_size(param) == 1}
        exchanged = {name: local(param) for name, param in parts.items() if name not in alone}
        alike = {
            **_table(state),
            **_rates(state),
            **_values({**_unexchanged(state, self._gradients.exchanged), **frozen}),
        }
        by_replica = {**_values({**rest, **alone}), **_plain(state)}
        drift = {} if self._warned_drift else _values(exchanged)
        return state.shard_key(), state.shard_names(), alike, by_replica, drift

    def _refuse_parts(self, state: State, step: int) -> None:
        everyone = _gathered(self._parts(state))
        if unlike := _unlike(everyone):
            message, self._warned = RATES if {*unlike.names} <= state.rates().keys() else PARTS, True
        elif unlike := _drifted(everyone):
            message, self._warned_drift = DRIFTS, True
        else:
            raise AssertionError("the digests of these parts differed")
        text = unlike.text(message, step)
        if self._warned and not self._only_say:
            raise MisuseRuntimeError(text)
        if dist.get_rank() == 0:
            print(f"elastic: {text}", file=sys.stderr, flush=True)


def _digest(rows: Rows) -> int:
    hasher = xxhash.xxh3_64()
    for name, token in rows.items():
        hasher.update(f"{name} {token}\n".encode())
    return hasher.intdigest() >> (64 - DIGEST_BITS)


def _compared(state: State) -> dict[str, torch.Tensor]:
    """The parameters that an optimizer of the state may step and that are whole on each rank, by name."""
    return {name: param for name, param in state.stepped() if param.requires_grad and _comparable(param)}


def _unexchanged(state: State, exchanged: set[int]) -> dict[str, torch.Tensor]:
    """Of these, those that are not in `exchanged`."""
    return {name: param for name, param in _compared(state).items() if id(param) not in exchanged}


def _values(params: Mapping[str, torch.Tensor]) -> Rows:
    """A hash of some elements of each, evenly spread. One copy from each device."""
    each = max(1, ELEMENTS // max(1, len(params)))
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, param in params.items():
        sample = _sample(param.detach(), -(-param.numel() // each)).resolve_conj().resolve_neg().contiguous()
        by_device.setdefault(param.device, []).append((name, sample.view(torch.uint8)))
    hashes: Rows = {}
    for samples in by_device.values():
        joined, start = torch.cat([sample for _, sample in samples]).cpu().numpy().tobytes(), 0
        for name, sample in samples:
            stop = start + sample.numel()
            hashes[name] = xxhash.xxh3_64_hexdigest(joined[start:stop])
            start = stop
    return hashes


def _sample(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """Each element whose index is a multiple of `stride`. Of one that is not contiguous (channels last, a transposed
    table) no whole copy is made: the device may have no room for it."""
    if tensor.is_contiguous():
        return tensor.view(-1)[::stride]
    indices = torch.arange(0, tensor.numel(), stride, device=tensor.device)
    return tensor[torch.unravel_index(indices, tensor.shape)]


def _table(state: State) -> Rows:
    """Of a DTensor the shape is that of the whole. Where each rank has a part, also the names of all other tensors."""
    rows = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in state.optimizer_tensors()}
    return {**{info.name: "" for info in state.table()}, **rows} if state.is_sharded else rows


def _rates(state: State) -> Rows:
    return {name: repr(rate) for name, rate in state.rates().items()}


def _plain(state: State) -> Rows:
    """Plain values, generators and objects with a `state_dict`, and some elements of each tensor within them; not of
    objects that say `ranks_differ`."""
    extra: dict[str, Any] = {}
    tensors = {info.name: tensor for info, tensor in state.tensors(extra, own=False) if _comparable(tensor)}
    values = {name: part for name, part in extra["parts"].items() if extra["kinds"][name] in SINGLE}
    values = {name: part for name, part in values.items() if not getattr(getattr(state, name), "ranks_differ", False)}
    inner = {name: sorted(tensors_named(value) & tensors.keys()) for name, value in values.items()}
    samples = _values({name: tensors[name] for names in inner.values() for name in names})
    looks = {name: repr((value, [samples[each] for each in inner[name]])) for name, value in values.items()}
    return {name: xxhash.xxh3_64_hexdigest(look.encode(errors="replace")) for name, look in looks.items()}


def _comparable(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.layout is torch.strided and not is_sharded(tensor)


def _gathered(own: Sequence[Any]) -> list[Any]:
    return shared_values.gather(
        list(own), rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu")
    )


class _Unlike(NamedTuple):
    names: list[str]
    rank: int
    other: int

    def text(self, message: str, step: int) -> str:
        return message.format(names=", state.".join(self.names), step=step, ranks=f"rank {self.rank}", other=self.other)


def _unlike(everyone: Sequence[Any]) -> _Unlike | None:
    """The first rank whose part is not as it must be, of what `Replicas._parts` returns on each, or of digests of it;
    None: there is none. Where the names differ, each key has its own, and nothing must be alike on ranks of two."""
    staged = len({names for _, names, *_ in everyone}) > 1
    first: dict[int, int] = {}
    for rank, (key, _, alike, rest, _) in enumerate(everyone):
        replica = first.setdefault(key, rank)
        common = replica if staged else 0
        for other, mine, theirs in ((common, alike, everyone[common][2]), (replica, rest, everyone[replica][3])):
            if mine != theirs:
                rows = {**theirs, **mine} if isinstance(mine, dict) else {}
                return _Unlike([name for name in rows if mine.get(name) != theirs.get(name)][:NAMES], rank, other)
    return None


def _drifted(everyone: Sequence[Any]) -> _Unlike | None:
    """The same of what should be alike on the ranks of one key."""
    return _unlike([(key, names, None, drift, None) for key, names, _, _, drift in everyone])


class _Difference(NamedTuple):
    names: list[str]
    """The first rows that differ from rank 0's on any rank; if any of these is `own`, only such."""
    ranks: list[int]
    """On which they do."""
    own: bool
    """Whether a row that differs is one that this rank, or rank 0, does not exchange or does not have."""
    unlike: bool
    """Whether any of all rows differs, and is not merely missing on a rank."""

    def text(self, message: str, step: int) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return message.format(names=", state.".join(self.names), step=step, ranks=ranks, other=0)


def _differing(rows: Rows, rank: int, world_size: int, own: Collection[str] = ()) -> _Difference:
    """The same on all ranks. `own`: the rows that this rank does not exchange."""
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "device": torch.device("cpu")}
    first, first_own = shared_values.broadcast_value([rows, list(own)], **place)
    kept = {*own, *first_own, *(first.keys() ^ rows.keys())}
    unlike_rows = [name for name in {**first, **rows} if first.get(name) != rows.get(name)]
    unlike = any(name in first and name in rows for name in unlike_rows)
    unlike_rows = [name for name in unlike_rows if name in kept] or unlike_rows
    everywhere: Sequence[Any] = shared_values.gather(
        [unlike_rows[:NAMES], not kept.isdisjoint(unlike_rows), unlike], **place
    )
    any_own = any(each for _, each, _ in everywhere)
    reported = [names if each or not any_own else [] for names, each, _ in everywhere]
    names = dict.fromkeys(name for theirs in reported for name in theirs)
    ranks = [other for other, theirs in enumerate(reported) if theirs]
    return _Difference(list(names)[:NAMES], ranks, any_own, any(each for _, _, each in everywhere))


UNEXCHANGED = (
    "state.{names} differs between the ranks after step {step} ({ranks} from rank 0): an optimizer steps it, and "
    "nothing averages its gradients, so that each rank applies its own. Wrap its module in train(), criterion = "
    "job.ddp(state.criterion), or put it into the module that job.ddp wraps; call what job.ddp has returned, model(x) "
    "and not state.model(x), and keep the last backward of a step out of no_sync(). After unfreezing a parameter call "
    "job.ddp again: it exchanges what wants gradients then"
)

DRIFTS = (
    "state.{names} differs between the ranks after step {step} ({ranks} from rank {other}), though its gradients are "
    "exchanged: something changes it on each rank by itself (Embedding(max_norm=…), noise that is added to gradients "
    "after their exchange, an optimizer that draws numbers, nodes whose hardware rounds differently). A rank that is "
    "replaced begins with the weights of one other rank, so after a failure the weights are not those of an "
    "undisturbed run. Draw the same numbers on all ranks, or change the parameter on rank 0 and send it: "
    "job.broadcast. fingerprint_every_steps makes this a failure"
)

RATES = (
    "state.{names} is not the same on each rank after step {step} ({ranks} from rank {other}): a rank sets it by what "
    "it alone knows, its own loss or a counter that is lost with a process, and the weights of the ranks drift apart. "
    "Set it by state.step, or keep what sets it in the state: State(…, scheduler=…); a metric for it: job.gather or "
    "job.total"
)

SHARDED = (
    "state.{names} is not the same tensor on each rank after step {step} ({ranks} against rank 0): the optimizer keeps "
    "a part of its state on each rank, and a rank that is lost would take its part with it, as elastic restores a "
    "replacement from one other rank. Use the form of the optimizer that runs on all parameters on each rank, with "
    "job.ddp"
)

PARTS = (
    "state.{names} is not the same on {ranks} as on rank {other} after step {step}: after a failure one would get the "
    "other's. Shard it (fully_shard, parallelize_module) over a mesh of the ranks that train together, keep it alike "
    "on these ranks (average BatchNorm's statistics; the same seeds), or, for pipeline stages and experts, name it by "
    "its number (ModuleDict)"
)

STEPPED_ON_SOME = (
    ". Or the parameter was stepped on some ranks only, as nothing averages its gradients: wrap its module in train(), "
    "job.ddp(state.model)"
)

PLAIN = (
    "state.{names} is not the same on each rank after step {step} ({ranks} from rank 0). The state is one for all "
    "ranks, and one of them gives it to those that are replaced: what one rank alone keeps is lost with it. Set it on "
    "all ranks alike, where they know different things by job.broadcast(…), or keep what each has by job.gather(…)"
)
