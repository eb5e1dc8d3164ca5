"""Sharded state on each rank: its boxes, its key, which samples it takes; what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elastic
from elastic.checkpoint.format import manifest
from elastic.checkpoint.format.errors import Damaged
from elastic.checkpoint.format.layout import arena_nbytes
from elastic.checkpoint.format.manifest import Shard
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.memory.buffers import Buffers
from elastic.contract.worker.tensor_table import TensorInfo
from elastic.worker.data.batches import batches
from elastic.worker.job.data_ranks import data_rank, refuse_weights
from elastic.worker.job.job import Job
from elastic.worker.link.misuse import MisuseError
from elastic.worker.state.handover.restore import Store, kept_in, saved_for
from elastic.worker.state.parts.boxes import Accepted
from elastic.worker.state.parts.described import Like

__all__ = ["ranks"]


def net(width: int = 7) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def formed(rank: int, world_size: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    Accepted.sharded = True


def built(model: nn.Module) -> elastic.State:
    state = elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
    model(torch.ones(4, 5)).sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.committed(1)
    return state


def shards(rank: int, world_size: int, port: int, *, of: str) -> Any:
    formed(rank, world_size, port)
    if of in ("hsdp", "both"):
        names = ("replicate", "shard") if of == "hsdp" else ("data", "tensor")
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names)
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    width = 8 if of in ("tp", "both") else 7  # tensor parallelism needs columns that divide
    model, anew = net(width), net(width)
    for each in (model, anew):
        if of in ("tp", "both"):
            parallel = mesh["tensor"] if of == "both" else mesh
            parallelize_module(each, parallel, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if of != "tp":
            fully_shard(each, mesh=mesh["data"] if of == "both" else mesh)
    state = built(model)
    parked, before = state.parked(), state.shard_key()
    other = elastic.State(model=anew, optimizer=torch.optim.AdamW(anew.parameters(), lr=1e-2))
    other.unpark(parked)
    state.begin()
    other.begin()
    with torch.no_grad():  # an evaluation: FSDP's root stays unsharded behind it
        model(torch.ones(4, 5))
    state.turned()
    same = all(torch.equal(a, b) for (_, a), (_, b) in zip(state.tensors(), other.tensors(), strict=True))
    whole = tuple(TensorInfo(i.name, i.dtype, i.of or i.shape, 0) for i in state.table())
    again = other.table_for(whole)
    unlike = False
    for each in (state, other):  # what was made for a parameter that is whole on each rank is a DTensor, too
        each.model(torch.ones(4, 5)).sum().backward()
        each.optimizer.step()
        each.optimizer.zero_grad()
    unlike = not all(torch.equal(a, b) for (_, a), (_, b) in zip(state.tensors(), other.tensors(), strict=True))
    return {
        "unlike": unlike,
        "table": [(i.name, i.dtype, i.shape, i.nbytes, i.of, i.at) for i in state.table()],
        "key": before,
        "same": same and other.shard_key() == before and other.version == state.version,
        "derived": [(i.name, i.shape, i.of, i.at) for i in again]
        == [(i.name, i.shape, i.of, i.at) for i in state.table()],
        "data": refusal(lambda: data_rank(state.modules(), None, rank, world_size)),
        "mesh": data_rank(state.modules(), mesh, rank, world_size),
    }


def refusal(call: Any) -> Any:
    try:
        return call()
    except MisuseError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("of", "world_size", "keys"), [("fsdp", 3, 3), ("fsdp", 4, 4), ("hsdp", 4, 2), ("tp", 2, 2), ("both", 4, 4)]
)
def test_the_boxes_of_all_ranks_fill_each_tensor_and_come_back(of: str, world_size: int, keys: int) -> None:
    """Also with fewer rows than ranks, and rows that do not divide."""
    found = run_ranks(shards, world_size=world_size, of=of)
    assert all(each["same"] and each["derived"] and not each["unlike"] for each in found)
    assert len({each["key"] for each in found}) == keys
    first = {each["key"]: each for each in reversed(found)}.values()
    boxes = [
        TensorInfo(n, d, tuple(s), b, tuple(o), tuple(a)) for each in first for n, d, s, b, o, a in each["table"] if o
    ]
    manifest._check_boxes(boxes)
    assert {box.name for box in boxes} >= {"model.0.weight", "optimizer.state.0.exp_avg"}
    with pytest.raises(Damaged, match=f"the boxes of {boxes[0].name} do not fill it"):
        manifest._check_boxes(box for box in boxes if (box.name, box.at) != (boxes[0].name, boxes[0].at))
    if of in ("tp", "both"):
        assert "mesh=mesh['data']" in found[1]["data"]
    else:
        assert [tuple(each["data"]) for each in found] == [(rank, world_size) for rank in range(world_size)]
    assert [tuple(each["mesh"]) for each in found] == [(rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((2, 3), (4, 3), (0, 0)), ((2, 3), (4, 3), (1, 0))], "do not fill it"),
        ([((3, 3), (4, 3), (0, 0)), ((1, 3), (4, 3), (0, 0))], "listed twice"),
        ([((2, 3), (4, 3), (0, 0)), ((2, 3), (5, 3), (2, 0))], "of unlike tensors"),
        ([((2, 3), (4, 3), (3, 0))], "outside of it"),
        ([((2, 3), (), ()), ((2, 3), (), ())], "listed twice"),
    ],
)
def test_boxes_that_are_no_tensor_are_seen(boxes: list[tuple[Any, Any, Any]], problem: str) -> None:
    with pytest.raises(Damaged, match=problem):
        manifest._check_boxes(TensorInfo("w", "F32", shape, 0, of, at) for shape, of, at in boxes)


def refused(rank: int, world_size: int, port: int) -> Any:
    formed(rank, world_size, port)

    class FullyShardedDataParallel(nn.Module):
        pass

    first = refusal(lambda: elastic.State(model=FullyShardedDataParallel()))
    bare = net()
    FSDP1(bare, device_id=torch.device("cpu"), use_orig_params=True)
    within = refusal(lambda: elastic.State(model=bare))
    Accepted.sharded = False
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return first, within, refusal(lambda: elastic.State(model=model))


def test_what_is_sharded_otherwise_or_unsaid_is_refused_with_the_fix() -> None:
    ((old, within, unsaid), *_) = run_ranks(refused, world_size=1)
    assert "fully_shard (FSDP2)" in old
    assert within == old, "the model that is within it"
    assert "elastic.run(setup, train, sharded=True)" in unsaid


def saved_again(rank: int, world_size: int, port: int) -> Any:
    formed(rank, world_size, port)
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    state, found = elastic.State(model=model), []
    for _entry in range(2):
        state.forget_gradients()
        with torch.no_grad():
            model(torch.ones(4, 5))  # an evaluation: it leaves the parameters unsharded
        found.append([type(each).__name__ for each in model.state_dict().values()])
    return found


def test_a_survivors_state_dict_after_an_evaluation_is_sharded_as_that_of_a_replacement() -> None:
    """FSDP2 makes its hooks for that at the first forward, once; the hooks that `train` makes are taken away."""
    for found in run_ranks(saved_again, world_size=2):
        assert found == [["DTensor"] * 4] * 2


def test_parts_of_unequal_sizes_and_micro_batches_are_refused() -> None:
    class Progress:
        step = 0

    loop = batches(list(range(10)), Progress(), rank=0, world_size=4, batch_size=10, equal_parts=True)
    with pytest.raises(MisuseError, match="10 samples for 4 ranks"):
        next(loop)
    with pytest.raises(MisuseError, match="set_requires_gradient_sync"):
        refuse_weights({"micro_batch": 2})


def arena(step: int, key: int = 7, *, rank: int = 2, parts: int = 1) -> Arena:
    """With the snapshot of rank `rank` of 4 at `step`; `parts` as where its shards are kept among the node's."""
    table = (TensorInfo("model.w", "F32", (2,), 8, (8,), (4,)),)
    made = Arena.create(arena_nbytes(table))
    made.layout(table, shard=rank, shards=4, part=0, parts=parts)
    made.fill([torch.full((2,), float(step))]).finish()
    made.seal(step, 1, {"state": {}, "positions": [0], "key": key})
    return made


