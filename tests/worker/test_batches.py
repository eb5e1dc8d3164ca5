"""Each sample once, the same draws whatever the world, and nothing left of the loader's processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import socket
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Subset

from elastic.worker.comm.ddp import GradientWeight
from elastic.worker.comm.errors import GroupAborted
from elastic.worker.data.batches import Batch, batches
from elastic.worker.data.reading import take_many
from elastic.worker.data.sharding import SampleOrder
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.link.misuse import MisuseTypeError
from elastic.worker.link.session import GenerationEnded
from elastic.worker.state.state import State


class Numbers:
    """Sample i is (tensor of i, i); with draws, what the three generators give while it is loaded."""

    def __init__(self, size: int, *, draws: bool = False) -> None:
        self.size = size
        self.draws = draws

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        x = torch.full((2,), float(index))
        if self.draws:
            x = torch.tensor([random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)
        return x, index


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(1000))

    def __len__(self) -> int:
        return 1000


def run(dataset: Any, step: int = 0, **options: Any) -> list[Batch]:
    """All batches of one rank from `step` on, committing each."""
    state = SimpleNamespace(step=step)
    taken = []
    for batch in batches(dataset, state, **options):
        taken.append(batch)
        state.step += 1
    return taken


@settings(deadline=None)
@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    world_sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    spans=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_each_sample_once_when_the_world_changes_at_any_steps(
    size: int, batch_size: int, world_sizes: list[int], spans: list[int]
) -> None:
    committed: Counter[int] = Counter()
    step, turn = 0, 0
    end = -(-size // batch_size)
    while step < end:
        world_size, stop = world_sizes[turn % len(world_sizes)], min(end, step + spans[turn % len(spans)])
        parts = [
            run(Numbers(size), step, batch_size=batch_size, rank=r, world_size=world_size, steps=stop, seed=5)
            for r in range(world_size)
        ]
        for same_step in zip(*parts, strict=True):
            committed.update(i for batch in same_step for i in batch.indices)
            assert sum(batch.weight for batch in same_step) == pytest.approx(1.0)
            assert all(torch.equal(b.y, torch.tensor(b.indices)) for b in same_step if b.size)
        step, turn = stop, turn + 1
    assert committed == Counter(range(size))


def test_rank_without_samples_gets_a_batch_of_weight_zero() -> None:
    (batch,) = run(Numbers(2), batch_size=2, rank=2, world_size=3)
    assert batch.indices == ()
    assert batch.size == 0
    assert batch.weight == 0.0
    assert batch.x.shape == (1, 2)


def test_draws_in_the_dataset_depend_on_the_position_alone() -> None:
    def drawn(world_size: int, workers: int) -> dict[int, list[float]]:
        found = {}
        for rank in range(world_size):
            for b in run(
                Numbers(12, draws=True), batch_size=6, rank=rank, world_size=world_size, seed=3, num_workers=workers
            ):
                found |= dict(zip(b.indices, b.x.tolist(), strict=True))
        return found

    alone = drawn(1, 0)
    assert len({tuple(values) for values in alone.values()}) == 12
    assert drawn(3, 0) == alone
    assert drawn(1, 2) == alone


class Holding(Numbers):
    """Draws from generators of its own, and of a transform."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rng, self.py, self.transforms = np.random.default_rng(1), random.Random(2), [SimpleNamespace(g=None)]
        self.transforms[0].g, self.old = torch.Generator(), np.random.RandomState(3)

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand((), generator=self.transforms[0].g).item()
        return torch.tensor([self.rng.random(), self.py.random(), drawn, self.old.random()], dtype=torch.float64), index


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_from_generators_of_the_dataset_depend_on_the_position_alone(workers: int) -> None:
    def drawn(data: Any, step: int) -> dict[int, list[float]]:
        taken = run(data, step, batch_size=4, rank=0, world_size=1, num_workers=workers)
        return {i: row for b in taken for i, row in zip(b.indices, b.x.tolist(), strict=True)}

    data = Subset(Holding(16), range(12))
    whole = drawn(data, 0)
    assert all(len({row[column] for row in whole.values()}) == 12 for column in range(4))
    rest = drawn(data, 1)  # as a survivor, whose generators have gone on
    assert rest.items() <= whole.items()
    assert drawn(Subset(Holding(16), range(12)), 1) == rest


