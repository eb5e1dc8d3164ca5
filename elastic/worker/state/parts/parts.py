"""Modules and optimizers as parts of a `State`, and what all kinds of parts have in common (`object_parts` has the
others). Receiving has two steps: `adopt` provides storage for exactly the tensors to come (storage that exists and fits
is kept, so parameters remain the objects that DDP and the optimizer hold) and returns them, and `filled` is called when
their bytes are in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import msgspec
import torch

from elastic.checkpoint.format.json_values import Codecs, decode
from elastic.checkpoint.format.plain import tensors_named
from elastic.contract.worker.tensor_table import TensorInfo
from elastic.worker.link.misuse import MisuseTypeError
from elastic.worker.torch_internals import torch_private

from .copies import Copy, immutable, warn_if_not_restored, writable
from .described import Like, fitting, storage_of
from .json_codec import encode

Named = list[tuple[str, torch.Tensor]]
Infos = Mapping[str, TensorInfo]  # by full name, including the part's own name
Watched = Callable[[torch.Tensor], bool]  # tensors too large to copy at each commit, or stepped by an optimizer


class Slot(msgspec.Struct, frozen=True):
    """An entry in which a module holds a tensor. Its tensor may be replaced by another."""

    holder: MutableMapping[str, torch.Tensor | None]
    key: str
    name: str
    is_buffer: bool


class Part:
    kind: str  # what plain torch would load it into; see `checkpoint.plain`

    def __init__(self, name: str, value: Any, codecs: Codecs) -> None:
        self.name = name
        self.value = value
        self._codecs = codecs
        self._coming: Coming | None = None

    def held(self) -> tuple[Named, Any]:
        """(tensors, everything else as JSON), from one walk: with thousands of tensors a second one costs."""
        raise NotImplementedError

    def adopt(self, infos: Infos, extra: Any) -> Mapping[str, torch.Tensor]:
        """The tensors to fill, by name; those of `infos` that have no place here are missing. A module returns those
        alone that were not in `held()` before."""
        raise NotImplementedError

    def filled(self) -> None:
        pass

    def to(self, device: torch.device) -> None:
        pass  # left to an object; most hold no tensors

    def slots(self) -> list[Slot]:
        """The entries that hold its tensors; none for tensors that have no fixed entry."""
        return []

    def rest(self, before: Copy | None, watched: Watched) -> Copy | None:
        """A copy of everything that is in no slot; None: there is nothing."""
        raise NotImplementedError

    def put_back(self, held: Any) -> None:
        """Load what `Copy.restored` returns for a `rest`."""
        raise NotImplementedError


class Coming(NamedTuple):
    """What `adopt` was given, until its tensors are filled."""

    extra: Any
    """As JSON."""
    value: Any
    """The same decoded, with `tensors` in it."""
    tensors: dict[str, torch.Tensor]

    @staticmethod
    def of(extra: Any, infos: Infos, codecs: Codecs, like: Callable[[str, TensorInfo, str], torch.Tensor]) -> Coming:
        """`like(name, info, device type)` returns the storage for a tensor."""
        tensors: dict[str, torch.Tensor] = {}

        def target(name: str, device: str) -> torch.Tensor:
            if name not in infos:
                raise ValueError(f"{name} is named by the state that came, but is not in its table")
            tensors[name] = like(name, infos[name], device)
            return tensors[name]

        return Coming(extra, decode(extra, target, codecs), tensors)


class ModulePart(Part):
    """Parameters and persistent buffers, in place. Anything else in `state_dict()`, such as extra state and what a
    hook or a metric makes, is loaded by `load_state_dict`: writing into those tensors would change nothing."""

    kind = "module"
    value: torch.nn.Module

    def __init__(self, name: str, value: torch.nn.Module, codecs: Codecs) -> None:
        super().__init__(name, value, codecs)
        self._makes: tuple[bool, dict[str, torch.nn.Module]] | None = None

    def held(self) -> tuple[Named, Any]:
        tensors, made = self.split()
        encoded = self._encoded(made, tensors if self._coming is None else {})
        tensors.update(self._coming.tensors if self._coming is not None else {})
        return list(tensors.items()), encoded

    def adopt(self, infos: Infos, extra: Any) -> Mapping[str, torch.Tensor]:
        self._coming = None
        replaced: dict[str, torch.Tensor] = {}
        others: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for slot in self.slots():
            if not slot.is_buffer or (tensor := slot.holder[slot.key]) is None:
                continue
            if id(tensor) not in others:  # tied ones stay so
                info = infos.get(slot.name)
                fits = writable(tensor) and (info is None or info.shape == tensor.shape)
                new = tensor if fits else fitting(None, info, tensor.device.type) if info else tensor.clone()
                others[id(tensor)] = tensor, new
            if (new := others[id(tensor)][1]) is not tensor:
                slot.holder[slot.key] = replaced[slot.name] = new
        if not extra:
            return replaced
        present: dict[str, torch.Tensor] = {}
        self._encoded(self.split()[1], present)
        self._coming = Coming.of(
            extra, infos, self._codecs, lambda name, info, device: fitting(None, info, device, like=present.get(name))
        )
        return {**replaced, **self._coming.tensors}

    def filled(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            self.put_back(coming.value)
            now: dict[str, torch.Tensor] = {}
            now_extra = self._encoded(self.split()[1], now)
            warn_if_not_restored(self.name, (coming.extra, coming.tensors), (now_extra, now))

    def to(self, device: torch.device) -> None:
        before = list(self.value.parameters())
        self.value.to(device)
        if any(a is not b for a, b in zip(before, self.value.parameters(), strict=True)):
            raise RuntimeError(
                f"state.{self.name} cannot move to {device} without new parameters; the optimizer has the old"
            )

    def slots(self) -> list[Slot]:
        self._makes = None
        slots = []
        for prefix, module in self.value.named_modules():
            path = f"{self.name}.{prefix}." if prefix else f"{self.name}."
            *own, skipped = torch_private.own_tensors(module)
            params, buffers = map(_dictionary, own)
            slots += [Slot(params, key, f"{path}{key}", False) for key in params]
            slots += [Slot(buffers, key, f"{path}{key}", True) for key in buffers if key not in skipped]
        return slots

    def rest(self, before: Copy | None, watched: Watched) -> Copy | None:
        if self._makes is None:
            keepers = {
                f"{prefix}.{_EXTRA}" if prefix else _EXTRA: module
                for prefix, module in self.value.named_modules()
                if type(module).get_extra_state is not torch.nn.Module.get_extra_state
            }
            self._makes = bool(set(self.split()[1]) - set(keepers)), keepers
        others, keepers = self._makes
        if not others and not keepers:
            return None
        made = self.split()[1] if others else {key: module.get_extra_state() for key, module in keepers.items()}
        return Copy(made, self.name, self._codecs, before, watched)

    def put_back(self, held: Any) -> None:
        # Complete, as a module may need several keys together; tensors in place are copied onto themselves.
        complete = {**self.value.state_dict(), **held}
        missed = set(self.value.load_state_dict(complete, strict=False).unexpected_keys) & set(held)
        if missed:
            raise ValueError(f"{self.name}.{min(missed)} is in the state, and load_state_dict() here does not take it")

    def split(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(the module's own tensors by full name, everything else in its state_dict by key)."""
        entries = self.value.state_dict(keep_vars=True)
        tensors = [*self.value.parameters(), *self.value.buffers()]
        ids = set(map(id, tensors))
        storages: set[int] | None = None
        own: dict[str, torch.Tensor] = {}
        made: dict[str, Any] = {}
        for key, item in entries.items():
            if id(item) not in ids:
                if storages is None:
                    storages = {storage_of(tensor) for tensor in tensors} - {0}
                if not (isinstance(item, torch.Tensor) and storage_of(item) in storages):
                    made[key] = item
                    continue
            own[f"{self.name}.{key}"] = item
        return own, made

    def _encoded(self, made: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
        return {key: encode(item, f"{self.name}.{key}", tensors, self._codecs) for key, item in made.items()}


_EXTRA = "_extra_state"  # torch's key for what `get_extra_state` returns


class OptimizerTensors(msgspec.Struct, frozen=True):
    """An optimizer's per-parameter tensors for a state that is to come, before the rest of it is known."""

    state: dict[Any, dict[str, Any]]
    """Parameter -> its entries by key, as `Optimizer.state`."""
    came: dict[str, torch.Tensor]
    """The same tensors by full name."""


class OptimizerPart(Part):
    """Per-parameter tensors as `optimizer.state.<index>.<key>`; everything else as JSON. An optimizer that has not
    stepped yet has no state: `adopt` creates it, with the memory layout of its parameter."""

    kind = "optimizer"
    value: torch.optim.Optimizer

    def __init__(self, name: str, value: torch.optim.Optimizer, codecs: Codecs) -> None:
        super().__init__(name, value, codecs)
        self._rest: tuple[Copy | None, list[tuple[Any, ...]], list[Any]] = None, [], []
        """A `rest`, if all of it is immutable, the keys and the items that it is of: the same objects are equal."""

    def held(self) -> tuple[Named, Any]:
        tensors: dict[str, torch.Tensor] = {}
        groups = []
        for number, group in enumerate(self.value.param_groups):
            options = {key: item for key, item in group.items() if key != "params"}
            encoded = encode(options, f"{self.name}.groups.{number}", tensors, self._codecs)
            groups.append({"params": len(group["params"]), "options": encoded})
        on: dict[str, str] = {}
        rest: dict[str, Any] = {}
        state = {id(param): entries for param, entries in self.value.state.items()}
        sorts: dict[tuple[Any, ...], list[Any]] = {}
        order, last = dict[str, list[str]](), ()
        numbers: dict[int, int] = {}
        for index, param in enumerate(self._params()):
            if (entries := state.get(id(param))) is None:
                continue
            numbers[id(param)] = index
            if not entries:
                continue
            path = f"{self.name}.state.{index}"
            if (keys := sorts.get(kinds := tuple(entries))) is None:
                keys = sorts[kinds] = _texts(entries, path)
            if kinds != last:
                order[str(index)], last = list(kinds), kinds
            on_cpu, others = param.is_cpu, list[str]()
            for key in keys:
                item = entries[key]
                if isinstance(item, torch.Tensor):
                    tensors[f"{path}.{key}"] = item
                    if not (on_cpu and item.is_cpu) and item.device.type != param.device.type:
                        on[key] = item.device.type
                else:
                    others.append(key)
            for key in others:  # last: a name that one of the tensors has is not given to a tensor within these
                rest.setdefault(str(index), {})[key] = encode(entries[key], f"{path}.{key}", tensors, self._codecs)
        extra: dict[str, Any] = {"groups": groups, "on": on, "state": rest, "order": order}
        if list(numbers) != list(state):  # by numbers, and by names, as the optimizer has met them
            extra["sequence"] = [numbers.get(id(key), key) for key in self.value.state]
        if common := self._common():
            extra["common"] = encode(common, f"{self.name}.common", tensors, self._codecs)
        return list(tensors.items()), extra

    def make(self, infos: Infos, devices: Mapping[str, str]) -> OptimizerTensors | None:
        """What `adopt` is to fill for `infos`, whose tensors are on `devices` by name. Changes nothing. None: nothing
        can be made beforehand, as an entry may be a list or dict of tensors. Raises ValueError if they are not of this
        optimizer's parameters."""
        depth = self.name.count(".") + 3  # NAME.state.INDEX.KEY
        if max((name.count(".") for name in infos), default=0) > depth:
            return None
        return self._made(infos, set(), dict(self.held()[0]), devices, {})

    def adopt(self, infos: Infos, extra: Any, made: OptimizerTensors | None = None) -> Mapping[str, torch.Tensor]:
        """`made`: what `make` has returned for the same `infos`, since when nothing has changed here."""
        counts, theirs = [len(g["params"]) for g in self.value.param_groups], [g["params"] for g in extra["groups"]]
        if counts != theirs:
            said = f"{self.name} has parameter groups of {counts} parameters as setup() builds it, and of {theirs}"
            raise ValueError(f"{said} in the state to be loaded: let setup() build all groups that training will add")
        mine = dict(self.held()[0])
        inner = tensors_named(extra)
        if made is None or not inner.isdisjoint(made.came):
            made = self._made(infos, inner, mine, {}, extra["on"])
        params, came, fresh = self._params(), made.came, made.state

        def target(name: str, device: str) -> torch.Tensor:
            came[name] = fitting(mine.get(name), infos[name], device)
            return came[name]

        for group, saved in zip(self.value.param_groups, extra["groups"], strict=True):
            options = decode(saved["options"], target, self._codecs)
            for key in [key for key in group if key != "params" and key not in options]:
                del group[key]
            group.update(options)
        for index, saved in extra["state"].items():
            param = params[int(index)]
            fresh.setdefault(param, {}).update(decode(saved, target, self._codecs))
        fresh.update(decode(extra.get("common", {}), target, self._codecs))
        self.value.state.clear()
        self.value.state.update(_in_order(fresh, params, extra))
        return came

    def _made(
        self,
        infos: Infos,
        inner: Container[str],
        present: Mapping[str, torch.Tensor],
        devices: Mapping[str, str],
        on: Mapping[str, str],
    ) -> OptimizerTensors:
        """Those of `present` that fit, and new ones; without `inner`, the tensors within an optimizer's other entries.
        Each is on the device that is told by its name (`devices`) or key (`on`), else on its parameter's."""
        state, came, params = dict[Any, dict[str, Any]](), dict[str, torch.Tensor](), self._params()
        prefix, place, number, like = f"{self.name}.state.", dict[str, torch.Tensor](), "", Like(torch.empty(0))
        start = len(prefix)
        for name, info in infos.items():
            if not name.startswith(prefix) or name in inner:
                continue
            index, _, key = name[start:].partition(".")
            if number != index:
                if int(index) >= len(params):
                    raise ValueError(f"{name}: there are only {len(params)} parameters here")
                number, param = index, params[int(index)]
                place, like = state.setdefault(param, {}), Like(param)
            device, here = devices.get(name) or on.get(key, like.device), present.get(name)
            place[key] = came[name] = like.empty(info, device) if here is None else fitting(here, info, device, param)
        return OptimizerTensors(state, came)

    def to(self, device: torch.device) -> None:
        for param, entries in self.value.state.items():
            for key, item in entries.items() if isinstance(param, torch.Tensor) else ():
                if isinstance(item, torch.Tensor) and (key != "step" or item.device.type != "cpu"):
                    entries[key] = item.to(param.device)

    def rest(self, before: Copy | None, watched: Watched) -> Copy | None:
        groups, items = self.groups(), list[Any]()
        keys = list(map(tuple, groups))
        for group in groups:
            items += group.values()  # the list of parameters among them
        known, known_keys, known_items = self._rest
        if before is not None and before is known and keys == known_keys and all(map(operator.is_, items, known_items)):
            return before
        groups = [{key: item for key, item in group.items() if key != "params"} for group in groups]
        copy = Copy(groups, self.name, self._codecs, before, watched)
        fixed = all(immutable(item) for group in groups for item in group.values())
        self._rest = copy if fixed else None, keys, items
        return copy

    def put_back(self, held: Any) -> None:
        for group, options in zip(self.groups(), held, strict=False):
            for key in [key for key in group if key != "params" and key not in options]:
                del group[key]
            group.update(options)

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups, each once."""
        return self.value.param_groups

    def stepped(self) -> Iterator[torch.Tensor]:
        """The parameters in `groups`."""
        for group in self.groups():
            yield from group["params"]

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.value.param_groups for param in group["params"]]

    def _common(self) -> dict[str, Any]:
        """State that the optimizer keeps for all parameters together, by name. Raises TypeError for other keys."""
        known = set(map(id, self._params()))
        others: dict[Any, Any] = {key: item for key, item in self.value.state.items() if id(key) not in known}
        for key in others:
            if isinstance(key, torch.Tensor):
                raise MisuseTypeError(
                    f"state.{self.name} keeps state for a tensor that is in none of its parameter groups"
                )
            if type(key) is not str:
                raise MisuseTypeError(f"state.{self.name} keeps state under {key!r}: neither a parameter nor a text")
        return others


class WrappedOptimizerPart(OptimizerPart):
    """An optimizer and the optimizers that it holds, as Lookahead and SAM step another one. The state of these is
    `optimizer.<attribute>.state.<index>.<key>`.

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


def _in_order(
    state: dict[Any, dict[str, Any]], params: list[torch.Tensor], extra: Mapping[str, Any]
) -> dict[Any, dict[str, Any]]:
    """`state` in the order in which the optimizer has made it where it comes from, so that what is computed from it as
    it comes (a hash, the bytes of `torch.save`) is the same on survivors and replacements."""
    order, keys = {int(number): each for number, each in extra.get("order", {}).items()}, list[str]()
    for number, param in enumerate(params):
        keys, entries = order.get(number, keys), state.get(param, {})
        for key in keys:
            if key in entries:
                entries[key] = entries.pop(key)
    first = [each if isinstance(each, str) else params[each] for each in extra.get("sequence", ())]
    return {**{key: state.get(key, {}) for key in first}, **state} if first else state


def _texts(entries: Mapping[Any, Any], path: str) -> list[str]:
    """The names in an optimizer's entry for a parameter, sorted. Raises TypeError for a key that is not text."""
    for key in sorted(entries, key=str):
        if type(key) is not str:
            raise MisuseTypeError(f"state.{path} has an entry {key!r}: only names can be kept, this is no text")
    return sorted(entries)


def _dictionary(held: Any) -> MutableMapping[str, torch.Tensor | None]:
    """The module's own dictionary; for TorchScript a copy of its mapping, whose tensors are always the same."""
    return held if isinstance(held, dict) else dict(held.items())
