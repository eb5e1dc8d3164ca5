"""State on a GPU: snapshots into the arena beside the card's own copy speed, and the broadcast over NCCL."""

from __future__ import annotations

import time
from typing import Any

import cards
import pytest
import smoke
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(240)]

MB = 1000 if not smoke.ON else 8
BLOCKED_S = 0.010 if not smoke.ON else 60.0
SHARE_OF_COPY = 0.8 if not smoke.ON else 0.0


def timed(act: Any) -> float:
    torch.cuda.synchronize()
    begun_s = time.monotonic()
    act()
    return time.monotonic() - begun_s


def snapshot(rank: int, world_size: int, port: int) -> Any:
    from elastic.checkpoint.format.layout import arena_nbytes
    from elastic.checkpoint.memory.arena import Arena
    from elastic.contract.worker.tensor_table import TensorInfo

    tensors = [torch.randn(MB * 1_000_000 // 4 // 20, device="cuda") for _ in range(20)]
    table = tuple(TensorInfo(f"t{i}", "F32", tuple(t.shape), t.nbytes) for i, t in enumerate(tensors))
    nbytes = sum(t.numel() * 4 for t in tensors)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    copy_s = min(timed(lambda: pinned.copy_(device)) for _ in range(5))
    arena = Arena.create(arena_nbytes(table))
    arena.layout(table)
    first_s = timed(lambda: arena.fill(tensors).finish())
    blocked, whole = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        begun_s = time.monotonic()
        fill = arena.fill(tensors)
        blocked.append(time.monotonic() - begun_s)
        fill.finish()
        whole.append(time.monotonic() - begun_s)
    arena.seal(1, 1)
    same = all(torch.equal(arena.tensors()[f"t{i}"], t.cpu()) for i, t in enumerate(tensors))
    result = {"same": same, "first_s": first_s, "copy_s": copy_s, "whole_s": min(whole), "blocked_s": min(blocked),
              "copy_gb_s": nbytes / copy_s / 1e9}  # fmt: skip
    arena.close()
    return result


def test_a_snapshot_runs_beside_the_steps_at_the_cards_speed(measured: dict[str, object]) -> None:
    pytest.importorskip("msgspec", reason="the arena needs msgspec")
    (found,) = cards.run(snapshot, world_size=1, timeout_s=180.0)
    measured |= {k: round(v, 4) for k, v in found.items() if k != "same"}
    assert found["same"]
    assert found["blocked_s"] < BLOCKED_S
    assert found["copy_s"] / found["whole_s"] >= SHARE_OF_COPY


def changed_behind(rank: int, world_size: int, port: int) -> Any:
    """What is filled is what the stream had when `fill` was called, though kernels were still queued before it."""
    from elastic.checkpoint.format.layout import arena_nbytes
    from elastic.checkpoint.memory.arena import Arena
    from elastic.contract.worker.tensor_table import TensorInfo

    values, buffer = torch.zeros(1 << 24, device="cuda"), torch.zeros(1 << 20, device="cuda")
    table = tuple(TensorInfo(n, "F32", tuple(t.shape), t.nbytes) for n, t in (("w", values), ("b", buffer)))
    arena = Arena.create(arena_nbytes(table))
    arena.layout(table)
    wrong = 0
    for step in range(1, 30):
        torch.cuda._sleep(10**7)
        values.fill_(step)
        buffer.fill_(step)
        fill = arena.fill([values, buffer], volatile={1})
        buffer.fill_(-1)  # the next forward pass: allowed for what is volatile
        fill.finish()
        values.fill_(-1)  # the optimizer: after `finish`
        arena.seal(step, 1)
        kept = arena.tensors()
        wrong += not (bool((kept["w"] == step).all()) and bool((kept["b"] == step).all()))
    return wrong


def test_a_snapshot_holds_the_step_it_was_taken_at() -> None:
    pytest.importorskip("msgspec", reason="the arena needs msgspec")
    assert cards.run(changed_behind, world_size=1) == [0]


WIDTH = 4096 if not smoke.ON else 64
"""Of ten square layers: with Adam's two averages 2 GB."""


def overlapped(rank: int, world_size: int, port: int) -> Any:
    """As a worker does it: the scheduler after each commit, its settling in the guard, an arena for each."""
    from support.arenas import Agent

    from elastic.checkpoint.interval import IntervalRule
    from elastic.worker.job.job import Job
    from elastic.worker.snapshots.agent_snapshots import AgentSnapshots
    from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
    from elastic.worker.state.state import State

    class Link:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(10)]
    model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(WIDTH)).to(torch.device("cuda"))
    state = State(model=model, optimizer=torch.optim.Adam(model.parameters(), foreach=True))
    job = Job(name="j", device=torch.device("cuda", 0), local_rank=0, link=Link())  # type: ignore[arg-type]
    agent = Agent()
    scheduler = CheckpointScheduler(AgentSnapshots(agent), IntervalRule(every_steps=5), shared=True)  # type: ignore[arg-type]
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=scheduler)
    state.watch_optimizers(job.guard())
    samples = torch.randn(256, WIDTH, device="cuda")
    times: dict[bool, list[float]] = {True: [], False: []}
    blocked, wrong, kept = [], 0, {}
    for _ in range(41):
        torch.cuda.synchronize()
        begun_s = time.monotonic()
        model(samples).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        if saves := (state.step + 1) % 5 == 0:
            kept = {info.name: tensor.to("cpu", copy=True) for info, tensor in state.tensors()}
        committing_s = time.monotonic()
        job.commit(state)
        if saves and state.step > 5:  # the first gets its buffers ready
            blocked.append(time.monotonic() - committing_s)
        times[state.step % 5 == 1].append(time.monotonic() - begun_s)  # those whose optimizer waits for the copy
        for message in agent.filled[:]:
            arena, step = agent.arenas[message.buffer], message.step
            found = arena.tensors()
            wrong += arena.header().step != step or step % 5 != 0
            wrong += sum(not torch.equal(found[name], tensor) for name, tensor in kept.items())
            del found
            agent.filled.remove(message)
            agent.wrote()
    taken = len(blocked) + 1
    for arena in agent.arenas:
        arena.close()
    mb = sum(info.nbytes for info in state.table()) / 1e6
    median = {late: sorted(values)[len(values) // 2] for late, values in times.items()}
    return {"wrong": wrong, "skipped": scheduler.policy.skipped, "taken": taken, "blocked_s": max(blocked),
            "step_s": median[False], "step_that_waits_s": median[True], "mb": mb}  # fmt: skip


def test_training_goes_on_while_a_snapshot_is_copied(measured: dict[str, object]) -> None:
    pytest.importorskip("msgspec", reason="the scheduler needs msgspec")
    pytest.importorskip("numpy", reason="the job needs numpy")
    (found,) = cards.run(overlapped, world_size=1, timeout_s=180.0)
    measured |= {k: round(v, 4) for k, v in found.items()}
    assert (found["wrong"], found["skipped"], found["taken"]) == (0, 0, 8)
    assert found["blocked_s"] < BLOCKED_S


def relayed(rank: int, world_size: int, port: int) -> Any:
    from test_nccl_groups import make

    from elastic.worker.state.handover import broadcast

    group = make(rank, world_size, port, 1)
    group.form()
    generator = torch.Generator("cuda").manual_seed(rank)
    tensors = [torch.randn(MB * 1_000_000 // 8 // 10, device="cuda", generator=generator) for _ in range(10)]
    tensors += [torch.randn(shape, device="cuda", generator=generator) for shape in ((3,), (), (7, 5))]
    begun_s = time.monotonic()
    nbytes = broadcast.relay(
        tensors, previous=rank - 1 if rank else None, following=rank + 1 if rank + 1 < world_size else None
    )
    torch.cuda.synchronize()
    seconds = time.monotonic() - begun_s
    source = torch.Generator("cuda").manual_seed(0)
    same = all(torch.equal(t, torch.randn(t.shape, device="cuda", generator=source)) for t in tensors)
    group.close()
    return {"same": same, "gb_s": nbytes / seconds / 1e9}


@pytest.mark.parametrize("world_size", [2, 3])
def test_state_is_sent_over_nccl(world_size: int, measured: dict[str, object]) -> None:
    pytest.importorskip("xxhash", reason="the broadcast needs xxhash")
    if smoke.ON:
        pytest.importorskip("numpy", reason="the broadcast between CPUs needs numpy")
    results = cards.run(relayed, world_size=world_size)
    measured["gb_s"] = round(min(r["gb_s"] for r in results), 2)
    assert all(r["same"] for r in results)
