"""What `setup` has made through device meshes is made again in the next group, under a model that stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic.worker.torch_internals import torch_private
from elastic.worker.torch_internals.mesh_groups import MeshGroups, can_put_back, put_back

__all__ = ["ranks"]

if not can_put_back():
    pytest.skip(f"torch {torch.__version__}: setup runs again", allow_module_level=True)


def end() -> None:
    """Once all ranks have connected whatever groups there are."""
    dist.barrier()
    dist.destroy_process_group()


def form(rank: int, world_size: int, port: int, generation: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    torch_private.restart_group_names()
    prefixed = dist.PrefixStore(str(generation), store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size)


def built(of: str) -> nn.Module:
    torch.manual_seed(5)
    hidden = 8 if of == "tp" else 7  # which does not pass on uneven parts
    model = nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    world = dist.get_world_size()
    if of == "tp":
        mesh = init_device_mesh("cpu", (world,))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if of == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model(torch.arange(10.0).view(2, 5) + dist.get_rank()).sum().backward()
    found = [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]  # type: ignore[attr-defined]
    model.zero_grad()
    return found


def strike(_: torch.Tensor) -> None:
    raise KeyError("struck")


def twice(rank: int, world_size: int, port: int, *, of: str, interrupted: str) -> Any:
    """The model of the first generation in the second one, beside one that is built there."""
    form(rank, world_size, port, 1)
    made = MeshGroups()
    with made.recorded():
        model = built(of)
    before = gradients(model)
    if interrupted:
        hook = model[1].register_forward_hook(lambda *given: given[-1].register_hook(strike) and None)  # type: ignore[index]
        output = model(torch.ones(2, 5))
        if interrupted == "backward":
            with pytest.raises(KeyError):
                output.sum().backward()
        hook.remove()
    end()
    put_back([model])
    model.zero_grad()
    form(rank, world_size, port, 2)
    if rank == 1:
        other = MeshGroups()  # a replacement, whose `setup` makes them for the first time
        with other.recorded(state_is_there=True):
            model = built(of)
    else:
        made.again([model])
    after = gradients(model)
    end()
    return {
        "why": made.why_not([model]),
        "equal": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "count": len(after),
    }


@pytest.mark.parametrize(
    ("of", "interrupted"),
    [
        ("fsdp", ""),
        ("hsdp", ""),
        ("tp", ""),
        ("fsdp", "forward"),
        ("fsdp", "backward"),
        ("hsdp", "backward"),
        ("tp", "backward"),
    ],
)
def test_a_survivor_keeps_its_model_beside_a_replacement_that_builds_it(of: str, interrupted: str) -> None:
    for found in run_ranks(twice, world_size=4 if of == "hsdp" else 2, of=of, interrupted=interrupted):
        assert found == {"why": "", "equal": True, "count": 4}


def exchanges() -> None:
    dist.barrier()


def own_group() -> None:
    dist.new_group([0, 1])


def asks() -> None:
    init_device_mesh("cpu", (dist.get_world_size(),)).get_group()


def stage() -> None:
    PipelineStage(nn.Linear(4, 4), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def own_group_by_another_name() -> None:
    NEW_GROUP([0, 1])


def keeps_the_world() -> None:
    KEPT.append(dist.group.WORLD)


def sends() -> None:
    dist.send(torch.ones(1), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)


NEW_GROUP, KEPT = dist.new_group, list[Any]()
SETUPS = [
    (exchanges, "exchanges data"),
    (sends, "exchanges data"),
    (own_group, "of its own"),
    (own_group_by_another_name, "of its own"),
    (asks, "asks for a process group"),
    (keeps_the_world, "asks for a process group"),
    (stage, "PipelineStageBase"),
]


def reasons(rank: int, world_size: int, port: int) -> Any:
    form(rank, world_size, port, 1)
    found = []
    for number, (act, _) in enumerate(SETUPS):
        end()
        form(rank, world_size, port, 2 + number)
        made = MeshGroups()
        with made.recorded():
            act()
        found.append(made.why_not([]))
    end()
    return found


def test_a_setup_that_does_more_in_the_group_is_told_and_runs_again() -> None:
    for found in run_ranks(reasons, world_size=2):
        for (_, part), why in zip(SETUPS, found, strict=True):
            assert part in why


def shared_out(rank: int, world_size: int, port: int, *, there: list[bool]) -> Any:
    """What ranks with values of their own have of them, for each of `there`."""
    form(rank, world_size, port, 1)
    found = []
    for number, state_is_there in enumerate(there):
        end()
        form(rank, world_size, port, 2 + number)
        made = MeshGroups()
        with made.recorded(state_is_there=state_is_there):
            mesh = init_device_mesh("cpu", (world_size,))
            layer = nn.Linear(3, 3)
            for param in layer.parameters():
                nn.init.constant_(param, 10.0 + rank)
            parallelize_module(nn.Sequential(layer), mesh, {"0": ColwiseParallel()})
            alike = distribute_tensor(torch.full((2,), 10.0 + rank), mesh, [Replicate()])
        shards = [shard.to_local().unique().tolist() for shard in (*layer.parameters(), alike)]  # type: ignore[attr-defined]
        found.append((shards, made.shares_out, made.why_not([])))
    end()
    return found


def test_values_are_shared_out_only_where_no_rank_has_the_state() -> None:
    """3 rows over 2 ranks: uneven parts."""
    for rank, (new, there) in enumerate(run_ranks(shared_out, world_size=2, there=[False, True])):
        assert new == [[[10.0]] * 3, True, ""]
        assert there == [[[10.0 + rank]] * 3, True, ""]


def enlarged(rank: int, world_size: int, port: int) -> Any:
    form(rank, world_size, port, 1)
    made = MeshGroups()
    with made.recorded():
        mesh = init_device_mesh("cpu", (2, 1, world_size // 2), mesh_dim_names=("a", "b", "c"))
    before = made.why_not([])
    mesh["b", "c"]._flatten("both")
    after = made.why_not([])
    end()
    return before, after


def test_a_group_that_train_makes_out_of_a_mesh_of_setup_is_seen() -> None:
    for before, after in run_ranks(enlarged, world_size=4):
        assert before == ""
        assert "out of its meshes in `train`" in after


def split(rank: int, world_size: int, port: int) -> Any:
    """As torch makes the groups of meshes with NCCL: out of the group of that time, which ends with its generation."""
    form(rank, world_size, port, 1)
    made, parents = MeshGroups(), list[Any]()

    def split_group(parent_pg: Any = None, **_: Any) -> Any:
        parents.append(parent_pg)
        return dist.new_group(list(range(world_size)))

    maker = made._noted(split_group)
    maker(parent_pg=dist.group.WORLD)
    end()
    form(rank, world_size, port, 2)
    made.again([])
    found = [parents[0] is not parents[1], parents[1] is dist.group.WORLD]
    end()
    return found


def test_a_group_is_split_off_the_group_of_the_new_generation() -> None:
    assert run_ranks(split, world_size=2) == [[True, True]] * 2


def test_a_survivor_has_the_random_generator_of_dtensors_that_a_replacement_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first use makes it, with a broadcast, in which all ranks must take part."""
    monkeypatch.setattr(torch.distributed.tensor._random, "_rng_tracker", "made in train")
    MeshGroups().again([])
    assert torch_private.random_tracker() is None
