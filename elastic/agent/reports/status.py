"""The agent's status, as a file for the daemon of this node and as the job's progress record in etcd."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from elastic.agent.workers.pool import Pool
from elastic.checkpoint.saving.saver import SaveStatus
from elastic.contract.agent_files import LEFT, AgentStatus
from elastic.contract.records.job_records import ProgressRecord, RankRow
from elastic.contract.records.reasons import Code, Text, codes, reason
from elastic.contract.worker.messages import Copies, CopyState
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.model import Agent
from elastic.util.files import replace_file
from elastic.util.processes import memory_nbytes

RATE_WINDOW_S = 10.0
SLOW_S = 1.0
"""A process group that takes longer than this to form waits for a rank."""


class StepRate:
    """Steps per second over a sliding window."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self._generation = 0
        self.loss: float | None = None
        """The last one reported; kept when the worker is gone."""
        self._loss_of: int | None = None
        """`incarnation` of the worker that reported it."""
        self.step_wall_s = 0.0
        """Time of day at which the step was last seen to change; 0: not yet."""

    def mark(self, step: int, generation: int, now_s: float) -> None:
        """`generation`: in which `step` was committed here. A rate is of the steps of one: between two, a rank that
        joins or goes back is given a step that it has not made."""
        if generation != self._generation:
            self._marks.clear()
            self._generation = generation
        if not self._marks or self._marks[-1][1] != step:
            self.step_wall_s = time.time() if step else 0.0
        self._marks.append((now_s, step))
        while len(self._marks) > 2 and now_s - self._marks[0][0] > RATE_WINDOW_S:
            self._marks.popleft()

    def show(self, loss: float, worker_id: int) -> None:
        """`loss` on a worker's page: NaN until the worker reports one, and where the one that it reports is NaN."""
        if not math.isnan(loss) or worker_id == self._loss_of:
            self.loss, self._loss_of = loss, worker_id

    def per_s(self) -> float:
        if len(self._marks) < 2:
            return 0.0
        (t0, s0), (t1, s1) = self._marks[0], self._marks[-1]
        return max(0.0, (s1 - s0) / (t1 - t0)) if t1 > t0 else 0.0


def rank_rows(agent: Agent, pool: Pool) -> tuple[RankRow, ...]:
    ranks = agent.formed.generation.ranks(agent.policy.node) if agent.formed.generation else {}
    rows = []
    for slot, worker in sorted(agent.local.workers.items()):
        process = pool.processes.get(worker.worker_id)
        beat = process.page.read() if process else None
        rss_mb = None
        if process and process.pid:
            with contextlib.suppress(OSError):
                rss_mb = round(memory_nbytes(process.pid)[0] / 2**20, 1)
        rows.append(
            RankRow(
                rank=ranks.get(slot, -1),
                node=agent.policy.node,
                slot=slot,
                pid=process.pid if process else 0,
                phase=worker.stage.value
                if worker.stage is not Stage.RUNNING or beat is None or not agent.policy.managed
                else beat.doing.name.lower(),
                step=max(worker.step, beat.step) if beat else worker.step,
                incarnation=worker.worker_id,
                rss_mb=rss_mb,
                step_s=round(beat.step_s, 6) if beat else 0.0,
            )
        )
    return tuple(rows)


def progress(
    agent: Agent, pool: Pool, step_rate: StepRate, rows: tuple[RankRow, ...], saved: SaveStatus
) -> ProgressRecord:
    # The loss of this node's lowest rank, whichever slot has it: where the leader writes, that is rank 0.
    for worker_id in (row.incarnation for row in sorted(rows, key=lambda row: (row.rank < 0, row.rank))):
        if process := pool.processes.get(worker_id):
            step_rate.show(process.page.read().loss, worker_id)
            break
    leaves = agent.drain.leaving is not None  # why it goes is no matter of the job's, which goes on elsewhere
    runs = phase_of(agent) == "running" and Code.SAVING not in codes(agent.lead.reason)
    leads = "" if leaves or runs else agent.lead.reason
    record = agent.etcd.view.progress
    mine = max((row.step for row in rows), default=agent.progress.step)
    step, loss = _reached(agent, mine, step_rate.loss)
    repeats = record is not None and step == record.step and (step != mine or not step_rate.step_wall_s)
    view = agent.etcd.view
    # A leader of before, or one that has led before, may have saved more since than this agent itself.
    own = saved.step is not None and (saved.generation, saved.step) >= (view.saved_generation, view.saved_step)
    return ProgressRecord(
        generation=agent.formed.generation.number if agent.formed.generation else 0,
        world_size=agent.formed.generation.world_size if agent.formed.generation else 0,
        step=step,
        steps_per_s=round(step_rate.per_s(), 3),
        loss=loss,
        wall_s=time.time(),
        step_wall_s=record.step_wall_s if record is not None and repeats else step_rate.step_wall_s,
        stepped_in=max(agent.progress.settled, record.stepped_in if record is not None else 0),
        waiting_for=leads or _waits_for(agent, time.monotonic()),
        ranks=rows,
        checkpoint_step=saved.step if own else view.saved_step or None,
        checkpoint_generation=saved.generation if own else view.saved_generation,
        checkpoint_wall_s=saved.wall_s if own or record is None else record.checkpoint_wall_s,
        checkpoint_write_s=saved.seconds if own else record.checkpoint_write_s if record else None,
        checkpoint_error=saved.error,
        checkpoint_interval=saved.interval or (record.checkpoint_interval if record else ""),
        checkpoint_skipped=saved.skipped,
        snapshot_step=saved.kept_step,
        snapshot_mb=round(saved.kept_mb, 3),
        snapshot_interval=saved.kept_interval,
        snapshot_copies=_copies(agent, saved.copies),
        managed=agent.policy.managed,
    )


