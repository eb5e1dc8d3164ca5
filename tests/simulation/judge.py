"""What must hold, whatever happens. Called at every event; raises Broken with the promise that was not kept."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from support.incidents import on_record

from elastic.contract.records.job_records import GenerationRecord, IncidentRecord, JobState, Phase
from elastic.contract.records.reasons import Code, codes
from elastic.contract.worker import messages
from elastic.recovery.facts.restart_budget import BAD_NODE_FAILURES
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.effects import Effect, Kill, Publish, PutState, Send
from elastic.recovery.machine.events import Event, PeerDead
from elastic.recovery.machine.model import Agent
from elastic.worker.data.sharding import BatchPlan, rank_range
from elastic.worker.state.state_source import Choice, Version

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Node
    from .training import Group, Worker


class Broken(AssertionError):
    """A promise was not kept."""

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(f"{promise}: {detail}")


SAMPLES, BATCH, PER_EPOCH = 10, 4, 3
"""The data: the last batch of each epoch is a short one."""

SLACK_S = 5.0
GONE = ("lost", "unreachable")
REJOIN_S = 1.0
"""Who has a new lease only since then may have come a moment too late."""


class Judge:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.only_etcd = False
        """Nothing but etcd fails in this history: training must not notice (G4)."""
        self.obedient = False
        """Every worker does in this history what it is told."""
        self.chains: dict[Version, int] = {}
        self.newest: dict[int, int] = {}
        """Generation -> newest step committed in it."""
        self.plans: dict[int, GenerationRecord] = {}
        self.stands: tuple[int, GenerationRecord | None] = (0, None)
        """The etcd cluster, and the generation in it."""
        self.commits = 0
        self.steps: dict[int, set[int]] = {}
        """Step -> generations that have committed it."""
        self.top: Version = (0, 0)
        self._first_etcd = cluster.etcd.cluster
        self.told: dict[str, dict[int, int]] = {}
        """Agent -> life of a worker -> newest generation that it was told to form."""
        self.proven: dict[str, set[tuple[str, str]]] = {}
        """Agent -> (node, incarnation) of the agents that it was told are dead."""
        self.condemned: set[int] = set()
        """Chains of states that the job went back from."""
        self._killed: list[tuple[str, str, int, int]] = []
        """(node, incarnation of its agent, generation, slot) of each worker that was killed from outside."""
        self._leaseless: dict[str, float] = {}
        """Node -> when its agent last had no lease."""

    # ── the machines ────────────────────────────────────────────────────────────────────────────────────────

    def turned(self, node: Node, event: Event, before: Agent, after: Agent, effects: tuple[Effect, ...]) -> None:
        self._deaths(node, event, after)
        self._orders(node, effects)
        self._saved(after, effects)
        if not (before.etcd.joined and after.etcd.joined):
            self._leaseless[node.name] = self._cluster.clock.now_s
        if after.formed.generation is not before.formed.generation:
            self._generation(node, before.formed.generation, after.formed.generation)
        steps = self._cluster.training.steps
        done = (bool(steps) and self.top[1] >= steps) or any(
            w.stage is Stage.DONE for w in before.local.workers.values()
        )
        if self.only_etcd and self.commits and not after.etcd.view.state.phase.over and not done:
            for effect in effects:
                match effect:
                    case Send(message=messages.AbortGroup(generation=number)):
                        disturbs = number in self.newest and not self._left_as_planned(number)
                    case Publish():
                        number = after.formed.generation.number if after.formed.generation else 0
                        disturbs = number in self.newest and _drops(after, effect)
                    case _:
                        disturbs = isinstance(effect, Kill)
                if disturbs:
                    raise Broken("G4", f"{node.name} disturbs training while only etcd fails: {effect}")

    def _left_as_planned(self, number: int) -> bool:
        """Whether generation `number` was left by plan. An agent that learns of that late, with the generation after
        it, aborts a step that can no longer be committed: the other ranks take no part in it."""
        following = min((later for later in self.plans if later > number), default=None)
        return following is not None and self.plans[following].at_step is not None

    def _saved(self, agent: Agent, effects: tuple[Effect, ...]) -> None:
        """The job succeeds when its last checkpoint is on disk."""
        if not any(isinstance(e, PutState) and e.state.phase is Phase.SUCCEEDED for e in effects):
            return
        there = {m.record.incarnation for m in agent.etcd.view.members.values()}
        newest, held = self._cluster.record(), agent.formed.generation
        current = newest is not None and held is not None and newest.number == held.number
        for node in self._cluster.nodes:
            if current and node.incarnation in there and node.agent is not None and node.saves:
                raise Broken("G7", f"the job succeeds while {node.name} saves the last checkpoint")

    def _deaths(self, node: Node, event: Event, after: Agent) -> None:
        """What is proven is not forgotten while it matters: as long as the dead have a place or a member record."""
        proven = self.proven.setdefault(node.incarnation, set())
        if isinstance(event, PeerDead) and (event.node, event.incarnation) not in after.peers.falsely_suspected:
            proven.add((event.node, event.incarnation))
        if not proven:
            return
        proven -= after.peers.falsely_suspected
        places = after.formed.generation.nodes if after.formed.generation else ()
        matter = {m.id for m in after.etcd.view.members.values()} | {(p.node, p.incarnation) for p in places}
        proven &= matter
        for dead in proven - after.peers.dead:
            raise Broken("G2", f"{node.name} has forgotten that {dead} is dead")

    def _orders(self, node: Node, effects: tuple[Effect, ...]) -> None:
        """A worker is told once to form a generation, and never an older one after a newer one."""
        told = self.told.setdefault(node.incarnation, {})
        for effect in effects:
            match effect:
                case Send(worker_id=worker_id, message=messages.Form(generation=number)):
                    if number <= told.get(worker_id, 0):
                        raise Broken(
                            "one order", f"{node.name} has worker {worker_id} form {number} after {told[worker_id]}"
                        )
                    told[worker_id] = number
                case Kill(worker_id=worker_id, why=why):
                    worker = node.processes.get(worker_id)
                    if Code.LATE_ABORT in codes(why) and worker and self.obedient:
                        raise Broken("G1", f"{worker.name} is killed though it was about to abort: {why}")

    def _generation(self, node: Node, old: GenerationRecord | None, new: GenerationRecord | None) -> None:
        if new is None or (old is not None and new.number <= old.number):
            raise Broken("generations grow", f"{node.name} goes from {old} to {new}")
        if self.plans.get(new.number, new) != new:
            if not self._forgotten(new.number):
                raise Broken("one plan per generation", f"{node.name} has {new}, others {self.plans[new.number]}")
            self._forget(new.number)
        self.plans[new.number] = new

    def _forgotten(self, number: int) -> bool:
        """etcd was wiped, and no agent lives that knew of that generation. No step was done in it, and none can be; or
        nothing is left of its steps, nor of those of later generations: no process and no checkpoint."""
        cluster = self._cluster
        held = [node.agent.formed.generation for node in cluster.nodes if node.agent is not None]
        if self.plans[number] in held or number not in self.newest:
            return self.plans[number] not in held
        left = [w.state()[0][0] for node in cluster.nodes for w in node.processes.values() if w.established]
        left += [generation.number - 1 for generation in held if generation is not None]
        return cluster.etcd.cluster != self._first_etcd and max([*left, cluster.training.saved_in]) < number

    def _forget(self, number: int) -> None:
        self.chains = {version: chain for version, chain in self.chains.items() if version[0] < number}
        self.newest = {of: step for of, step in self.newest.items() if of < number}
        self.plans = {of: plan for of, plan in self.plans.items() if of < number}

    def stored(self) -> None:
        """Something may have been written to etcd."""
        cluster = self._cluster
        old = self.stands[1] if self.stands[0] == cluster.etcd.cluster else None  # else it was wiped
        new = cluster.record()
        self.stands = cluster.etcd.cluster, new
        if new is not None and new.restore == "snapshot" and (old is None or old.number < new.number):
            self.condemned |= cluster.training.spoiled
        self._set_aside()
        if old is not None and (new is None or new.number < old.number):
            raise Broken("generations grow", f"in etcd {new} replaces {old}")
        if old is not None and new is not None and new.number == old.number and new != old:
            raise Broken("one plan per generation", f"in etcd {new} replaces {old}")
        if old is not None and new is not None and old.number < new.number:
            _ranks_kept(old, new)

    def _set_aside(self) -> None:
        """No node is set aside for what happened elsewhere."""
        state = self._cluster.state()
        for name in state.excluded_nodes:
            if name in state.no_agent and name in self._cluster.starved:
                continue
            if self._cluster.deaths[name] < BAD_NODE_FAILURES:
                raise Broken("blame", f"{name} is set aside after {self._cluster.deaths[name]} deaths there")

    # ── training ────────────────────────────────────────────────────────────────────────────────────────────

    def chosen(self, group: Group, choice: Choice) -> None:
        """A generation has chosen the state that it goes on from."""
        version = choice.version if choice.origin != "setup" else (0, 0)
        if choice.origin == "live" and not group.ranks[choice.source].whole:
            raise Broken("G1", f"generation {group.generation} goes on from half a state, of rank {choice.source}")
        for rank, worker in group.ranks.items():
            if rank != choice.source and rank not in choice.needs and not worker.whole:
                raise Broken("G1", f"rank {rank} of generation {group.generation} goes on with half a state")
        if choice.origin == "live" and group.ranks[choice.source].chain in self.condemned:
            raise Broken("rollback", f"generation {group.generation} goes on from a state that was gone back from")
        if group.restore != "newest":
            return
        for node in self._cluster.nodes:
            for worker in node.processes.values():
                held = worker.state()[0]
                if not (worker.whole and worker.established and held[1]) or held <= version:
                    continue
                if worker.group is group or not self._unreachable(worker, group):
                    raise Broken(
                        "G1",
                        f"generation {group.generation} goes on from {choice.origin} {version}; "
                        f"{worker.name} has {held}",
                    )

    def _unreachable(self, worker: Worker, group: Group) -> bool:
        """A newer state outside may be left behind when nobody could get it, or its node was about to leave."""
        cluster, node = self._cluster, worker.node
        if worker.stopped or worker.deaf or node.agent is None or node.name in cluster.troubled:
            return True
        if cluster.clock.now_s - self._leaseless[node.name] < REJOIN_S:
            return True
        return node.agent.drain.leaving is not None or cluster.scaled

    def committed(self, group: Group) -> None:
        """A step is committed on some rank of `group`."""
        version, number, step = group.version, group.generation, group.version[1]
        if self.chains.setdefault(version, group.chain) != group.chain:
            raise Broken("G9", f"two histories lead to version {version}")
        before = self.newest.get(number)
        if before is not None and step != before + 1:
            raise Broken("G7", f"generation {number} commits step {step} after {before}")
        if before is not None and number < max(self.newest) and not self._cut_off(group):
            raise Broken("G9", f"generation {number} commits step {step}, generation {max(self.newest)} has committed")
        self._samples(group, step)
        self.newest[number] = step
        self.steps.setdefault(step, set()).add(number)
        self.commits += 1
        self.top = max(self.top, version)

    def _samples(self, group: Group, step: int) -> None:
        """The ranks' parts of the step are its batch, all of it and nothing twice (G7)."""
        plan = BatchPlan(SAMPLES, BATCH)
        turn = (step - 1) % PER_EPOCH
        batch = plan.at(step - 1)
        ends = [rank_range(batch.start, batch.stop, rank, group.world_size) for rank in range(group.world_size)]
        taken = [sample for start, stop in ends for sample in range(start, stop)]
        if taken != list(range(turn * BATCH, min(turn * BATCH + BATCH, SAMPLES))):
            raise Broken("G7", f"step {step} in a world of {group.world_size} takes the samples {taken}")

    def _cut_off(self, group: Group) -> bool:
        """Nobody can tell this world that it is over: all of it is away from etcd, or its agents stand still."""
        return all(w.node.name in self._cluster.troubled for w in group.ranks.values())

    def redone(self, since: int = 1, until: int = 10**9) -> int:
        """Steps that had been committed, and that generations of these numbers went back behind."""
        lost: set[int] = set()
        for before, number in itertools.pairwise(sorted(self.newest)):
            if since <= number < until:
                first = min(step for step, of in self.steps.items() if number in of)
                lost |= set(range(first, self.newest[before] + 1))
        return len(lost)

    # ── incidents ───────────────────────────────────────────────────────────────────────────────────────────

    def incidents(self) -> dict[tuple[int, int], IncidentRecord]:
        """Those on record, by the number after that of the generation that failed first and their repeat, in that
        order."""
        found = on_record(self._cluster.keys, self._cluster.etcd.kvs)
        return {(int(incident.id.partition(".")[0]), incident.repeat): incident for incident in found}

    def killed(self, worker: Worker) -> None:
        """`worker` is about to be killed from outside. Called for what its agent is to name in an incident."""
        if worker.alive and worker.group is not None and worker.node.up:
            self._killed.append((worker.node.name, worker.node.incarnation, worker.group.generation, worker.slot))

    def deaths_told(self) -> None:
        """Each worker that was killed in a generation is named, as long as its agent lives to report it."""
        if self._cluster.etcd.cluster != self._first_etcd:
            return  # records were lost with etcd's data
        agents = {(node.name, node.incarnation) for node in self._cluster.nodes if node.agent is not None}
        causes = [cause for incident in self.incidents().values() for cause in incident.causes]
        for node, incarnation, generation, slot in self._killed:
            # At a planned change its agent may have taken on the generation after it already.
            ranks = {n: self.plans[n].ranks(node).get(slot) for n in (generation, generation + 1) if n in self.plans}
            # A node that is lost during the recovery is named with all its workers.
            named = (
                c.node == node
                and (ranks.get(c.generation, -1) in c.ranks or (c.kind in GONE and c.generation >= generation))
                for c in causes
            )
            if (node, incarnation) in agents and not any(named):
                raise Broken("incidents", f"{node}/{slot} was killed in generation {generation}, not named: {causes}")

    def told_once(self) -> None:
        """What has ended once is the cause of one incident: a worker, or a node's place in a generation. No more
        incidents name a process of a node that ended than processes have ended there."""
        if self._cluster.etcd.cluster != self._first_etcd:
            return  # records were lost with etcd's data
        known: dict[tuple[int, str, str, int], tuple[int, int]] = {}
        exits: Counter[str] = Counter()
        for at, incident in self.incidents().items():
            ended = [cause for cause in incident.causes if cause.kind in ("exit", "lost")]
            exits.update({cause.node for cause in ended if cause.kind == "exit"})
            for c in ended:
                for rank in c.ranks or (-1,):
                    if known.setdefault((c.generation, c.node, c.kind, rank), at) != at:
                        raise Broken("incidents", f"{at} has {c}, which another one has, too: {self.incidents()}")
        for node, count in exits.items():
            if count > self._cluster.deaths[node]:
                raise Broken("incidents", f"{count} incidents name an exit on {node}: {self.incidents()}")

    def failures_told(self) -> None:
        """Each generation that was formed without a plan belongs to an incident, as the one before it has failed; but
        the agent of its leader may have died before it had written that."""
        if self._cluster.etcd.cluster != self._first_etcd:
            return  # records were lost with etcd's data
        found, agents = self.incidents(), {node.incarnation for node in self._cluster.nodes if node.agent is not None}
        formed = (f for f in self.plans.values() if f.number > 1 and f.at_step is None)
        lived = (f for f in formed if any(p.node == f.leader and p.incarnation in agents for p in f.nodes))
        for number in (f.number for f in lived):
            of = (i for (key, _), i in found.items() if key <= number and (i.open or number <= i.generation))
            if next(of, None) is None:
                raise Broken(
                    "incidents", f"generation {number} was formed without a plan, and no incident has it: {found}"
                )

    def steps_told(self) -> None:
        """Each incident says how many steps were done again, or at least says nothing that is wrong."""
        if self._cluster.etcd.cluster != self._first_etcd:
            return  # records were lost with etcd's data
        found = self.incidents()
        for at, (following, _) in itertools.zip_longest(found, list(found)[1:], fillvalue=(10**9, 0)):
            incident, key = found[at], at[0]
            if incident.open or incident.steps_lost is None:
                continue
            redone, most = self.redone(key, following), incident.steps_lost_at_most
            if incident.steps_lost > redone or (most is not None and most < redone):
                raise Broken(
                    "incidents",
                    f"{redone} steps were lost, and incident {key} says {incident.steps_lost} to {most}",
                )

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────

    def ended(self, state: JobState) -> None:
        """The job is over: for a good reason?"""
        cluster = self._cluster
        training = cluster.training
        if state.phase is Phase.SUCCEEDED:
            # The newest state may have died with its only rank, and an older one have been complete already: then the
            # ranks of the last generation are complete by that one.
            number = cluster.record().number
            agents = [node.agent for node in cluster.nodes if node.agent is not None]
            workers = [worker for agent in agents for worker in agent.local.workers.values()]
            done = [w.step for w in workers if w.stage is Stage.DONE and w.generation == number]
            if not training.steps or max([self.top[1], *done]) < training.steps:
                raise Broken("G7", f"the job has succeeded at step {self.top[1]} of {training.steps or 'endless'}")
        if Code.OVER_BUDGET in codes(state.reason):
            now_s, rules = cluster.clock.now_s, cluster.spec.restarts
            # One that could not be written while etcd was away is dated when it is written.
            recent = sum(1 for at_s in cluster.died_s if now_s - at_s < rules.window_s + SLACK_S)
            if recent <= rules.budget:
                raise Broken("G10", f"{recent} deaths in {rules.window_s:g} s and more: {state.reason}")
        looped = cluster.failed_on_order >= cluster.spec.restarts.same_failure and not codes(state.reason).isdisjoint(
            (Code.CRASH_LOOP, Code.ENDS_ALIKE)
        )
        if state.phase is Phase.FAILED and not (training.bug or looped or Code.OVER_BUDGET in codes(state.reason)):
            raise Broken("G10", f"the job has failed though its script has no bug: {state.reason}")
        if state.phase in (Phase.STOPPED, Phase.STOPPING) and not cluster.stopped:
            raise Broken("G10", f"the job is {state.phase.value}, and nobody asked: {state.reason}")


def _ranks_kept(old: GenerationRecord, new: GenerationRecord) -> None:
    """In an unchanged world, each node that stays keeps its node rank, and each of its workers its rank. Unchanged:
    nodes that stay have as many workers as before, and those that join as many as those that leave."""
    before, after = ({p.node: p.slots for p in formed.nodes} for formed in (old, new))
    stay = before.keys() & after.keys()
    left = sorted(len(slots) for node, slots in before.items() if node not in stay)
    joined = sorted(len(slots) for node, slots in after.items() if node not in stay)
    if left != joined or any(len(before[node]) != len(after[node]) for node in stay):
        return
    for node in stay:
        had, has = old.ranks(node), new.ranks(node)
        if old.at(node) != new.at(node) or any(had[slot] != has[slot] for slot in had.keys() & has.keys()):
            raise Broken("ranks", f"{node} has ranks {has} in generation {new.number} of an unchanged world, had {had}")


def _drops(agent: Agent, effect: Publish) -> bool:
    """Whether somebody who takes part would not any more."""
    before = {p.node for p in agent.formed.generation.nodes} if agent.formed.generation else set()
    return not before <= {p.node for p in effect.change.nodes}
