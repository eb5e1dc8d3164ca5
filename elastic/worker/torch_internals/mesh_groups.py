"""The process groups that device meshes have made in `setup`, made again in a group that was formed anew.

A survivor keeps its model, whose DTensors and FSDP2 modules refer to meshes, and these to groups by name. It makes the
same groups in the same order as a replacement's `setup` does at that moment, so that they have the same names, and
gives them to the meshes and to FSDP2. That is right only if `setup` does nothing else in the group: if it exchanges
data, or gets hold of a group in any way that is not known to be harmless, `why_not` says so, and `setup` runs again.
What DTensor shares out by itself (`distribute_tensor`, so tensor parallelism) is no such exchange: where a rank has the
state, all others get it from there, and each takes its part of its own values meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as mesh_module
import torch.distributed.distributed_c10d as c10d
import torch.distributed.tensor.placement_types as placements

from . import torch_private

Maker = Callable[..., Any]
_MAKERS = ("new_group", "split_group")
_SENDERS = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
"""NCCL does not count them."""
_ASKERS = (*(f"torch.distributed.{name}" for name in ("fsdp", "tensor", "device_mesh")), c10d.__name__, "elastic.")
"""They ask for a group whenever they need it, or `again` gives it to them."""
_OWN_GROUP = "it makes a process group of its own"
_APART = "reduce_scatter_process_group"
"""Of FSDP2: made by `set_separate_reduce_scatter_group`."""
_KEEPERS = (("pipelining.stage", "_PipelineStageBase"), ("pipelining.schedules", "_PipelineSchedule"))
_KEEPS = "which keeps its process group: make that in `train`"


class CannotRepeat(RuntimeError):
    """The groups cannot be made again, which shows only now."""


class MeshGroups:
    """Main thread only."""

    def __init__(self) -> None:
        self._calls: list[tuple[Maker, tuple[Any, ...], dict[str, Any], str]] = []
        """(function, arguments, name of the group here); groups among the arguments as `_Named`."""
        self._meshes: list[Any] = []
        self._names: set[str] = set()
        """Of the groups that the meshes had when `setup` had returned."""
        self._random: Any = None
        """DTensor's generator, if `setup` has made it."""
        self._why_not = ""
        self.shares_out = False
        """DTensor shares out values in `setup`: all ranks run it, unless one has the state."""
        self._shared: Counter[str] = Counter()
        """Collectives of that, by group."""

    @contextlib.contextmanager
    def recorded(self, *, state_is_there: bool = False) -> Iterator[None]:
        """Note what the code within makes, which runs in the formed group. `state_is_there`: on a rank, from which all
        get it, so that nothing is shared out; alike on all ranks."""
        keepers, groups = _keepers(), set(c10d._world.pg_map)
        world_before = _exchanges(dist.group.WORLD)
        places = self._watched(keepers) + self._sharing(state_is_there)
        before = [(where, name, where.__dict__[name]) for where, name, _ in places]
        for where, name, act in places:
            setattr(where, name, act)
        try:
            yield
        finally:
            for where, name, act in before:
                setattr(where, name, act)
        if _keepers() != keepers:
            self._cannot("it imports torch.distributed.pipelining, whose stages keep their process group")
        noted = {name for *_, name in self._calls if name}
        if len(set(c10d._world.pg_map) - groups) > len(noted):  # by a function that was imported before
            self._cannot(_OWN_GROUP)
        self._shared[_name(dist.group.WORLD)] += world_before
        if any(_exchanges(group) > self._shared[_name(group)] for group in [dist.group.WORLD, *map(_named, noted)]):
            self._cannot("it exchanges data with the other ranks")
        if not can_put_back():
            self._cannot(f"torch {torch.__version__} cannot put back a step that was interrupted")
        self._names = noted | {_name(dist.group.WORLD)}
        self._random = torch_private.random_tracker()

    def _watched(self, keepers: Sequence[Any]) -> list[tuple[Any, str, Any]]:
        """(object, name of an attribute, what it is to be meanwhile)."""
        mesh, made, world = mesh_module.DeviceMesh, mesh_module.DeviceMesh.__init__, type(dist.group)

        def init(own: Any, *args: Any, **options: Any) -> None:
            made(own, *args, **options)
            self._meshes.append(own)

        places: list[tuple[Any, str, Any]] = [(mesh, "__init__", init)]
        places += [(mesh, name, self._asked(getattr(mesh, name))) for name in ("get_group", "get_all_groups")]
        places += [(mesh_module, name, self._noted(getattr(c10d, name))) for name in _MAKERS]
        for names, why in ((_MAKERS, _OWN_GROUP), (_SENDERS, "it exchanges data with the other ranks")):
            places += [(where, n, self._refused(getattr(where, n), why)) for where in (dist, c10d) for n in names]
        for kind in keepers:
            places.append((kind, "__init__", self._refused(kind.__init__, f"it makes a {kind.__name__}, {_KEEPS}")))
        get, put = world.WORLD.fget, world.WORLD.fset  # type: ignore[attr-defined]
        places += [(c10d, "_get_default_group", self._asked(c10d._get_default_group))]
        return [*places, (world, "WORLD", property(self._asked(get), put))]

    def _sharing(self, state_is_there: bool) -> list[tuple[Any, str, Any]]:
        """As `_watched`, for what DTensor shares out. A torch that has other functions for that exchanges data."""

        names = "mesh_scatter", "mesh_broadcast"
        if not all(hasattr(placements, name) for name in names):
            return []
        scatter, broadcast = (getattr(placements, name) for name in names)

        def counted(share: Maker, mesh: Any, mesh_dim: int, *args: Any, **options: Any) -> Any:
            group = mesh.get_group(mesh_dim)
            before = _exchanges(group)
            result = share(*args, mesh, mesh_dim, **options)
            self._shared[_name(group)] += _exchanges(group) - before
            return result

        def own_chunk(output: torch.Tensor, chunks: Any, mesh: Any, mesh_dim: int = 0, **options: Any) -> Any:
            self.shares_out = True
            if not state_is_there:
                return counted(scatter, mesh, mesh_dim, output, chunks, **options)
            output.copy_(chunks[mesh.get_local_rank(mesh_dim)])
            return None

        def own_values(tensor: torch.Tensor, mesh: Any, mesh_dim: int = 0, **options: Any) -> Any:
            self.shares_out = True
            return None if state_is_there else counted(broadcast, mesh, mesh_dim, tensor, **options)

        return [(placements, name, act) for name, act in zip(names, (own_chunk, own_values), strict=True)]

    def _cannot(self, why: str) -> None:
        self._why_not = self._why_not or why

    def _noted(self, maker: Maker) -> Maker:
        def call(*args: Any, **options: Any) -> Any:
            group = maker(*args, **options)
            kept = [_Named(_name(each)) if isinstance(each, dist.ProcessGroup) else each for each in args]
            named = {n: _Named(_name(e)) if isinstance(e, dist.ProcessGroup) else e for n, e in options.items()}
            self._calls.append((maker, tuple(kept), named, _name(group)))
            return group

        return call

    def _refused(self, maker: Maker, why: str) -> Maker:
        def call(*args: Any, **options: Any) -> Any:
            self._cannot(why)
            return maker(*args, **options)

        return call

    def _asked(self, ask: Maker) -> Maker:
        def call(*args: Any, **options: Any) -> Any:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith(_ASKERS):
                self._cannot("it asks for a process group, and may keep that")
            return ask(*args, **options)

        return call

    def why_not(self, modules: Sequence[torch.nn.Module]) -> str:
        """Why the groups cannot be made again under `modules`; empty: they can."""
        theirs = {name for mesh in self._meshes for name in getattr(mesh, "_pg_registry", ())}
        for info in _mesh_infos(modules):
            theirs |= {_name(group) for group in [getattr(info, _APART, None)] if group is not None}
        if not theirs <= self._names:
            self._cannot(
                "groups were made out of its meshes in `train`: make them in setup, or of a mesh of train's own"
            )
        return self._why_not

    def again(self, modules: Sequence[torch.nn.Module]) -> None:
        """Make them again, and give them to the meshes and to `modules`. Raises CannotRepeat, and what torch raises."""
        torch_private.set_random_tracker(self._random)
        for maker, args, options, name in self._calls:
            now = _name(maker(*map(_there, args), **{key: _there(each) for key, each in options.items()}))
            if now != name:
                raise CannotRepeat(f"group {name!r} of a device mesh is {now!r} now")
        for mesh in self._meshes:
            registry = getattr(mesh, "_pg_registry", {})
            for name in list(registry):
                registry[name] = _named(name)
        for info in _mesh_infos(modules):
            apart = getattr(info, _APART, None)
            info.__post_init__()
            if apart is not None:
                setattr(info, _APART, _named(_name(apart)))


