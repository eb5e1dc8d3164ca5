"""What an agent tells of its job: the status file, the progress record, the accounts of its ranks, and the history."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

from elastic import __version__
from elastic.agent.etcd.view_reader import ViewReader
from elastic.agent.etcd.writer import EtcdWriter
from elastic.agent.hangs.hang_detector import HangDetector
from elastic.agent.hangs.standstill import with_stillness
from elastic.agent.workers.pool import Pool
from elastic.checkpoint.saving.saver import Saver
from elastic.contract.agent_files import AgentConfig, AgentStatus
from elastic.contract.records.job_records import ProgressRecord, SpecRecord
from elastic.contract.records.reasons import Text
from elastic.contract.worker import messages
from elastic.contract.worker.beat import Beat
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.effects import Leave
from elastic.recovery.machine.events import Event, Tick, Viewed, WorkerSaid
from elastic.recovery.machine.events import Progress as Stepped
from elastic.recovery.machine.model import Agent, is_leader

from . import status
from .history import HistoryFile
from .ledger import LedgerKeeper, began_wall_s, left_behind
from .step_times import StepTimes
from .worker_reports import WorkerReports

STATUS_S = 0.5
PROGRESS_S = 2.0

log = structlog.get_logger()


class Reports:
    """Call `turned` after each turn of the state machine, `looked` when the beat pages were read, and `write` when it
    is `due`."""

    def __init__(
        self,
        config: AgentConfig,
        spec: SpecRecord,
        pool: Pool,
        etcd_writer: EtcdWriter,
        hang_detector: HangDetector,
        view_reader: ViewReader,
        saver: Saver,
    ) -> None:
        folder, submitted_wall_s = Path(config.agent_dir), spec.submitted_wall_s
        self._config, self._spec, self._submitted_wall_s = config, spec.spec, submitted_wall_s
        self._pool, self._etcd_writer, self._hang_detector = pool, etcd_writer, hang_detector
        self._view_reader, self._saver = view_reader, saver
        self.messages = WorkerReports(config, spec, saver, lambda: view_reader.known_step)
        self._step_rate = status.StepRate()
        self._step_times = StepTimes(config.node, spec.spec.debug.window_s, gpu=bool(config.gpus))
        self._ledger = LedgerKeeper(submitted_wall_s, began_wall_s(), left_behind(folder, submitted_wall_s))
        self._status_file = folder / "status.json"
        self._history = HistoryFile(folder, submitted_wall_s)
        self._status_due_s = self._progress_due_s = 0.0
        self._preloaded: tuple[str, ...] = ()
        self._zygote_up = False
        self._doing: tuple[Text, float] = ("", 0.0)
        """What the agent does before its workers are at work, and since what time of day."""

    def zygote_is_up(self, preloaded: tuple[str, ...]) -> None:
        self._preloaded, self._zygote_up = preloaded, True

    def turned(self, before: Agent, agent: Agent, event: Event, now_s: float) -> None:
        if not isinstance(event, Tick | Viewed | Stepped):
            log.debug("event", what=event)
        match event:
            case WorkerSaid(_, worker_id, messages.Ready()):
                if any(standby.worker_id == worker_id for standby in agent.local.standbys):
                    log.info("standby.ready", worker_id=worker_id)
        if agent.policy.managed and not before.policy.managed:
            log.info("job.managed", told_by="a worker" if isinstance(event, WorkerSaid) else "another agent")
        if agent.local.standbys != before.local.standbys:
            self.hurry()
        if agent.progress.settled > before.progress.settled:
            self._status_due_s = self._progress_due_s = 0.0  # a drained node waits for this
        self._ledger.turned(agent, now_s)

    def looked(self, beats: Mapping[int, Beat], now_s: float) -> None:
        """`beats`: worker id -> what its page shows."""
        self._ledger.looked(beats)
        self._step_times.look(beats, now_s)

    def hurry(self) -> None:
        """The status is written on the next tick."""
        self._status_due_s = 0.0

    def due(self, agent: Agent, now_s: float) -> bool:
        """Whether the status is to be written now; then it is due again after STATUS_S."""
        if now_s < self._status_due_s:
            return False
        self._status_due_s = now_s + STATUS_S
        self._step_rate.mark(agent.progress.step, agent.progress.step_in, now_s)
        return True

    def newest(self, agent: Agent) -> ProgressRecord | None:
        """What the job has reached at this instant; None: nothing is known."""
        return self._progress(agent) if agent.formed.generation else None

    def write(self, agent: Agent, ended: Leave | None) -> None:
        """`ended`: how the agent leaves, once it does."""
        leads, progress = is_leader(agent), self._progress(agent)
        times = self._ledger.ranks.record(agent, self._step_times.own_s, self.messages.samples, progress.ranks)
        if (doing := status.doing(agent, self._zygote_up or bool(self._pool.why_fresh))) != self._doing[0]:
            self._doing = doing, time.time()
        record = AgentStatus(
            pid=os.getpid(),
            incarnation=agent.policy.incarnation,
            job=self._config.job,
            node=self._config.node,
            phase=status.phase_of(agent),
            reason=self._view_reader.unreadable or agent.lead.reason or self.messages.lost,
            leader=leads,
            generation=agent.formed.generation.number if agent.formed.generation else 0,
            etcd_ok=agent.etcd.connected,
            written_wall_s=time.time(),
            ranks=progress.ranks,
            progress=progress if agent.formed.generation else None,
            rank_times=times,
            standbys=sum(1 for s in agent.local.standbys if s.stage is Stage.READY),
            why_fresh=self._pool.why_fresh,
            preloaded=self._preloaded,
            doing=self._doing[0],
            doing_since_wall_s=self._doing[1],
            submitted_wall_s=self._submitted_wall_s,
            version=__version__,
            exit_code=ended.code if ended else None,
        )
        status.write_for_daemon(self._status_file, record)
        now_s, last = time.monotonic(), ended is not None
        self._history.note(agent, progress, now_s, last=last)
        if self._ledger.ranks.due(agent, now_s, last=last, news=self.messages.news()):
            self._etcd_writer.put_ranks(times)
        if leads and agent.formed.generation and agent.etcd.connected and now_s >= self._progress_due_s:
            self._progress_due_s = now_s + PROGRESS_S
            self._etcd_writer.put_progress(progress, agent.etcd.view.generation_revision)

    def close(self, agent: Agent, ended: Leave) -> None:
        self._progress_due_s = 0.0  # the final progress is written
        self.write(agent, ended)

    def _progress(self, agent: Agent) -> ProgressRecord:
        rows = self._step_times.with_parts(status.rank_rows(agent, self._pool))
        progress = with_stillness(
            status.progress(agent, self._pool, self._step_rate, rows, self._saver.last),
            agent, self._hang_detector.known, self._spec.hang, time.monotonic(), time.time(),
        )  # fmt: skip
        return msgspec.structs.replace(
            progress,
            ledger=self._ledger.published(agent),
            slow_ranks=self._step_times.slow,
            **self.messages.fields(agent, leads=is_leader(agent)),
        )


TESTED = {"torch": ((2, 10), (2, 15)), "python": ((3, 11), (3, 13))}
"""Oldest and newest minor version; docs/versions.md has the table. The range of torch is pyproject.toml's."""


def untested(found: dict[str, str]) -> list[str]:
    """A message for each version outside those that the tests are run with."""
    outside = []
    for name, (oldest, newest) in TESTED.items():
        numbers = tuple(map(int, re.findall(r"\d+", found.get(name, ""))[:2]))
        if numbers and not oldest <= numbers <= newest:
            span = " to ".join(".".join(map(str, minor)) for minor in sorted({oldest, newest}))
            outside.append(f"{name} {found[name]} is outside the versions that elasticd is tested with ({span})")
    return outside
