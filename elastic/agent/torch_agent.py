"""The agent in the terms of torch.distributed.elastic: its WorkerSpec, its rendezvous, its events and metrics.

`SimpleElasticAgent.run` is torch's; `_invoke_run` is overridden: an event-driven loop in place of the stock one, which
polls, and stops and starts every worker on each change. What only the stock loop calls is not there.
"""

from __future__ import annotations

import signal
from typing import Any, NoReturn

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
from torch.distributed.elastic.rendezvous import RendezvousHandler

from elastic.contract.records.job_records import IncidentRecord, Phase
from elastic.util.processes import signal_number

from .loop import AgentLoop

METRICS = "elasticd"


def _only_in_torchs_loop(*_: Any, **__: Any) -> NoReturn:
    """Called by torch's own `_invoke_run` alone."""
    raise NotImplementedError


class LoopRendezvous(RendezvousHandler):
    """Names the job in torch's events. The loop itself forms the generations."""

    def __init__(self, job: str) -> None:
        self._job = job

    def get_backend(self) -> str:
        return "elastic"

    def get_run_id(self) -> str:
        return self._job

    next_rendezvous = is_closed = set_closed = num_nodes_waiting = shutdown = _only_in_torchs_loop


class NodeAgent(SimpleElasticAgent):
    """One job on this node, run by torch's own `SimpleElasticAgent.run`."""

    def __init__(self, loop: AgentLoop, env: dict[str, str], script: tuple[str, ...]) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=loop.config.slots,
            rdzv_handler=LoopRendezvous(loop.config.job),
            entrypoint=script[0],
            args=script[1:],
            max_restarts=loop.agent.policy.spec.restarts.budget,
            monitor_interval=loop.config.timeouts.beat_s,
        )
        super().__init__(spec)
        self.loop = loop
        self._env = env

    _start_workers = _stop_workers = _monitor_workers = _only_in_torchs_loop

    def _invoke_run(self, role: str = "default") -> RunResult:
        put_metric("agent.starts", 1, METRICS)
        self.exit_code = self.loop.run(self._env)
        self._name_workers(self._worker_group)
        return self._result()

    def _name_workers(self, group: WorkerGroup) -> None:
        """Tell torch the workers and their ranks in the newest generation, which its events name."""
        agent = self.loop.agent
        if (generation := agent.formed.generation) is None:
            return
        group.group_rank = generation.at(agent.policy.node)  # type: ignore[assignment]
        group.group_world_size = len(generation.nodes)  # type: ignore[assignment]
        group.workers = [
            Worker(
                local_rank=slot,
                global_rank=rank,
                role_rank=rank,
                world_size=generation.world_size,
                role_world_size=generation.world_size,
            )
            for slot, rank in generation.ranks(agent.policy.node).items()
        ]

    def _result(self) -> RunResult:
        phase = self.loop.agent.etcd.view.state.phase
        if phase is Phase.FAILED:
            return RunResult(WorkerState.FAILED, failures=self._failures())
        state = WorkerState.SUCCEEDED if phase is Phase.SUCCEEDED else WorkerState.STOPPED
        return RunResult(state, return_values={w.global_rank: None for w in self._worker_group.workers})

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


def count(incident: IncidentRecord) -> None:
    """Put an incident that is over into torch's metrics."""
    if incident.open:
        return
    put_metric("recovery.count", 1, METRICS)
    if (stepping_s := incident.timeline_s.get("stepping")) is not None:
        put_metric("recovery.duration.ms", int(stepping_s * 1000), METRICS)
    if incident.steps_lost is not None:
        put_metric("recovery.steps_lost", incident.steps_lost, METRICS)


def run(agent: NodeAgent) -> int:
    """Run until the job is over on this node. Returns the agent's exit code."""
    try:
        agent.run("default")
    except SignalException:
        return 1
    return agent.exit_code
