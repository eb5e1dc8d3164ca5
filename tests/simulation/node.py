"""One virtual machine with its agent: the real recovery machine and the real writer, on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from support.fake_etcd import FakeClient

from elastic.agent import write_queue
from elastic.agent.etcd.view_reader import ViewReader
from elastic.agent.etcd.watch_scope import WatchScope
from elastic.agent.etcd.writer import EtcdWriter
from elastic.contract.records.job_records import ProgressRecord
from elastic.contract.records.reasons import Code, reason
from elastic.contract.timeouts import Timeouts
from elastic.etcd.client import EtcdError, View
from elastic.recovery import recovery
from elastic.recovery.facts.membership import leader, living
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.leading import PUBLISH_AGAIN_S
from elastic.recovery.machine.effects import Effect, FindNewestSaved, ForkPlain, ForkWorker, Kill, Leave, SaveNow, Send
from elastic.recovery.machine.events import (
    ENTERING,
    Event,
    NewestSaved,
    Progress,
    Saving,
    Start,
    Tick,
    Viewed,
    WorkerExited,
    WorkerSaid,
    WorkersEnter,
)
from elastic.recovery.machine.model import Agent, Policy, is_leader
from elastic.recovery.machine.turn import ASK_AGAIN_S
from elastic.recovery.observers.watch_scope import watches_members
from elastic.recovery.workers.announce import SUSPICION_S

from .training import Worker

if TYPE_CHECKING:
    from .cluster import Cluster

BEAT_S = Timeouts().beat_s
ALL = 10**6
"""Members, of whom none is too many to be watched at first."""
PROGRESS_S = 2.0
AT_REST = ("",)
Order = Callable[[], None]


class WriteQueue(write_queue.WriteQueue):
    """As `agent.write_queue.WriteQueue`: orders by key, one after another, again until done."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._orders: dict[str, tuple[Order, bool]] = {}
        self._due = False

    def start(self) -> None:
        pass

    def ask(self, key: str, order: Order, *, persist: bool) -> None:
        self._orders[key] = (order, persist)
        self._call(self._node.cluster.delay(0.001, 0.01))

    def close(self, wait_s: float) -> None:
        self._run(self._node.incarnation)

    def _call(self, delay_s: float) -> None:
        if not self._due:
            self._due = True
            self._node.cluster.clock.after(delay_s, self._run, self._node.incarnation)

    def _run(self, incarnation: str) -> None:
        node = self._node
        self._due = False
        if node.incarnation != incarnation or node.agent is None:
            return
        if node.paused:
            self._call(0.2)
            return
        for key, (order, persist) in tuple(self._orders.items()):
            if node.agent is None:
                return
            if node.struck():
                if node.paused:
                    self._call(0.2)
                return
            try:
                order()
            except EtcdError:
                if persist:
                    continue
            node.cluster.judge.stored()
            if self._orders.get(key, (None,))[0] is order:
                del self._orders[key]
        node.cluster.etcd_changed()
        if self._orders:
            self._call(0.2)


