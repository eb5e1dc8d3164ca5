"""`job.log`: rows per committed step, and what a rank keeps of them for the next rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from elastic.contract.worker.messages import MAX_MESSAGE_BYTES, Logged, LoggedRow, encode
from elastic.worker.job.logged import KEPT_ROWS, MOST_NAMES, JobLog, chunks


class Sent:
    def __init__(self) -> None:
        self.all: list[tuple[int, list[LoggedRow], bool]] = []
        self.log = JobLog(lambda begun, rows, repeated: self._take(begun, rows, repeated), wall=lambda: 9.0)

    def _take(self, begun: int, rows: Sequence[LoggedRow], repeated: bool) -> None:
        self.all.append((begun, list(rows), repeated))

    def steps(self, *, repeated: bool = False) -> list[int]:
        return [row.step for _, rows, again in self.all if again is repeated for row in rows]

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.log.add({"loss": step / 10})
            self.log.committed(step)


def test_rank_0_passes_each_committed_step_on_with_all_its_values() -> None:
    sent = Sent()
    sent.log.enter(0, first=True)
    sent.log.add({"loss": 1.0, "lr": 2})
    sent.log.add({"loss": torch.tensor([0.5])})
    sent.log.committed(1)
    sent.log.committed(2)
    assert sent.all == [(0, [LoggedRow(step=1, wall_s=9.0, values={"loss": 0.5, "lr": 2.0})], False)]


def test_values_of_a_step_that_was_not_committed_are_dropped() -> None:
    sent = Sent()
    sent.log.enter(0, first=True)
    sent.log.add({"loss": 7.0})
    sent.log.enter(0, first=True)
    sent.train(1, 1)
    assert [row.values for _, rows, _ in sent.all for row in rows] == [{"loss": 0.1}]


def test_a_survivor_that_becomes_rank_0_repeats_what_it_has_kept_and_no_step_that_was_lost() -> None:
    sent = Sent()
    sent.log.enter(0, first=False)
    sent.train(1, 6)
    assert sent.all == []
    sent.log.enter(4, first=True)
    assert sent.steps(repeated=True) == [1, 2, 3, 4]
    sent.train(5, 6)
    assert sent.steps() == [5, 6]
    assert {begun for begun, _, _ in sent.all} == {4}


def test_a_replaced_rank_0_repeats_the_rows_that_another_rank_has_kept() -> None:
    survivor, sent = Sent(), Sent()
    survivor.log.enter(0, first=True)  # it was rank 0 in a larger world
    survivor.train(1, 6)
    before = len(survivor.all)
    sent.log.receive(survivor.log.kept())
    sent.log.enter(5, first=True)
    assert sent.steps(repeated=True) == [1, 2, 3, 4, 5]
    assert len(survivor.all) == before, "between two generations no row is passed on"
    sent.train(6, 7)
    survivor.train(7, 9)
    sent.log.receive(survivor.log.kept())
    sent.log.enter(8, first=True)
    assert sent.steps(repeated=True)[5:] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row.values["loss"] for row in sent.all[-1][1]][5] == 0.6, "its own row stays"


def test_kept_rows_are_bounded() -> None:
    sent = Sent()
    sent.log.enter(0, first=False)
    sent.train(1, KEPT_ROWS + 50)
    sent.log.enter(KEPT_ROWS + 50, first=True)
    assert sent.steps(repeated=True) == list(range(51, KEPT_ROWS + 51))


def test_values_after_the_last_commit_belong_to_it() -> None:
    sent = Sent()
    sent.log.enter(0, first=True)
    sent.train(1, 1)
    sent.log.add({"test accuracy": 0.9})
    sent.log.finish(1)
    assert sent.all[-1][1] == [LoggedRow(step=1, wall_s=9.0, values={"test accuracy": 0.9})]


class Copy:
    """Stands in for a value that is still on its way from a GPU."""

    def __init__(self) -> None:
        self.there = False

    def ready(self) -> bool:
        return self.there

    def get(self) -> float:
        self.there = True
        return 0.25


def test_rows_wait_for_values_on_their_way_from_a_gpu_and_keep_their_order() -> None:
    sent, copy = Sent(), Copy()
    sent.log.enter(0, first=True)
    sent.log._values["loss"] = copy  # type: ignore[assignment]
    sent.log.committed(1)
    sent.train(2, 3)
    assert sent.all == []
    copy.there = True
    sent.log.committed(4)
    assert sent.steps() == [1, 2, 3]


def test_what_is_no_number_or_too_much_is_refused_by_name() -> None:
    log = Sent().log
    for values, error, said in (
        ({"loss": "0.1"}, TypeError, "loss is str"),
        ({"done": True}, TypeError, "done is bool"),
        ({"grad": torch.ones(2)}, TypeError, "grad has 2 elements"),
        ({"a\n": 1.0}, ValueError, "printable"),
        ({f"n{i}": 1.0 for i in range(MOST_NAMES + 1)}, ValueError, "more than 64 names"),
    ):
        with pytest.raises(error, match=said):
            log.add(values)  # type: ignore[arg-type]


def test_every_chunk_of_rows_fits_into_a_message() -> None:
    values = {f"{i:03}{'ä' * 97}": 1.23456789012345e-300 for i in range(MOST_NAMES)}
    rows = [LoggedRow(step=10**9 + i, wall_s=1e9 + 0.1234567, values=values) for i in range(40)]
    found = chunks(rows)
    assert [row for chunk in found for row in chunk] == rows
    for chunk in found:
        assert len(encode(Logged(generation=1, begun=0, rows=tuple(chunk)))) < MAX_MESSAGE_BYTES


def test_numbers_of_numpy_and_a_loss_with_its_graph_are_logged_without_a_warning() -> None:
    sent: list[LoggedRow] = []
    log = JobLog(lambda begun, rows, repeated: sent.extend(rows))
    log.enter(0, first=True)
    torch.set_warn_always(True)
    try:
        log.add({"mean": np.float32(0.5), "right": np.int64(3), "loss": torch.ones(1, requires_grad=True).sum()})
    finally:
        torch.set_warn_always(False)
    log.committed(1)
    assert sent[0].values == {"mean": 0.5, "right": 3.0, "loss": 1.0}
    with pytest.raises(TypeError, match="right is bool"):
        log.add({"right": np.bool_(True)})
