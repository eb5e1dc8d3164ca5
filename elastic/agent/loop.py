"""The agent's loop: one thread owns the recovery state machine, feeds it events and carries out its effects."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from elastic.agent.etcd.view_reader import ViewReader
from elastic.agent.etcd.watch_scope import WatchScope
from elastic.agent.etcd.writer import EtcdWriter
from elastic.agent.hangs.hang_detector import HangDetector
from elastic.agent.hangs.standstill import with_stillness
from elastic.agent.peers.peers import PeerMonitor, Peers
from elastic.agent.reports.history import HistoryFile
from elastic.agent.reports.incidents import apart, cut_short, late_exit, save_failed, stray_checkpoints
from elastic.agent.reports.ledger import LedgerKeeper, began_wall_s
from elastic.agent.reports.logs import Trimmer
from elastic.agent.reports.rank_ledgers import left_behind
from elastic.agent.reports.step_times import StepTimes
from elastic.agent.reports.versions import VERSION, untested, versions
from elastic.agent.reports.worker_reports import WorkerReports, to_event
from elastic.agent.snapshots.saver import Saver
from elastic.agent.workers.pool import Exited, Pool, PoolEvent, ProcessStarted, WorkerMessage, ZygoteUp
from elastic.agent.workers.worker_error import last_lines, read_error
from elastic.agent.workers.zygote import ZygoteUnfit
from elastic.contract.agent_files import AgentConfig, AgentStatus
from elastic.contract.keys import JobKeys
from elastic.contract.records.job_records import (
    GenerationRecord,
    IncidentRecord,
    Phase,
    ProgressRecord,
    ProtocolVersionMismatch,
    SpecRecord,
    WorkerError,
)
from elastic.contract.worker import messages
from elastic.etcd.client import View
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.effects import Leave
from elastic.recovery.machine.events import (
    CheckpointSaved,
    Drain,
    Event,
    PeerDead,
    PeerReachable,
    PeerUnreachable,
    Progress,
    Saving,
    Start,
    Tick,
    Undrain,
    Viewed,
    WorkerDone,
    WorkerExited,
    WorkerFailed,
    WorkerManaged,
    WorkerReady,
    WorkerStarted,
)
from elastic.recovery.machine.model import Agent, is_leader
from elastic.recovery.observers.watch_scope import watches_members
from elastic.recovery.recovery import step
from elastic.recovery.workers.exits import ends_too_early

from .effect_runner import EffectRunner
from .orders import OrdersFile
from .reports import status

STATUS_S = 0.5
REAP_S = 1.0
"""Between two looks for processes that workers have left behind."""
PROGRESS_S = 2.0
FINISH_SAVING_S = 30.0

log = structlog.get_logger()


class AgentLoop:
    """Construct, then call `run()`, which returns when the job is over on this node."""

    def __init__(
        self,
        config: AgentConfig,
        agent: Agent,
        registry: EtcdWriter,
        peers: Peers,
        watch_scope: WatchScope,
        keys: JobKeys,
        spec: SpecRecord,
        pool: Pool,
    ) -> None:
        self.config, folder = config, Path(config.agent_dir)
        self.agent = agent
        self._registry = registry
        self._lookout = PeerMonitor(peers)
        self._watch_scope = watch_scope
        self._pictures = ViewReader(keys)
        self._spec = spec.spec
        self._selector = pool.selector
        self._wake_read, self._wake_write = socket.socketpair()
        self._woken = False
        """A wake-up has been sent and not yet received."""
        self._inbox: queue.SimpleQueue[Event | View] = queue.SimpleQueue()
        self.pool = pool
        self._deeds = EffectRunner(config, self._spec, registry, self.pool)
        self._deeds.on_incident = self._incident
        registry.progress = self._last_progress
        self._watchman = HangDetector(self.pool, self._spec.hang, self.post, config.timeouts.group_s)
        self._gauge = status.Gauge()
        self._step_times = StepTimes(config.node, self._spec.debug.window_s, gpu=bool(config.gpus))
        self._ledger = LedgerKeeper(spec.submitted_wall_s, began_wall_s(), left_behind(folder, spec.submitted_wall_s))
        self._status_file = status.StatusFile(folder)
        self._submitted_wall_s = spec.submitted_wall_s
        self._history = HistoryFile(folder, spec.submitted_wall_s)
        self._trimmer = Trimmer(self._spec.log_limit_mb, str(folder / "agent.log"))
        self._orders = OrdersFile(folder)
        self._status_due_s = self._progress_due_s = self._reap_due_s = 0.0
        for problem in untested(versions()):
            log.warning("versions.untested", problem=problem)
        self._ended: Leave | None = None
        self._end_by_s = float("inf")  # set by SIGTERM: the monotonic instant until which this agent may drain
        self.changed = threading.Event()
        """Set at each new generation, for threads that wait for one."""
        self.on_generation: Callable[[Agent, GenerationRecord], None] = lambda agent, generation: None
        self.on_incident: Callable[[IncidentRecord], None] = lambda incident: None
        self.on_tick: Callable[[Agent], Event | None] = lambda agent: None
        self._preloaded: tuple[str, ...] = ()
        self._zygote_up = False
        self._doing = ("", 0.0)
        """What the agent does before its workers are at work, and since what time of day."""
        self.saver = Saver(
            self._spec.checkpoint, config.job, self.pool.tell,
            on_saved=lambda generation, step: self.post(CheckpointSaved(generation, step)), on_failed=self._save_failed,
            cut=lambda generation: cut_short(self.agent, generation), apart=lambda: apart(self.agent, registry.folder),
            versions=versions(), slots=config.slots, patience_s=max(FINISH_SAVING_S, self._spec.exit_timeout_s),
        )  # fmt: skip
        self._reports = WorkerReports(config, spec, self.saver, lambda: self._pictures.known_step)

    # ── from any thread ─────────────────────────────────────────────────────────────────────────────────────

    def post(self, event: Event | View) -> None:
        self._inbox.put(event)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(OSError):
                self._wake_write.send(b"x")

    def on_dead(self, node: str, incarnation: str, evidence: str) -> None:
        self.post(PeerDead(node, incarnation, evidence))

    def on_reach(self, node: str, incarnation: str, evidence: str) -> None:
        self.post(PeerUnreachable(node, incarnation, evidence) if evidence else PeerReachable(node, incarnation))

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, env: dict[str, str]) -> int:
        """Returns the agent's exit code."""
        self._deeds.env = env
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("wake", 0))
        signal.signal(signal.SIGTERM, lambda *_: self._on_signal())
        signal.signal(signal.SIGHUP, lambda *_: self.post(Tick()))
        if self.saver.on:
            self._selector.register(self.saver.writer, selectors.EVENT_READ, ("writer", 0))
        self._turn(Start())
        beat_s = self.config.timeouts.beat_s
        due_s = time.monotonic() + beat_s
        while self._ended is None:
            self._wait(due_s)
            self._drain_inbox()
            now_s = time.monotonic()
            if now_s >= due_s:
                due_s = now_s + beat_s
                self._on_tick(now_s)
        # The interpreter restores default handlers while it exits: SIGHUP for new orders would then kill it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._finish_saving()
        self.saver.close()
        self._progress_due_s = 0.0  # the final progress is written
        self._write_status()
        self.pool.close()
        self._reports.close()
        self._selector.close()
        return self._ended.code

    def _wait(self, due_s: float) -> None:
        """Block until `due_s` at most, and handle descriptors that are readable."""
        until_s = min(due_s, self._pictures.due_s)
        for key, _ in self._selector.select(max(0.0, until_s - time.monotonic())):
            self._readable(key.data)

    def _save_failed(self, step: int, error: str, wall_s: float) -> None:
        """A failed checkpoint is recorded as an incident too, though it loses no step."""
        self._registry.put_save_incident(save_failed(self.agent, step, error, wall_s))

    def _look_at_saver(self) -> None:
        if (saving := self.saver.gets_on(time.monotonic())) != self.agent.local.saving:
            self._turn(Saving(saving))

    def _finish_saving(self) -> None:
        """Wait until what workers have handed over is on disk; of a job that has succeeded it is nowhere else."""
        soon_s = time.monotonic() + FINISH_SAVING_S
        latest_s = float("inf") if self.agent.etcd.view.state.phase is Phase.SUCCEEDED else soon_s
        self.saver.finish(lambda: min(latest_s, max(soon_s, self._end_by_s)), self._write_status)

    def _on_signal(self) -> None:
        self._end_by_s = min(self._end_by_s, time.monotonic() + self._spec.stop_grace_s)
        self.post(Tick())

    def _readable(self, key: tuple[str, int]) -> None:
        if key[0] == "wake":
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
            self._woken = False  # before the inbox is emptied: an event posted then wakes the loop again
            return
        if key[0] == "writer":
            self.saver.readable()
            return
        for happening in self.pool.handle(key):
            self._happened(happening)

    def _drain_inbox(self) -> None:
        newest: View | None = None
        while True:
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(event, View):
                if event.prefix == self._watch_scope.prefix:
                    newest = event  # views are complete: only the newest counts
            else:
                self._turn(event)
        if view := self._pictures.pick(newest, self.agent, time.monotonic()):
            self._viewed(view)

    def _viewed(self, view: View) -> None:
        try:
            job = self._pictures.read(view, self.agent)
        except ProtocolVersionMismatch as error:
            log.error("protocol.unknown", error=str(error))
            self._ended = Leave(str(error), code=3)
            return
        if view.connected != self.agent.etcd.connected:
            log.info("etcd.connected" if view.connected else "etcd.lost")
        self._turn(Viewed(job, view.connected))
        self._look_around(time.monotonic())

    def _look_around(self, now_s: float) -> None:
        if self.agent.etcd.connected:
            self._watch_scope.choose(watches_members(self.agent, now_s, self._watch_scope.narrow_for_s(now_s)), now_s)

    def _on_tick(self, now_s: float) -> None:
        for happening in self.pool.tick():
            self._happened(happening)
        self.saver.answer()
        self._look_at_saver()
        beats = self.pool.beats()
        progress = self._watchman.look(self.agent, now_s, beats)
        self._ledger.looked(beats)
        self._step_times.look(beats, now_s)
        self._read_orders()
        drain = self.agent.drain
        if self._end_by_s < (drain.drain_deadline_s if drain.draining is not None else float("inf")):
            self._turn(Drain(drain.draining or "the agent was told to end", self._end_by_s))
        self._turn(progress or Tick())
        if event := self.on_tick(self.agent):
            self._turn(event)
        self._look_around(now_s)
        if now_s >= self._status_due_s:
            self._status_due_s = now_s + STATUS_S
            if now_s >= self._reap_due_s:
                self._reap_due_s = now_s + REAP_S
                self.pool.reap()
            self._gauge.mark(self.agent.progress.step, self.agent.progress.step_in, now_s)
            self._trimmer.trim_all(process.log_file for process in self.pool.processes.values())
            self._write_status()

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def _happened(self, happening: PoolEvent) -> None:
        match happening:
            case ZygoteUp(seconds, problems, preloaded):
                self._preloaded, self._zygote_up = preloaded, True
                log.info("zygote.up", seconds=round(seconds, 3), preloaded=preloaded)
                for problem in problems:
                    log.warning("preload.failed", problem=problem)
            case ZygoteUnfit(why, preload):
                log.error("zygote.unfit", why=why, next="a zygote without preload" if preload else "new processes")
                self._status_due_s = 0.0
            case ProcessStarted(worker_id):
                self._turn(WorkerStarted(self._slot(worker_id), worker_id))
            case Exited():
                self._exited(happening)
            case WorkerMessage(worker_id, message):
                slot = self._slot(worker_id)
                if isinstance(message, messages.ScriptEnded):
                    if message.code or ends_too_early(self.agent, slot, worker_id):
                        self._failed(worker_id, slot, message.code)
                elif self._reports.take(slot, worker_id, message, self.agent):
                    pass
                elif event := to_event(slot, worker_id, message):
                    if isinstance(event, WorkerDone):
                        self._look_at_saver()
                    self._turn(event)

    def _slot(self, worker_id: int) -> int:
        return next(
            (s for s, w in self.agent.local.workers.items() if w.worker_id == worker_id),
            self._deeds.slots.get(worker_id, -1),
        )

    def _why(self, ended: Exited, slot: int) -> tuple[WorkerError | None, str]:
        ranks = self.agent.formed.generation.ranks(self.config.node) if self.agent.formed.generation else {}
        return read_error(ended, node=self.config.node, slot=slot, rank=ranks.get(slot, -1), step=ended.step)

    def _failed(self, worker_id: int, slot: int, code: int) -> None:
        """The script of this worker has failed; its process has yet to exit."""
        process = self.pool.processes[worker_id]
        self.pool.give_grace(process)
        step, files = process.page.read().step, (process.error_file, process.log_file)
        ended = Exited(worker_id, code, None, step, *files, misuse=process.misuse, terminated=process.terminated)
        error, fingerprint = self._why(ended, slot)
        log.info("worker.failed", slot=slot, worker_id=worker_id, cause=ended.cause)
        self._turn(WorkerFailed(slot, worker_id, ended.cause, code, error, fingerprint, ended.step))

    def _exited(self, ended: Exited) -> None:
        slot = self._slot(ended.worker_id)
        error, fingerprint = self._why(ended, slot)
        log.info("worker.exited", slot=slot, worker_id=ended.worker_id, cause=ended.cause, late_s=ended.late_s)
        if record := late_exit(self.agent, slot, ended, error, time.time()):
            self._registry.put_exit_incident(record, ended.worker_id)
        said, signal = last_lines(ended.log_file) if ended.signal else (), ended.signal or ""
        how = ended.cause, ended.code, error, fingerprint, ended.step, said, signal, ended.stopped, ended.shortage
        self._turn(WorkerExited(slot, ended.worker_id, *how))

    def _read_orders(self) -> None:
        if (news := self._orders.news()) is None:
            return
        before, orders = news
        if (orders.draining, orders.drain_deadline_s) != (before.draining, before.drain_deadline_s):
            limit_s = orders.drain_deadline_s or float("inf")
            self._turn(Drain(orders.draining, time.monotonic() + limit_s) if orders.draining else Undrain())
        if orders.checkpoint > before.checkpoint:
            self._deeds.save_now(self.agent, "asked")
        if orders.sample_step != before.sample_step:
            self._deeds.sample(self.agent, orders.sample_step)

    # ── state machine ───────────────────────────────────────────────────────────────────────────────────────

    def _turn(self, event: Event) -> None:
        before = self.agent
        now_s = time.monotonic()
        self.agent, effects = step(before, event, now_s, random.random(), time.time())
        if not isinstance(event, Tick | Viewed | Progress):
            log.debug("event", what=event)
        if isinstance(event, WorkerReady) and any(s.worker_id == event.worker_id for s in self.agent.local.standbys):
            log.info("standby.ready", worker_id=event.worker_id)
        if self.agent.policy.managed and not before.policy.managed:
            log.info("job.managed", told_by="a worker" if isinstance(event, WorkerManaged) else "another agent")
        if self.agent.local.standbys != before.local.standbys:
            self._status_due_s = 0.0  # written on the next tick
        for effect in effects:
            self._deeds.do(effect, self.agent)
        self._ledger.turned(event, self.agent, now_s)
        self._ended = self._ended or self._deeds.left
        if self.agent.progress.settled > before.progress.settled:
            self._status_due_s = self._progress_due_s = 0.0  # a drained node waits for this
        if self.agent.formed.generation is not None and self.agent.formed.generation is not before.formed.generation:
            if stray := stray_checkpoints(before, self.agent, self._registry.saved_generation, time.time()):
                self._registry.put_stray_incident(stray)
            self.on_generation(self.agent, self.agent.formed.generation)
            self.changed.set()
        self._lookout.turned(before, self.agent, self._watch_scope.whole, now_s)

    def _incident(self, record: IncidentRecord) -> None:
        if not record.open:
            self.on_incident(record)

    # ── status ──────────────────────────────────────────────────────────────────────────────────────────────

    def _progress(self, *, leads: bool) -> ProgressRecord:
        agent = self.agent
        rows = self._step_times.with_parts(status.rank_rows(agent, self.pool))
        progress = with_stillness(
            status.progress(agent, self.pool, self._gauge, rows, self.saver.last),
            agent, self._watchman.known, self._spec.hang, time.monotonic(), time.time(),
        )  # fmt: skip
        return msgspec.structs.replace(
            progress,
            ledger=self._ledger.published(agent),
            slow_ranks=self._step_times.slow,
            **self._reports.fields(agent, leads=leads),
        )

    def _last_progress(self) -> ProgressRecord | None:
        return self._progress(leads=is_leader(self.agent)) if self.agent.formed.generation else None

    def _write_status(self) -> None:
        agent = self.agent
        progress = self._progress(leads=(leads := is_leader(agent)))
        times = self._ledger.ranks.record(agent, self._step_times.own_s, self._reports.samples, progress.ranks)
        if (doing := status.doing(agent, self._zygote_up or bool(self.pool.why_fresh))) != self._doing[0]:
            self._doing = doing, time.time()
        record = AgentStatus(
            pid=os.getpid(),
            incarnation=agent.policy.incarnation,
            job=self.config.job,
            node=self.config.node,
            phase=status.phase_of(agent),
            reason=self._pictures.unreadable or agent.lead.reason or self._reports.lost,
            leader=leads,
            generation=agent.formed.generation.number if agent.formed.generation else 0,
            etcd_ok=agent.etcd.connected,
            written_wall_s=time.time(),
            ranks=progress.ranks,
            progress=progress if agent.formed.generation else None,
            rank_times=times,
            standbys=sum(1 for s in agent.local.standbys if s.stage is Stage.READY),
            why_fresh=self.pool.why_fresh,
            preloaded=self._preloaded,
            doing=self._doing[0],
            doing_since_wall_s=self._doing[1],
            submitted_wall_s=self._submitted_wall_s,
            version=VERSION,
            exit_code=self._ended.code if self._ended else None,
        )
        self._status_file.write(record)
        now_s = time.monotonic()
        self._history.note(agent, progress, now_s, last=self._ended is not None)
        if self._ledger.ranks.due(agent, now_s, last=self._ended is not None, news=self._reports.news()):
            self._registry.put_ranks(times)
        if leads and agent.formed.generation and agent.etcd.connected and now_s >= self._progress_due_s:
            self._progress_due_s = now_s + PROGRESS_S
            self._registry.put_progress(progress, agent.etcd.view.generation_revision)
