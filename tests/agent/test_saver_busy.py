"""The saver when its writer is behind: nothing is waited for that was never begun, no buffer freed that is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic.checkpoint.saving import orders
from elastic.checkpoint.saving.client import Busy
from elastic.checkpoint.saving.saver import MAX_KEPT, Failed, Outcome, Saver
from elastic.contract.job.spec import Checkpoint
from elastic.contract.records.reasons import Code, codes
from elastic.contract.worker import messages


class Writer:
    """In place of the writer process; `refuses` names the orders it has no room for."""

    def __init__(self) -> None:
        self.refuses: set[type] = set()
        self.taken: list[object] = []
        self.moved = 0

    def submit(self, order: object, arena: object = None) -> int:
        if type(order) in self.refuses:
            raise Busy("too many")
        self.taken.append(order)
        return len(self.taken)

    def results(self) -> list[orders.Result]:
        return []

    def under_way(self) -> list[object]:
        return self.taken

    def activity(self) -> tuple[object, ...]:
        return (self.moved,)

    def close(self) -> None: ...


class Bench:
    def __init__(self) -> None:
        self.told: list[tuple[messages.Message, int]] = []
        self.failed: list[int] = []
        self.saver = Saver(
            Checkpoint(dir="/nowhere"),
            "job",
            lambda worker_id, message, fds: self.told.append((message, len(fds))),
            self._report,
        )
        self.saver.writer.close()
        self.writer = Writer()
        self.saver.writer = self.writer  # type: ignore[assignment]
        self.saver.need_arena(0, 1, 4096)
        self.told.clear()

    def _report(self, outcome: Outcome) -> None:
        if isinstance(outcome, Failed):
            self.failed.append(outcome.row.began[0])

    def filled(self, step: int = 7, *, lead: bool = True) -> None:
        message = messages.Filled(step=step, generation=2, buffer=1, nbytes=9, shard=0, shards=1, stall_s=0.0)
        self.saver.filled(0, message, lead=lead, world_size=1)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for held in made.saver._slots.values():
        for arena in held.arenas:
            arena.close()


def test_a_commit_that_found_no_room_is_tried_with_the_next_shard(bench: Bench) -> None:
    bench.writer.refuses = {orders.Commit}
    bench.filled()
    assert bench.failed == [7]
    assert not bench.told, "its write is under way: the buffer is not free"
    assert not bench.saver._committing
    bench.writer.refuses = set()
    bench.filled()
    assert bench.saver._committing == {(2, 7): True}


def test_a_write_that_found_no_room_frees_the_buffer(bench: Bench) -> None:
    bench.writer.refuses = {orders.Write}
    bench.filled()
    assert [message for message, _ in bench.told] == [
        messages.SaveResult(step=7, buffer=1, error="too many", seconds=0.0)
    ]
    assert not bench.saver._committing
    assert not bench.saver._writes


def offered(bench: Bench, nbytes: int) -> list[bool]:
    """Which buffers a worker that replaces the one before is told to be busy."""
    bench.told.clear()
    bench.saver.need_arena(0, 2, nbytes)
    return [message.busy for message, _ in bench.told if isinstance(message, messages.Arena)]


def written(bench: Bench) -> None:
    ticket = next(i for i, order in enumerate(bench.writer.taken, 1) if isinstance(order, orders.Write))
    bench.told.clear()
    bench.saver._written(orders.Result(id=ticket, kind="Write", step=7, generation=2))


def test_a_replacement_is_told_which_buffers_are_still_written(bench: Bench) -> None:
    bench.filled()
    assert offered(bench, 4096) == [False, True]
    written(bench)
    assert bench.told == [(messages.SaveResult(step=7, buffer=1), 0)], "which is said to the replacement"
    assert offered(bench, 4096) == [False, False]


def test_saver_write_from_abandoned_buffers_frees_no_new_buffer(bench: Bench) -> None:
    bench.filled()
    assert offered(bench, 1 << 20) == [False, False]
    assert bench.saver._writes, "a recovery still waits for it"
    written(bench)
    assert not bench.told


def test_larger_buffers_do_not_wait_for_a_writer_that_is_behind(bench: Bench) -> None:
    bench.writer.refuses = {orders.Forget}
    assert offered(bench, 1 << 20) == [False, False]
    bench.writer.refuses = set()
    bench.saver.readable()
    bench.saver.readable()
    assert bench.writer.taken == [orders.Forget()], "told later, and once, to unmap the old ones"


@pytest.mark.parametrize(("lead", "stopped", "failed"), [(True, False, [7]), (True, True, []), (False, False, [])])
def test_a_checkpoint_that_is_not_durable_when_the_agent_leaves_has_failed(
    bench: Bench, lead: bool, stopped: bool, failed: list[int]
) -> None:
    """The agent that was to commit it says so, unless the job was stopped, and no more of it was to come."""
    bench.saver.cut = lambda generation: stopped
    bench.filled(lead=lead)
    bench.saver.close()
    assert bench.failed == failed
    assert codes(bench.saver.last.error or "") == ({Code.AT_STEP, Code.NOT_DURABLE} if failed else set())


def test_checkpoints_that_are_not_durable_when_the_agent_leaves_have_failed_once(bench: Bench) -> None:
    bench.filled(7)
    bench.filled(8)
    for _ in range(2):
        bench.saver.close()
        assert bench.saver.last.failing.count == 2


def test_a_checkpoint_that_is_durable_has_not_failed_when_the_agent_leaves(bench: Bench) -> None:
    bench.filled()
    written(bench)
    bench.saver._committed(orders.Result(id=2, kind="Commit", step=7, generation=2))
    bench.saver.close()
    assert not bench.failed


def test_more_arenas_than_a_message_takes_are_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = bench.saver._slots[0].arenas[0]
    for count in (MAX_KEPT, MAX_KEPT + 1):
        monkeypatch.setattr(bench.saver, "_complete_snapshot", lambda count=count: [arena] * count)
        bench.saver.ask_kept(1, 3)
    assert [fds for _, fds in bench.told] == [MAX_KEPT, 0]


def test_a_save_gets_on_as_long_as_bytes_move_and_a_writer_that_hangs_does_not(bench: Bench) -> None:
    patience_s = bench.saver.patience_s
    assert not bench.saver.gets_on(0.0), "nothing is under way"
    bench.filled()
    for now_s in (patience_s, 1.9 * patience_s, 2.8 * patience_s):
        bench.writer.moved += 1
        assert bench.saver.gets_on(now_s)
    assert bench.saver.gets_on(3.7 * patience_s)
    assert not bench.saver.gets_on(3.8 * patience_s)
    bench.writer.moved += 1
    assert bench.saver.gets_on(4.0 * patience_s), "the disk is back"


def test_a_commit_that_a_newer_checkpoint_has_overtaken_is_not_waited_for(bench: Bench) -> None:
    """Its last shard may be that of a rank that was killed: the end of the job waited a minute for it."""
    bench.filled()
    bench.writer.taken = [order for order in bench.writer.taken if isinstance(order, orders.Commit)]
    assert bench.saver.busy()
    bench.saver._committed(orders.Result(id=9, kind="Commit", step=8, generation=2))
    assert not bench.saver.busy()