class Stores:
    """As `agent.store.Stores`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.open_ports: dict[int, int] = {}
        self._bases: dict[int, Hashable] = {}

    def open(self, generation: int, basis: Hashable) -> tuple[str, int]:
        if generation in self.open_ports and self._bases[generation] == basis:
            return self._node.name, self.open_ports[generation]
        self._bases[generation] = basis
        self.open_ports[generation] = self._node.cluster.training.open_store(self._node, generation)
        for old in sorted(self.open_ports)[:-2]:
            del self.open_ports[old]
        return self._node.name, self.open_ports[generation]


class Node:
    def __init__(self, cluster: Cluster, index: int, rate: float) -> None:
        self.cluster = cluster
        self.index = index
        self.name = f"n{index}"
        self.rate = rate
        """How fast its clock runs."""
        self.wall_off_s = 0.0
        """How wrong its time of day is."""
        self.agent: Agent | None = None
        self.incarnation = ""
        self.up = True
        """The machine has power."""
        self.starved = False
        """No process can be started there."""
        self.paused = False
        self.processes: dict[int, Worker] = {}
        self.watched: set[tuple[str, str]] = set()
        self.effects_left: int | None = None
        """After so many more effects the agent's process is struck; None: it is not."""
        self.saves = 0
        """Last snapshots that its writer has not on disk yet."""
        self.pause_s = 0.0
        """Struck, it stands still for so long; 0: it dies."""
        self._starts = 0
        self._client: FakeClient | None = None
        self._view: View | None = None
        self._scope: WatchScope | None = None
        self._reader: ViewReader | None = None
        self._queue: list[Event] = []
        self._entering: list[WorkerSaid] = []
        self._undone: tuple[Effect, ...] = ()
        """What it was about to do when it was stopped."""
        self._lines: dict[tuple[str, int], float] = {}
        """Line -> when the last message on it arrives: no other overtakes it there."""
        self._tick_due_s = float("inf")
        self._seen = (0, 0)
        self._phone = 0

    def now_s(self) -> float:
        return 100.0 * self.index + self.cluster.clock.now_s * self.rate

    def wall_s(self) -> float:
        return self.cluster.clock.now_s + self.wall_off_s

    # ── the process ─────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """The node's daemon starts an agent where none runs."""
        cluster = self.cluster
        if self.agent is not None or not self.up or not cluster.wants_agent(self):
            return
        client = FakeClient(cluster.etcd, call_s=0.5)
        client.rate = self.rate
        if not cluster.etcd.up or self.name in cluster.cut_off or cluster.keys.spec not in cluster.etcd.kvs:
            client.close()
            cluster.clock.after(1.0, self.start)
            return
        self._starts += 1
        self.incarnation = f"{self.name}.{self._starts}"
        self._client, self._view, self._queue, self._undone, self._lines = client, None, [], (), {}
        self._entering = []
        self.paused, self.effects_left, self._seen, self.watched, self.saves = False, None, (0, 0), set(), 0
        self._tick_due_s = float("inf")
        spec = cluster.spec
        policy = Policy(
            node=self.name,
            incarnation=self.incarnation,
            host=self.name,
            port=1,
            slots=cluster.slots,
            managed=cluster.setting.managed,
            spec=spec,
            timeouts=Timeouts(),
            crowd=cluster.setting.crowd,
            leader_candidates=cluster.setting.leader_candidates,
        )
        self.stores = Stores(self)
        self.writer = EtcdWriter(
            client,  # type: ignore[arg-type]
            cluster.keys,
            policy,
            self.stores,
            self.soon,
            cluster.spec_record,
            queue=lambda _: WriteQueue(self),
            wall=self.wall_s,
        )
        self.agent = Agent(policy)
        self._reader = ViewReader(cluster.keys)
        self._scope = WatchScope(client, cluster.keys, ALL, lambda: cluster.clock.now_s)  # type: ignore[arg-type]
        self._scope.start(self._on_view, self.now_s())
        self.take(Start())
        cluster.clock.after(PROGRESS_S, self._tell_progress, self.incarnation)
        self.pump()

    def crash(self) -> None:
        """The agent's process dies, and its workers with it."""
        if self.agent is None:
            return
        self.agent = None
        cluster = self.cluster
        assert self._client is not None
        self._client.crash()
        for worker in tuple(self.processes.values()):
            worker.die()
        self.processes.clear()
        for group in cluster.training.groups.values():
            if group.host is self:
                group.host_died()
        cluster.check_doors()
        if cluster.healing or cluster.rng.random() < 0.8:
            cluster.clock.after(cluster.delay(0.3, 2.0), self.start)

    def serves(self, port: int) -> bool:
        return self.agent is not None and port in self.stores.open_ports.values()

    def struck(self) -> bool:
        """It dies or is stopped here, before its next effect."""
        if self.effects_left is None:
            return False
        self.effects_left -= 1
        if self.effects_left >= 0:
            return False
        self.effects_left = None
        if self.pause_s:
            self.cluster.pause_agent(self.index, self.pause_s)
        else:
            self.crash()
        return True

    def link(self) -> None:
        """Its line to etcd as the cluster's faults have it."""
        if self._client is not None and self.agent is not None:
            (self._client.cut if self.name in self.cluster.cut_off else self._client.heal)()
            self._client.lose_answers = self.name in self.cluster.unanswered
            self._client.paused = self.paused

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def _on_view(self, view: View) -> None:
        self._view = view

    def pump(self) -> None:
        """What etcd has to tell arrives."""
        if self.agent is None or self.paused:
            return
        assert self._client is not None
        assert self._scope is not None
        assert self._reader is not None
        self._client.pump()
        if self._view is not None:
            view, self._view = self._view, None
            job = self._reader.read(view, self.agent)
            if self._reader.lacks_base and not self._scope.complete:
                self._scope.read_base()
                self.cluster.clock.after(self.cluster.delay(0.001, 0.02), self.pump)
            self.take(Viewed(job, view.connected))

    def soon(self, event: Event, worker_id: int = 0) -> None:
        """From worker `life`, or a thread of the agent (0): taken in the loop's turn, in the order of its source."""
        self._send(("from", worker_id), self._arrives, self.incarnation, event)
        if self.cluster.setting.repeats and worker_id and not isinstance(event, WorkerExited):
            self.cluster.clock.after(self.cluster.delay(0.05, 1.0), self._arrives, self.incarnation, event)

    def _send(self, line: tuple[str, int], act: Callable[..., None], *args: object) -> None:
        clock = self.cluster.clock
        self._lines[line] = at_s = max(clock.now_s + self.cluster.lag_s(), self._lines.get(line, 0.0))
        clock.at(at_s, act, *args)

    def _arrives(self, incarnation: str, event: Event) -> None:
        if incarnation != self.incarnation:
            return
        if isinstance(event, WorkerSaid) and isinstance(event.message, ENTERING) and not self.paused:
            if not self._entering:
                self.cluster.clock.after(0.0, self._enter, incarnation)
            self._entering.append(event)
        else:
            self.take(event)

    def _enter(self, incarnation: str) -> None:
        """As `AgentLoop` does: what workers say at the same instant on their way into a group is one turn."""
        if incarnation != self.incarnation:
            return
        entering, self._entering = self._entering, []
        if entering:
            self.take(WorkersEnter(tuple(entering)) if len(entering) > 1 else entering[0])

    def take(self, event: Event) -> None:
        self._enter(self.incarnation)
        if self.agent is None:
            return
        if self.paused:
            self._queue.append(event)
            return
        self._look_at_pages()
        if self.agent is not None and self.agent.local.saving != bool(self.saves):
            self._turn(Saving(bool(self.saves)))
        self._turn(event)

    def resume(self) -> None:
        if self.paused and self.agent is not None:
            self.cluster.note_trouble()
            self.paused = False
            self.link()
            undone, self._undone = self._undone, ()
            self._do_all(undone)
            queue, self._queue = self._queue, []
            for event in queue:
                self.take(event)
            self.pump()
            self.take(Tick())

    def _look_at_pages(self) -> None:
        """What the hang_detector's last look at the beat pages has shown."""
        agent = self.agent
        assert agent is not None
        newest = (0, 0)
        for worker in self.processes.values():
            mine = agent.local.workers.get(worker.slot)
            if (
                mine
                and mine.worker_id == worker.worker_id
                and mine.stage in (Stage.RUNNING, Stage.STOPPING_AT_STEP)
                and worker.group
            ):
                newest = max(
                    newest, (worker.group.generation, worker.state()[0][1]) if not worker.group.fresh else newest
                )
        if newest > self._seen:
            self._seen = newest
            self._turn(Progress(*newest, self.cluster.training.step_s))

    def _turn(self, event: Event) -> None:
        before = self.agent
        if before is None:
            return
        cluster = self.cluster
        now_s = self.now_s()
        cluster.events += 1
        self.agent, effects = recovery.step(before, event, now_s, cluster.rng.random(), self.wall_s())
        cluster.judge.turned(self, event, before, self.agent, effects)
        if cluster.listener is not None:
            cluster.listener(self, event, effects)
        self._do_all(effects)
        agent = self.agent
        if agent is None:
            return
        if (
            agent.formed.generation is not before.formed.generation
            or agent.etcd.view.members != before.etcd.view.members
        ):
            self._watch_peers()
        self._look_around()
        self._schedule_tick()
        if agent.progress.settled > before.progress.settled:
            self._put_progress()

    def _tell_progress(self, incarnation: str) -> None:
        """As `agent.loop.AgentLoop`: the leader tells every two seconds how far the job is, and at a generation's first
        step."""
        agent = self.agent
        if agent is None or incarnation != self.incarnation:
            return
        self.cluster.clock.after(PROGRESS_S, self._tell_progress, incarnation)
        if self.paused or agent.formed.generation is None or not agent.etcd.connected:
            return
        self._look_at_pages()
        self._put_progress()

    def _put_progress(self) -> None:
        agent, now_s = self.agent, self.wall_s()
        if agent is None or agent.formed.generation is None:
            return
        if not is_leader(agent):
            return
        known = agent.etcd.view.progress
        at = agent.progress
        mine, at_s = (at.step if at.step_in >= at.settled else at.reached[1]), now_s
        if known is not None and known.generation > agent.progress.reached[0]:
            mine, at_s = known.step, known.step_wall_s
        self.writer.put_progress(
            ProgressRecord(
                generation=agent.formed.generation.number, world_size=agent.formed.generation.world_size,
                step=mine, steps_per_s=0.0, loss=None, wall_s=now_s, step_wall_s=at_s,
                stepped_in=agent.progress.settled,
            ),
            agent.etcd.view.generation_revision,
        )  # fmt: skip

    def _look_around(self) -> None:
        """As `AgentLoop` does: in a large job a node watches the head only, while it need not lead."""
        agent, scope = self.agent, self._scope
        if agent is None or scope is None or not agent.etcd.connected:
            return
        before = scope.complete
        scope.choose(watches_members(agent, self.now_s(), scope.narrow_for_s(self.now_s())), self.now_s())
        if scope.complete != before:
            self._view = None
            self.cluster.clock.after(self.cluster.delay(0.001, 0.02), self.pump)

    def _do_all(self, effects: tuple[Effect, ...]) -> None:
        for index, effect in enumerate(effects):
            if self.struck():
                if self.paused:
                    self._undone = effects[index:]
                return
            self._do(effect)

    def _watch_peers(self) -> None:
        agent = self.agent
        assert agent is not None
        others = {m.id for m in living(agent.etcd.view, agent.peers.dead).values() if m.record.node != self.name}
        chief = leader(agent.etcd.view, agent.peers.dead, agent.formed.generation, agent.policy.leader_candidates)
        if chief != self.name:
            others = {key for key in others if key[0] == chief}
        if others - self.watched:
            self.watched = others
            self.cluster.check_doors()
        self.watched = others

    def _do(self, effect: Effect) -> None:
        agent = self.agent
        assert agent is not None
        match effect:
            case Send(_, worker_id, message):
                if worker := self.processes.get(worker_id):
                    self._send(("to", worker_id), worker.hear, message)
            case ForkWorker(slot, worker_id) | ForkPlain(slot, worker_id) if self.starved:
                said = reason(Code.NOT_STARTED, "[Errno 24] Too many open files")
                event = WorkerExited(slot, worker_id, said, 1, shortage=True)
                self.cluster.clock.after(self.cluster.delay(0.0, 0.05), self.take, event)
            case ForkWorker(slot, worker_id, _):
                worker = self.processes[worker_id] = Worker(self, slot, worker_id)
                self.cluster.clock.after(self.cluster.delay(0.05, self.cluster.setup_s), worker.ready)
            case ForkPlain(slot, worker_id, _):
                worker = self.processes[worker_id] = Worker(self, slot, worker_id)
                self.cluster.clock.after(self.cluster.delay(0.01, 0.2), worker.calls_run)
            case Kill(_, worker_id, _, graceful):
                if worker := self.processes.get(worker_id):
                    self.cluster.clock.after(
                        0.05 if graceful else 0.002, worker.die, f"killed by {'SIGTERM' if graceful else 'SIGKILL'}"
                    )
            case SaveNow(_, stop):
                self.cluster.training.save_soon(self, stop)
            case FindNewestSaved(remote):
                self.soon(NewestSaved(self.cluster.training.saved_in, remote))
            case Leave():
                self._left()
            case _:
                self.writer.do(effect, agent.etcd.view)

    def _left(self) -> None:
        assert self._client is not None
        self.writer.leave()
        self._client.close()
        self.agent = None
        for group in self.cluster.training.groups.values():
            if group.host is self:
                group.host_died()
        self.cluster.check_doors()
        self.cluster.etcd_changed()
        self.cluster.left(self)

    # ── ticks ───────────────────────────────────────────────────────────────────────────────────────────────

    def _schedule_tick(self) -> None:
        """A tick at the next instant at which one can matter: with nothing due, ten a second change nothing."""
        due_s = self._due_s()
        if due_s == float("inf"):
            return
        at_s = max((due_s - 100.0 * self.index) / self.rate, self.cluster.clock.now_s) + BEAT_S / 2
        if at_s < self._tick_due_s - 1e-6:
            self._tick_due_s = at_s
            self._phone += 1
            self.cluster.clock.at(at_s, self._tick, self.incarnation, self._phone)

    def _tick(self, incarnation: str, phone: int) -> None:
        if incarnation != self.incarnation or phone != self._phone:
            return
        self._tick_due_s = float("inf")
        if self.paused:
            return
        self.take(Tick())

    def _due_s(self) -> float:
        agent = self.agent
        assert agent is not None
        now_s = self.now_s()
        due = [w.deadline_s for w in agent.local.workers.values()]
        due += [w.deadline_s for w in agent.local.standbys]
        if agent.local.suspicious_since_s is not None:
            due.append(agent.local.suspicious_since_s + SUSPICION_S)
        if agent.etcd.absence_ignored_until_s > now_s:
            due.append(agent.etcd.absence_ignored_until_s)
        due += [at + ASK_AGAIN_S for at in agent.etcd.asked.values() if at + ASK_AGAIN_S > now_s]
        if agent.lead.publishing and agent.lead.publishing_since_s + PUBLISH_AGAIN_S > now_s:
            due.append(agent.lead.publishing_since_s + PUBLISH_AGAIN_S)
        number = agent.formed.generation.number if agent.formed.generation else -1
        if any(w.stage is Stage.READY and w.generation == number for w in agent.local.workers.values()):
            due.append(now_s + 0.5)
        narrow = self._scope is not None and not self._scope.complete
        if self.agent.local.saving:  # whether it still does
            due.append(now_s + 0.5)
        if narrow:  # whether it still steps
            due.append(now_s + 1.0)
        if agent.drain.draining is not None or agent.lead.reason not in AT_REST:
            due.append(now_s + 0.5)
        return min(due, default=float("inf"))
