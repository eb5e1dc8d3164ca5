"""One turn of an agent's recovery: the state that the parts of `recovery` work on, and the queries that they share."""

from __future__ import annotations

import math
from collections.abc import Mapping

from elastic.contract.records.job_records import Phase
from elastic.contract.records.reasons import Text
from elastic.contract.structs import replace
from elastic.recovery.facts.membership import NodeLimits
from elastic.recovery.facts.transitions import Stage, Trigger, after

from .effects import Effect, FindNewestSaved, Kill
from .events import NewestSaved
from .model import Agent, Worker

STALL_S = 1.0
"""Without a step for this long (or three step times), an expired lease counts as a loss: see `steps_advance`."""

ASK_AGAIN_S = 1.0
"""A request whose result the view does not show is made again after this long."""


class Turn:
    """One turn: the agent's new state, in its parts, and the effects so far."""

    def __init__(self, agent: Agent, now_s: float, jitter: float, wall_s: float) -> None:
        self.policy = agent.policy
        self.etcd = agent.etcd
        self.formed = agent.formed
        self.peers = agent.peers
        self.local = agent.local
        self.progress = agent.progress
        self.lead = agent.lead
        self.drain = agent.drain
        self.incidents = agent.incidents
        self.now_s = now_s
        self.jitter = jitter
        self.wall_s = wall_s
        self.effects: list[Effect] = []
        self.newest_saved: NewestSaved | None = None
        """The event of this turn. It is not kept: later there may be newer checkpoints."""

    @property
    def agent(self) -> Agent:
        return Agent(
            self.policy, self.etcd, self.formed, self.peers, self.local, self.progress, self.lead, self.drain,
            self.incidents,
        )  # fmt: skip

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def put(self, worker: Worker) -> None:
        self.local = replace(self.local, workers={**self.local.workers, worker.slot: worker})

    def find(self, slot: int, worker_id: int) -> Worker | None:
        """The worker with this id in `slot`; None if it has been replaced since."""
        worker = self.local.workers.get(slot)
        return worker if worker and worker.worker_id == worker_id else None

    def moved(self, worker: Worker, trigger: Trigger, deadline_s: float = math.inf) -> Worker:
        """In the stage that the table of transitions gives. Raises UnknownTransition."""
        return replace(worker, stage=after(worker.stage, trigger), since_s=self.now_s, deadline_s=deadline_s)

    def move(self, worker: Worker, trigger: Trigger, deadline_s: float = math.inf) -> None:
        self.put(self.moved(worker, trigger, deadline_s))

    def kill(self, worker: Worker, why: Text, graceful: bool = False) -> None:
        self.do(Kill(worker.slot, worker.worker_id, why, graceful))
        self.move(replace(worker, told_to_end=graceful), Trigger.KILL)

    def reaches(self, generation: int, step: int) -> None:
        """Record that a worker of this node has committed `step`, or received a state of it."""
        if generation and (generation, step) > self.progress.reached:
            self.progress = replace(self.progress, reached=(generation, step))

    def ask(self, effect: Effect, key: str) -> None:
        """Request an effect that only the view can confirm; a call after ASK_AGAIN_S repeats the request."""
        asked = self.etcd.asked.get(key)
        if asked is None or self.now_s - asked >= ASK_AGAIN_S:
            recent = {k: at for k, at in self.etcd.asked.items() if self.now_s - at < ASK_AGAIN_S}
            self.etcd = replace(self.etcd, asked={**recent, key: self.now_s})
            self.do(effect)

    def find_newest_saved(self, *, remote: bool) -> NewestSaved | None:
        """The newest checkpoint, in the turn that brings the answer; else None, and it is asked for."""
        saved = self.newest_saved
        if saved is not None and not saved.error:
            self.etcd = replace(self.etcd, asked={k: at for k, at in self.etcd.asked.items() if k != "newest saved"})
        if saved is None or remote > saved.remote:
            self.ask(FindNewestSaved(remote), "newest saved")
            return None
        return saved

    def new_worker_id(self) -> int:
        self.local = replace(self.local, spawned=self.local.spawned + 1)
        return self.local.spawned

    def standby(self, worker_id: int) -> Worker | None:
        return next((w for w in self.local.standbys if w.worker_id == worker_id), None)

    def put_standby(self, before: Worker, now: Worker) -> None:
        """Put `now` in the place of the standby `before`: a standby has no slot yet."""
        self.local = replace(self.local, standbys=tuple(now if w is before else w for w in self.local.standbys))

    def is_broken(self) -> bool:
        generation = self.formed.generation
        return generation is not None and self.formed.broken >= generation.number

    def is_over(self) -> bool:
        phase = self.etcd.view.state.phase
        return self.drain.leaving is not None or phase.over or phase is Phase.STOPPING

    def is_taken(self) -> bool:
        """Whether a later job has this one's name: this agent has missed the end of its own, as it did not reach etcd
        then or was starting. An earlier one comes from a backup of etcd."""
        spec, submitted_wall_s = self.etcd.spec, self.policy.submitted_wall_s
        return spec is not None and 0.0 < submitted_wall_s < spec.submitted_wall_s

    def my_ranks(self) -> Mapping[int, int]:
        """slot -> rank of our workers in the newest generation; empty if it goes on without this node."""
        generation = self.formed.generation
        if generation is None:
            return {}
        if self.formed.ranks[0] != generation.number:  # asked in every turn, and there may be thousands of places
            here = generation.node_of(self.policy.node, self.policy.incarnation) is not None
            ranks = generation.ranks(self.policy.node) if here else {}
            self.formed = replace(self.formed, ranks=(generation.number, ranks))
        return self.formed.ranks[1]

    def limits(self) -> NodeLimits:
        """How many nodes the job may have by its current spec (`elasticctl scale` changes it)."""
        spec = self.etcd.view.spec
        if spec is None:
            return self.policy.limits
        return NodeLimits(spec.spec.min_nodes, spec.spec.max_nodes, spec.spec.join_wait_s)

    def steps_advance(self) -> bool:
        if not self.policy.managed:
            return False
        if self.saved_here():
            return True  # all ranks have reached the end; a silent one has nothing left to do
        if self.local.suspicious_since_s is not None:
            return False  # a collective has failed here: the last step of this group is over, however short ago
        return self.now_s - self.progress.stepped_at_s < max(STALL_S, 3 * self.progress.step_s)

    def done_here(self) -> bool:
        """Whether all our workers have reached the end, and with them all other ranks."""
        generation, ranks = self.formed.generation, self.my_ranks()
        number = generation.number if generation else 0
        workers = [w for slot, w in self.local.workers.items() if slot in ranks]
        for worker in workers:
            if worker.stage is not Stage.DONE or worker.generation != number:
                return False
        return bool(workers)

    def saved_here(self) -> bool:
        """Whether they have, and what they have handed over is on disk. Until then a node that is lost costs the last
        checkpoint, and the others, which hold that state, form again and save it."""
        return not self.local.saving and self.done_here()
