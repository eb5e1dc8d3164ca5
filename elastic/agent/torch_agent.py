"""The agent in the terms of torch.distributed.elastic: its WorkerSpec, its rendezvous, its events and metrics.

`SimpleElasticAgent.run` is torch's; `_invoke_run` is overridden: an event-driven loop in place of the stock one, which
polls, and stops and starts every worker on each change.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic.agent.peers.store import Stores
from elastic.contract.records.job_records import GenerationRecord, IncidentRecord, Phase
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.events import StoreClosed
from elastic.recovery.machine.model import Agent
from elastic.util.processes import signal_number

from .loop import AgentLoop

NEXT_S = 600.0
METRICS = "elasticd"

_STATES = {
    Stage.STARTING: WorkerState.INIT,
    Stage.READY: WorkerState.INIT,
    Stage.FORMING: WorkerState.INIT,
    Stage.RUNNING: WorkerState.HEALTHY,
    Stage.STOPPING_AT_STEP: WorkerState.HEALTHY,
    Stage.ABORTING: WorkerState.UNHEALTHY,
    Stage.KILLED: WorkerState.STOPPED,
    Stage.GONE: WorkerState.STOPPED,
    Stage.DONE: WorkerState.SUCCEEDED,
}


class LoopRendezvous(RendezvousHandler):
    """The loop's current generation, in torch's terms. The loop itself never waits for a rendezvous."""

    def __init__(self, loop: AgentLoop, stores: Stores) -> None:
        self._loop = loop
        self._stores = stores

    def get_backend(self) -> str:
        return "elastic"

    def get_run_id(self) -> str:
        return self._loop.config.job

    def next_rendezvous(self) -> RendezvousInfo:
        """The newest generation, if this node is a member of it, else the first one that it is a member of. Raises
        RendezvousTimeoutError after NEXT_S seconds without one, RendezvousClosedError when the job is over."""
        policy, deadline_s = self._loop.agent.policy, time.monotonic() + NEXT_S
        while not self.is_closed():
            self._loop.changed.clear()
            generation = self._loop.agent.formed.generation
            if generation is not None and generation.node_of(policy.node, policy.incarnation) is not None:
                return self._info(generation)
            if not self._loop.changed.wait(max(0.0, deadline_s - time.monotonic())):
                raise RendezvousTimeoutError(f"no generation with node {policy.node} within {NEXT_S:g} s")
        raise RendezvousClosedError(f"job {self.get_run_id()} is over")

    def _info(self, generation: GenerationRecord) -> RendezvousInfo:
        node = self._loop.agent.policy.node
        rank = next(i for i, place in enumerate(generation.nodes) if place.node == node)
        where = RendezvousStoreInfo(generation.store_host, generation.store_port)
        return RendezvousInfo(self._stores.client(generation), rank, len(generation.nodes), where)

    def is_closed(self) -> bool:
        return self._loop.agent.etcd.view.state.phase.over

    def set_closed(self) -> None:
        """Does nothing: whether the job is over is part of its state, and no single node decides it."""

    def num_nodes_waiting(self) -> int:
        agent = self._loop.agent
        placed = {place.node for place in agent.formed.generation.nodes} if agent.formed.generation else set()
        return sum(1 for node, m in agent.etcd.view.members.items() if m.record.ready and node not in placed)

    def shutdown(self) -> bool:
        return True


class NodeAgent(SimpleElasticAgent):
    """One job on this node, run by torch's own `SimpleElasticAgent.run`."""

    def __init__(self, loop: AgentLoop, stores: Stores, env: dict[str, str], script: tuple[str, ...]) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=loop.config.slots,
            rdzv_handler=LoopRendezvous(loop, stores),
            entrypoint=script[0],
            args=script[1:],
            max_restarts=loop.agent.policy.spec.restarts.budget,
            monitor_interval=loop.config.timeouts.beat_s,
        )
        super().__init__(spec)
        self.loop = loop
        self._env = env
        self._stores = stores
        loop.on_generation = self._adopted
        loop.on_incident = self._metered
        loop.on_tick = self._store_closed

    def _invoke_run(self, role: str = "default") -> RunResult:
        put_metric("agent.starts", 1, METRICS)
        self.exit_code = self.loop.run(self._env)
        return self._monitor_workers(self._worker_group)

    def _adopted(self, agent: Agent, generation: GenerationRecord) -> None:
        """Update torch's record of the workers and their ranks, which its events use."""
        group, ranks = self._worker_group, generation.ranks(agent.policy.node)
        places = [place.node for place in generation.nodes]
        group.group_rank = places.index(agent.policy.node) if ranks else None  # type: ignore[assignment]
        group.group_world_size = len(places)  # type: ignore[assignment]
        group.workers = [
            Worker(
                local_rank=slot,
                global_rank=rank,
                role_rank=rank,
                world_size=generation.world_size,
                role_world_size=generation.world_size,
            )
            for slot, rank in ranks.items()
        ]

    def _store_closed(self, agent: Agent) -> StoreClosed | None:
        generation = agent.formed.generation
        if generation is None or agent.formed.broken >= generation.number:
            return None
        why = self._stores.overfull(generation.number, generation.world_size)
        return StoreClosed(generation.number, why) if why else None

    def _metered(self, incident: IncidentRecord) -> None:
        put_metric("recovery.count", 1, METRICS)
        if (stepping_s := incident.timeline_s.get("stepping")) is not None:
            put_metric("recovery.duration.ms", int(stepping_s * 1000), METRICS)
        if incident.steps_lost is not None:
            put_metric("recovery.steps_lost", incident.steps_lost, METRICS)

    # ── torch's hooks ───────────────────────────────────────────────────────────────────────────────────────

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Returns slot -> pid of the workers, which the loop starts by itself."""
        processes = self.loop.pool.processes
        return {
            slot: processes[w.worker_id].pid
            for slot, w in self.loop.agent.local.workers.items()
            if w.worker_id in processes
        }

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        for worker_id in tuple(self.loop.pool.processes):
            self.loop.pool.kill(worker_id, graceful=True)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        agent = self.loop.agent
        phase = agent.etcd.view.state.phase
        ranks = {w.global_rank for w in worker_group.workers}
        if phase is Phase.SUCCEEDED:
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        if phase is Phase.FAILED:
            return RunResult(WorkerState.FAILED, failures=self._failures())
        states = {_STATES[w.stage] for w in agent.local.workers.values()}
        state = WorkerState.HEALTHY if states <= {WorkerState.HEALTHY, WorkerState.SUCCEEDED} else WorkerState.STOPPED
        return RunResult(state, return_values=dict.fromkeys(ranks))

    def _failures(self) -> dict[int, ProcessFailure]:
        error = self.loop.agent.etcd.view.state.error
        if error is None or error.node != self.loop.agent.policy.node:
            return {}
        code = error.exit_code or 1
        if error.signal and error.exit_code is None:
            code = -signal_number(error.signal)
        failure = ProcessFailure(local_rank=error.slot, pid=0, exitcode=code, error_file="")
        failure.error_file_data = {"message": error.message}
        return {error.rank: failure}

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.loop.pool.close()


def run(agent: NodeAgent) -> int:
    """Run until the job is over on this node. Returns the agent's exit code."""
    try:
        agent.run("default")
    except SignalException:
        return 1
    return agent.exit_code
