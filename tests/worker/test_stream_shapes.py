"""Streams as the libraries have them, on real ranks: each sample once, at a fixed world size and at a changing one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.forming import formed
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture

from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.state import State

pytest.importorskip("torchdata")
pytestmark = pytest.mark.slow

COUNT, BATCH, EACH = 4, 8, 30
"""Streams; samples of a step; samples of a stream."""


class HubDataset:
    """Of the shape of `datasets.IterableDataset`: `shard`, and a state of nested dicts."""

    def __init__(self, shards: range) -> None:
        self.shards, self._at = shards, {"shard_idx": 0, "examples_iterable": {"shard_example_idx": 0}}

    def shard(self, num_shards: int, index: int) -> HubDataset:
        return HubDataset(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[Any]:
        while (number := self._at["shard_idx"]) < len(self.shards):
            inner: Any = self._at["examples_iterable"]
            while inner["shard_example_idx"] < EACH // 2:
                inner["shard_example_idx"] += 1
                yield torch.tensor(self.shards[number] * 1000 + inner["shard_example_idx"] - 1)
            self._at = {"shard_idx": number + 1, "examples_iterable": {"shard_example_idx": 0}}
        self._at = {"shard_idx": 0, "examples_iterable": {"shard_example_idx": 0}}

    def state_dict(self) -> Any:
        return json.loads(json.dumps(self._at))

    def load_state_dict(self, state: Any) -> None:
        self._at = json.loads(json.dumps(state))


class WebDataset:
    """Of the shape of webdataset's: a pipeline over urls without a state, whose default splitter wants one rank."""

    def __init__(self, urls: list[int], nodesplitter: Any = None) -> None:
        assert nodesplitter is not None, "you need to add an explicit nodesplitter for multi-node training"
        self._urls = nodesplitter(urls)

    def __iter__(self) -> Iterator[Any]:
        for url in self._urls:
            for number in range(EACH // 2):
                yield torch.tensor(url * 1000 + number)


def make(shape: str, stream: int, count: int) -> Any:
    if shape == "datasets":
        return HubDataset(range(2 * COUNT)).shard(num_shards=count, index=stream)
    return WebDataset(list(range(2 * COUNT))[stream::count], nodesplitter=lambda urls: urls)


def reads(rank: int, world_size: int, port: int, shape: str, kept: Any, step: int, until: int) -> Any:
    """(samples of this rank by step, the state's streams)."""
    group = formed(rank, world_size, port)
    job = Job(name="j", device=torch.device("cpu"), local_rank=rank, link=Link())
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None)
    state = State(model=torch.nn.Linear(1, 1), streams=kept)
    state._step = step
    state.begin()
    found = []
    options: dict[str, Any] = {"count": COUNT, "batch_size": BATCH, "keep_every": 3}
    for batch in job.streams(lambda n, count: make(shape, n, count), state, steps=until, **options):
        found.append([state.step, batch.data.tolist()])
        job.commit(state)
    group.close()
    return [found, state.streams]


@pytest.mark.parametrize("shape", ["datasets", "webdataset"])
@pytest.mark.parametrize("worlds", [(2, 2), (3, 2)])
def test_each_sample_of_a_librarys_stream_is_taken_once(shape: str, worlds: tuple[int, int]) -> None:
    """After 7 steps all processes are new: what is in the State is from step 6."""
    seen: dict[int, list[int]] = {}
    kept, step = None, 0
    for world_size, until in zip(worlds, (7, 15), strict=True):
        results = run_ranks(reads, world_size=world_size, shape=shape, kept=kept, step=step, until=until)
        for found, _ in results:
            for number, samples in found:
                seen.setdefault(number, []).extend(samples)
        assert len({json.dumps(streams, sort_keys=True) for _, streams in results}) == 1, "the replicas are alike"
        kept, step = results[0][1], until
    assert sorted(seen) == list(range(15))
    taken = [sample for samples in seen.values() for sample in samples]
    assert sorted(taken) == sorted(url * 1000 + number for url in range(2 * COUNT) for number in range(EACH // 2))


def own_loader(rank: int, world_size: int, port: int) -> Any:
    """A StatefulDataLoader per rank, whose states are gathered into the State; after 4 steps all of it is new."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    group = formed(rank, world_size, port)
    kept, found = None, []
    for generation, until in ((1, 4), (2, 10)):
        job = Job(name="j", device=torch.device("cpu"), local_rank=rank, link=Link())
        job.enter(rank=rank, world_size=world_size, generation=generation, checkpoint_scheduler=None)
        state = State(model=torch.nn.Linear(1, 1), loaders=kept)
        state._step = 0 if kept is None else 4
        state.begin()
        mine = list(range(rank, 40, world_size))
        generator = torch.Generator().manual_seed(rank)
        loader: Any = StatefulDataLoader(mine, batch_size=2, shuffle=True, generator=generator)
        if state.loaders:
            loader.load_state_dict(state.loaders[job.rank])
        for batch in loader:
            found += batch.tolist()
            state.loaders = job.gather(loader.state_dict())
            job.commit(state)
            if state.step == until:
                break
        kept = state.loaders
    group.close()
    return [found, repr(kept)]


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_the_states_of_the_ranks_own_loaders_are_kept_at_a_fixed_world_size() -> None:
    first, second = run_ranks(own_loader, world_size=2)
    assert first[1] == second[1], "the replicas are alike"
    assert sorted(first[0]) == list(range(0, 40, 2))
    assert sorted(second[0]) == list(range(1, 40, 2))
