"""State reaches every rank that lacks it, bit for bit: real processes, real sockets."""

from __future__ import annotations

import hashlib
import math
import os
import pathlib
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ckpt import save
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn

from elastic.checkpoint.format.errors import NoGoodCheckpoint
from elastic.contract.worker.messages import LoggedRow
from elastic.worker.comm.errors import GroupAborted, is_communication_error
from elastic.worker.comm.group import Group
from elastic.worker.state.handover import broadcast, pull, restore, sync
from elastic.worker.state.handover.restore import Disk
from elastic.worker.state.handover.sync import Handover
from elastic.worker.state.parts.parts import OptimizerPart
from elastic.worker.state.state import State
from elastic.worker.state.state_source import NoStateError, Saved, Version
from elastic.worker.torch_internals import torch_private

pytestmark = pytest.mark.slow


class Odd(nn.Module):
    """Tied, bf16, non-contiguous, zero-dimensional, empty, boolean, complex."""

    def __init__(self, seed: int, width: int = 40) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        self.coarse = nn.Parameter(torch.randn(33, 7, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(600, 700).t())
        self.channels = nn.Parameter(torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last))
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.rand(17) > 0.5)
        self.register_buffer("phase", torch.randn(5, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        wide = self.head(self.embed(tokens)).sum() * self.scale
        return wide + self.coarse.float().sum() + (self.turned**2).sum() + self.channels.sum() + self.nothing.sum()


def build(seed: int, kind: str = "adamw") -> State:
    model = Odd(seed)
    optimizer: torch.optim.Optimizer
    match kind:
        case "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (seed + 1))
        case "fused":
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        case "amsgrad":
            optimizer = torch.optim.Adam(model.parameters(), amsgrad=True, foreach=True)
        case _:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5])
    return State(model=model, optimizer=optimizer, scheduler=scheduler, best=float("inf"), names=("a", {1: [seed]}))


def step(state: State, generation: int) -> None:
    generator = torch.Generator().manual_seed(state.step)
    state.optimizer.zero_grad()
    state.model(torch.randint(0, 50, (3, 4), generator=generator)).backward()
    state.optimizer.step()
    state.scheduler.step()
    state.best = min(state.best, float(state.step))
    state.committed(generation)


def fingerprint(state: State) -> str:
    hasher = hashlib.sha256(repr(state.extra()).encode())
    for info, tensor in state.tensors():
        hasher.update(repr(info).encode())
        flat = tensor.contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def group(rank: int, world_size: int, port: int, generation: int) -> Group:
    made = Group(
        backend="gloo", rank=rank, world_size=world_size, store_host="127.0.0.1", store_port=port, generation=generation
    )
    made.form()
    return made


def only_by(way: str, rank: int) -> None:
    """Over sockets only, as between hosts; or out of memory where that works, here that is everywhere; or both."""
    if way == "sockets" or (way == "both" and rank % 2):
        pull.can_read = lambda window: False


def newcomer(rank: int, world_size: int, port: int, kind: str, way: str) -> Any:
    """Ranks 1 and 2 have trained three steps; the others are new."""
    only_by(way, rank)
    state = build(rank, kind)
    if rank in (1, 2):
        same = build(1, kind)
        state = same
        for _ in range(3):
            step(state, generation=4)
    kept = [id(p) for p in state.model.parameters()], [p.data_ptr() for p in state.model.parameters()]
    made = group(rank, world_size, port, 5)
    synced = Handover(state, rank=rank, world_size=world_size, generation=5).run()
    now = [id(p) for p in state.model.parameters()], [p.data_ptr() for p in state.model.parameters()]
    received = fingerprint(state)
    step(state, generation=5)
    made.close()
    return {
        "step": synced.step,
        "source": synced.source,
        "nbytes": synced.nbytes,
        "received": received,
        "after": fingerprint(state),
        "kept": kept == now,
        "tied": state.model.head.weight is state.model.embed.weight,
        "best": state.best,
        "names": repr(state.names),
        "version": state.version,
    }


