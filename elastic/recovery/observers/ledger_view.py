"""What an agent's job does at this instant, as a bucket of the goodput ledger. Pure."""

from __future__ import annotations

from collections.abc import Collection

from elastic.contract.records.job_records import GenerationRecord, Phase
from elastic.contract.records.ledger import Bucket, Seen
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.model import Agent, Worker

_LEAVING = frozenset({Stage.RUNNING, Stage.STOPPING_AT_STEP, Stage.ABORTING, Stage.DONE})


def seen(agent: Agent) -> Seen:
    """Ranks of other nodes are taken to do what those of this node do: all ranks step together, or none does."""
    generation, policy, progress = agent.formed.generation, agent.policy, agent.etcd.view.progress
    ranks = generation.world_size if generation else policy.slots * policy.limits.min_nodes
    my_ranks = generation.ranks(policy.node) if generation else {}
    step = agent.progress.step
    # The leader may have seen a step sooner than this agent, which its ledger has then.
    if progress is not None and not (my_ranks and generation and progress.stepped_in < generation.number):
        step = max(step, progress.step)
    step = max([step, *(w.step for w in agent.local.workers.values() if w.stage is Stage.DONE)])
    broken = generation is not None and agent.formed.broken >= generation.number
    workers = [w for slot, w in agent.local.workers.items() if slot in my_ranks]
    return Seen(_bucket(agent, workers, broken), ranks, step, broken, policy.managed)


def seen_slot(agent: Agent, whole: Seen, slot: int) -> Seen:
    """One slot of this node alone. `whole`: what is seen of all. A slot without a rank waits for one."""
    generation = agent.formed.generation
    if generation is not None and slot not in generation.ranks(agent.policy.node):
        over = whole.bucket is Bucket.IDLE
        return Seen(Bucket.IDLE if over else Bucket.WAITING, 1, whole.step, False, whole.counted)
    worker = agent.local.workers.get(slot)
    bucket = _bucket(agent, [worker] if worker else [], whole.broken)
    if bucket is Bucket.STEPPING and worker is None:
        bucket = Bucket.FORM
    return Seen(bucket, 1, whole.step, whole.broken, whole.counted)


def _bucket(agent: Agent, workers: Collection[Worker], broken: bool) -> Bucket:
    generation, phase = agent.formed.generation, agent.etcd.view.state.phase
    if phase.over or phase is Phase.STOPPING:
        return Bucket.IDLE
    if agent.lead.below_min or agent.lead.halted:
        return Bucket.WAITING
    if generation is None:
        members = {*agent.etcd.view.members, agent.policy.node}  # this node's own key may not be there yet
        few = agent.etcd.view.has_all_members and len(members) < agent.policy.limits.min_nodes
        return Bucket.WAITING if few else Bucket.SETUP
    if broken:
        return Bucket.ABORT if any(w.stage in _LEAVING for w in workers) else Bucket.FORM
    return _forming(agent, generation, workers)


def _forming(agent: Agent, generation: GenerationRecord, workers: Collection[Worker]) -> Bucket:
    """Of a generation that has not failed."""
    stages = {w.stage for w in workers}
    progress = agent.etcd.view.progress
    if stages and stages <= {Stage.DONE}:
        return Bucket.IDLE
    if stages & {Stage.RUNNING, Stage.STOPPING_AT_STEP, Stage.DONE}:
        return Bucket.STEPPING
    if progress is not None and progress.stepped_in >= generation.number and not stages:
        return Bucket.STEPPING
    if generation.number == 1:
        return Bucket.SETUP
    return Bucket.SYNC if any(w.formed >= generation.number for w in workers) else Bucket.FORM