def test_draws_in_the_loop_depend_on_seed_step_and_rank() -> None:
    def drawn(step: int, rank: int, seed: int = 1) -> list[tuple[float, float, float]]:
        state, found = SimpleNamespace(step=step), []
        for _ in batches(Numbers(8), state, batch_size=2, rank=rank, world_size=2, seed=seed):
            found.append((random.random(), float(np.random.random()), torch.rand(()).item()))
            state.step += 1
        return found

    whole = drawn(0, 0)
    assert len(set(whole)) == 4
    assert drawn(2, 0) == whole[2:]  # entered again after a re-formation
    assert not set(drawn(0, 1)) & set(whole)
    assert not set(drawn(0, 0, seed=2)) & set(whole)


def test_epochs_have_orders_of_their_own_and_the_last_batch_is_short() -> None:
    taken = run(Numbers(10), batch_size=4, rank=0, world_size=1, epochs=2)
    assert [b.size for b in taken] == [4, 4, 2, 4, 4, 2]
    assert [b.epoch for b in taken] == [0, 0, 0, 1, 1, 1]
    first, second = ([i for b in taken if b.epoch == e for i in b.indices] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_turn_without_commit_is_refused() -> None:
    loop = batches(Numbers(8), SimpleNamespace(step=0), batch_size=2, rank=0, world_size=1)
    next(loop)
    with pytest.raises(RuntimeError, match=r"step 0 ended with state.step = 0: call job.commit"):
        next(loop)


def test_the_weight_is_set_before_the_loop_body_and_for_each_part() -> None:
    weight = GradientWeight()
    state, seen = SimpleNamespace(step=0), []
    for batch in batches(
        Numbers(10), state, batch_size=10, rank=0, world_size=2, micro_batch=2, gradient_weight=weight
    ):
        assert weight() == 0.5
        for part in batch.parts():
            assert part.x.shape[0] == part.y.shape[0] == part.size
            seen.append((part.size, weight(), part.indices))
        state.step += 1
    assert [s[:2] for s in seen] == [(2, 0.2), (2, 0.2), (1, 0.1)]
    assert sum((s[2] for s in seen), ()) == batch.indices


def test_batches_of_other_shapes_are_in_data() -> None:
    class Words(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"id": index, "text": f"word {index}"}

    (batch,) = run(Words(3), batch_size=3, rank=0, world_size=1, shuffle=False)
    assert batch.data["text"] == batch["text"] == ["word 0", "word 1", "word 2"]
    with pytest.raises(TypeError, match=r"batch\.data"):
        _ = batch.x


def test_batches_of_tuples_unpack_as_those_of_a_data_loader_do() -> None:
    (batch, *_) = run(Numbers(8), batch_size=4, rank=0, world_size=1, shuffle=False)
    x, y = batch
    assert x is batch.x
    assert y.tolist() == [0, 1, 2, 3]
    (other, *_) = run([torch.tensor(1.0), torch.tensor(2.0)], batch_size=2, rank=0, world_size=1)
    assert torch.equal(other[:1], other.data[:1])
    with pytest.raises(MisuseTypeError, match=r"linear got a Batch where it needs a tensor: .* in batch\.data"):
        torch.nn.Linear(2, 1)(other)
    with pytest.raises(MisuseTypeError, match=r"a batch of Tensor has no parts to unpack: it is in batch\.data"):
        _first, _second = other


def test_sample_order_in_bulk_equals_one_by_one() -> None:
    for size in (1, 2, 3, 100, 1025, 16384, 16385):
        order = SampleOrder(size, 9, 4)
        assert take_many(order, 0, size) == order.take(0, size)
        assert take_many(order, size // 2, size) == order.take(size // 2, size)
    huge = SampleOrder(10**10, 9, 4)
    assert take_many(huge, 10**10 - 300, 10**10) == huge.take(10**10 - 300, 10**10)
    assert run(Numbers(200), batch_size=200, rank=0, world_size=1, seed=9)[0].indices == SampleOrder(200, 9, 0).take(
        0, 200
    )


def test_loader_processes_end_with_the_iterator_and_hold_no_socket_of_ours() -> None:
    """A re-formation drops the iterator in the middle; the peers must see the end of a dead worker's sockets."""
    here, there = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with here, there:
        there.connect(here.getsockname())
        peer, _ = here.accept()
        with peer:
            state = SimpleNamespace(step=0)
            loop = batches(Numbers(1000), state, batch_size=1, rank=0, world_size=1, num_workers=2)
            next(loop)
            assert len(multiprocessing.active_children()) == 2
            there.close()
            peer.settimeout(60.0)
            assert peer.recv(1) == b""  # although the children were forked while it was open
            with pytest.raises(GenerationEnded) as held:  # its traceback holds the iterator
                loop.throw(GenerationEnded("another rank has died"))  # type: ignore[attr-defined]
            assert multiprocessing.active_children() == []
            assert held.tb is not None


class Over(Link):
    def check(self, step: int) -> None:
        raise GenerationEnded("another rank has died")


def test_a_script_that_catches_every_error_of_its_step_is_told_at_the_next_batch() -> None:
    """It would go through all of the data otherwise, each step failing, while the others wait for it."""
    job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Over())
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None)
    state = State(count=0)
    parts = job.batches(torch.utils.data.TensorDataset(torch.zeros(40, 1)), state, batch_size=4, epochs=1)
    next(parts)
    with contextlib.suppress(BaseException):
        job.commit(state)
    with pytest.raises(GenerationEnded):
        next(parts)


