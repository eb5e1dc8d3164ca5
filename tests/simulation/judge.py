"""What must hold, whatever happens. Called at every event; raises Broken with the promise that was not kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.core import messages
from elastic.core.effects import Effect, Kill, Publish, Tell
from elastic.core.model import Agent, Stage
from elastic.core.records import GenerationRecord, JobState, Phase, decode
from elastic.core.source import Choice, Version

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Node
    from .training import Group, Worker


class Broken(AssertionError):
    """A promise was not kept."""

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(f"{promise}: {detail}")


REJOIN_S = 1.0
"""Who has a new lease only since then may have come a moment too late."""


class Judge:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.only_etcd = False
        """Nothing but etcd fails in this history: training must not notice (G4)."""
        self.plain_deaths = False
        """One worker dies in this history, and nothing else happens: rank 0 is then always a survivor."""
        self.chains: dict[Version, int] = {}
        self.newest: dict[int, int] = {}
        """Generation -> newest step committed in it."""
        self.plans: dict[int, GenerationRecord] = {}
        self.stands: tuple[int, GenerationRecord | None] = (0, None)
        """The etcd cluster, and the generation in it."""
        self.commits = 0
        self.top: Version = (0, 0)
        self._leaseless: dict[str, float] = {}
        """Node -> when its agent last had no lease."""

    # ── the machines ────────────────────────────────────────────────────────────────────────────────────────

    def turned(self, node: Node, before: Agent, after: Agent, effects: tuple[Effect, ...]) -> None:
        if not (before.joined and after.joined):
            self._leaseless[node.name] = self._cluster.clock.now_s
        if after.generation is not before.generation:
            self._generation(node, before.generation, after.generation)
        steps = self._cluster.training.steps
        done = (bool(steps) and self.top[1] >= steps) or any(w.stage is Stage.DONE for w in before.workers.values())
        if self.only_etcd and self.commits and not after.view.state.phase.over and not done:
            # Who hears of a planned change after its boundary lets go of a step that nobody can commit.
            planned = after.generation is not None and after.generation.at_step is not None
            for effect in effects:
                match effect:
                    case Tell(message=messages.LetGo(generation=number)):
                        disturbs = number in self.newest and not planned
                    case Publish():
                        number = after.generation.number if after.generation else 0
                        disturbs = number in self.newest and _drops(after, effect)
                    case _:
                        disturbs = isinstance(effect, Kill)
                if disturbs:
                    raise Broken("G4", f"{node.name} disturbs training while only etcd fails: {effect}")

    def _generation(self, node: Node, old: GenerationRecord | None, new: GenerationRecord | None) -> None:
        if new is None or (old is not None and new.number <= old.number):
            raise Broken("generations grow", f"{node.name} goes from {old} to {new}")
        if self.plans.get(new.number, new) != new and not self._forgotten(new.number):
            raise Broken("one plan per generation", f"{node.name} has {new}, others {self.plans[new.number]}")

        self.plans[new.number] = new

    def _forgotten(self, number: int) -> bool:
        """etcd was wiped, and nobody lives who knew of that generation: no step was done in it, and none can be."""
        held = [node.agent.generation for node in self._cluster.nodes if node.agent is not None]
        return number not in self.newest and self.plans[number] not in held

    def stored(self) -> None:
        """Something may have been written to etcd."""
        cluster = self._cluster
        kv = cluster.etcd.kvs.get(cluster.keys.generation)
        old = self.stands[1] if self.stands[0] == cluster.etcd.cluster else None  # else it was wiped
        new = decode(GenerationRecord, kv.value) if kv else None
        self.stands = cluster.etcd.cluster, new
        if old is not None and (new is None or new.number < old.number):
            raise Broken("generations grow", f"in etcd {new} replaces {old}")
        if old is not None and new is not None and new.number == old.number and new != old:
            raise Broken("one plan per generation", f"in etcd {new} replaces {old}")

    # ── training ────────────────────────────────────────────────────────────────────────────────────────────

    def chosen(self, group: Group, choice: Choice) -> None:
        """A generation has chosen the state that it goes on from."""
        version = choice.version if choice.kind != "setup" else (0, 0)
        if choice.kind == "live" and not group.ranks[choice.source].whole:
            raise Broken("G1", f"generation {group.generation} goes on from half a state, of rank {choice.source}")
        for rank, worker in group.ranks.items():
            if rank != choice.source and rank not in choice.needs and not worker.whole:
                raise Broken("G1", f"rank {rank} of generation {group.generation} goes on with half a state")
        if self.plain_deaths and choice.kind == "live" and not group.ranks[0].established:
            raise Broken("survivors first", f"rank 0 of generation {group.generation} is a newcomer")
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
                        f"generation {group.generation} goes on from {choice.kind} {version}; {worker.name} has {held}",
                    )

    def _unreachable(self, worker: Worker, group: Group) -> bool:
        """A newer state outside may be left behind when nobody could get it, or its node was about to leave."""
        cluster, node = self._cluster, worker.node
        if worker.stopped or worker.deaf or node.agent is None or node.name in cluster.troubled:
            return True
        if cluster.clock.now_s - self._leaseless[node.name] < REJOIN_S:
            return True
        return node.agent.draining is not None or node.agent.leaving is not None or cluster.scaled

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
        self.newest[number] = step
        self.commits += 1
        self.top = max(self.top, version)

    def _cut_off(self, group: Group) -> bool:
        """Nobody can tell this world that it is over: all of it is away from etcd, or its agents stand still."""
        return all(w.node.name in self._cluster.troubled for w in group.ranks.values())

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────

    def ended(self, state: JobState) -> None:
        """The job is over: for a good reason?"""
        cluster = self._cluster
        training = cluster.training
        if state.phase is Phase.SUCCEEDED and (not training.steps or self.top[1] < training.steps):
            raise Broken("G7", f"the job has succeeded at step {self.top[1]} of {training.steps or 'endless'}")
        looped = cluster.failed_on_order >= cluster.spec.restarts.same_failure and "crash loop" in state.reason
        if state.phase is Phase.FAILED and not (training.bug or looped or "failures within" in state.reason):
            raise Broken("G10", f"the job has failed though its script has no bug: {state.reason}")
        if state.phase in (Phase.STOPPED, Phase.STOPPING) and not cluster.stopped:
            raise Broken("G10", f"the job is {state.phase.value}, and nobody asked: {state.reason}")


def _drops(agent: Agent, effect: Publish) -> bool:
    """Whether somebody who takes part would not any more."""
    before = {p.node for p in agent.generation.places} if agent.generation else set()
    return not before <= {p.node for p in effect.change.places}
