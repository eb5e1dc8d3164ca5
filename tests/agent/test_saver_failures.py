"""Failed checkpoints and copies, as status and incidents tell of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import msgspec
import pytest
import torch
from support.ckpt import table_of
from support.jobs import changed, generation, member, place, policy, view

from elastic.agent.reports.incidents import apart, has_failed
from elastic.checkpoint.format.errors import ArenaError
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.saving import orders
from elastic.checkpoint.saving.saver import ESCALATE_AFTER, Failed, Outcome, Saver
from elastic.contract.job.spec import Checkpoint
from elastic.contract.worker import messages
from elastic.recovery.machine.model import Agent, FormedState


class Writer:
    """In place of the writer process: answers what the test says."""

    def __init__(self) -> None:
        self.orders: list[orders.AnyOrder] = []
        self.answers: list[orders.Result] = []

    def submit(self, order: orders.AnyOrder, arena: object = None) -> int:
        self.orders.append(order)
        return len(self.orders)

    def results(self) -> list[orders.Result]:
        found, self.answers = self.answers, []
        return found


class Bench:
    def __init__(self) -> None:
        self.failed: list[str] = []
        self.broken = 0
        self.apart = ""
        self.saver = Saver(
            Checkpoint(dir="/nowhere", remote="memory://there"),
            "job",
            lambda worker_id, message, fds: None,
            self._report,
            cut=lambda generation: generation <= self.broken,
            apart=lambda: self.apart,
        )
        self.saver.writer.close()
        self.writer = Writer()
        self.saver.writer = self.writer  # type: ignore[assignment]
        self.saver.need_arena(0, 1, 4096)

    def _report(self, outcome: Outcome) -> None:
        if isinstance(outcome, Failed):
            self.failed.append(f"{outcome.row.began[0]}: {outcome.error}")

    def save(self, step: int, error: str = "", *, lead: bool = True, copies: bool = True) -> None:
        """One shard, and its commit if this node leads: both answered alike."""
        first = len(self.writer.orders)
        filled = messages.Filled(step=step, generation=2, buffer=0, nbytes=9, shard=0, shards=1, stall_s=0.0)
        self.saver.filled(0, filled, lead=lead, world_size=1, copies=copies)
        self._answer(first, step, error)

    def copied(self, step: int, error: str = "") -> None:
        assert isinstance(self.writer.orders[-1], orders.CopyUp)
        self._answer(len(self.writer.orders) - 1, step, error)

    def _answer(self, first: int, step: int, error: str) -> None:
        for number, order in enumerate(self.writer.orders[first:], first + 1):
            kind = type(order).__name__
            self.writer.answers.append(orders.Result(id=number, kind=kind, step=step, generation=2, error=error))
        self.saver.readable()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for held in made.saver._slots.values():
        for arena in held.arenas:
            arena.close()


@pytest.mark.parametrize("shared", [True, False])
def test_the_writer_is_told_whether_the_folder_is_of_this_node_alone(shared: bool, bench: Bench) -> None:
    bench.saver.rules = msgspec.structs.replace(bench.saver.rules, shared=shared)
    bench.save(7)
    order = bench.writer.orders[0]
    assert isinstance(order, orders.Write)
    assert order.alone is not shared


@pytest.mark.parametrize("copies", [True, False])
def test_one_node_copies_where_each_commits_its_own(copies: bool, bench: Bench) -> None:
    bench.save(7, copies=copies)
    assert any(isinstance(order, orders.CopyUp) for order in bench.writer.orders) is copies


@pytest.mark.parametrize(("shared", "copies"), [(False, True), (False, False), (True, True)])
def test_a_save_that_fails_on_the_node_that_copies_tells_that_no_other_node_does(
    shared: bool, copies: bool, bench: Bench
) -> None:
    """The other nodes may have saved theirs: the checkpoint is there, and the newest remote copy is an older one."""
    bench.saver.rules = msgspec.structs.replace(bench.saver.rules, shared=shared)
    bench.save(7, "no space", copies=copies)
    alone = copies and not shared
    says = (
        "; no node copies this checkpoint to memory://there: with checkpoint.shared = false the leader's node copies "
        "its own"
    )
    assert bench.failed == [f"7: no space{says if alone else ''}"]
    assert str(bench.saver.last.error) == f"step 7: no space{says if alone else ''}"


def test_checkpoint_with_failed_shard_and_failed_commit_counts_as_one_failure(bench: Bench) -> None:
    bench.save(7, "no space")
    assert bench.failed == ["7: no space"]
    assert str(bench.saver.last.error) == "step 7: no space"
    bench.save(8)
    assert bench.saver.last.error is None


def test_first_step_is_a_particular_checkpoint_and_lack_of_memory_is_of_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.save(0, "no space")
    assert bench.saver.last.failing.count == 1
    monkeypatch.setattr(os, "memfd_create", lambda *_: os.open("/nowhere", os.O_RDONLY))
    for _ in range(2):
        bench.saver.need_arena(0, 1, 1 << 20)
    assert bench.saver.last.failing.count == 3


def test_checkpoint_failures_in_a_row_are_escalated_until_one_succeeds(bench: Bench) -> None:
    for step in range(1, ESCALATE_AFTER):
        bench.save(step, "no space")
    assert not any("in a row" in said for said in bench.failed)
    bench.save(9, "no space")
    assert bench.failed[-1] == f"1: no space ({ESCALATE_AFTER} in a row)", "one incident, that of the first"
    assert str(bench.saver.last.error) == f"step 9: no space ({ESCALATE_AFTER} in a row)"
    bench.save(10)
    bench.save(11, "no space")
    assert bench.failed[-1] == "11: no space"
    bench.save(12, "step 12: no inodes")
    bench.save(13, "step 13: no inodes")
    assert bench.failed[-1] == f"12: step 13: no inodes ({ESCALATE_AFTER} in a row)"


def test_copies_that_fail_again_and_again_are_escalated_though_the_checkpoints_are_good(bench: Bench) -> None:
    for step in range(1, ESCALATE_AFTER + 1):
        bench.save(step)
        bench.copied(step, "unreachable")
    assert bench.saver.last.step == ESCALATE_AFTER
    assert bench.failed[-1].endswith(f"copy to memory://there: unreachable ({ESCALATE_AFTER} in a row)")
    bench.save(8)
    assert bench.saver.last.error is not None, "the newest copy is still an old one"
    bench.copied(8)
    assert bench.saver.last.error is None


def test_where_another_node_commits_a_shard_that_was_written_ends_the_row(bench: Bench) -> None:
    bench.save(7, "no space", lead=False)
    assert str(bench.saver.last.error) == "step 7: no space"
    bench.save(8, lead=False)
    assert bench.saver.last.error is None


@pytest.mark.parametrize(("broken", "missing", "told"), [(2, (1,), False), (1, (1,), True), (2, (), True)])
def test_a_checkpoint_that_lost_its_ranks_is_no_incident_beside_their_failure(
    bench: Bench, broken: int, missing: tuple[int, ...], told: bool
) -> None:
    bench.broken = broken
    error = "step 7: 1 of 2 shards were not written: 1"
    bench.writer.answers.append(orders.Result(id=9, kind="Commit", step=7, generation=2, error=error, missing=missing))
    bench.saver.readable()
    assert bench.failed == ([f"7: {error}"] if told else [])
    assert (bench.saver.last.error is not None) is told


@pytest.mark.parametrize("lead", [True, False])
def test_nothing_is_written_into_a_folder_that_is_not_one_for_all_nodes(lead: bool, bench: Bench) -> None:
    bench.apart = "/ckpt is not one folder"
    for step in range(1, 5):
        bench.save(step, lead=lead)
    assert not bench.writer.orders, "so a stop waits for nothing, too"
    assert bench.failed[-1:] == (["1: /ckpt is not one folder (4 in a row)"] if lead else [])
    bench.saver.rules = msgspec.structs.replace(bench.saver.rules, shared=False)
    bench.save(5, lead=lead)
    assert bench.writer.orders


def test_folders_are_apart_if_another_node_with_a_place_has_another_id() -> None:
    def said(mine: str, theirs: str, *nodes: str) -> str:
        members = [dataclasses.replace(m, record=msgspec.structs.replace(m.record, folder=folder))
                   for m, folder in ((member("a", 1), mine), (member("b", 2), theirs))]  # fmt: skip
        agent = changed(Agent(policy("a")), view=view(*members), generation=generation(1, [place(n) for n in nodes]))
        return str(apart(agent, mine) or "")

    assert "on a and b: what one writes the other does not see" in said("1", "2", "a", "b")
    assert not said("1", "1", "a", "b")
    assert not said("1", "2", "a")
    assert not said("1", "", "a", "b"), "an agent that could not read it"
    assert not said("", "2", "a", "b")


def test_a_generation_has_failed_once_it_is_broken_or_left_at_once() -> None:
    one, two = (generation(number, [place("a")]) for number in (1, 2))
    planned = msgspec.structs.replace(two, at_step=9)
    assert not has_failed(FormedState(), 1)
    assert not has_failed(FormedState(generation=one), 1)
    assert has_failed(FormedState(generation=one, broken=1), 1)
    assert has_failed(FormedState(generation=two), 1), "its node is gone"
    assert not has_failed(FormedState(generation=planned), 1)


def test_a_buffer_without_its_second_is_given_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker asks again at each checkpoint: the agent would run out of descriptors."""
    create, made = Arena.create, []

    def short_of_memory(nbytes: int, *, warm: bool = True) -> Arena:
        if made:
            raise ArenaError("no shared memory")
        made.append(create(nbytes, warm=warm))
        return made[0]

    monkeypatch.setattr(Arena, "create", short_of_memory)
    bench.saver.need_arena(0, 1, 1 << 20)
    assert bench.failed == ["0: no shared memory for snapshots: no shared memory"]
    assert made[0].fd == -1


@pytest.mark.parametrize("how", ["a rollback", "larger buffers"])
def test_a_snapshot_that_is_gone_is_not_shown(how: str, bench: Bench) -> None:
    bench.saver.need_arena(0, 1, 1 << 16)
    arena, tensors = bench.saver._slots[0].arenas[0], {"w": torch.ones(4)}
    arena.layout(table_of(tensors))
    arena.fill(list(tensors.values()))
    arena.seal(7, 2)
    filled = messages.Filled(step=7, generation=2, buffer=0, nbytes=9, shard=0, shards=1, stall_s=0.0, save=False)
    bench.saver.filled(0, filled, lead=True, world_size=1)
    assert bench.saver.last.kept_step == 7
    if how == "a rollback":
        bench.saver.ask_kept(1, 3, saved=True)
    else:
        bench.saver.need_arena(0, 1, 1 << 20)
    assert bench.saver.last.kept_step is None
