"""The private API of torch that elasticd uses: all that a new version of torch may take away.

No other module uses underscore names of torch (`tests/house/test_torch_private.py`). Not counted: a tensor's
`_version`, which torch documents, and the stores, which are public but typed in `torch._C` alone. Two subclasses use
what they inherit: `comm.ddp` of DistributedDataParallel, `agent.torch_agent` of torchrun's agent.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d
from torch.utils import _pytree as pytree
from torch.utils.data._utils import collate

__all__ = ["pytree"]  # and all below

T = TypeVar("T")


def default_generator_address() -> int:
    """Address of the object of the CPU's default generator."""
    return int(torch.default_generator._cdata)  # type: ignore[attr-defined]


def foreach_copy(into: list[torch.Tensor], what: list[torch.Tensor]) -> None:
    """Copy each of `what` into the tensor of `into` at its place."""
    try:
        torch._foreach_copy_(into, what)
    except RuntimeError:  # it writes to none that is conjugated or negated by a mark alone
        for to, each in zip(into, what, strict=True):
            to.copy_(each)


foreach_mul = torch._foreach_mul_

# ── process groups ──────────────────────────────────────────────────────────────────────────────────────────

REGISTRIES = (
    "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state",
    "pg_flight_recorder_hooks",
)  # fmt: skip
"""Attributes of `c10d._world` that have an entry per group."""


def group_names() -> dict[Any, str]:
    """Group -> name of every group; a copy: the main thread may create another one meanwhile."""
    return dict(c10d._world.pg_names)


def registered_groups() -> Mapping[Any, Any]:
    return c10d._world.pg_map


def restart_group_names() -> None:
    """torch names a default group by a counter; the next one gets the name of the first."""
    c10d._world.group_count = 0


def forget_all_groups() -> None:
    """Remove every group from torch's registries, so that a new default group can be created: `_abort_process_group`
    without its second abort of each back end, which would wait for the first. Main thread only. The groups themselves
    are destroyed when nothing references them any more."""
    c10d._update_default_pg(None)
    for registry in REGISTRIES:
        if (entries := getattr(c10d._world, registry, None)) is not None:
            entries.clear()
    _distributed_c10d._unregister_all_process_groups()
    restart_group_names()


def abort_default_group() -> None:
    c10d._abort_process_group()


def gpu_backend(group: dist.ProcessGroup) -> Any:
    """Raises RuntimeError for a group without one."""
    return group._get_backend(torch.device("cuda"))


def has_timed_out(backend: Any) -> bool:
    return bool(backend.get_error() == _distributed_c10d.ErrorType.TIMEOUT)


def is_gloo(backend: object) -> bool:
    return isinstance(backend, _distributed_c10d.ProcessGroupGloo)


# ── groups that torch forms again in place (2.14 and newer) ─────────────────────────────────────────────────

RECONFIGURABLE = "enable_reconfigure" in inspect.signature(dist.init_process_group).parameters


class RegisteredGroup(NamedTuple):
    """A default group, and what torch's registries say of it."""

    group: Any
    name: Any
    backend: str
    backend_config: str


def take_out_default_group() -> RegisteredGroup:
    """Remove every group from torch's registries, and return the default one, which can be put back."""
    group = c10d._get_default_group()
    world = c10d._world
    found = RegisteredGroup(group, world.pg_names[group], world.pg_map[group][0], world.pg_backend_config[group])
    forget_all_groups()
    return found


def put_back_default_group(record: RegisteredGroup, store: Any, world_size: int) -> None:
    """Make it torch's default group again, with its present rank, `world_size`, and `store` for groups of the script's.
    torch itself leaves the ranks of the first forming in its registry."""
    c10d._register_pg_in_world(
        record.group,
        backend_name=record.backend,
        store=_distributed_c10d.PrefixStore(f"{record.name}/", store),
        group_name=record.name,
        backend_config=record.backend_config,
        rank_mapping={rank: rank for rank in range(world_size)},
        add_to_default_tag=True,
    )
    c10d._update_default_pg(record.group)
    c10d._world.group_count = 1  # as after the creation of a default group: it is part of the names of later ones