class _Named(str):
    """The name of a group, in place of the group, which ends with its generation."""


def _there(argument: Any) -> Any:
    return _named(argument) if isinstance(argument, _Named) else argument


def _keepers() -> list[Any]:
    there = [(sys.modules.get(f"torch.distributed.{module}"), name) for module, name in _KEEPERS]
    return [torch.nn.parallel.DistributedDataParallel, *(getattr(module, name) for module, name in there if module)]


def _name(group: Any) -> str:
    return str(getattr(group, "group_name", ""))


def _exchanges(group: Any) -> int:
    """Collectives in it so far, of all of its back ends: one with NCCL has gloo for the CPU."""
    backends = [group._get_backend(device) for device in group._device_types]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def _named(name: str) -> Any:
    return c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]


def can_put_back() -> bool:
    """Whether this torch can; see `put_back`."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return hasattr(FSDPState, "_reset_iter_state")


def _states(modules: Sequence[torch.nn.Module]) -> list[Any]:
    """FSDP2's, each once."""
    found = {}
    for inner in (inner for module in modules for inner in module.modules()):
        if hasattr(inner, "_get_fsdp_state"):
            state = inner._get_fsdp_state()  # type: ignore[operator]
            found[id(state)] = state
    return list(found.values())


def _param_groups(state: Any) -> list[Any]:
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [group] if group is not None else []


def _mesh_infos(modules: Sequence[torch.nn.Module]) -> list[Any]:
    """FSDP2's, which keep the groups of their meshes, each once."""
    infos: list[Any] = []
    for group in (group for state in _states(modules) for group in _param_groups(state)):
        infos += [group.mesh_info, group.post_forward_mesh_info]
        infos += [info for param in group.fsdp_params for info in (param.mesh_info, param.post_forward_mesh_info)]
    return list({id(info): info for info in infos if info is not None}.values())


def put_back(modules: Sequence[torch.nn.Module]) -> None:
    """A forward or backward was interrupted, and its group aborted: FSDP2 is as between two steps, and the unsharded
    gradients that it has left are gone."""
    states = _states(modules)
    groups = [group for state in states for group in _param_groups(state)]
    for group in groups:
        group._all_gather_result = None  # it was aborted, and raises when it is waited for
    for state in states:
        if state._is_root:
            state._reset_iter_state()
    for group in groups:
        for param in group.fsdp_params:
            if not isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property):
                param.unsharded_accumulated_grad = None
            if getattr(param, "_unsharded_param", None) is not None:
                param._unsharded_param.grad = None
