"""Streams: each sample once and in order, through changes of the world and restarts from the kept state."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.worker.data import streams as module
from elastic.worker.data.batches import Batch
from elastic.worker.data.streams import streams

pytest.importorskip("torchdata")


class Counting:
    """Stream n gives n·1000, n·1000 + 1, …; counts what was read from it."""

    def __init__(self, number: int, length: int, stateful: bool) -> None:
        self.number, self.length, self.at, self.read = number, length, 0, 0
        if stateful:
            self.state_dict = lambda: {"at": self.at}
            self.load_state_dict = self._load

    def _load(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at += 1
            self.read += 1
            yield self.number * 1000 + self.at - 1
        self.at = 0


class Job:
    """A job whose ranks run one after the other; what they exchange meets in `kept`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, length: int = 1000, stateful: bool = True) -> None:
        self.step, self.kept = 0, None
        self.taken: dict[int, list[int]] = {}
        self.read = 0
        self._length, self._stateful = length, stateful
        self._exchange: dict[int, dict[str, Any]] = {}
        monkeypatch.setattr(
            module, "_exchanged", lambda mine, rank, world_size: {str(n): s.state() for n, s in mine.items()}
        )

    def run(self, world_size: int, until: int, **options: Any) -> None:
        """All ranks of `world` from the present step on; then the state as a checkpoint would hold it."""
        kept: dict[str, Any] | None = None
        for rank in range(world_size):
            state = SimpleNamespace(step=self.step, streams=json.loads(json.dumps(self.kept)))
            made: list[Counting] = []

            def make(number: int, count: int, made: list[Counting] = made) -> Counting:
                made.append(Counting(number, self._length, self._stateful))
                return made[-1]

            options = {"count": 4, "batch_size": 8, "keep_every": 3} | options
            for batch in streams(make, state, steps=until, rank=rank, world_size=world_size, **options):
                self._take(batch)
                state.step += 1
            self.read += sum(stream.read for stream in made)
            if kept is None or state.streams["step"] == kept["step"]:
                kept = state.streams | {"states": (kept or {"states": {}})["states"] | state.streams["states"]}
        self.step, self.kept = until, kept

    def _take(self, batch: Batch) -> None:
        for value in batch.data.tolist():
            self.taken.setdefault(value // 1000, []).append(value % 1000)


@pytest.mark.parametrize("stateful", [True, False])
def test_each_sample_once_and_in_order_over_changing_worlds(monkeypatch: pytest.MonkeyPatch, stateful: bool) -> None:
    job = Job(monkeypatch, stateful=stateful)
    for world_size, until in ((2, 4), (3, 5), (1, 11), (4, 13), (2, 20)):
        job.run(world_size, until)
    assert job.taken == {n: list(range(40)) for n in range(4)}


def test_a_stateful_stream_is_not_read_again_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.run(1, 100)
    before = job.read
    job.run(2, 102)
    assert job.read - before <= 4 * 2 * (2 + 1)  # the steps since the last exchange, and the new ones


def test_a_stream_that_ends_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, length=6)
    job.run(2, 4)
    job.run(1, 7)
    assert job.taken[3] == [0, 1, 2, 3, 4, 5] * 2 + [0, 1]


def test_numbers_that_do_not_go_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    with pytest.raises(ValueError, match="batch_size = 9"):
        job.run(1, 1, batch_size=9)
    with pytest.raises(ValueError, match=r"count = 4 streams: not enough for a world of 5"):
        job.run(5, 1)
    with pytest.raises(ValueError, match="fewer samples"):
        Job(monkeypatch, length=1).run(1, 1)


@pytest.mark.parametrize(("name", "value"), [("count", 2), ("batch_size", 16)])
def test_positions_of_other_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    """A restarted job with another count or batch_size: its streams would go on at the wrong samples."""
    job = Job(monkeypatch)
    job.run(2, 5)
    before = {"count": 4, "batch_size": 8}[name]
    with pytest.raises(ValueError, match=rf"{name} = {value}: .* {name} = {before}.*use that again.*new job"):
        job.run(2, 7, **{name: value})