@pytest.mark.parametrize(
    ("kind", "way"),
    [("adamw", "memory"), ("adamw", "sockets"), ("fused", "both"), ("amsgrad", "memory"), ("sgd", "sockets")],
)
def test_newcomers_get_bit_identical_state_and_step_on_alike(kind: str, way: str) -> None:
    results = run_ranks(newcomer, world_size=5, kind=kind, way=way)
    assert [r["step"] for r in results] == [3] * 5
    assert {r["source"] for r in results} == {"live"}
    assert len({r["received"] for r in results}) == 1
    assert len({r["after"] for r in results}) == 1
    assert all(r["kept"] and r["tied"] for r in results)
    assert results[1]["nbytes"] == results[2]["nbytes"] == 0 < results[0]["nbytes"] == results[3]["nbytes"]
    assert {r["names"] for r in results} == {"('a', {1: [1]})"}
    assert {tuple(r["version"]) for r in results} == {(5, 4)}


def change(state: State, what: str) -> None:
    """Change what the optimizer keeps for each of its parameters."""
    for number, (param, kept) in enumerate(state.optimizer.state.items()):
        match what:
            case "another key":
                kept["sum"] = torch.full_like(param, float(number), requires_grad=False)
            case "one key less":
                del kept["exp_avg"]
            case "other memory":
                kept["exp_avg"] = kept["exp_avg"].clone()
            case "another dtype":
                kept["exp_avg_sq"] = kept["exp_avg_sq"].double()
            case "a nested tensor":
                kept["both"] = [torch.full((3,), float(number)), "text"]
            case "the step as a number":
                kept["step"] = int(kept["step"])


CHANGES = "another key", "one key less", "other memory", "another dtype", "a nested tensor", "the step as a number"