def test_a_rank_takes_what_is_kept_for_its_key_newest_first() -> None:
    old, new, other, partial = arena(10), arena(20), arena(20, 8, rank=3), arena(30, parts=2)
    own, others = kept_in([old, other, partial, new], 7, 2, 4)
    assert [version for version, _ in own] == [(1, 20), (1, 10)]
    assert [(version, each.key) for version, each in others] == [((1, 20), 8)]
    assert partial.fd == -1
    for each in (old, new, other):
        each.close()


def test_a_rank_whose_setup_builds_other_boxes_than_before_is_refused() -> None:
    with pytest.raises(MisuseError, match="other boxes of the state for rank 2 of 4"):
        kept_in([arena(10, 9)], 7, 2, 4)


def test_what_is_newer_than_what_all_have_gone_back_to_is_discarded_and_the_next_copy_replaces_it() -> None:
    """Else the next snapshot would replace the one that all have, and for a moment no step would be common to all."""
    old, new, guest = arena(10), arena(20), arena(20, 8, rank=3)
    store = Store(None, None, None, None)  # type: ignore[arg-type]
    store._kept, store._others = kept_in([old, new, guest], 7, 2, 4)
    buffers = Buffers(keep_newest=True)
    buffers.replace([old, new])
    assert buffers.free() == 0
    store.discard_newer((1, 10))
    assert buffers.free() == 1
    assert not guest.header().complete
    assert old.header().complete