_COPIES = {
    CopyState.REPLICAS: Code.REPLICAS_ELSEWHERE,
    CopyState.COPIED: Code.COPIED_ELSEWHERE,
    CopyState.SENDING: Code.NOT_COPIED_YET,
    CopyState.NO_NODE: Code.NO_NODE_FOR_COPY,
    CopyState.NO_MEMORY: Code.NO_MEMORY_FOR_COPY,
    CopyState.UNREACHABLE: Code.COPY_BROKEN,
}


def _copies(agent: Agent, copies: Copies | None) -> Text:
    """What the loss of a node costs a sharded job."""
    formed = agent.formed.generation
    if copies is None or formed is None or copies.group_rank >= len(formed.nodes):
        return ""
    return reason(_COPIES[copies.state], step=copies.step, node=formed.nodes[copies.group_rank].node)


def _reached(agent: Agent, step: int, loss: float | None) -> tuple[int, float | None]:
    """Step and loss to report: those of the local workers, if one of them holds the job's state. An agent whose workers
    have not received it (it joined late, perhaps when the others had finished already) repeats what is on record."""
    record = agent.etcd.view.progress
    number = agent.formed.generation.number if agent.formed.generation else 0
    holding = (Stage.RUNNING, Stage.STOPPING_AT_STEP, Stage.DONE)
    holds = any(w.generation == number and w.stage in holding for w in agent.local.workers.values())
    if record is None:
        return step, loss
    return (step if holds else max(step, record.step)), record.loss if loss is None else loss


def _starting(agent: Agent) -> list[int]:
    return [worker.slot for worker in agent.local.workers.values() if worker.stage is Stage.STARTING]


def _waits_for(agent: Agent, now_s: float) -> Text:
    if starting := _starting(agent):
        return reason(Code.WORKERS_START, slots=_slots(starting), node=agent.policy.node)
    slow = [w for w in agent.local.workers.values() if w.stage is Stage.FORMING and now_s - w.since_s > SLOW_S]
    if slow and (formed := agent.formed.generation):  # only the agent of a missing rank can tell which one it is
        return reason(Code.RANKS_START, formed.why, number=formed.number)
    return ""


def doing(agent: Agent, zygote_up: bool) -> Text:
    """What this agent does before all of its workers are at work; '' if they are, or if none is needed here."""
    starting = _starting(agent)
    if not zygote_up and any(worker.stage is not Stage.GONE for worker in agent.local.workers.values()):
        return reason(Code.IMPORTS)
    if starting:
        return reason(Code.SETS_UP, slots=_slots(starting))
    formed = agent.formed.generation
    if formed is not None and any(worker.stage is Stage.FORMING for worker in agent.local.workers.values()):
        return reason(Code.FORMS, number=formed.number)
    paused = [w.slot for w in agent.local.workers.values() if w.stage is Stage.GONE and w.crashes > 1]
    return reason(Code.RESTS, slots=_slots(paused)) if paused else ""


def _slots(slots: list[int]) -> str:
    return ", ".join(map(str, sorted(slots)))


def phase_of(agent: Agent) -> str:
    stages = {w.stage for w in agent.local.workers.values()}
    if agent.drain.leaving is not None:
        return "finishing"
    if agent.drain.draining is not None:
        return "draining"
    if agent.formed.generation is None:
        return "joining"
    if agent.formed.broken >= agent.formed.generation.number:
        return "waiting" if agent.lead.below_min else "repairing"
    if stages & {Stage.RUNNING, Stage.DONE, Stage.STOPPING_AT_STEP}:
        return "running"
    return "forming"


def left_behind(folder: Path, submitted_wall_s: float) -> tuple[tuple[int, int], float]:
    """((generation, step) of the newest commit, its time of day) as the previous agent here last wrote them, normally
    half a second before its end or less. Zeros if there was none, or it ran an earlier job of the same name.

    The generation is the one that stepped, not a newer one that had only formed: that may begin from earlier state, and
    the step would outrank the first ones of it."""
    for status in of_predecessors(folder, submitted_wall_s):
        if (progress := status.progress) is not None and progress.step:
            return (progress.stepped_in, progress.step), progress.step_wall_s
    return (0, 0), 0.0


def of_predecessors(folder: Path, submitted_wall_s: float) -> Iterator[AgentStatus]:
    """What earlier agents of this job wrote last here, the newest first. A daemon sets the status file aside before it
    starts an agent; an agent that was started without one finds it in place."""
    for name in ("status.json", LEFT):
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            status = msgspec.json.decode((folder / name).read_bytes(), type=AgentStatus)
            if status.submitted_wall_s == submitted_wall_s:
                yield status


def write_for_daemon(path: Path, record: msgspec.Struct | bytes) -> None:
    """Replace a file that the daemon of this node reads; if the disk is full the old one stays, and the job goes on."""
    with contextlib.suppress(OSError):
        replace_file(path, record if isinstance(record, bytes) else msgspec.json.encode(record), mode=0o640)
