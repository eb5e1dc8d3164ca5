"""A copy of a large state takes longer than a worker may be silent: each piece of it is a sign of progress."""

from __future__ import annotations

from typing import Any

import torch
from support.arenas import Agent, NoBackend
from support.ckpt import table_of

from elastic.checkpoint.interval import IntervalRule
from elastic.contract.worker.beat import PAGE_BYTES, BeatPage, Doing
from elastic.worker.snapshots.agent_snapshots import AgentSnapshots, SnapshotPart
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.state.state import State

LARGE = 1 << 24
"""Elements: 64 MiB of float32."""
MOST_BYTES = 16 << 20
"""Between two signs of progress."""


def part(step: int, **options: Any) -> SnapshotPart:
    tensors = {"w": torch.full((LARGE,), float(step))}
    return SnapshotPart(
        step=step, commit_generation=1, shard=0, shards=1, extra={}, interval="",
        table=table_of(tensors), tensors=list(tensors.values()), **options,
    )  # fmt: skip


def test_the_first_copy_into_fresh_buffers_is_progress_all_the_way(agent: Agent) -> None:
    backend = AgentSnapshots(agent)  # type: ignore[arg-type]
    assert backend.put(part(1, volatile={0}))  # so all of it within the commit
    backend.settle()
    assert agent.arenas[0].header().step == 1
    assert sum(agent.progress) >= LARGE * 4
    assert max(agent.progress) <= MOST_BYTES


def test_a_wait_for_pages_that_a_thread_touches_is_progress_too(agent: Agent) -> None:
    backend = AgentSnapshots(agent)  # type: ignore[arg-type]
    backend.prepare(part(1))
    before = len(agent.progress)
    assert before == 0, "nobody waits yet: a thread of ours must not vouch for the main thread"
    assert backend.put(part(1, volatile={0}))
    backend.settle()
    assert sum(agent.progress) >= LARGE * 4
    assert max(agent.progress) <= MOST_BYTES


def test_the_buffers_of_a_state_on_the_cpu_are_touched_ahead() -> None:
    prepared: list[SnapshotPart] = []

    class SnapshotBackend(NoBackend):
        def prepare(self, part: SnapshotPart) -> None:
            prepared.append(part)

    state = State(model=torch.nn.Linear(4, 4))
    scheduler = CheckpointScheduler(SnapshotBackend(), IntervalRule(every_steps=100), shared=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    for _ in range(3):
        state.committed(1)
        scheduler.after(state)
    assert len(prepared) == 1


def test_beat_page_copied_bytes_refresh_it_without_changing_its_activity() -> None:
    page = BeatPage(memoryview(bytearray(PAGE_BYTES)))
    page.clear(0.0)
    page.committed(3, 0.05, None, 1.0)
    page.write(Doing.SAVING, 1.0)
    before = page.read()
    page.copied(3.9)
    beat = page.read()
    assert (beat.doing, beat.step) == (Doing.SAVING, 3)
    assert beat.beats == before.beats + 1
    assert beat.beat_at_s == 3.9
