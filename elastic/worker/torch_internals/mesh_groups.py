"""The process groups that device meshes have made in `setup`, made again in a group that was formed anew.

A survivor keeps its model, whose DTensors and FSDP2 modules refer to meshes, and these to groups by name. It makes the
same groups in the same order as a replacement's `setup` does at that moment, so that they have the same names, and
gives them to the meshes and to FSDP2. That is right only if `setup` does nothing else in the group: if it exchanges
data, or keeps a group, `why_not` says so, and `setup` runs again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as mesh_module
import torch.distributed.distributed_c10d as c10d

Maker = Callable[..., Any]
_MAKERS = ("new_group", "split_group")
_ASKERS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.device_mesh", c10d.__name__)
"""They ask a mesh for its group whenever they need it, or `_seat` gives it to them again."""
_KEEPERS = (("pipelining.stage", "_PipelineStageBase"), ("pipelining.schedules", "_PipelineSchedule"))
_KEEPS = "which keeps its process group: make that in `train`"


class CannotRepeat(RuntimeError):
    """A group has another name than it had."""


class MeshGroups:
    """Main thread only."""

    def __init__(self) -> None:
        self._calls: list[tuple[Maker, tuple[Any, ...], dict[str, Any], str]] = []
        """(function, arguments, name of the group here)."""
        self._meshes: list[Any] = []
        self.why_not = ""
        """Why the groups cannot be made again; empty: they can."""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Note what the code within makes, which runs in the formed group."""
        mesh, made = mesh_module.DeviceMesh, mesh_module.DeviceMesh.__init__
        get_group, groups = mesh.get_group, mesh.get_all_groups
        makers = {name: getattr(c10d, name) for name in _MAKERS}

        def init(own: Any, *args: Any, **options: Any) -> None:
            made(own, *args, **options)
            self._meshes.append(own)

        places: list[tuple[Any, str, Maker]] = [(mesh, "__init__", init), (mesh, "get_group", self._asked(get_group))]
        places += [(mesh, "get_all_groups", self._asked(groups))]
        places += [(mesh_module, name, self._noted(maker)) for name, maker in makers.items()]
        own_group = "it makes a process group of its own"
        places += [
            (where, name, self._refused(maker, own_group)) for where in (dist, c10d) for name, maker in makers.items()
        ]
        keepers = _keepers()
        for kind in keepers:
            places.append((kind, "__init__", self._refused(kind.__init__, f"it makes a {kind.__name__}, {_KEEPS}")))
        before = [(where, name, getattr(where, name)) for where, name, _ in places]
        for where, name, act in places:
            setattr(where, name, act)
        try:
            yield
        finally:
            for where, name, act in before:
                setattr(where, name, act)
        if _keepers() != keepers:
            self._cannot("it imports torch.distributed.pipelining, whose stages keep their process group")
        here = [dist.group.WORLD, *(_named(name) for *_, name in self._calls if name)]
        if any(map(_exchanged, here)):
            self._cannot("it exchanges data with the other ranks")
        if not hasattr(_fsdp_state(), "_reset_iter_state"):
            self._cannot(f"torch {torch.__version__} cannot put back a step that was interrupted")

    def _cannot(self, why: str) -> None:
        self.why_not = self.why_not or why

    def _noted(self, maker: Maker) -> Maker:
        def call(*args: Any, **options: Any) -> Any:
            group = maker(*args, **options)
            self._calls.append((maker, args, options, _name(group)))
            return group

        return call

    def _refused(self, maker: Maker, why: str) -> Maker:
        def call(*args: Any, **options: Any) -> Any:
            self._cannot(why)
            return maker(*args, **options)

        return call

    def _asked(self, ask: Maker) -> Maker:
        def call(own: Any, *args: Any, **options: Any) -> Any:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith(_ASKERS):
                self._cannot("it asks a mesh for its process group, and may keep that")
            return ask(own, *args, **options)

        return call

    def again(self, modules: Sequence[torch.nn.Module]) -> None:
        """Make them again, and give them to the meshes and to `modules`. Raises CannotRepeat, and what torch raises."""
        for maker, args, options, name in self._calls:
            if (now := _name(maker(*args, **options))) != name:
                raise CannotRepeat(f"group {name!r} of a device mesh is {now!r} now")
        for mesh in self._meshes:
            registry = getattr(mesh, "_pg_registry", {})
            for name in list(registry):
                registry[name] = _named(name)
        for state in _states(modules):
            for group in _param_groups(state):
                _seat(group)


def _keepers() -> list[Any]:
    there = [(sys.modules.get(f"torch.distributed.{module}"), name) for module, name in _KEEPERS]
    return [torch.nn.parallel.DistributedDataParallel, *(getattr(module, name) for module, name in there if module)]


def _name(group: Any) -> str:
    return str(getattr(group, "group_name", ""))


def _exchanged(group: Any) -> bool:
    """Whether anything was sent over it, by any of its back ends: one with NCCL has gloo for the CPU."""
    backends = [group._get_backend(device) for device in group._device_types]
    return any(backend._get_sequence_number_for_group() for backend in backends)


def _named(name: str) -> Any:
    return c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]


def _fsdp_state() -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return FSDPState


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


def _seat(group: Any) -> None:
    """FSDP2 keeps the groups of its meshes."""
    infos = [group.mesh_info, group.post_forward_mesh_info]
    infos += [info for param in group.fsdp_params for info in (param.mesh_info, param.post_forward_mesh_info)]
    for info in {id(info): info for info in infos if info is not None}.values():
        apart = getattr(info, "reduce_scatter_process_group", None)
        info.__post_init__()
        if apart is not None:
            info.reduce_scatter_process_group = _named(_name(apart))


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