def reconfigure(group: Any, uuid: int, handles: list[str], timeout: timedelta) -> None:
    getattr(c10d, "_reconfigure")(uuid=uuid, handles=handles, group=group, timeout=timeout).wait()  # noqa: B009


# ── autograd and DDP ────────────────────────────────────────────────────────────────────────────────────────


def at_end_of_backward(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def rebuild_buckets(reducer: Any) -> Any:
    """Give DDP's buckets their final layout now. Whether that was done."""
    reducer._push_all_rebuilt_params()
    return reducer._rebuild_buckets()


def end_reducer(model: torch.nn.Module) -> None:
    """End the reducer of a DistributedDataParallel, with its hooks at the parameters, and let go of the group."""
    attributes: Any = vars(model)  # a name for the reducer itself would let it outlive the group
    if "reducer" in attributes:
        attributes["reducer"]._remove_autograd_hooks()  # the graph of an aborted backward may hold it
    for name in ("logger", "reducer", "_comm_hooks", "process_group"):  # the logger holds the reducer
        attributes.pop(name, None)


# After `destroy_process_group()` a reducer may hold the group alone. Its destructor then ends the group with the GIL
# held, and joins gloo's threads; one of them may just be waiting for the GIL, to drop the context of Python that a
# backward leaves with each all-reduce (torch 2.13). So a script whose DDP is a function's local hung at its end. The
# Python object of a group releases the GIL when it ends the group: let it be the last.
setattr(torch.nn.parallel.DistributedDataParallel, "__del__", end_reducer)  # noqa: B010


# ── modules, scalers, data loaders ──────────────────────────────────────────────────────────────────────────

SCALER_STATE = ("_scale", "_growth_tracker", "_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval")
"""Attributes of a GradScaler that are its state."""


def own_tensors(module: torch.nn.Module) -> tuple[Any, Any, set[str]]:
    """(parameters, buffers, names of the buffers that no state_dict has) of this module without its children."""
    return module._parameters, module._buffers, module._non_persistent_buffers_set


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Drop the marks of optimizers whose gradients it has unscaled in this step."""
    for held in scaler._per_optimizer_states.values():
        held.update(torch.amp.grad_scaler._refresh_per_optimizer_state())


class _Made(Generic[T]):
    """The objects of a class in this process that were made since this module was imported. The garbage collector has
    a list too: to go through it takes tens of milliseconds of each recovery, and what a script has frozen (`gc.freeze`)
    is not in it."""

    def __init__(self, kind: type[T]) -> None:
        self.count = 0
        """Made so far; some may be gone."""
        self._alive: weakref.WeakSet[T] = weakref.WeakSet()
        setattr(kind, "__new__", staticmethod(self._make))  # noqa: B010 - copies and pickles call it, too

    def _make(self, kind: type[T], *_: object, **__: object) -> T:
        made = object.__new__(kind)
        self._alive.add(made)
        self.count += 1
        return made

    def __call__(self) -> list[T]:
        return list(self._alive)


scalers = _Made(torch.amp.GradScaler)
schedulers = _Made(torch.optim.lr_scheduler.LRScheduler)


_MODULE_HOOKS = tuple(name for name in vars(torch.nn.Module()) if "_hooks" in name)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(each: torch.nn.Module | torch.Tensor | torch.optim.Optimizer) -> Iterator[tuple[str, dict[int, Any]]]:
    """The dictionaries, by name, in which it has hooks. Python's and C++ code calls what is in them."""
    if isinstance(each, torch.Tensor):
        pairs = ((name, getattr(each, name, None)) for name in _TENSOR_HOOKS)
    elif isinstance(each, torch.nn.Module):
        attributes = vars(each)
        pairs = ((name, attributes.get(name)) for name in _MODULE_HOOKS)
    else:
        pairs = (item for item in vars(each).items() if "_hooks" in item[0])
    return ((name, hooks) for name, hooks in pairs if isinstance(hooks, dict))


def is_used(scaler: torch.amp.GradScaler) -> bool:
    """Whether it has scaled a loss."""
    return getattr(scaler, "_scale", None) is not None


def scales(
    optimizers: Iterable[torch.optim.Optimizer], of: Collection[torch.amp.GradScaler]
) -> dict[torch.optim.Optimizer, torch.Tensor]:
    """The factors of the losses whose gradients one of these GradScalers hands to these optimizers in this step."""
    found = ((each, scaler) for each in optimizers for scaler in of if id(each) in scaler._per_optimizer_states)
    return {each: scaler._scale for each, scaler in found if scaler._scale is not None}


def begin_anew(scaler: torch.amp.GradScaler) -> None:
    """With the scale that it was built with, made at its next use."""
    scaler._scale = scaler._growth_tracker = None


@contextlib.contextmanager
def with_another_scale(scaler: torch.amp.GradScaler) -> Iterator[None]:
    """Context in which a scaler that is used has another scale and growth than before and after."""
    before = scaler._scale, scaler._growth_tracker
    scaler._scale, scaler._growth_tracker = (None if each is None else each * 2 + 1 for each in before)
    try:
        yield
    finally:
        scaler._scale, scaler._growth_tracker = before


def forget_scale(optimizer: torch.optim.Optimizer) -> None:
    """Drop what GradScaler.step gives to an optimizer that divides by the scale itself, and takes back after its step.
    Attributes of such a name that are the optimizer's own are left."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        for name in ("grad_scale", "found_inf"):
            if isinstance(vars(optimizer).get(name), torch.Tensor | None):
                vars(optimizer).pop(name, None)


_collate_tensors = collate.default_collate_fn_map.get(torch.Tensor)


def collates_tensors_by_stack() -> bool:
    """Whether `default_collate` has its own function for tensors: a script may register another."""
    return collate.default_collate_fn_map.get(torch.Tensor) is _collate_tensors


def shut_down_workers(iterator: object) -> None:
    """End the processes of a DataLoader's iterator, if it has any. While they load items that are not wanted any more
    they are terminated: torch waits for those, up to 5 s for each process. Not if a thread pins memory, since it may
    wait for ever for the rest of what a process was writing."""
    if (shut := getattr(iterator, "_shutdown_workers", None)) is None:
        return
    if getattr(iterator, "_tasks_outstanding", 0) and not getattr(iterator, "_pin_memory", True):
        torch._C._remove_worker_pids(id(iterator))  # else their deaths raise in this thread
        iterator._worker_pids_set = False  # type: ignore[attr-defined]
        for process in getattr(iterator, "_workers", ()):
            process.terminate()
    shut()


# ── sharded tensors ─────────────────────────────────────────────────────────────────────────────────────────


def local_tensor(tensor: Any) -> torch.Tensor:
    """Of a DTensor: the tensor in this rank's memory."""
    return tensor._local_tensor  # type: ignore[no-any-return]


def box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a DTensor: (shape of the whole tensor, offset of this rank's box in it); empty tuples if it is whole here.
    Raises TypeError for a partial sum."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(f"a tensor with the placements {tensor.placements} is a partial sum, and no state")
    if all(placement.is_replicate() for placement in tensor.placements):
        return (), ()
    _, at = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(tensor.shape), tuple(at)


def forget_sharding() -> None:
    """Drop what DTensor has cached: local shapes, true of the rank that this process was, and meshes of an earlier
    generation, equal to the new ones but for their groups."""
    if (clear := getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)) is not None:
        clear()


def random_tracker() -> Any:
    """DTensor's generator of random numbers; None: it is not made yet."""
    module = sys.modules.get("torch.distributed.tensor._random")
    return getattr(module, "_rng_tracker", None)


def set_random_tracker(tracker: Any) -> None:
    """On GPUs the first random operation on a DTensor makes one, with a broadcast, in which all ranks must take part: a
    survivor has what a replacement has."""
    if (module := sys.modules.get("torch.distributed.tensor._random")) is not None:
        module._rng_tracker = tracker  # type: ignore[attr-defined]


def is_flattened(param: torch.nn.Parameter) -> bool:
    """Whether it is a view of a flat parameter of the first FSDP."""
    return getattr(param, "_fsdp_flattened", False)


# ── the build ───────────────────────────────────────────────────────────────────────────────────────────────


def registered_device() -> bool:
    """Whether a third party's back end for a device is registered. Starts no driver."""
    return bool(torch._C._get_privateuse1_backend_name() != "privateuseone")


def cuda_was_forked() -> bool:
    """Whether CUDA was started before this process was forked."""
    return bool(torch.cuda._is_in_bad_fork())
