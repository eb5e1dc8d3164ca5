"""A whole cluster on virtual time, and what can befall it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from support.fake_etcd import FakeServer

from elastic.contract.job.spec import Checkpoint, JobSpec, Restarts
from elastic.contract.keys import ClusterKeys
from elastic.contract.records import job_records as records
from elastic.contract.records.generation_delta import GenerationReader
from elastic.contract.records.job_records import GenerationRecord, JobState, Phase, SpecRecord, decode, encode
from elastic.etcd.client import Put
from elastic.recovery.machine.effects import Effect
from elastic.recovery.machine.events import Drain, Event, PeerDead, Undrain

from .clock import Clock
from .judge import Judge
from .node import Node
from .training import Training, Worker

LEASE_TURN_S = 0.5
MEMORY_S = 10.0
"""For so long after a trouble its consequences may show."""
Listener = Callable[[Node, Event, tuple[Effect, ...]], None]


@dataclass(frozen=True)
class Setting:
    """What a history plays on."""

    seed: int = 1
    nodes: int = 3
    slots: int = 2
    least: int = 1
    most: int = 3
    step_s: float = 0.2
    steps: int = 0
    standby: int = 0
    shrink: bool = False
    checkpoint_every: int = 0
    save_s: float = 0.05
    """How long until a checkpoint is durable."""
    setup_s: float = 0.5
    rollback: bool = False
    """`on_bad_numbers`."""
    budget: int = 20
    window_s: float = 3600.0
    drift: float = 0.0
    crowd: int = 64
    """With more nodes than this, not all see all members."""
    leader_candidates: int = 8
    repeats: bool = False
    """What workers say may arrive a second time, late."""
    managed: bool = True
    """Agents know from the start that the script calls `elastic.run`; else workers tell them."""
    calm: bool = False
    """Delays have one length: for histories that are read."""


class Cluster:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rng = random.Random(setting.seed)
        self.clock = Clock()
        self.etcd = FakeServer(expiry_delay_s=0.3)
        self.keys = ClusterKeys("sim").job("job")
        self.slots = setting.slots
        self.setup_s = setting.setup_s
        self.spec = JobSpec(
            name="job",
            script="train.py",
            nodes=f"{setting.least}:{setting.most}",
            workers_per_node=setting.slots,
            standby=setting.standby,
            on_loss="shrink" if setting.shrink else "wait",
            checkpoint=Checkpoint(dir="/dev/null/checkpoints") if setting.checkpoint_every else Checkpoint(),
            on_bad_numbers="rollback" if setting.rollback else "stop",
            restarts=Restarts(budget=setting.budget, window_s=setting.window_s),
        )
        self.spec_record = SpecRecord(spec=self.spec, submitted_wall_s=0.0, submitted_by="sim")
        self.events = 0
        self.listener: Listener | None = None
        self.healing = False
        self.failed_on_order = 0
        self.deaths: Counter[str] = Counter()
        """Node -> how many workers have died there that were not told to."""
        self.died_s: list[float] = []
        """When they died, and when else a failure was made that is charged."""
        self.cut_off: set[str] = set()
        self.unanswered: set[str] = set()
        self.islands: dict[str, int] = {}
        """Nodes of different islands do not reach each other."""
        self.etcd_slow_s = 0.0
        self.strikes: list[str] = []
        """Nodes that die in the middle of the next hand-overs."""
        self.drained: set[str] = set()
        self.starved: set[str] = set()
        """Nodes that have been so at some time."""
        self.scaled = False
        self.needs = setting.least
        """Nodes: the largest minimum that the job has ever had, as a change of it may be lost with etcd's data."""
        self.stopped = False
        self._trouble: dict[str, float] = {}
        self.training = Training(self, setting.step_s, setting.steps, setting.checkpoint_every)
        self.judge = Judge(self)
        self.etcd.put_all([Put(self.keys.spec, encode(self.spec_record))])
        self._revision = (self.etcd.cluster, self.etcd.revision, self.etcd.up)
        self._doors: set[tuple[str, str, str]] = set()
        self.nodes = [Node(self, i, 1.0 + self.rng.uniform(-1, 1) * setting.drift) for i in range(setting.nodes)]
        for node in self.nodes:
            self.clock.at(self.delay(0.0, 0.3), node.start)
        self._turn_leases()

    def delay(self, least_s: float, most_s: float) -> float:
        return (least_s + most_s) / 2 if self.setting.calm else self.rng.uniform(least_s, most_s)

    def lag_s(self) -> float:
        """How long a message takes within a machine: mostly next to nothing."""
        return 0.0005 if self.setting.calm or self.rng.random() < 0.8 else self.rng.uniform(0.0, 0.03)

    # ── etcd ────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn_leases(self) -> None:
        self.etcd.advance(self.clock.now_s)
        self.etcd_changed()
        self.clock.after(LEASE_TURN_S, self._turn_leases)

    def etcd_changed(self) -> None:
        self.etcd.now_s = max(self.etcd.now_s, self.clock.now_s)
        now = (self.etcd.cluster, self.etcd.revision, self.etcd.up)
        if now != self._revision:
            self._revision = now
            for node in self.nodes:
                self.clock.after(self.delay(0.001, 0.01) + self.rng.random() * self.etcd_slow_s, node.pump)

    def record(self) -> GenerationRecord | None:
        kv, base = self.etcd.kvs.get(self.keys.generation), self.etcd.kvs.get(self.keys.base)
        return GenerationReader().read(kv.value, base.value if base else None) if kv else None

    def state(self) -> JobState:
        kv = self.etcd.kvs.get(self.keys.state)
        return decode(JobState, kv.value) if kv else JobState()

    def _write(self, key: str, record: records.Record) -> None:
        self.etcd.put_all([Put(key, encode(record))])
        self.etcd_changed()

    # ── the network ─────────────────────────────────────────────────────────────────────────────────────────

    def reaches(self, one: Node, other: Node) -> bool:
        if one is other:
            return True
        return one.up and other.up and self.islands.get(one.name, 0) == self.islands.get(other.name, 0)

    def check_doors(self) -> None:
        """Agents find a dead agent's port refused, where they watch it and reach its machine."""
        by_name = {node.name: node for node in self.nodes}
        for node in self.nodes:
            if node.agent is None or not node.watched:
                continue
            for name, incarnation in sorted(node.watched):
                other = by_name[name]
                dead = other.incarnation != incarnation or other.agent is None
                key = (node.incarnation, name, incarnation)
                if dead and self.reaches(node, other) and key not in self._doors:
                    self._doors.add(key)
                    evidence = f"connection to {name} refused"
                    self.clock.after(self.delay(0.002, 0.02), node.take, PeerDead(name, incarnation, evidence))

    # ── the daemons ─────────────────────────────────────────────────────────────────────────────────────────

    def wants_agent(self, node: Node) -> bool:
        return node.name not in self.drained and not self.state().phase.over

    def left(self, node: Node) -> None:
        if node.name not in self.drained and not self.state().phase.over:
            self.clock.after(1.0, node.start)

    def died(self, worker: Worker, cause: str) -> None:
        self.deaths[worker.node.name] += 1
        self.died_s.append(self.clock.now_s)

    # ── faults ──────────────────────────────────────────────────────────────────────────────────────────────

    def worker(self, node: int, slot: int) -> Worker | None:
        alive = [w for w in self.nodes[node].processes.values() if w.slot == slot]
        return alive[0] if alive else None

    def kill_worker(self, node: int, slot: int) -> None:
        if worker := self.worker(node, slot):
            self.judge.killed(worker)
            worker.die()

    def fail_worker(self, node: int, slot: int) -> None:
        if worker := self.worker(node, slot):
            self.failed_on_order += 1
            worker.die("exit code 1", 1, "RuntimeError: planted", "RuntimeError at train.py:7")

    def stop_worker(self, node: int, slot: int) -> None:
        worker = self.worker(node, slot)
        if worker and worker.doing != "setup":
            worker.stopped = True
            self.clock.after(2.2, self.training.hang, worker)

    def deafen_worker(self, node: int, slot: int) -> None:
        if worker := self.worker(node, slot):
            worker.deaf = True

    def starve(self, node: int, seconds: float) -> None:
        it = self.nodes[node]
        it.starved = True
        self.starved.add(it.name)
        self.clock.after(seconds, setattr, it, "starved", False)

    def kill_agent(self, node: int) -> None:
        self.nodes[node].crash()

    def kill_agent_after(self, node: int, effects: int) -> None:
        if self.nodes[node].agent is not None:
            self.nodes[node].effects_left, self.nodes[node].pause_s = effects, 0.0

    def pause_agent_after(self, node: int, effects: int, seconds: float) -> None:
        """What it does next it may do long after it has decided on it."""
        if self.nodes[node].agent is not None:
            self.nodes[node].effects_left, self.nodes[node].pause_s = effects, seconds

    def kill_source(self) -> None:
        """The next node that hands its state over dies in the middle of it."""
        self.strikes.append("source")

    def kill_receiver(self) -> None:
        self.strikes.append("receiver")

    def handing_over(self, source: Worker, receivers: list[Worker]) -> None:
        if self.strikes:
            victim = source if self.strikes.pop(0) == "source" else self.rng.choice(receivers)
            self.clock.after(0.005, self._strike, victim)

    def _strike(self, worker: Worker) -> None:
        self.judge.killed(worker)
        worker.die()

    def pause_agent(self, node: int, seconds: float) -> None:
        it = self.nodes[node]
        if it.agent is not None and not it.paused:
            it.paused = True
            it.link()
            self.clock.after(seconds, it.resume)

    def power_off(self, node: int) -> None:
        """Nothing on it says good-bye, and nothing answers there."""
        it = self.nodes[node]
        if not it.up:
            return
        it.up = False
        it.agent, it.incarnation = None, it.incarnation + "+off"
        it.paused = False
        if it._client is not None:
            it._client.crash()
        for worker in tuple(it.processes.values()):
            worker.stopped = True  # as the others see it: it never answers again
            worker.doing = "dead" if worker.group is None else worker.doing
        it.processes.clear()

    def power_on(self, node: int) -> None:
        it = self.nodes[node]
        if it.up:
            return
        it.up = True
        for group in self.training.groups.values():
            for worker in tuple(group.ranks.values()):
                if worker.node is it and worker.stopped:
                    group.leave(worker, None, partial=False)  # the machine answers again: it knows no such connection
                    worker.doing = "dead"
        self.check_doors()
        self.clock.after(1.0, it.start)

    def cut(self, node: int) -> None:
        """From etcd alone."""
        self.cut_off.add(self.nodes[node].name)
        self._links()

    def lose_answers(self, node: int) -> None:
        self.unanswered.add(self.nodes[node].name)
        self._links()

    def heal_etcd_links(self) -> None:
        self.note_trouble()
        self.cut_off.clear()
        self.unanswered.clear()
        self._links()

    def _links(self) -> None:
        for node in self.nodes:
            node.link()
            self.clock.after(self.delay(0.01, 0.1), node.pump)

    def isolate(self, node: int) -> None:
        """From the other nodes alone."""
        self.islands[self.nodes[node].name] = node + 1

    def heal_network(self) -> None:
        self.note_trouble()
        self.islands.clear()
        self.training.kick()
        self.check_doors()

    def stop_etcd(self) -> None:
        self.etcd.stop()
        self.etcd_changed()

    def start_etcd(self) -> None:
        if not self.etcd.up:
            self.note_trouble()
            self.etcd.now_s = max(self.etcd.now_s, self.clock.now_s)
            self.etcd.start()
            self.etcd_changed()

    def wipe_etcd(self) -> None:
        if self.state().phase.over:
            return  # nobody is left to say so
        self.etcd.wipe()
        self.etcd_changed()

    def compact(self) -> None:
        if self.etcd.compacted < self.etcd.revision:
            self.etcd.compact(self.etcd.revision)

    def slow_views(self, seconds: float) -> None:
        self.note_trouble()
        self.etcd_slow_s = seconds

    def drain(self, node: int, deadline_s: float) -> None:
        it = self.nodes[node]
        if it.agent is not None:
            self.drained.add(it.name)
            it.take(Drain("maintenance", it.now_s() + deadline_s))

    def undrain(self, node: int) -> None:
        it = self.nodes[node]
        self.drained.discard(it.name)
        if it.agent is not None:
            it.take(Undrain())
        else:
            self.clock.after(0.5, it.start)

    def scale(self, least: int, most: int) -> None:
        """`elasticctl scale`"""
        self.scaled = True
        if not self.etcd.up or self.keys.spec not in self.etcd.kvs:
            return
        self.needs = max(self.needs, least)
        self.spec = msgspec.structs.replace(self.spec, nodes=f"{least}:{most}")
        self.spec_record = msgspec.structs.replace(self.spec_record, spec=self.spec)
        self._write(self.keys.spec, self.spec_record)

    def stop_job(self) -> None:
        self.stopped = True
        if self.etcd.up and self.keys.spec in self.etcd.kvs and not self.state().phase.over:  # that would be refused
            self._write(self.keys.state, msgspec.structs.replace(self.state(), phase=Phase.STOPPING))

    def plant_bug(self, rank: int, misuse: int = 0) -> None:
        """From the next step but one on the script fails on this rank, always at the same step; `misuse`: with an error
        that elastic has raised for what it does."""
        latest = self.training.latest
        self.training.bug = (latest.version[1] if latest else 0) + 2
        self.training.bug_rank, self.training.misuse = rank, bool(misuse)

    def spoil(self, steps: int) -> None:
        """The step after so many more makes the numbers bad."""
        latest = self.training.latest
        self.died_s.append(self.clock.now_s + (steps + 1) * self.setting.step_s)
        self.training.spoil_at = (latest.version[1] if latest else 0) + 1 + steps

    def slow_step(self, seconds: float) -> None:
        """The next step that begins takes so much longer on all ranks."""
        self.training.slower_s = seconds

    def fail_forming(self, times: int) -> None:
        """The next groups fail while they form, on all ranks, for no known reason."""
        self.training.failing_forms = times

    def heal(self) -> None:
        """All faults end."""
        self.training.failing_forms = 0
        self.note_trouble()
        self.healing = True
        self.strikes.clear()
        self.heal_network()
        if not self.etcd.up:
            self.start_etcd()
        self.etcd_slow_s = 0.0
        self.heal_etcd_links()
        for node in self.nodes:
            node.effects_left, node.starved = None, False
            self.power_on(node.index)
            node.resume()
            if node.name in self.drained and sum(n.name not in self.drained for n in self.nodes) < self.needs:
                self.undrain(node.index)
            self.clock.after(self.delay(0.5, 1.0), node.start)
            for worker in tuple(node.processes.values()):
                worker.deaf = False

    def run(self, until_s: float) -> None:
        self.clock.run(until_s)

    # ── how it stands ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def troubled(self) -> set[str]:
        """Nodes that etcd, or the other nodes, cannot rely on now, or could not a moment ago."""
        self.note_trouble()
        return {name for name, at_s in self._trouble.items() if self.clock.now_s - at_s < MEMORY_S}

    def note_trouble(self) -> None:
        """To be called before a trouble ends."""
        now_s = self.clock.now_s
        for node in self.nodes:
            away = node.paused or not node.up or not self.etcd.up or self.etcd_slow_s
            if away or node.name in self.cut_off or node.name in self.unanswered or node.name in self.islands:
                self._trouble[node.name] = now_s

    def whole(self) -> bool:
        """As many nodes train as can, with all their workers."""
        record, latest = self.record(), self.training.latest
        fit = sum(1 for n in self.nodes if n.name not in self.drained and n.name not in self.state().excluded_nodes)
        spec = self.etcd.kvs.get(self.keys.spec)  # a change of it may have been lost with etcd's data
        want = min(fit, decode(SpecRecord, spec.value).spec.max_nodes) if spec else 0
        return (
            spec is not None
            and record is not None
            and latest is not None
            and latest.generation == record.number
            and len(record.nodes) >= want
            and record.world_size >= want * self.slots
        )

    def over(self) -> bool:
        phase = self.state().phase
        if self.keys.spec not in self.etcd.kvs and all(n.agent is None for n in self.nodes):
            return True  # wiped when no agent that knew it was there
        return phase.over or (phase is Phase.STOPPING and all(n.agent is None for n in self.nodes))
