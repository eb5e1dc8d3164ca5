"""Carries out the state machine's effects: forks, messages and kills workers, and writes records to etcd."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from elastic.agent.etcd.writer import EtcdWriter
from elastic.agent.workers.pool import Pool
from elastic.contract.agent_files import AgentConfig
from elastic.contract.job.spec import JobSpec
from elastic.contract.records.job_records import IncidentRecord, ProgressRecord
from elastic.contract.records.reasons import Code, codes
from elastic.contract.worker import messages
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine import effects
from elastic.recovery.machine.model import Agent

from .saved_generations import NewestSavedFinder
from .workers import worker_env

log = structlog.get_logger()


class EffectRunner:
    """Nothing here blocks: the outcome of an effect arrives later, as an event."""

    def __init__(
        self,
        config: AgentConfig,
        spec: JobSpec,
        etcd_writer: EtcdWriter,
        newest_saved: NewestSavedFinder,
        pool: Pool,
        on_incident: Callable[[IncidentRecord], None],
        progress: Callable[[], ProgressRecord | None],
    ) -> None:
        """`progress`: what the job has reached at this instant; None: nothing is known."""
        self._on_incident, self._progress = on_incident, progress
        self._config = config
        self._spec = spec
        self._etcd_writer, self._newest_saved = etcd_writer, newest_saved
        self._pool = pool
        self._workdir = worker_env.workdir(spec)
        self.env: Mapping[str, str] = {}
        """The environment that those of the workers are based on."""
        self.slots: dict[int, int] = {}
        """worker id -> slot of every process ever forked here; -1: a standby."""
        self.left: effects.Leave | None = None

    def do(self, effect: effects.Effect, agent: Agent) -> None:
        """`agent`: its state after the event that caused the effect."""
        match effect:
            case effects.Send(slot, worker_id, message):
                if isinstance(message, messages.Assign):
                    log.info("standby.assigned", slot=slot, worker_id=worker_id)
                    self.slots[worker_id] = slot
                self._pool.tell(worker_id, message)
            case effects.ForkWorker() | effects.ForkPlain():
                self._fork(effect, agent)
            case effects.Kill(slot, worker_id, why, graceful):
                log.info("worker.kill", slot=slot, worker_id=worker_id, why=why, graceful=graceful)
                self._pool.kill(worker_id, graceful, late=Code.LATE_END in codes(why))
            case effects.SaveNow(reason, stop):
                log.info("checkpoint.wanted", reason=reason, stop=stop)
                self.save_now(agent, stop)
            case effects.Leave():
                log.info("agent.leaves", reason=effect.reason)
                self.left = effect
            case effects.FindNewestSaved(remote):
                self._newest_saved.find(remote=remote)
            case _:
                self._etcd_writer.do(effect, agent.etcd.view, self._progress)
        if isinstance(effect, effects.PutIncident):
            record = effect.record
            self._on_incident(record)
            log.info("incident", first=effect.account.first, **record.in_words())

    def _fork(self, effect: effects.ForkWorker | effects.ForkPlain, agent: Agent) -> None:
        slot, worker_id, spec = effect.slot, effect.worker_id, self._spec
        files = worker_env.files(self._config, slot, worker_id, agent.policy.incarnation)
        generation = effect.generation if isinstance(effect, effects.ForkPlain) else agent.formed.generation
        env = worker_env.worker(
            self._config, spec, self.env, slot=slot, error_file=files.error_file, generation=generation
        )
        self.slots[worker_id] = slot
        self._pool.fork(worker_id, slot, env, worker_env.argv(spec), self._workdir, files.log_file)

    def sample(self, agent: Agent, step: int) -> None:
        for worker in agent.local.workers.values():
            if worker.stage is Stage.RUNNING:
                self._pool.tell(worker.worker_id, messages.SampleGradients(at_step=step))

    def save_now(self, agent: Agent, stop: bool = False) -> None:
        for worker in agent.local.workers.values():
            self._pool.tell(worker.worker_id, messages.SaveSoon(stop=stop))