def test_a_script_that_skips_a_step_whose_collective_has_failed_is_not_blamed_for_it() -> None:
    """`except RuntimeError: continue` leaves the step without a commit."""
    for link, error in ((Over(), GenerationEnded), (Link(), GroupAborted)):
        job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=link)
        job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None)
        parts = job.batches(torch.utils.data.TensorDataset(torch.zeros(40, 1)), State(count=0), batch_size=4, epochs=1)
        next(parts)
        job._gradient_weight.failed = error is GroupAborted
        with pytest.raises(error):
            next(parts)


@pytest.mark.parametrize(
    ("dataset", "given", "said"),
    [
        (DataLoader(Numbers(8), batch_size=2), {}, "is a DataLoader.*give its dataset"),
        (Endless(), {}, r"Endless, without len\(dataset\).*job\.streams"),
        (Numbers(8), {"batch_size": 4.0}, r"batch_size = 4\.0: a whole number"),
        (Numbers(8), {"micro_batch": 2.0}, r"micro_batch = 2\.0"),
        (Numbers(8), {"steps": 7.5}, r"steps = 7\.5"),
        (Numbers(8), {"epochs": -1}, "epochs = -1: .*leave it out"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(dataset: Any, given: dict[str, Any], said: str) -> None:
    """-1 epochs, as for Lightning, were none."""
    with pytest.raises((TypeError, ValueError), match=said):
        run(dataset, **{"batch_size": 4, "rank": 0, "world_size": 1, **given})


def test_numpys_numbers_are_whole_numbers() -> None:
    want = run(Numbers(9), batch_size=4, rank=0, world_size=2, steps=3)
    found = run(Numbers(9), batch_size=np.int64(4), rank=0, world_size=2, steps=np.int64(3), micro_batch=np.int32(1))
    assert [batch.indices for batch in found] == [batch.indices for batch in want]
