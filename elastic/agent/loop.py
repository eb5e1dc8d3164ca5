"""The agent's loop: one thread owns the recovery state machine, feeds it events and carries out its effects."""

from __future__ import annotations

import os
import random
import selectors
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from elastic.agent.etcd.view_reader import ViewReader
from elastic.agent.etcd.watch_scope import WatchScope
from elastic.agent.etcd.writer import EtcdWriter
from elastic.agent.hangs.hang_detector import HangDetector
from elastic.agent.peers.peers import PeerMonitor, Peers
from elastic.agent.reports.incidents import apart, cut_short, late_exit, save_failed, stray_checkpoints
from elastic.agent.reports.logs import Trimmer
from elastic.agent.reports.reports import Reports, untested
from elastic.agent.workers.pool import Exited, Pool, PoolEvent, ProcessStarted, WorkerMessage
from elastic.agent.workers.worker_error import last_lines, read_error
from elastic.agent.workers.zygote import ZygoteUnfit
from elastic.checkpoint.saving.saver import Cut, Failed, NotKept, Outcome, Saved, Saver, versions
from elastic.contract.agent_files import AgentConfig, AgentOrders
from elastic.contract.keys import JobKeys
from elastic.contract.records import job_records
from elastic.contract.records.reasons import Code, Reason, Text, reason
from elastic.contract.worker import messages
from elastic.etcd.client import View
from elastic.recovery.machine import events
from elastic.recovery.machine.effects import Leave
from elastic.recovery.machine.model import Agent
from elastic.recovery.observers.watch_scope import watches_members
from elastic.recovery.recovery import step
from elastic.recovery.workers.exits import ends_too_early

from .effect_runner import EffectRunner
from .inbox import Inbox
from .saved_generations import NewestSavedFinder

REAP_S = 1.0
"""Between two looks for processes that workers have left behind."""
FINISH_SAVING_S = 30.0

log = structlog.get_logger()


