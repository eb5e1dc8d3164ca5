"""A worker takes on its predecessor's buffers: what is still being written from them is left alone."""

from __future__ import annotations

import torch
from support.arenas import Agent

from elastic.contract.worker.tensor_table import TensorInfo
from elastic.worker.snapshots.agent_snapshots import AgentSnapshots, SnapshotPart

SIZE = 1 << 10


def save(backend: AgentSnapshots, step: int) -> bool:
    put = backend.put(
        SnapshotPart(
            step=step, commit_generation=1, shard=0, shards=1, extra={}, interval="",
            table=(TensorInfo("w", "F32", (SIZE,), SIZE * 4),), tensors=[torch.full((SIZE,), float(step))],
        )
    )  # fmt: skip
    backend.settle()
    return put


def steps(agent: Agent) -> list[int]:
    return [arena.header().step for arena in agent.arenas]


def test_a_buffer_that_is_still_written_is_not_filled(agent: Agent) -> None:
    before = AgentSnapshots(agent)  # type: ignore[arg-type]
    assert save(before, 1)
    assert save(before, 2)
    agent.wrote()
    after = AgentSnapshots(agent)  # type: ignore[arg-type]
    assert save(after, 3)
    assert steps(agent) == [3, 2]
    assert not after.free()
    agent.wrote()
    assert after.free()
    assert save(after, 4)
    assert steps(agent) == [3, 4]


def test_with_both_still_written_a_snapshot_is_skipped(agent: Agent) -> None:
    before = AgentSnapshots(agent)  # type: ignore[arg-type]
    assert save(before, 1)
    assert save(before, 2)
    after = AgentSnapshots(agent)  # type: ignore[arg-type]
    assert not save(after, 3)
    assert steps(agent) == [1, 2]
    agent.wrote()
    assert save(after, 3)
    assert steps(agent) == [3, 2]


def test_snapshot_buffer_freed_before_its_worker_knew_it_is_free(agent: Agent) -> None:
    before = AgentSnapshots(agent)  # type: ignore[arg-type]
    assert save(before, 1)
    after = AgentSnapshots(agent)  # type: ignore[arg-type]
    agent.offer()  # the answer to a request that was not waited for any longer
    agent.wrote()
    assert after.free()
    assert save(after, 2)
    assert after.free()
    assert save(after, 3)
    assert sorted(steps(agent)) == [2, 3]
