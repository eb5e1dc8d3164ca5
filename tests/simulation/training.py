"""A model of what the workers do: processes that hold a state, and groups of them that step together.

A step's all-reduce completes when every rank has taken part. When a rank dies or lets go in the middle of one, it may
have completed on some ranks and not on others: those are a step ahead. A state is known by its version and by the
chain of all that went into it, so that a lost, doubled or forked step shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from support import says

from elastic.contract.origin import Origin
from elastic.contract.records.job_records import WorkerError
from elastic.contract.worker import messages
from elastic.recovery.machine.events import (
    CheckpointSaved,
    Event,
    WorkerExited,
    WorkerUnhealthy,
)
from elastic.worker.link.session import LATE_S
from elastic.worker.state.state_source import (
    NoStateError,
    Offer,
    StateLostError,
    Version,
    choose,
    counted_before,
    reached,
)

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Node

LONG_S = 1.0
COMMIT_WAIT_S = 5.0
"""Steps longer than this delay a worker that is told to abort."""
SETUP = 0
"""The chain of a state that nothing has gone into."""


@dataclass(eq=False)
class Worker:
    """One worker process."""

    node: Node
    slot: int
    worker_id: int
    doing: str = "setup"  # setup, idle, arriving, forming, syncing, running, done, dead
    group: Group | None = None
    rank: int = -1
    version: Version = (0, 0)
    chain: int = SETUP
    whole: bool = True
    established: bool = False
    stopped: bool = False
    deaf: bool = False
    """Does not abort when told to."""
    aborted: int = 0
    leave: tuple[int, int] = (0, 0)
    """(generation, step after which to leave it)"""
    forms: list[messages.Form] = field(default_factory=list)
    unheard: list[messages.Message] = field(default_factory=list)
    """What came while the process was stopped."""
    finish: bool = False
    known_commit: Version = (0, 0)

    @property
    def alive(self) -> bool:
        return self.doing != "dead"

    @property
    def name(self) -> str:
        return f"{self.node.name}/{self.slot}"

    def state(self) -> tuple[Version, int]:
        group = self.group
        return (
            (group.version, group.chain) if group and self.doing in ("running", "done") else (self.version, self.chain)
        )

    # ── what the agent says ─────────────────────────────────────────────────────────────────────────────────

    def hear(self, message: messages.Message) -> None:
        if not self.alive:
            return
        if self.stopped:
            self.unheard.append(message)
            return
        match message:
            case messages.Form():
                self.forms.append(message)
                self.look()
            case messages.AbortGroup(generation=generation):
                if self.deaf:
                    return
                self.aborted = max(self.aborted, generation)
                if self.group and self.group.generation <= generation:
                    self._let_go_of(self.group)
                elif self.doing == "arriving" and self.group is None:  # it still dials
                    self.doing = "idle"
                    self.say(says.group_closed(self.slot, self.worker_id, generation, self.version[1], between=True))
                    self.look()
            case messages.StopAtStep(generation=generation, at_step=at_step):
                self.leave = (generation, at_step)
                if self.group and self.group.generation == generation:
                    self.group.yields = True
                    if self.state()[0][1] > at_step:  # the step under way is left to be completed by all
                        late_s = max(LATE_S, 1.5 * self.node.cluster.training.step_s)
                        self.node.cluster.clock.after(late_s, self._give_up, self.group)
            case messages.Assign(slot=slot):
                self.slot = slot
            case messages.Finish():
                self.finish = True
                if self.doing in ("idle", "done"):
                    self.node.cluster.clock.after(0.01, self.die, "exit code 0", 0)

    def _let_go_of(self, group: Group) -> None:
        """The call in flight raises only when its step gets to it."""
        step_s = self.node.cluster.training.step_s
        if step_s <= LONG_S or self.doing != "running":
            group.leave(self, "", partial=True)
        else:
            self.node.cluster.clock.after(step_s * 0.8, group.leave_late, self)

    def _give_up(self, group: Group) -> None:
        """As `worker.session`: the step is not completed in time."""
        if self.alive and not self.stopped and self.group is group:
            self.aborted = max(self.aborted, group.generation)
            group.leave(self, "", partial=True)

    def look(self) -> None:
        """Idle: take the next generation to form."""
        if self.doing != "idle" or self.stopped:
            return
        while self.forms:
            form = self.forms.pop(0)
            if form.generation > self.aborted:
                self.doing, self.rank, self.known_commit = "arriving", form.rank, form.reached
                self.node.cluster.training.arrive(self, form)
                return

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped = False
        unheard, self.unheard = self.unheard, []
        for message in unheard:
            self.hear(message)
        if self.group:
            self.group.kick()

    # ── what it says ────────────────────────────────────────────────────────────────────────────────────────

    def say(self, event: Event) -> None:
        self.node.soon(event, self.worker_id)

    def calls_run(self) -> None:
        """Its imports are done."""
        if self.stopped:
            self.node.cluster.clock.after(1.0, self.calls_run)
        elif self.alive:
            self.say(says.managed(self.slot, self.worker_id))
            self.node.cluster.clock.after(self.node.cluster.delay(0.05, self.node.cluster.setup_s), self.ready)

    def ready(self) -> None:
        if self.doing == "setup" and not self.stopped:
            self.doing = "idle"
            self.say(says.ready(self.slot, self.worker_id))
        elif self.doing == "setup":
            self.node.cluster.clock.after(1.0, self.ready)

    def die(
        self, cause: str = "killed by SIGKILL", code: int | None = None, error: str = "", fingerprint: str = "",
        no_state: bool = False,
    ) -> None:  # fmt: skip
        if not self.alive:
            return
        step = self.state()[0][1]
        group = self.group
        self.node.cluster.died(self, cause)
        if group is not None:
            if code == 0 and self.doing == "done":
                group.part(self)
            else:
                group.leave(self, None, partial=True)
                step = self.version[1]
        self.doing = "dead"
        signal = cause.removeprefix("killed by ") if code is None else ""
        self.node.processes.pop(self.worker_id, None)
        said = (
            WorkerError(
                node=self.node.name,
                slot=self.slot,
                rank=self.rank,
                message=error,
                step=step,
                no_state=no_state,
                misuse=error.startswith("Misuse"),
            )
            if error
            else None
        )
        kind = fingerprint or signal or cause
        self.say(WorkerExited(self.slot, self.worker_id, error or cause, code, said, kind, step, signal=signal))


@dataclass(eq=False)
class Group:
    """The ranks of one published generation, as they meet at its store."""

    training: Training
    generation: int
    port: int
    host: Node
    world_size: int
    restore: str = "newest"
    ranks: dict[int, Worker] = field(default_factory=dict)
    phase: str = "arriving"  # arriving, forming, syncing, running, broken, done
    version: Version = (0, 0)
    chain: int = SETUP
    origin: Origin = Origin.LIVE
    reached: int = 0
    """The newest step that its ranks, or their agents, knew of when it formed."""
    fresh: bool = True
    """No step of this generation is committed yet."""
    committed_s: float = 0.0
    yields: bool = False
    save: bool = False
    stop: bool = False
    """All leave after the next step, which is saved."""
    stalled: bool = False
    turn: int = 0
    came: int = 0

    # ── together ────────────────────────────────────────────────────────────────────────────────────────────

    def together(self) -> bool:
        """Every rank can take part now."""
        cluster = self.training.cluster
        first = self.ranks[0].node
        return not any(w.stopped or not cluster.reaches(first, w.node) for w in self.ranks.values())

    def kick(self) -> None:
        """Something that may have held it up has changed."""
        if self.stalled and self.phase in ("forming", "syncing", "running"):
            self.stalled = False
            self._next(0.001)

    def _next(self, delay_s: float) -> None:
        self.turn += 1
        self.training.cluster.clock.after(delay_s, self._advance, self.turn)

    def _advance(self, turn: int) -> None:
        if turn != self.turn or self.phase in ("broken", "done"):
            return
        if not self.together():
            self.stalled = True
            return
        match self.phase:
            case "forming" if self.training.failing_forms:
                self.training.failing_forms -= 1
                self.training.cluster.died_s.append(self.training.cluster.clock.now_s)
                for worker in tuple(self.ranks.values()):
                    self.training.cluster.clock.after(0.01, self._fails, worker)
            case "forming":
                self.phase = "syncing"
                for worker in self.ranks.values():
                    worker.doing = "syncing"
                    worker.say(says.formed(worker.slot, worker.worker_id, self.generation))
                self._choose()
            case "syncing":
                self._run()
            case "running":
                self._step()

    def arrived(self, worker: Worker, rank: int) -> None:
        if rank in self.ranks or len(self.ranks) >= self.world_size:
            raise AssertionError(f"rank {rank} of generation {self.generation} came twice: {worker.name}")
        worker.group, worker.rank = self, rank
        self.ranks[rank] = worker
        self.came += 1
        if self.came < self.world_size:
            return
        for other in self.ranks.values():
            other.doing = "forming"
        if len(self.ranks) == self.world_size:
            self.phase = "forming"
            self._next(self.training.cluster.delay(0.01, 0.05))
        else:  # somebody came and died: the others find nobody at its address
            self.phase = "broken"
            for other in tuple(self.ranks.values()):
                self.training.cluster.clock.after(0.05, self._fails, other)

    def _choose(self) -> None:
        """As `worker.sync`: one offer per rank, one choice."""
        checkpoint = self.training.newest_checkpoint()
        offers = []
        for rank, w in sorted(self.ranks.items()):
            look = self.restore == "snapshot" or not (w.whole and w.established)
            saved = checkpoint[0] if checkpoint and look else None
            offers.append(
                Offer(
                    rank=rank,
                    version=w.version,
                    clean=w.whole,
                    established=w.established,
                    checkpoint=saved,
                    reached=w.known_commit,
                )
            )
        self.reached = max(self.reached, reached(offers))
        try:
            (choice,) = choose(offers, self.restore, counted_before(offers, self.restore, self.generation)).values()
        except StateLostError:  # each builds its state anew, and they choose again
            for worker in self.ranks.values():
                if worker.established or not worker.whole:
                    worker.version, worker.chain, worker.whole, worker.established = (0, 0), SETUP, True, False
            self._choose()
            return
        except NoStateError as error:
            for worker in tuple(self.ranks.values()):
                self.training.cluster.clock.after(0.001, worker.die, "exit code 1", 1, str(error), "NoStateError", True)
            return
        source, self.origin = self.ranks[choice.source], choice.origin
        if choice.origin == "checkpoint":
            assert checkpoint is not None
            self.version, self.chain = checkpoint
        elif choice.origin == "setup":
            self.version, self.chain = (self.generation, 0), SETUP
        else:
            self.version, self.chain = source.version, source.chain
        self.training.cluster.judge.chosen(self, choice)
        for rank in choice.needs:
            self.ranks[rank].whole = False
        if choice.needs:
            self.training.cluster.handing_over(source, [self.ranks[rank] for rank in choice.needs])
        if choice.origin != "live":
            source.whole = choice.origin == "setup"
        self._next(self.training.cluster.delay(0.01, 0.1 if choice.needs else 0.02))

    def _run(self) -> None:
        self.phase = "running"
        for worker in self.ranks.values():
            worker.doing, worker.whole, worker.established = "running", True, True
            worker.version, worker.chain = self.version, self.chain
            synced = self.generation, self.version[1], self.origin, str(self.origin), self.reached
            worker.say(says.synced(worker.slot, worker.worker_id, *synced))
        self._leavers()
        if self.phase == "running":
            self._work_or_finish()

    def _work_or_finish(self) -> None:
        training = self.training
        if training.steps and self.version[1] >= training.steps:
            self.phase = "done"
            if training.checkpoint_every:
                training.save_last(self)
            for worker in self.ranks.values():
                worker.doing = "done"
                worker.say(says.done(worker.slot, worker.worker_id, self.generation, self.version[1]))
            return
        slower_s, training.slower_s = training.slower_s, 0.0
        self._next(training.step_s + slower_s)

    def _step(self) -> None:
        """The all-reduce of one step has completed on all ranks."""
        training = self.training
        step = self.version[1] + 1
        if training.bug == step:
            victim = self.ranks[training.bug_rank % self.world_size]
            kind = "MisuseValueError" if training.misuse else "ValueError"
            victim.die("exit code 1", 1, f"{kind}: planted", f"{kind} at train.py:1")
            return
        self._commit()
        training.committed(self, step)
        if self.chain in training.spoiled:
            training.cluster.deaths[self.ranks[0].node.name] += 1
            training.cluster.died_s.append(training.cluster.clock.now_s)
            self.ranks[0].say(
                says.bad_numbers(
                    self.ranks[0].slot, self.ranks[0].worker_id, self.generation, step, "bad loss", "loss is nan", (0,)
                )
            )
        if self.fresh:
            self.fresh = False
            for worker in self.ranks.values():
                worker.say(says.stepping(worker.slot, worker.worker_id, self.generation, step))
        if self.yields or self.stop:
            self._leavers()
        if self.phase == "running":
            self._work_or_finish()

    def _commit(self) -> None:
        step = self.version[1] + 1
        self.version = (max(self.version[0], self.generation), step)
        before, training = self.chain, self.training
        self.chain = hash((self.chain, self.generation, step, self.world_size))
        if before in training.spoiled or step == training.spoil_at:
            training.spoiled.add(self.chain)
            training.spoil_at = 0
        self.committed_s = self.training.cluster.clock.now_s
        self.training.cluster.judge.committed(self)

    def _leavers(self) -> None:
        step = self.version[1]
        due = [w for w in self.ranks.values() if self.stop or (w.leave[0] == self.generation and step >= w.leave[1])]
        for worker in due:
            self.leave(worker, "", partial=False)

    # ── apart ───────────────────────────────────────────────────────────────────────────────────────────────

    def part(self, worker: Worker) -> None:
        """`worker` is no longer of this group; nobody else notices."""
        if self.phase in ("running", "done") and worker.doing in ("running", "done"):
            worker.version, worker.chain = self.version, self.chain
        self.ranks.pop(worker.rank, None)
        worker.group = None

    def leave(self, worker: Worker, error: str | None, *, partial: bool) -> None:
        """`worker` lets go ('': told to; None: it dies; else: a collective failed). The others are held up."""
        cluster = self.training.cluster
        if worker.group is not self:
            return
        between = worker.doing not in ("running", "broken") or (error == "" and not partial)
        if self.phase == "running":
            self._materialise(partial and cluster.rng.random() < 0.3 and self.together())
        elif self.phase == "done":
            worker.version, worker.chain = self.version, self.chain
        if self.phase in ("forming", "syncing", "running"):
            self.phase = "broken"
        self.ranks.pop(worker.rank, None)
        worker.group = None
        if self.phase == "broken":
            for other in tuple(self.ranks.values()):
                if cluster.rng.random() < 0.6:
                    cluster.clock.after(cluster.delay(0.001, 0.05), self._fails, other)
        if error is not None:
            worker.doing = "idle"
            at = self.generation, worker.version[1]
            stepless_s = (cluster.clock.now_s - self.committed_s) * worker.node.rate if not self.fresh else None
            said = {"between": between and not error, "clean": worker.whole, "stepless_s": stepless_s}
            worker.say(says.group_closed(worker.slot, worker.worker_id, *at, error, **said))
            cluster.clock.after(0.001, worker.look)

    def leave_late(self, worker: Worker) -> None:
        if worker.alive and not worker.stopped:
            self.leave(worker, "", partial=True)

    def _materialise(self, partial: bool) -> None:
        """The group breaks up: each rank keeps its own state from here on. `partial`: the step under way completed
        on some of them."""
        before = (self.version, self.chain)
        for worker in self.ranks.values():
            worker.version, worker.chain = before
            worker.doing = "broken"
        training = self.training
        if (
            partial
            and training.bug != self.version[1] + 1
            and not (training.steps and self.version[1] >= training.steps)
        ):
            ahead = [w for w in self.ranks.values() if training.cluster.rng.random() < 0.5]
            if ahead and not all(w.leave == (self.generation, before[0][1]) for w in ahead):
                self._commit()
                for worker in ahead:
                    worker.version, worker.chain = self.version, self.chain

    def _fails(self, worker: Worker) -> None:
        if worker.group is self and not worker.stopped:
            self.leave(worker, "RuntimeError: connection closed by peer", partial=False)

    def host_died(self) -> None:
        """The store is gone: who still waits there sees it."""
        if self.phase == "arriving":
            cluster = self.training.cluster
            for worker in tuple(self.ranks.values()):
                cluster.clock.after(cluster.delay(0.001, 0.05), self._lost_store, worker)

    def _lost_store(self, worker: Worker) -> None:
        if worker.group is self and not worker.stopped:
            self.leave(worker, "FormError: the store is gone", partial=False)


class Training:
    """All workers of the cluster's one job."""

    def __init__(self, cluster: Cluster, step_s: float, steps: int, checkpoint_every: int) -> None:
        self.cluster = cluster
        self.step_s = step_s
        self.slower_s = 0.0
        """So much longer takes the next step."""
        self.steps = steps
        """After so many the training is complete; 0: never."""
        self.bug = 0
        """The step at which the script fails, each time; 0: none."""
        self.bug_rank = 0
        self.misuse = False
        """That failure is a refusal of elastic's."""
        self.spoil_at = 0
        """The step that spoils the numbers; 0: none."""
        self.spoiled: set[int] = set()
        """Chains of states with bad numbers in them."""
        self.failing_forms = 0
        """So many groups fail while they form, and nobody knows why."""
        self.groups: dict[int, Group] = {}
        self.checkpoint_every = checkpoint_every
        self.checkpoints: list[tuple[Version, int]] = []
        self.saved_in = 0
        """The newest generation of which a checkpoint was begun."""
        self.latest: Group | None = None
        self._ports = 0

    def open_store(self, host: Node, generation: int) -> int:
        self._ports += 1
        self.groups[self._ports] = Group(self, generation, self._ports, host, 0)
        return self._ports

    def arrive(self, worker: Worker, form: messages.Form) -> None:
        group = self.groups[form.store_port]
        group.world_size, group.restore = form.world_size, form.restore
        if not group.host.serves(form.store_port):
            return  # connects until it is told to abort
        if not self.cluster.reaches(worker.node, group.host):
            self.cluster.clock.after(0.5, self._again, worker, form)
            return
        if group.phase != "arriving" or form.rank in group.ranks:
            return  # waits until it is killed: its rank is taken
        group.arrived(worker, form.rank)

    def _again(self, worker: Worker, form: messages.Form) -> None:
        if worker.doing == "arriving" and worker.group is None and worker.aborted < form.generation:
            self.arrive(worker, form)

    def committed(self, group: Group, step: int) -> None:
        self.latest = group
        if self.checkpoint_every and (step % self.checkpoint_every == 0 or group.save or group.stop):
            group.save = False
            self.saved_in = max(self.saved_in, group.version[0])
            self.cluster.clock.after(self.cluster.setting.save_s, self._saved, (group.version, group.chain))

    def save_soon(self, node: Node, stop: bool) -> None:
        """Rank 0 hears it, and at the next step it is for all; `stop`: they end there."""
        for worker in node.processes.values():
            if not self.checkpoint_every or worker.group is None:
                continue  # without a folder for checkpoints nobody listens
            if worker.rank == 0 and worker.group.phase == "running":
                worker.group.save = True
                worker.group.stop = worker.group.stop or stop

    def save_last(self, group: Group) -> None:
        """The final state, a shard on each node: committed if none of their writers dies before."""
        writers = {worker.node.name: (worker.node, worker.node.incarnation) for worker in group.ranks.values()}
        for node, _ in writers.values():
            node.saves += 1
        saved = (group.version, group.chain)
        self.saved_in = max(self.saved_in, group.version[0])
        self.cluster.clock.after(self.cluster.setting.save_s, self._last_saved, saved, list(writers.values()), False)

    def _last_saved(self, saved: tuple[Version, int], writers: list[tuple[Node, str]], waited: bool) -> None:
        alive = [node for node, incarnation in writers if node.agent and node.incarnation == incarnation]
        if len(alive) == len(writers):
            self._saved(saved)
        elif not waited:  # the commit waits for the shard that is missing
            self.cluster.clock.after(COMMIT_WAIT_S, self._last_saved, saved, writers, True)
            return
        for node in alive:
            node.saves -= 1

    def _saved(self, checkpoint: tuple[Version, int]) -> None:
        if checkpoint[1] in self.spoiled:
            return  # the worker saves no bad numbers
        self.checkpoints.append(checkpoint)
        for node in self.cluster.nodes:
            node.soon(CheckpointSaved(*checkpoint[0]))

    def newest_checkpoint(self) -> tuple[Version, int] | None:
        return max(self.checkpoints, default=None)

    def kick(self) -> None:
        for group in self.groups.values():
            if group.stalled:
                group.kick()

    def hang(self, worker: Worker) -> None:
        """The agent's hang detector finds a stopped worker by the state of its process."""
        if worker.alive and worker.stopped:
            worker.say(WorkerUnhealthy(worker.slot, worker.worker_id, "hang", "process is stopped (state T)"))
            self.cluster.clock.after(2.0, self.hang, worker)
