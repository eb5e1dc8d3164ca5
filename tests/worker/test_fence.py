"""The verdict of a broken fence: which ranks go on, by what each living one has counted."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.worker.comm import fence as fence_module
from elastic.worker.comm.errors import GroupAborted
from elastic.worker.comm.fence import Fence


class Board:
    """The generation's store."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def add(self, key: str, value: int) -> int:
        with self.lock:
            self.counts[key] += value
            return self.counts[key]


class Group:
    def __init__(self, board: Board | None, world_size: int) -> None:
        self.board, self.world_size, self.given_back = board, world_size, 0

    def store_after_abort(self, limit: timedelta) -> Any:
        if self.board is None:
            raise dist.DistNetworkError("refused")
        return self.board

    def store_done(self) -> None:
        self.given_back += 1


class Collective:
    """In place of torch.distributed in the fence alone."""

    DistNetworkError, DistStoreError = dist.DistNetworkError, dist.DistStoreError
    here = threading.local()
    """`value`: what the collective of this thread, a rank, ends with."""

    @classmethod
    def all_reduce(cls, tensor: torch.Tensor, *, async_op: bool) -> None:
        if cls.here.value is None:
            raise GroupAborted("it does not end")
        tensor.fill_(cls.here.value)


class Rank:
    def __init__(self, board: Board | None, world_size: int = 4) -> None:
        self.group = Group(board, world_size)
        self.fence = Fence(self.group)

    def come(self, step: int, *, value: float | None) -> bool:
        """Whether it goes on from the fence of `step`, whose collective ends with `value`; None: it was given up."""
        Collective.here.value = value
        try:
            self.fence.wait(step)
        except GroupAborted:
            return False
        return True


def interrupted(*ranks: Rank, step: int) -> list[bool]:
    """Which of the ranks go on that are interrupted in the fence of `step`, all at once."""
    went = dict.fromkeys(ranks, False)

    def come(rank: Rank) -> None:
        went[rank] = rank.come(step, value=-1.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [went[rank] for rank in ranks]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence_module, "dist", Collective)
    monkeypatch.setattr(fence_module, "LIMIT_S", 0.3)
    monkeypatch.setattr(fence_module, "control_device", lambda: "cpu")


def ranks(count: int, board: Board | None = None, at: int = 6) -> list[Rank]:
    """Of a world of four, each of which was let through to step `at`."""
    board = board or Board()
    made = [Rank(board) for _ in range(count)]
    assert all(rank.come(at, value=4.0) for rank in made)
    return made


def test_one_that_was_let_through_takes_the_others_along() -> None:
    first, second, third = ranks(3)
    assert first.come(7, value=4.0)
    first.fence.broken()
    assert interrupted(second, third, step=7) == [True, True]


def test_one_whose_collective_was_given_up_goes_along_as_well() -> None:
    first, second = ranks(2)
    assert first.come(7, value=4.0)
    first.fence.broken()
    assert second.come(7, value=None)


def test_all_that_live_had_their_gradients() -> None:
    assert interrupted(*ranks(3), step=7) == [True, True, True]


def test_one_that_lives_had_them_not() -> None:
    first, second, third = ranks(3)
    third.fence.broken()
    assert interrupted(first, second, step=7) == [False, False]
    assert not third.come(7, value=-1.0), "it may not come later either"


def test_of_two_that_died_nobody_knows_whether_they_had_them() -> None:
    assert interrupted(*ranks(2), step=7) == [False, False]


def test_one_that_was_let_through_and_is_at_the_next_fence_counts_for_both() -> None:
    ahead, behind, third = ranks(3)
    assert ahead.come(7, value=4.0)
    assert third.come(7, value=4.0)
    third.fence.broken()
    assert interrupted(ahead, step=8) == [False]
    assert interrupted(behind, step=7) == [True]


def test_without_the_store_each_stays_where_it_is() -> None:
    (rank,) = ranks(1)
    rank.group.board = None
    assert interrupted(rank, step=7) == [False]
    assert rank.group.given_back == 1


def test_a_rank_that_was_at_no_fence_yet_is_counted_as_well() -> None:
    board = Board()
    Rank(board).fence.broken()
    assert interrupted(*ranks(2, board), step=7) == [False, False]
    assert board.counts["fence/all"] == 3