def listed_early(rank: int, world_size: int, port: int, what: str, since: bool, way: str) -> Any:
    """Rank 1 has trained three steps; rank 2 has trained one, then was away; the others are new. `since`: the change on
    rank 1 was made after its tensors were listed."""
    only_by(way, rank)
    sync.EARLY_TENSORS = 1
    holds: list[bool] = []
    made: dict[int, torch.Tensor] = {}
    really, makes = sync._received, OptimizerPart.make

    def received(kind: Any, previous: int, following: int | None) -> Any:
        got = really(kind, previous, following)
        if kind is sync.StateHeader:
            holds.append(got.tensors is None)
        return got

    def make(part: OptimizerPart, *given: Any) -> Any:
        found = makes(part, *given)
        made.update({} if found is None else {id(tensor): tensor for tensor in found.came.values()})
        return found

    sync._received = received  # type: ignore[assignment]
    OptimizerPart.make = make  # type: ignore[method-assign]
    state = build(1 if rank in (1, 2) else rank)
    for _ in range({1: 3, 2: 1}.get(rank, 0)):
        step(state, generation=4)
    if rank == 1:
        change(state, what)
        if not since:
            state.table()
    group_of_ranks = group(rank, world_size, port, 5)
    synced = Handover(state, rank=rank, world_size=world_size, generation=5).run()
    group_of_ranks.close()
    kept = [t for entry in state.optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    return {
        "step": synced.step,
        "received": fingerprint(state),
        "holds": holds,
        "clean": state.clean(),
        "made": sum(id(tensor) in made for tensor in kept) / len(kept),
        "keys": sorted({key for entry in state.optimizer.state.values() for key in entry}),
    }


@pytest.mark.parametrize("way", ["memory", "sockets"])
@pytest.mark.parametrize(("what", "since"), [("nothing", False), *((w, s) for w in CHANGES for s in (False, True))])
def test_tensors_made_by_a_list_sent_early_are_used_only_where_it_still_holds(what: str, since: bool, way: str) -> None:
    """The source sends its list before it has looked whether it still holds, and receivers make their tensors by it."""
    results = run_ranks(listed_early, world_size=4, what=what, since=since, way=way)
    assert [r["step"] for r in results] == [3] * 4
    assert all(r["clean"] for r in results)
    assert len({r["received"] for r in results}) == 1
    assert len({tuple(r["keys"]) for r in results}) == 1
    holds = not since or what == "other memory"
    assert [r["holds"] for r in results] == [[holds], [], [holds], [holds]]
    # Nothing is made for an optimizer whose entries hold lists of tensors, as they may.
    used = 1.0 if holds and what != "a nested tensor" else 0.0
    assert [r["made"] for r in results] == [used, 0.0, used, used] or not holds


def first_start(rank: int, world_size: int, port: int) -> Any:
    """Three fresh processes with different seeds; then one is replaced before anybody has committed."""
    state = build(rank)
    made = group(rank, world_size, port, 1)
    synced = Handover(state, rank=rank, world_size=world_size, generation=1).run()
    made.close()
    first = fingerprint(state)
    if rank == 2:
        state = build(7)
    made = group(rank, world_size, port, 2)
    again = Handover(state, rank=rank, world_size=world_size, generation=2).run()
    made.close()
    return [synced.source, again.source, again.nbytes > 0, first, fingerprint(state), state.version]


def test_fresh_ranks_start_from_the_setup_of_one_rank() -> None:
    results = run_ranks(first_start, world_size=3)
    assert [r[:3] for r in results] == [["setup", "live", False]] * 2 + [["setup", "live", True]]
    assert len({fingerprint for r in results for fingerprint in r[3:5]}) == 1
    assert {tuple(r[5]) for r in results} == {(1, 0)}


def one_ahead(rank: int, world_size: int, port: int) -> Any:
    """Rank 2 committed step 4, the others lost the group in step 4: rank 1 half-way through the optimizer. Rank 2 has
    the row that it has logged in step 4, rank 0 may lack it."""
    state = build(0)
    for _ in range(3 + (rank == 2)):
        step(state, generation=1)
    if rank == 1:
        state.optimizer.step()
        assert not state.clean()
    made = group(rank, world_size, port, 2)
    own = [LoggedRow(step=4, wall_s=1.0, values={"rank": rank, "loss": math.nan})]
    synced = Handover(state, rank=rank, world_size=world_size, generation=2, logged=lambda: own).run()
    made.close()
    rows = [(row.step, row.values["rank"], str(row.values["loss"])) for row in synced.logged]
    return [synced.step, state.clean(), fingerprint(state), synced.source_rank, rows]


def test_the_rank_that_is_ahead_is_the_source() -> None:
    results = run_ranks(one_ahead, world_size=3)
    assert [r[:2] for r in results] == [[4, True]] * 3
    assert len({r[2] for r in results}) == 1
    assert [r[3] for r in results] == [2, 2, 2]
    assert results[0][4] == [[4, 2, "nan"]]
    assert results[2][4] == []


def fill(state: State, steps: int, generation: int = 3) -> None:
    """As a checkpoint of `generation` does."""
    older = build(5)
    for _ in range(steps):
        step(older, generation)
    state.adopt(older.table(), older.extra())
    for (_, here), (_, there) in zip(state.tensors(), older.tensors(), strict=True):
        here.copy_(there)
    state.filled()


def from_disk(rank: int, world_size: int, port: int) -> Any:
    """Only rank 1 can load; the one it offered is damaged, and `load` took the one before."""
    state = build(rank)

    def load(kind: str, _version: Version) -> str:
        fill(state, 2)
        return f"{kind} step 2 at /here"

    made = group(rank, world_size, port, 9)
    synced = Handover(
        state,
        rank=rank,
        world_size=world_size,
        generation=9,
        saved=lambda: Saved(checkpoint=(3, 4) if rank else None),
        load=load,
    ).run()
    made.close()
    return [synced.step, synced.source, state.version, fingerprint(state)]


def test_one_rank_loads_and_the_others_receive() -> None:
    results = run_ranks(from_disk, world_size=3)
    assert [r[:3] for r in results] == [[2, "checkpoint step 2 at /here", [3, 2]]] * 3
    assert len({r[3] for r in results}) == 1


def late_node(rank: int, world_size: int, port: int, saved: tuple[int, int]) -> Any:
    """Rank 0 has live state of generation 3; generations 4 to 8 have not stepped. Rank 1 has a checkpoint alone."""
    state = build(rank)
    for _ in range(4 if rank == 0 else 0):
        step(state, generation=3)

    def load(kind: str, _version: Version) -> str:
        fill(state, 2, saved[0])
        return f"{kind} step 2"

    made = group(rank, world_size, port, 9)
    theirs = Saved(checkpoint=saved if rank else None)
    synced = Handover(state, rank=rank, world_size=world_size, generation=9, saved=lambda: theirs, load=load).run()
    made.close()
    return [synced.origin.value, state.step, fingerprint(state)]


@pytest.mark.parametrize(("saved", "origin", "at"), [((30, 2), "live", 4), ((8, 2), "checkpoint", 2)])
def test_live_state_stays_when_a_node_brings_a_checkpoint_of_no_earlier_generation(
    saved: tuple[int, int], origin: str, at: int
) -> None:
    results = run_ranks(late_node, world_size=2, saved=saved)
    assert [r[:2] for r in results] == [[origin, at]] * 2
    assert len({r[2] for r in results}) == 1


def from_two_disks(rank: int, world_size: int, port: int, damage: str) -> Any:
    """Each rank has a disk of its own. The newest checkpoint on rank 0's is damaged: it loads an older one, or none."""
    state = build(rank)

    def load(kind: str, _version: Version) -> str:
        if rank == 0 and damage == "all":
            raise NoGoodCheckpoint("step-4: damaged")
        fill(state, 3 if rank else 2)
        return f"{kind} step {state.step} of rank {rank}"

    made = group(rank, world_size, port, 9)
    newest = (3, 3) if rank else (3, 4)
    theirs = Saved(checkpoint=newest, storage_id=rank, look_again=lambda passed: (newest, rank))
    synced = Handover(state, rank=rank, world_size=world_size, generation=9, saved=lambda: theirs, load=load).run()
    made.close()
    return [synced.step, synced.source, state.version, fingerprint(state)]


@pytest.mark.parametrize("damage", ["the newest", "all"])
def test_another_ranks_checkpoint_is_loaded_when_the_newest_turns_out_damaged(damage: str) -> None:
    results = run_ranks(from_two_disks, world_size=2, damage=damage)
    assert [r[:3] for r in results] == [[3, "checkpoint step 3 of rank 1", [3, 3]]] * 2
    assert len({r[3] for r in results}) == 1


def from_one_disk(rank: int, world_size: int, port: int, folder: str, ends: str) -> Any:
    """All ranks see one folder. Its newest checkpoint is damaged, which shows while it is loaded, and it `ends` so."""
    state, loads, disk = build(rank), 0, Disk(folder, "job")
    if ends in ("on another host", "at an unknown place"):
        restore._storage_id = lambda _: rank + 1 if ends == "on another host" else 0

    def load(kind: str, _version: Version) -> str:
        nonlocal loads
        loads += 1
        newest = pathlib.Path(folder, "step-4")
        if ends == "moved":
            newest.rename(f"{newest}.damaged-shard-hash")
        if ends == "all passed over":
            raise NoGoodCheckpoint("none is good")
        fill(state, 4 if ends == "on another host" and rank else 3)
        return f"{kind} step {state.step} of rank {rank}"

    made = group(rank, world_size, port, 9)
    try:
        synced = Handover(state, rank=rank, world_size=world_size, generation=9, saved=disk.saved, load=load).run()
    except (NoGoodCheckpoint, NoStateError):
        return [0, "", loads]
    finally:
        made.close()
    return [synced.step, synced.source, loads]


@pytest.mark.parametrize("ends", ["moved", "in place", "all passed over"])
def test_a_damaged_checkpoint_of_a_shared_folder_costs_one_load_not_one_of_each_rank(
    tmp_path: pathlib.Path, ends: str
) -> None:
    """Also if it keeps its name: its folder is read-only, or the disk reports errors."""
    for at in (3, 4):
        save(str(tmp_path), at, generation=3)
    results = run_ranks(from_one_disk, world_size=3, folder=str(tmp_path), ends=ends)
    said = [0, ""] if ends == "all passed over" else [3, "checkpoint step 3 of rank 0"]
    assert results == [[*said, 1 if rank == 0 else 0] for rank in range(3)]


def test_a_checkpoint_that_one_host_cannot_read_is_tried_by_another(tmp_path: pathlib.Path) -> None:
    for at in (3, 4):
        save(str(tmp_path), at, generation=3)
    results = run_ranks(from_one_disk, world_size=3, folder=str(tmp_path), ends="on another host")
    assert results == [[4, "checkpoint step 4 of rank 1", loads] for loads in (1, 1, 0)]


def test_where_it_is_not_known_which_ranks_see_one_folder_each_tries(tmp_path: pathlib.Path) -> None:
    """Another rank's may be good."""
    for at in (3, 4):
        save(str(tmp_path), at, generation=3)
    results = run_ranks(from_one_disk, world_size=3, folder=str(tmp_path), ends="at an unknown place")
    assert results == [[3, "checkpoint step 3 of rank 0", 1]] * 3


class Large(nn.Module):
    def __init__(self, rank: int, megabytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((megabytes, 1 << 18), float(rank)))


def interrupted(rank: int, world_size: int, port: int, way: str) -> Any:
    """The source dies, and the group is aborted, while a quarter of a gigabyte is being sent."""
    only_by(way, rank)
    state = State(model=Large(rank, 256))
    if rank == 0:
        state.committed(1)
    made = group(rank, world_size, port, 2)
    pieces = []

    def check() -> None:
        made.check()
        pieces.append(1)
        if rank == 0 and len(pieces) == 3:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank and len(pieces) == 3:
            time.sleep(0.6)

    if rank:
        threading.Timer(1.0, made.abort, ["rank 0 died"]).start()
    with pytest.raises((RuntimeError, GroupAborted)) as caught:
        Handover(state, rank=rank, world_size=world_size, generation=2, check=check).run()
    assert is_communication_error(caught.value), caught.value
    del caught
    made.close()
    touched = bool((state.model.weight == 0).any())
    made = group(rank - 1, world_size - 1, port, 3)
    with pytest.raises(NoStateError, match="half-changed"):
        Handover(state, rank=rank - 1, world_size=world_size - 1, generation=3).run()
    made.close()
    return [state.clean(), state.version, touched]


@pytest.mark.parametrize("way", ["memory", "sockets"])
def test_an_interrupted_transfer_leaves_no_usable_state(way: str) -> None:
    dead, *others = run_ranks(interrupted, world_size=3, way=way)
    assert dead == {"died": signal.SIGKILL}
    assert others == [[False, [0, 0], True]] * 2


def mismatch(rank: int, world_size: int, port: int, what: str, early: int) -> Any:
    sync.EARLY_TENSORS = early
    model = nn.Linear(3, 4 + (rank if what == "shape" else 0))
    if what == "frozen bias" and rank:
        optimizer = torch.optim.AdamW([model.weight])
    else:
        optimizer = torch.optim.AdamW(model.parameters())
    state = State(model=model, **{"other" if what == "name" and rank else "optimizer": optimizer})
    if rank == 0:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        state.committed(1)
    made = group(rank, world_size, port, 2)
    said = ""
    try:
        Handover(state, rank=rank, world_size=world_size, generation=2).run()
    except (ValueError, RuntimeError) as error:
        said = str(error)
    made.abort("one rank failed")
    made.close()
    return said


@pytest.mark.parametrize("early", [1, 1000])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "model.weight is F32 [5, 3] here and F32 [4, 3] in the state that came"),
        ("name", "this state has the parts model, other, the one that came model, optimizer"),
        ("frozen bias", "optimizer has parameter groups of [1] parameters as setup() builds it, and of [2]"),
    ],
)
def test_another_model_is_named(what: str, words: str, early: int) -> None:
    assert words in run_ranks(mismatch, world_size=2, what=what, early=early)[1]


