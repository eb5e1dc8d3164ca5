"""Messages of workers that no decision depends on: snapshots for the saver, values that the script logs, and
samples of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from elastic.checkpoint.saving.saver import Saver
from elastic.contract.agent_files import AgentConfig
from elastic.contract.origin import Origin
from elastic.contract.records.job_records import SpecRecord
from elastic.contract.records.rank_records import Sample
from elastic.contract.records.reasons import Code, Text, reason
from elastic.contract.worker import messages
from elastic.recovery.machine.model import Agent, is_leader

from .gradient_file import GradientFile, by_layer
from .metric_files import MetricWriter, published

log = structlog.get_logger()


class WorkerReports:
    def __init__(
        self, config: AgentConfig, submitted: SpecRecord, saver: Saver, known_step: Callable[[], int | None]
    ) -> None:
        """`known_step`: the newest step on record."""
        self._known_step = known_step
        self.lost: Text = ""
        """For the status, if all state was lost for good."""
        spec = submitted.spec
        self._shared = spec.checkpoint.shared
        self._saver = saver
        self._gradients = GradientFile(Path(config.agent_dir), config.node, submitted.submitted_wall_s)
        self.samples = self._gradients.samples
        """The newest sample of each slot's gradients, in short."""
        self._told: dict[int, Sample] = {}
        self._logged_in = 0
        """The newest generation in which rank 0 was here and logged something."""
        self._resumed: dict[str, Any] = {}
        """Fields of the ProgressRecord."""
        folder = Path(spec.tensorboard) / spec.name if spec.tensorboard else None
        self.metrics = MetricWriter(folder)
        self._norms = MetricWriter(folder / f"gradients-{config.node}" if folder else None)

    def take(self, slot: int, worker_id: int, message: messages.FromWorker, agent: Agent) -> bool:
        """Whether `message` is one of these."""
        match message:
            case messages.NeedArena(nbytes=nbytes, request=request, optional=optional, guest=guest):
                self._saver.need_arena(slot, worker_id, nbytes, request=request, optional=optional, guest=guest)
            case messages.RequestSnapshot(generation=generation, saved=saved, own_parts=own_parts):
                self._saver.ask_kept(worker_id, generation, saved=saved, own_parts=own_parts)
            case messages.Filled():
                world_size = agent.formed.generation.world_size if agent.formed.generation else 0
                leads = is_leader(agent)
                self._saver.filled(slot, message, lead=leads or not self._shared, world_size=world_size, copies=leads)
            case messages.Logged(generation=generation, begun=begun, rows=rows, repeated=repeated):
                self._logged_in = max(self._logged_in, generation)
                self.metrics.take(generation, begun, [row.from_json() for row in rows], repeated=repeated)
            case messages.GradientSample():
                self._sampled(slot, message)
            case messages.Synced(step=step, origin=origin, source=source):
                if origin is Origin.SETUP:
                    self._started_over(message.generation, agent)
                if origin in (Origin.CHECKPOINT, Origin.SNAPSHOT):
                    self._resumed = {"resumed_step": step, "resumed_from": source}
                log.info("worker.synced", slot=slot, step=step, source=source)
                return False
            case _:
                return False
        return True

    def _sampled(self, slot: int, message: messages.GradientSample) -> None:
        sample = self._gradients.take(slot, message)
        if sample is None:
            return
        self._gradients.write()
        values: dict[str, float] = {}
        for layer, (own, mean, weight) in by_layer(sample.rows).items():
            named = (("gradient", own), ("mean gradient", mean), ("weight", weight))
            values |= {f"{name}/{layer}/rank {sample.rank}": norm for name, norm in named if norm is not None}
        row = messages.LoggedRow(step=sample.step, wall_s=sample.wall_s, values=values)
        self._norms.take(sample.generation, sample.step - 1, [row], repeated=False)

    def news(self) -> bool:
        """Whether there are samples that this was not called for yet."""
        told, self._told = self._told, dict(self.samples)
        return told != self._told

    def _started_over(self, generation: int, agent: Agent) -> None:
        """No rank had any state: expected at the start of a job, otherwise reported in the log and the status."""
        step = max(self._known_step() or 0, agent.progress.step)
        if generation > 1 and step > 0:
            self.lost = reason(Code.STATE_LOST, step=step)
            log.error("state.lost", generation=generation, step=step)

    def fields(self, agent: Agent, *, leads: bool) -> dict[str, Any]:
        """Of a ProgressRecord: what the job has gone on from, and the newest values that it has logged."""
        known = agent.etcd.view.progress if leads else None
        on_record = {"resumed_step": known.resumed_step, "resumed_from": known.resumed_from} if known else {}
        return {**on_record, **self._resumed, **self._logged(agent, leads=leads)}

    def _logged(self, agent: Agent, *, leads: bool) -> dict[str, dict[str, Any]]:
        """The newest values, if rank 0 is here; else none, or those on record from the leader, which it repeats."""
        if (
            agent.formed.generation is not None
            and self._logged_in == agent.formed.generation.number
            and self.metrics.newest
        ):
            return published(self.metrics.newest)
        known = agent.etcd.view.progress if leads else None
        return {"logged": known.logged, "logged_not_finite": known.logged_not_finite} if known is not None else {}

    def close(self) -> None:
        self.metrics.close()
        self._norms.close()
