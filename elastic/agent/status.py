"""What this agent knows, as files for the daemon of this node and as the job's progress in etcd."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from pathlib import Path

import msgspec
import psutil

from ..core.agentfile import AgentStatus
from ..core.model import Agent, Stage
from ..core.records import ProgressRecord, RankRow
from .pool import Pool
from .saver import Saved

RATE_WINDOW_S = 10.0
SLOW_S = 1.0
"""A group that takes longer than this to form waits for somebody."""


class Gauge:
    """Steps per second over a sliding window."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self.loss: float | None = None
        """The last that was reported: outlives the worker."""

    def mark(self, step: int, now_s: float) -> None:
        self._marks.append((now_s, step))
        while len(self._marks) > 2 and now_s - self._marks[0][0] > RATE_WINDOW_S:
            self._marks.popleft()

    def per_s(self) -> float:
        if len(self._marks) < 2:
            return 0.0
        (t0, s0), (t1, s1) = self._marks[0], self._marks[-1]
        return max(0.0, (s1 - s0) / (t1 - t0)) if t1 > t0 else 0.0


def rank_rows(agent: Agent, pool: Pool) -> tuple[RankRow, ...]:
    ranks = agent.generation.ranks(agent.policy.node) if agent.generation else {}
    rows = []
    for slot, worker in sorted(agent.workers.items()):
        process = pool.processes.get(worker.life)
        beat = process.page.read() if process else None
        rss_mb = None
        if process and process.pid:
            with contextlib.suppress(psutil.Error):
                rss_mb = round(psutil.Process(process.pid).memory_info().rss / 2**20, 1)
        rows.append(
            RankRow(
                rank=ranks.get(slot, -1),
                node=agent.policy.node,
                slot=slot,
                pid=process.pid if process else 0,
                phase=worker.stage.value
                if worker.stage is not Stage.RUNNING or beat is None
                else beat.doing.name.lower(),
                step=max(worker.step, beat.step) if beat else worker.step,
                incarnation=worker.life,
                rss_mb=rss_mb,
            )
        )
    return tuple(rows)


def progress(agent: Agent, pool: Pool, gauge: Gauge, rows: tuple[RankRow, ...], saved: Saved) -> ProgressRecord:
    for worker in agent.workers.values():
        if process := pool.processes.get(worker.life):
            beat = process.page.read()
            if not math.isnan(beat.loss):
                gauge.loss = beat.loss
                break
    reason = "" if phase_of(agent) == "running" else agent.reason
    return ProgressRecord(
        generation=agent.generation.number if agent.generation else 0,
        world=agent.generation.world if agent.generation else 0,
        step=max((row.step for row in rows), default=agent.step),
        steps_per_s=round(gauge.per_s(), 3),
        loss=gauge.loss,
        wall_s=time.time(),
        waiting_for=reason or _waits_for(agent, time.monotonic()),
        ranks=rows,
        checkpoint_step=saved.step if saved.step is not None else agent.view.saved_step or None,
        checkpoint_wall_s=saved.wall_s,
        checkpoint_error=saved.error,
        checkpoint_interval=saved.interval,
        checkpoint_skipped=saved.skipped,
    )


def _waits_for(agent: Agent, now_s: float) -> str:
    starting = [f"slot {w.slot} of {agent.policy.node}" for w in agent.workers.values() if w.stage is Stage.STARTING]
    if starting:
        return f"{', '.join(starting)} to start"
    slow = [w for w in agent.workers.values() if w.stage is Stage.FORMING and now_s - w.since_s > SLOW_S]
    if slow and agent.generation is not None:  # which of the others is not there yet, only its own agent knows
        return f"all ranks to start in generation {agent.generation.number} ({agent.generation.why})"
    return ""


def phase_of(agent: Agent) -> str:
    stages = {w.stage for w in agent.workers.values()}
    if agent.leaving is not None:
        return "finishing"
    if agent.draining is not None:
        return "draining"
    if agent.generation is None:
        return "joining"
    if agent.broken >= agent.generation.number:
        return "waiting" if agent.below_min else "repairing"
    if stages & {Stage.RUNNING, Stage.DONE, Stage.YIELDING}:
        return "running"
    return "forming"


class StatusFile:
    """What the daemon of this node reads."""

    def __init__(self, folder: Path) -> None:
        self._path, self._temporary = str(folder / "status.json"), str(folder / "status.tmp")

    def write(self, status: AgentStatus) -> None:
        """Replace it; a full disk keeps the old one and costs the job nothing."""
        with contextlib.suppress(OSError):
            with open(self._temporary, "wb") as file:
                file.write(msgspec.json.encode(status))
            os.replace(self._temporary, self._path)