def damaged(rank: int, world_size: int, port: int) -> Any:
    """Rank 1 passes on other bytes than it received: rank 2 notices, rank 1 does not know."""
    tensors = [torch.full((3 << 20,), float(rank)), torch.full((5,), float(rank))]
    made = group(rank, world_size, port, 2)
    if rank == 1:
        really = dist.isend

        def spoil(data: torch.Tensor, target: int) -> Any:
            bad = data.clone()
            bad[-1] ^= 1
            return really(bad, target)

        dist.isend = spoil  # type: ignore[assignment]
    said = ""
    try:
        broadcast.relay(
            tensors, previous=rank - 1 if rank else None, following=rank + 1 if rank < world_size - 1 else None
        )
    except broadcast.CorruptError as error:
        said = str(error)
    made.close()
    return said


def test_damage_on_the_way_is_found() -> None:
    assert run_ranks(damaged, world_size=3) == ["", "", "4 of 4 slices of the state arrived damaged, the first is 0"]


def test_tensors_that_are_conjugated_or_negated_by_a_mark_are_written_to() -> None:
    """torch writes to none of them at once, and does not say to which."""
    values = [torch.complex(torch.rand(3), torch.rand(3)) for _ in range(3)]
    conjugate, negative = values[0].clone().conj(), values[1].clone().conj().imag
    plain, sign = torch.zeros(3, dtype=torch.complex64), negative.is_neg()
    what = [values[0], values[1].real, values[2]]
    torch_private.foreach_copy([conjugate, negative, plain], what)
    assert all(map(torch.equal, [conjugate, negative, plain], what))
    assert conjugate.is_conj()
    assert negative.is_neg() == sign is True
    with pytest.raises(RuntimeError):
        torch_private.foreach_copy([plain], [torch.zeros(2)])