def test_of_two_snapshots_of_one_step_one_gives_way() -> None:
    """A step that was kept in memory, and saved right after it, as a planned change begins."""
    buffers = Buffers(keep_newest=True)
    buffers.replace([arena(10), arena(10)], busy=[1])
    assert buffers.free() == 0
    buffers.busy.clear()
    assert buffers.free() is not None


def test_a_box_of_another_parameter_is_not_made() -> None:
    with pytest.raises(ValueError, match="its parameter here is another one"):
        Like(torch.empty(4, 3)).empty(TensorInfo("optimizer.state.0.row", "F32", (2, 1), 8, (4, 1), (2, 0)), "cpu")


def test_calls_that_share_out_data_as_if_each_rank_had_the_whole_model_are_refused() -> None:
    class Sharded:
        is_sharded = True

    job: Any = object.__new__(Job)
    with pytest.raises(MisuseError, match="the same number of batches on each rank"):
        job.evaluate(Sharded(), [], lambda batch: {}, batch_size=1)
    with pytest.raises(MisuseError, match=r"job\.steps"):
        job.streams(lambda *_: None, Sharded(), count=1, batch_size=1, steps=1)


def test_the_newest_snapshot_stays_while_the_other_buffer_is_written_to_disk() -> None:
    buffers = Buffers(keep_newest=True)
    buffers.replace([arena(10), arena(20)], busy=[0])
    assert buffers.free() is None


def shard_of(rank: int, key: int, names: str, *, parts: dict[str, Any] | None = None, **extra: Any) -> Shard:
    """`names`: tensors by letter; capital: a box of two."""
    boxes = {"of": (4,), "at": (2 * rank,)}
    table = tuple(TensorInfo(name, "F32", (2,), 8, **(boxes if name.isupper() else {})) for name in names)
    extra = {"state": parts or {"rank": rank}, "positions": list(range(len(names))), "key": key, **extra}
    return Shard(
        file=f"{rank}", shard=rank, shards=2, step=4, generation=1, nbytes=0, data_at=0, tensors=table, extra=extra
    )


def test_of_a_checkpoint_a_rank_takes_all_boxes_and_what_its_own_key_has_saved() -> None:
    best = {"best": {"$tensor": "v"}}
    shards = [shard_of(0, 11, "Wpbv", parts=best), shard_of(1, 12, "Wb")]  # p: a parameter, b: a buffer, v: in a value
    for key, extra, names in ((11, best, "WWpbv"), (12, {"rank": 1}, "WWbp"), (13, best, "WWpbv"), (0, best, "WWpbv")):
        found, table = saved_for(shards, key)
        assert found == extra
        assert sorted(info.name for info in table) == sorted(names)
        (buffer,) = (info for info in table if info.name == "b")
        assert any(buffer is info for info in shards[key == 12].tensors)


def test_stages_are_read_by_their_own_key_alone() -> None:
    shards = [shard_of(0, 11, "ab", staged=True), shard_of(1, 12, "ac", staged=True)]
    with pytest.raises(MisuseError, match="Set nodes and workers_per_node as then"):
        saved_for(shards[:1], 12)
    with pytest.raises(MisuseError, match="Set nodes and workers_per_node as then"):
        saved_for(shards, 11)  # by one rank: two have saved it
    assert saved_for(shards[:1], 11) == ({"rank": 0}, shards[0].tensors)