def test_indices_number_the_samples_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in range(2):
        state = SimpleNamespace(step=3, streams=None)
        loop = streams(lambda n, _: range(100), state, count=2, batch_size=4, steps=9, rank=rank, world_size=2)
        found += next(loop).indices
    assert found == [12, 13, 14, 15]


def taken_by(make: Any, *, num_workers: int, steps: int) -> list[int]:
    state, found = SimpleNamespace(step=0, streams=None), []
    loop = streams(
        make, state, count=1, batch_size=2, steps=steps, rank=0, world_size=1, num_workers=num_workers, collate=list
    )
    for batch in loop:
        found += batch.data
        state.step += 1
    return found


def test_more_processes_than_one_take_no_sample_twice() -> None:
    """Each would read the whole stream."""
    assert taken_by(lambda *_: range(10), num_workers=2, steps=5) == list(range(10))


def inodes() -> set[int]:
    """Of the open files of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add(os.fstat(int(name)).st_ino)
    return found


def test_a_loader_process_does_not_hold_the_sockets_of_the_worker() -> None:
    """Peers would not notice the worker's death by its sockets."""
    with socket.create_server(("127.0.0.1", 0)) as ours:
        inode = os.fstat(ours.fileno()).st_ino
        assert inode in inodes()
        assert taken_by(lambda *_: (inode in inodes() for _ in range(2)), num_workers=1, steps=1) == [False] * 2


def test_a_stream_that_can_be_read_once_only_is_named() -> None:
    with pytest.raises(ValueError, match=r"is a generator or iterator.*read again from its beginning"):
        taken_by(lambda *_: (number for number in range(10)), num_workers=0, steps=6)


class HubDataset:
    """As `datasets.IterableDataset`: what was loaded stays where each pass of that epoch begins."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0
        self._starting: dict[str, int] | None = None
        self._at = {"at": 0, "epoch": 0}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        begins = self._starting is not None and self._starting["epoch"] == self.epoch
        self._at = {"at": self._starting["at"] if begins and self._starting else 0, "epoch": self.epoch}
        while self._at["at"] < self.length:
            self._at["at"] += 1
            yield self._at["at"] - 1

    def state_dict(self) -> dict[str, int]:
        return dict(self._at)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._starting = dict(state)


@pytest.mark.parametrize("restored_at", [4, 10, 16])
def test_each_pass_of_a_stream_of_datasets_is_whole_after_it_was_restored(restored_at: int) -> None:
    """10 samples are 5 steps."""
    kept, found = None, []
    for first, until in ((0, restored_at), (restored_at, 30)):
        state = SimpleNamespace(step=first, streams=json.loads(json.dumps(kept)))
        options: dict[str, Any] = {"count": 1, "batch_size": 2, "rank": 0, "world_size": 1, "keep_every": 2}
        for batch in streams(lambda n, count: HubDataset(10), state, steps=until, **options):
            found += batch.data.tolist()
            state.step += 1
        kept = state.streams
    assert found == [*range(10)] * 6


def test_an_epoch_that_the_script_has_set_stays_for_the_first_pass_after_it_was_restored() -> None:
    """A shuffled stream has another order in another epoch."""
    made: list[HubDataset] = []

    def make(n: int, count: int) -> HubDataset:
        made.append(HubDataset(10))
        made[-1].set_epoch(3)
        return made[-1]

    options: dict[str, Any] = {"count": 1, "batch_size": 2, "rank": 0, "world_size": 1, "keep_every": 2}
    state = SimpleNamespace(step=0, streams=None)
    for _ in streams(make, state, steps=2, **options):
        state.step += 1
    for _ in streams(make, SimpleNamespace(step=2, streams=state.streams), steps=3, **options):
        break
    assert [dataset.epoch for dataset in made] == [3, 3]