class AgentLoop:
    """Construct, then call `run()`, which returns when the job is over on this node."""

    def __init__(
        self,
        config: AgentConfig,
        agent: Agent,
        inbox: Inbox,
        etcd_writer: EtcdWriter,
        peers: Peers,
        watch_scope: WatchScope,
        keys: JobKeys,
        spec: job_records.SpecRecord,
        pool: Pool,
        store_overfull: Callable[[int, int], Reason | None],
        on_incident: Callable[[job_records.IncidentRecord], None],
    ) -> None:
        """`store_overfull(generation, ranks)`: see `Stores.overfull`; `on_incident`: called with each record of one."""
        self.config, folder = config, Path(config.agent_dir)
        self.agent = agent
        self._etcd_writer = etcd_writer
        self._peer_monitor = PeerMonitor(peers)
        self._watch_scope = watch_scope
        self._view_reader = ViewReader(keys)
        self._spec = spec.spec
        self._selector = pool.selector
        self._inbox = inbox
        self._store_overfull = store_overfull
        self.pool = pool
        self._newest_saved = NewestSavedFinder(self._spec, inbox.post)
        self._effects = EffectRunner(
            config,
            self._spec,
            etcd_writer,
            self._newest_saved,
            self.pool,
            on_incident,
            lambda: self._reports.newest(self.agent),
        )
        self._hang_detector = HangDetector(self.pool, self._spec.hang, inbox.post, config.timeouts.group_s)
        self._trimmer = Trimmer(self._spec.log_limit_mb, str(folder / "agent.log"))
        self._orders = OrdersFile(folder)
        self._reap_due_s = 0.0
        for problem in untested(versions()):
            log.warning("versions.untested", problem=problem)
        self._ended: Leave | None = None
        self._entering: list[events.WorkerSaid] = []
        """Messages of workers that wait for a turn together: see `events.WorkersEnter`."""
        self._end_by_s = float("inf")  # set by SIGTERM: the monotonic instant until which this agent may drain
        self.saver = Saver(
            self._spec.checkpoint, config.job, self.pool.tell, self._save_ended,
            cut=lambda generation: cut_short(self.agent, generation),
            apart=lambda: apart(self.agent, etcd_writer.folder) or "", slots=config.slots,
            patience_s=max(FINISH_SAVING_S, self._spec.exit_timeout_s),
        )  # fmt: skip
        self._reports = Reports(
            config, spec, self.pool, etcd_writer, self._hang_detector, self._view_reader, self.saver
        )

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, env: dict[str, str]) -> int:
        """Returns the agent's exit code."""
        self._effects.env = env
        self._selector.register(self._inbox.readable, selectors.EVENT_READ, ("wake", 0))
        signal.signal(signal.SIGTERM, lambda *_: self._on_signal())
        signal.signal(signal.SIGHUP, lambda *_: self._inbox.post(events.Tick()))
        if self.saver.on:
            self._selector.register(self.saver.writer, selectors.EVENT_READ, ("writer", 0))
        self._turn(events.Start())
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
        self._newest_saved.close()
        self._reports.close(self.agent, self._ended)
        self.pool.close()
        self._reports.messages.close()
        self._selector.close()
        return self._ended.code

    def _wait(self, due_s: float) -> None:
        """Block until `due_s` at most, and handle descriptors that are readable."""
        until_s = min(due_s, self._view_reader.throttle.due_s)
        for key, _ in self._selector.select(max(0.0, until_s - time.monotonic())):
            self._readable(key.data)
        self._enter()

    def _save_ended(self, outcome: Outcome) -> None:
        """A failed checkpoint is recorded as an incident too, though it loses no step."""
        match outcome:
            case Saved(generation=generation, step=step):
                log.info("checkpoint.saved", step=step, path=outcome.path, seconds=round(outcome.seconds, 3))
                for note in outcome.notes:
                    log.warning("checkpoint.not_removed", why=note)
                self._inbox.post(events.CheckpointSaved(generation, step))
            case Failed(step=step, error=error, row=row):
                say = log.error if row.escalate else log.warning
                say("checkpoint.failed", step=step, what=outcome.what, error=str(error), in_a_row=row.count)
                began_step, began_wall_s = row.began
                incident = save_failed(self.agent, began_step, error, began_wall_s)
                self._etcd_writer.put_beside("save", incident, began_step)
            case Cut(step=step, why=why):
                log.warning("checkpoint.cut", step=step, why=why)  # the incident is that of the failure
            case NotKept(why=why):
                log.warning("snapshot.not_kept", why=str(why))

    def _look_at_saver(self) -> None:
        if (saving := self.saver.gets_on(time.monotonic())) != self.agent.local.saving:
            self._turn(events.Saving(saving))

    def _finish_saving(self) -> None:
        """Wait until what workers have handed over is on disk; of a job that has succeeded it is nowhere else."""
        soon_s = time.monotonic() + FINISH_SAVING_S
        latest_s = float("inf") if self.agent.etcd.view.state.phase is job_records.Phase.SUCCEEDED else soon_s
        self.saver.finish(
            lambda: min(latest_s, max(soon_s, self._end_by_s)), lambda: self._reports.write(self.agent, self._ended)
        )

    def _on_signal(self) -> None:
        self._end_by_s = min(self._end_by_s, time.monotonic() + self._spec.stop_grace_s)
        self._inbox.post(events.Tick())

    def _readable(self, key: tuple[str, int]) -> None:
        if key[0] == "wake":
            self._inbox.awake()
        elif key[0] == "writer":
            self.saver.readable()
        else:
            for event in self.pool.handle(key):
                self._on_pool_event(event)

    def _drain_inbox(self) -> None:
        newest: View | None = None
        for event in self._inbox.taken():
            if isinstance(event, View):
                if event.prefix == self._watch_scope.prefix:
                    newest = event  # views are complete: only the newest counts
            elif isinstance(event, events.WorkerSaid):
                self._heard(event)
            else:
                self._turn(event)
        self._enter()
        formed = self.agent.formed.generation is not None
        if view := self._view_reader.throttle.pick(newest, formed, time.monotonic()):
            self._viewed(view)

    def _viewed(self, view: View) -> None:
        try:
            job = self._view_reader.read(view, self.agent)
        except job_records.ProtocolVersionMismatch as error:
            log.error("protocol.unknown", error=str(error))
            self._ended = Leave(str(error), code=3)
            return
        if self._view_reader.lacks_base and not self._watch_scope.complete:
            self._watch_scope.read_base()
        if view.connected != self.agent.etcd.connected:
            log.info("etcd.connected" if view.connected else "etcd.lost")
        self._turn(events.Viewed(job, view.connected))
        self._look_around(time.monotonic())

    def _look_around(self, now_s: float) -> None:
        if self.agent.etcd.connected:
            self._watch_scope.choose(watches_members(self.agent, now_s, self._watch_scope.narrow_for_s(now_s)), now_s)

    def _on_tick(self, now_s: float) -> None:
        for pool_event in self.pool.tick():
            self._on_pool_event(pool_event)
        self.saver.answer()
        self._look_at_saver()
        beats = self.pool.beats()
        progress = self._hang_detector.look(self.agent, now_s, beats)
        self._reports.looked(beats, now_s)
        self._read_orders()
        drain = self.agent.drain
        if self._end_by_s < (drain.drain_deadline_s if drain.draining is not None else float("inf")):
            self._turn(events.Drain(drain.draining or reason(Code.AGENT_ENDED), self._end_by_s))
        self._turn(progress or events.Tick())
        self._check_store()
        self._look_around(now_s)
        if self._reports.due(self.agent, now_s):
            if now_s >= self._reap_due_s:
                self._reap_due_s = now_s + REAP_S
                self.pool.reap()
            self._trimmer.trim_all(process.log_file for process in self.pool.processes.values())
            self._reports.write(self.agent, self._ended)

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def _on_pool_event(self, event: PoolEvent) -> None:
        if not (isinstance(event, WorkerMessage) and isinstance(event.message, events.ENTERING)):
            self._enter()
        match event:
            case messages.ZygoteReady(seconds=seconds, problems=problems, preloaded=preloaded):
                self._reports.zygote_is_up(preloaded)
                log.info("zygote.up", seconds=round(seconds, 3), preloaded=preloaded)
                for problem in problems:
                    log.warning("preload.failed", problem=problem)
            case ZygoteUnfit(why, preload):
                log.error("zygote.unfit", why=why, next="a zygote without preload" if preload else "new processes")
                self._reports.hurry()
            case ProcessStarted(worker_id):
                self._turn(events.WorkerStarted(self._slot(worker_id), worker_id))
            case Exited():
                self._exited(event)
            case WorkerMessage(worker_id, message):
                slot = self._slot(worker_id)
                if isinstance(message, messages.ScriptEnded):
                    if message.code or ends_too_early(self.agent, slot, worker_id):
                        self._failed(worker_id, slot, message.code)
                elif not self._reports.messages.take(slot, worker_id, message, self.agent):
                    if isinstance(message, messages.Done):
                        self._look_at_saver()
                    self._heard(events.WorkerSaid(slot, worker_id, message))

    def _heard(self, said: events.WorkerSaid) -> None:
        if isinstance(said.message, events.ENTERING):
            self._entering.append(said)
        else:
            self._turn(said)

    def _enter(self) -> None:
        entering, self._entering = self._entering, []
        if entering:
            self._turn(entering[0] if len(entering) == 1 else events.WorkersEnter(tuple(entering)))

    def _slot(self, worker_id: int) -> int:
        return next(
            (s for s, w in self.agent.local.workers.items() if w.worker_id == worker_id),
            self._effects.slots.get(worker_id, -1),
        )

    def _why(self, ended: Exited, slot: int) -> tuple[Text, job_records.WorkerError | None, str]:
        ranks = self.agent.formed.generation.ranks(self.config.node) if self.agent.formed.generation else {}
        return read_error(ended, node=self.config.node, slot=slot, rank=ranks.get(slot, -1), step=ended.step)

    def _failed(self, worker_id: int, slot: int, code: int) -> None:
        """The script of this worker has failed; its process has yet to exit."""
        process = self.pool.processes[worker_id]
        self.pool.give_grace(process)
        step, files = process.page.read().step, (process.error_file, process.log_file)
        ended = Exited(worker_id, code, None, step, *files, misuse=process.misuse, terminated=process.terminated)
        cause, error, fingerprint = self._why(ended, slot)
        log.info("worker.failed", slot=slot, worker_id=worker_id, cause=ended.cause)
        self._turn(events.WorkerFailed(slot, worker_id, cause, code, error, fingerprint, ended.step))

    def _exited(self, ended: Exited) -> None:
        slot = self._slot(ended.worker_id)
        cause, error, fingerprint = self._why(ended, slot)
        log.info("worker.exited", slot=slot, worker_id=ended.worker_id, cause=ended.cause, late_s=ended.late_s)
        if record := late_exit(self.agent, slot, ended, cause, error, time.time()):
            self._etcd_writer.put_beside("exit", record, ended.worker_id)
        said, signal = last_lines(ended.log_file) if ended.signal else (), ended.signal or ""
        how = cause, ended.code, error, fingerprint, ended.step, said, signal, ended.stopped, ended.shortage
        self._turn(events.WorkerExited(slot, ended.worker_id, *how, ended.undone))

    def _read_orders(self) -> None:
        if (news := self._orders.news()) is None:
            return
        before, orders = news
        if (orders.draining, orders.drain_deadline_s) != (before.draining, before.drain_deadline_s):
            limit_s = orders.drain_deadline_s or float("inf")
            self._turn(
                events.Drain(orders.draining, time.monotonic() + limit_s) if orders.draining else events.Undrain()
            )
        if orders.checkpoint > before.checkpoint:
            self._effects.save_now(self.agent)
        if orders.sample_step != before.sample_step:
            self._effects.sample(self.agent, orders.sample_step)

    # ── state machine ───────────────────────────────────────────────────────────────────────────────────────

    def _turn(self, event: events.Event) -> None:
        self._enter()  # it came first
        before = self.agent
        now_s = time.monotonic()
        self.agent, effects = step(before, event, now_s, random.random(), time.time())
        for effect in effects:
            self._effects.do(effect, self.agent)
        self._reports.turned(before, self.agent, event, now_s)
        self._ended = self._ended or self._effects.left
        if stray := stray_checkpoints(before, self.agent, self._etcd_writer.saved_generation, time.time()):
            self._etcd_writer.put_beside("stray", stray)
        self._peer_monitor.after_turn(before, self.agent, self._watch_scope.complete, now_s)

    def _check_store(self) -> None:
        generation, broken = self.agent.formed.generation, self.agent.formed.broken
        if generation is None or broken >= generation.number:
            return
        if why := self._store_overfull(generation.number, generation.world_size):
            self._turn(events.StoreClosed(generation.number, why))


_ORDERS = msgspec.json.Decoder(AgentOrders)


class OrdersFile:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "orders.json"
        self._version = (0, 0, 0)
        self._orders = AgentOrders()

    def news(self) -> tuple[AgentOrders, AgentOrders] | None:
        """The previous and the current orders, if the file has changed since the last call. A file that cannot be read
        is logged, and read again the next time."""
        try:
            written = os.stat(self._path)
            version = (written.st_ino, written.st_mtime_ns, written.st_size)
            if version == self._version:
                return None
            orders = _ORDERS.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
            log.warning("orders.unreadable", error=str(error))
            return None
        before, self._orders, self._version = self._orders, orders, version
        return before, orders
