"""What an agent does about everything that can happen to its job: ``step(agent, event, now_s)``. Pure.

An event changes what the agent knows; then `_settle` compares what is with what should be and asks for the
difference. So no event needs to know what came before it, and a lost or repeated one does no harm.

Order of effects: as returned, but nothing waits for anything: each is handed to the shell, which reports back by
events. A worker is told a thing once, when its stage changes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from . import messages
from .membership import JobView, Limits, Wait, bereft, leader, next_generation
from .model import (
    IN_GROUP,
    Agent,
    ChargeFailure,
    Drain,
    Effect,
    Event,
    ForkPlain,
    ForkWorker,
    Joined,
    Kill,
    LeaseLost,
    Leave,
    NumbersBad,
    PeerDead,
    Policy,
    Progress,
    Publish,
    PublishFailed,
    PutBroken,
    PutMember,
    PutPhase,
    Rejoin,
    Restore,
    Saved,
    SaveNow,
    Stage,
    Start,
    StillBusy,
    Tell,
    Tick,
    Undrain,
    Viewed,
    Worker,
    WorkerDone,
    WorkerExited,
    WorkerFormed,
    WorkerReady,
    WorkerReleased,
    WorkerSick,
    WorkerStepping,
    WorkerSynced,
)
from .records import BrokenRecord, GenerationRecord, MemberRecord, Phase, WorkerError
from .restarts import backoff_s

SUSPICION_S = 0.3
"""From a collective that failed for no known reason until the generation is called broken for it: time for
the one who knows the reason to say so first."""

STALL_S = 1.0
"""With no step for this long (or three step times), an expired lease is believed."""

IDLE_S = 1.0
"""A worker outside of the generation that it was in, with nothing to wait for, is not left there for longer."""

LEAD_S = 0.25
"""How far ahead a planned boundary is set, so that every rank hears of it before it gets there."""


ASK_AGAIN_S = 1.0
"""A request whose result the view does not show is made again after this long."""


def step(agent: Agent, event: Event, now_s: float, jitter: float = 0.5) -> tuple[Agent, tuple[Effect, ...]]:
    """The agent after `event`, and what is to be done. `jitter` in [0, 1) spreads pauses between agents."""
    turn = _Turn(agent, now_s, jitter)
    turn.take(event)
    turn.settle()
    return turn.agent, tuple(turn.effects)


class _Turn:
    """One turn: the agent as it becomes, and the effects so far."""

    def __init__(self, agent: Agent, now_s: float, jitter: float) -> None:
        self.agent = agent
        self.now_s = now_s
        self.jitter = jitter
        self.effects: list[Effect] = []
        self._ranks: tuple[GenerationRecord | None, dict[int, int]] = (None, {})

    # ── small helpers ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def policy(self) -> Policy:
        return self.agent.policy

    def change(self, **fields: object) -> None:
        self.agent = replace(self.agent, **fields)  # type: ignore[arg-type]

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def put(self, worker: Worker) -> None:
        self.change(workers={**self.agent.workers, worker.slot: worker})

    def find(self, slot: int, life: int) -> Worker | None:
        """The worker meant, or None when it has been replaced since."""
        worker = self.agent.workers.get(slot)
        return worker if worker and worker.life == life else None

    def move(self, worker: Worker, stage: Stage, deadline_s: float = math.inf, **fields: object) -> Worker:
        moved = replace(worker, stage=stage, since_s=self.now_s, deadline_s=deadline_s, **fields)  # type: ignore[arg-type]
        self.put(moved)
        return moved

    def ask(self, effect: Effect, key: str) -> None:
        """Ask for something that only the view can confirm; again after a while if it does not."""
        asked = self.agent.asked.get(key)
        if asked is None or self.now_s - asked >= ASK_AGAIN_S:
            self.change(asked={**self.agent.asked, key: self.now_s})
            self.do(effect)

    def is_broken(self) -> bool:
        generation = self.agent.generation
        return generation is not None and self.agent.broken >= generation.number

    def my_ranks(self) -> dict[int, int]:
        """slot -> rank of our workers in the newest generation; empty when it goes on without us."""
        generation = self.agent.generation
        if generation is None:
            return {}
        if self._ranks[0] is not generation:  # asked many times a turn, and a generation may have thousands of places
            mine = generation.place(self.policy.node, self.policy.incarnation) is not None
            self._ranks = generation, generation.ranks(self.policy.node) if mine else {}
        return self._ranks[1]

    def limits(self) -> Limits:
        """How many nodes the job may have, as its spec says now (`elasticctl scale`)."""
        spec = self.agent.view.spec
        if spec is None:
            return self.policy.limits
        return Limits(spec.spec.min_nodes, spec.spec.max_nodes, spec.spec.join_wait_s)

    def steps_advance(self) -> bool:
        if not self.policy.managed:
            return False
        if self.done_here():
            return True  # all ranks have got to the end; who is silent has nothing left to do
        return self.now_s - self.agent.stepped_at_s < max(STALL_S, 3 * self.agent.step_s)

    def done_here(self) -> bool:
        """All our workers have got to the end, and so have all others."""
        number = self.agent.generation.number if self.agent.generation else 0
        mine = [w for s, w in self.agent.workers.items() if s in self.my_ranks()]
        return bool(mine) and all(w.stage is Stage.DONE and w.generation == number for w in mine)

    # ── what happened ───────────────────────────────────────────────────────────────────────────────────────

    def take(self, event: Event) -> None:
        match event:
            case Start():
                self._start()
            case Joined():
                self.change(joined=True)
            case LeaseLost():
                self.change(joined=False)
                self._rejoin()
            case Viewed(view, connected):
                self._viewed(view, connected)
            case PublishFailed(number):
                if self.agent.publishing == number:
                    self.change(publishing=0)
            case PeerDead(node, incarnation):
                self.change(
                    dead=self.agent.dead | {(node, incarnation)},
                    dead_since_s={**self.agent.dead_since_s, (node, incarnation): self.now_s},
                )
            case Progress(generation, at_step, step_s):
                if at_step > self.agent.step or generation > self.agent.settled:
                    self.change(stepped_at_s=self.now_s)
                self.change(step=at_step, step_s=step_s, settled=max(self.agent.settled, generation))
            case Drain(reason, deadline_s):
                self.change(draining=reason, drain_deadline_s=deadline_s, drain_saved=0)
            case Undrain():
                self.change(draining=None, drain_deadline_s=math.inf)
                current = self.agent.generation
                if current and any(
                    w.stage is Stage.READY and w.generation == current.number for w in self.agent.workers.values()
                ):
                    self._break("undrain", "stopped for a drain that was called off", (), charged=False)
            case Saved(at_step):
                self.change(drain_saved=at_step)
            case Tick():
                self._forgive()
            case _:
                self._take_from_worker(event)

    def _forgive(self) -> None:
        """Who is called dead and still renews its lease after more than its time-to-live was called so wrongly."""
        agent = self.agent
        if not agent.connected or not agent.dead:
            return
        limit_s = self.policy.timeouts.lease_ttl_s + 1.0
        standing = {m.id for m in agent.view.members.values()}
        alive = {d for d in agent.dead & standing if self.now_s - agent.dead_since_s.get(d, self.now_s) > limit_s}
        if alive:
            self.change(dead=agent.dead - alive)

    def _take_from_worker(self, event: Event) -> None:
        match event:
            case WorkerExited(slot, life):
                self._exited(event)
                return
            case WorkerReady(slot, life) if self._standby(life):
                self._set_standby(life, Stage.READY)
                return
            case WorkerReady(slot, life) | WorkerFormed(slot, life) | WorkerSynced(slot, life):
                worker = self.find(slot, life)
            case WorkerStepping(slot, life) | WorkerReleased(slot, life) | WorkerDone(slot, life):
                worker = self.find(slot, life)
            case WorkerSick(slot, life) | NumbersBad(slot, life) | StillBusy(slot, life):
                worker = self.find(slot, life)
            case _:
                raise AssertionError(f"no transition on {event!r}")
        if worker is None:
            return  # said by a process that has been replaced
        match event:
            case WorkerReady():
                if worker.stage is Stage.STARTING:
                    self.move(worker, Stage.READY)
            case WorkerFormed():
                pass
            case WorkerSynced(_, _, generation, at_step):
                if worker.stage is Stage.FORMING and generation == worker.generation:
                    self.move(worker, Stage.RUNNING, step=at_step)
            case WorkerStepping(_, _, generation, at_step):
                if generation == worker.generation:
                    self.put(replace(worker, step=at_step, crashes=0))
                    self.change(settled=max(self.agent.settled, generation), stepped_at_s=self.now_s)
            case WorkerReleased():
                self._released(worker, event)
            case WorkerDone(_, _, generation, at_step):
                if worker.stage in IN_GROUP and generation == worker.generation:
                    self.move(worker, Stage.DONE, step=at_step)
            case WorkerSick(_, _, kind, evidence):
                if worker.stage in IN_GROUP | {Stage.STARTING, Stage.READY}:
                    if worker.slot in self.my_ranks():
                        self._break(kind, evidence, (worker.slot,), step=worker.step, fingerprint=kind)
                    self._kill(worker, evidence)
            case StillBusy():
                if worker.stage in (Stage.LEAVING, Stage.YIELDING):
                    self.put(replace(worker, deadline_s=self.now_s + self.policy.timeouts.let_go_s))
            case NumbersBad():
                self._bad_numbers(worker, event)

    def _viewed(self, view: JobView, connected: bool) -> None:
        before = self.agent
        wiped = view.revision < before.view.revision or (before.view.spec is not None and view.spec is None)
        if connected and (wiped or not before.connected):
            # Wiped or away, or we are new. The others come back with their next renewals, each at its own time.
            self.change(blind_until_s=self.now_s + self.policy.timeouts.lease_ttl_s)
            if wiped:  # and with it what we may have published
                self.change(wiped_until_s=self.agent.blind_until_s, publishing=0)
        places = before.generation.places if before.generation else ()
        known = {m.id for m in view.members.values()} | {(p.node, p.incarnation) for p in places}
        self.change(view=view, connected=connected, dead=frozenset(d for d in before.dead if d in known))
        self.change(state=view.state if view.state_revision else before.state, spec=view.spec or before.spec)
        if view.broken and view.generation and view.broken.generation == view.generation.number > before.broken:
            self.change(broken=view.broken.generation, broken_record=view.broken)

    def _start(self) -> None:
        for slot in range(self.policy.slots):
            stage = Stage.GONE if self.policy.managed else Stage.READY
            self.put(Worker(slot=slot, life=0, stage=stage, since_s=self.now_s, deadline_s=self.now_s))
        self._rejoin()

    def _rejoin(self) -> None:
        record = self._member_record()
        self.change(published=record)
        self.do(Rejoin(record))

    def _released(self, worker: Worker, event: WorkerReleased) -> None:
        if event.generation != worker.generation or worker.stage not in IN_GROUP | {Stage.LEAVING}:
            return
        untold = worker.stage in (Stage.FORMING, Stage.RUNNING, Stage.DONE)
        self.move(worker, Stage.READY, step=event.step)
        current = self.agent.generation
        if untold and event.error and current and current.number == event.generation and not self.is_broken():
            self.change(suspicion=event.error)
            if self.agent.suspicious_since_s is None:
                self.change(suspicious_since_s=self.now_s)

    def _bad_numbers(self, worker: Worker, event: NumbersBad) -> None:
        mode = self.policy.spec.on_bad_numbers
        if mode == "ignore" or event.generation != worker.generation:
            return
        ranks = ", ".join(map(str, event.ranks)) or "?"
        detail = f"{event.kind} on rank {ranks} at step {event.step}: {event.detail}"
        if mode == "stop":
            if self.agent.view.state.phase is Phase.RUNNING:
                self.do(PutPhase(Phase.FAILED, detail, self.agent.view.state_revision))
            return
        error = WorkerError(node=self.policy.node, slot=worker.slot, rank=-1, message=detail, step=event.step)
        self._break(event.kind, detail, (), step=event.step, fingerprint=event.kind, error=error, rollback=True)

    # ── a worker's end ──────────────────────────────────────────────────────────────────────────────────────

    def _standby(self, life: int) -> Worker | None:
        return next((w for w in self.agent.standbys if w.life == life), None)

    def _set_standby(self, life: int, stage: Stage, deadline_s: float = math.inf) -> None:
        changed = tuple(
            replace(w, stage=stage, deadline_s=deadline_s) if w.life == life else w for w in self.agent.standbys
        )
        self.change(standbys=changed)

    def _exited(self, event: WorkerExited) -> None:
        if standby := self._standby(event.life):
            pause = backoff_s(standby.crashes + 1, self.policy.spec.restarts, self.jitter)
            gone = replace(standby, stage=Stage.GONE, deadline_s=self.now_s + pause, crashes=standby.crashes + 1)
            self.change(standbys=tuple(gone if w.life == event.life else w for w in self.agent.standbys))
            return  # charged to no budget
        worker = self.find(event.slot, event.life)
        if worker is None or worker.stage is Stage.GONE:
            return
        worker = replace(worker, step=max(worker.step, event.step))
        expected = worker.stage in (Stage.KILLED, Stage.LEAVING) or self._over()
        if not self.policy.managed:
            self._plain_exited(worker, event, expected)
            return
        crashes = worker.crashes + (0 if expected else 1)
        pause = backoff_s(crashes, self.policy.spec.restarts, self.jitter)
        self.move(worker, Stage.GONE, self.now_s + pause, crashes=crashes)
        self._promote(worker.slot)
        if not expected:
            self._report_exit(worker, event)
        elif self.policy.shrink and worker.slot in self.my_ranks() and not self.is_broken():
            self._break("respawn", "did not let go in time", (worker.slot,), step=worker.step, charged=False)

    def _plain_exited(self, worker: Worker, event: WorkerExited, expected: bool) -> None:
        if event.code == 0 and not expected:
            self.move(worker, Stage.DONE)
            return
        self.move(worker, Stage.READY, crashes=worker.crashes + (0 if expected else 1))
        if not expected:
            self._report_exit(worker, event)

    def _report_exit(self, worker: Worker, event: WorkerExited) -> None:
        detail = event.error.message if event.error else event.cause
        if event.code == 0 and self.policy.managed:
            detail = "exited with code 0 before the job was done"
        fingerprint = event.fingerprint or event.cause
        if worker.slot in self.my_ranks():
            self._break("exit", detail, (worker.slot,), step=worker.step, fingerprint=fingerprint, error=event.error)
            return
        record = self._broken_record(
            self.agent.generation.number if self.agent.generation else 0,
            "exit",
            detail,
            (worker.slot,),
            step=worker.step,
            fingerprint=fingerprint,
            error=event.error,
        )
        self.do(ChargeFailure(record))

    def _promote(self, slot: int) -> None:
        """A ready standby takes the place of the dead."""
        standby = next((w for w in self.agent.standbys if w.stage is Stage.READY), None)
        if standby is None or self._over():
            return
        rest = tuple(
            replace(w, life=0, stage=Stage.GONE, deadline_s=self.now_s) if w is standby else w
            for w in self.agent.standbys
        )
        self.change(standbys=rest)
        crashes = self.agent.workers[slot].crashes
        self.put(replace(standby, slot=slot, since_s=self.now_s, crashes=crashes))
        self.do(Tell(slot, standby.life, messages.Assign(slot=slot)))

    def _kill(self, worker: Worker, why: str, gently: bool = False) -> None:
        self.do(Kill(worker.slot, worker.life, why, gently))
        self.move(worker, Stage.KILLED)

    def _broken_record(
        self,
        generation: int,
        kind: str,
        detail: str,
        slots: tuple[int, ...],
        *,
        step: int | None = None,
        fingerprint: str = "",
        error: WorkerError | None = None,
        charged: bool = True,
        rollback: bool = False,
    ) -> BrokenRecord:
        ranks = self.my_ranks()
        return BrokenRecord(
            generation=generation,
            node=self.policy.node,
            kind=kind,
            detail=detail,
            slots=slots,
            ranks=tuple(ranks[s] for s in slots if s in ranks),
            error=error,
            fingerprint=fingerprint,
            step=step,
            charged=charged,
            rollback=rollback,
        )

    def _break(self, kind: str, detail: str, slots: tuple[int, ...], **more: object) -> None:
        """Say once that the newest generation is broken."""
        generation = self.agent.generation
        if generation is None or self.is_broken() or self._over():
            return
        record = self._broken_record(generation.number, kind, detail, slots, **more)  # type: ignore[arg-type]
        self.change(broken=generation.number, broken_record=record, suspicious_since_s=None)
        self.change(asked={**self.agent.asked, f"broken {generation.number}": self.now_s})
        member = None
        if self.policy.shrink and (wanted := self._member_record()) != self.agent.published:
            member = wanted
            self.change(published=wanted)
        self.do(PutBroken(record, member))

    # ── what follows ────────────────────────────────────────────────────────────────────────────────────────

    def _over(self) -> bool:
        phase = self.agent.view.state.phase
        return self.agent.leaving is not None or phase.over or phase is Phase.STOPPING

    def settle(self) -> None:
        self._adopt()
        self._check_suspicion()
        self._check_idle()
        self._check_drain()
        self._check_end()
        if self.agent.leaving is not None:
            self._leave()
            return
        for worker in tuple(self.agent.workers.values()):
            self._settle_worker(worker)
        self._settle_standbys()
        self._settle_member()
        self._lead()

    def _adopt(self) -> None:
        seen, held = self.agent.view.generation, self.agent.generation
        if seen is not None and (held is None or seen.number > held.number):
            self.change(generation=seen, suspicious_since_s=None, publishing=0)
        elif self.agent.connected and (
            self.agent.view.spec is None or (held and (seen is None or seen.number < held.number))
        ):
            self.ask(
                Restore(held, self.agent.state, self.agent.spec), "restore"
            )  # etcd was wiped or set back; what we hold is newer
        record = self.agent.broken_record
        if record and held and seen == held and record.generation == held.number and not self.agent.view.broken:
            self.ask(PutBroken(record), f"broken {held.number}")

    def _check_suspicion(self) -> None:
        since = self.agent.suspicious_since_s
        if since is None or self.now_s - since < SUSPICION_S:
            return
        self.change(suspicious_since_s=None)
        self._break("comm", self.agent.suspicion, (), charged=False)

    def _check_idle(self) -> None:
        """A worker has let go of a generation that stands: what it left for was called off, or never came."""
        current = self.agent.generation
        if current is None or self.is_broken() or not self.policy.managed:
            return
        members = self.agent.view.members.values()
        stay = sum(1 for m in members if m.record.ready and m.record.draining is None)
        if any(m.record.draining is not None for m in members) and stay < self.limits().min_nodes:
            return  # it waits for the one who leaves, and the job for a node in its place
        ranks = self.my_ranks()
        for worker in self.agent.workers.values():
            left = worker.stage is Stage.READY and worker.generation == current.number and worker.slot in ranks
            if left and self.now_s - worker.since_s >= IDLE_S:
                self._break("idle", "left its group, and nothing followed", (), charged=False)
                return

    def _check_drain(self) -> None:
        agent = self.agent
        if agent.draining is None or agent.leaving is not None:
            return
        if not self.my_ranks():
            if all(w.stage not in IN_GROUP | {Stage.LEAVING} for w in agent.workers.values()):
                self.change(leaving=f"drained: {agent.draining}")
            return
        due = self.now_s >= agent.drain_deadline_s
        stay = [
            m
            for m in agent.view.members.values()
            if m.record.node != self.policy.node and m.record.ready and m.record.draining is None
        ]
        if len(stay) < self.limits().min_nodes and not due:
            due = self._may_fall_below_min(bool(stay))
        if due:
            self._settle_member()  # the next generation is to be made without this node
            self._break("drain", agent.draining, tuple(self.my_ranks()), charged=False)
            self.change(leaving=f"drained: {agent.draining}")

    def _may_fall_below_min(self, others: bool) -> bool:
        """Leaving would stop the job: only once its state is safe. The world stops at the step that is saved."""
        agent = self.agent
        if not self.policy.spec.checkpoint.dir:
            return others  # they keep the state, and wait
        stopped = all(w.stage is Stage.READY for w in agent.workers.values() if w.slot in self.my_ranks())
        at_step = max((w.step for w in agent.workers.values()), default=0)
        if stopped and max(agent.drain_saved, agent.view.saved_step) >= at_step > 0:
            return True
        self.ask(SaveNow(f"drain: {agent.draining}", stop=True), "save")
        return False

    def _check_end(self) -> None:
        phase, reason = self.agent.view.state.phase, self.agent.view.state.reason
        if self.agent.leaving is None and (phase.over or phase is Phase.STOPPING):
            self.change(leaving=f"{phase.value}: {reason}" if reason else phase.value)

    def _leave(self) -> None:
        """Every worker ends; then the agent does."""
        succeeded = self.agent.view.state.phase is Phase.SUCCEEDED
        busy = False
        for worker in tuple(self.agent.workers.values()):
            if worker.stage is Stage.GONE or (not self.policy.managed and worker.stage in (Stage.READY, Stage.DONE)):
                continue
            busy = True
            if worker.stage is Stage.DONE and succeeded:
                self.do(Tell(worker.slot, worker.life, messages.Finish()))
                self.move(worker, Stage.LEAVING, self.now_s + self.policy.spec.stop_grace_s)
            elif worker.stage is Stage.LEAVING:
                if self.now_s >= worker.deadline_s or not succeeded:
                    self._kill(worker, "did not end in time")
            elif worker.stage is not Stage.KILLED:
                self._kill(worker, self.agent.leaving or "", gently=True)
        for standby in self.agent.standbys:
            if standby.stage in (Stage.STARTING, Stage.READY):
                self.do(Kill(-1, standby.life, "the job is over here"))
                self._set_standby(standby.life, Stage.KILLED)
            busy = busy or standby.stage is not Stage.GONE
        if not busy and self.agent.leaving is not None and not self.agent.reason.startswith("left"):
            self.change(reason=f"left: {self.agent.leaving}")
            self.do(Leave(self.agent.leaving))

    def _settle_worker(self, worker: Worker) -> None:
        agent, generation = self.agent, self.agent.generation
        if worker.stage is Stage.GONE:
            if self.now_s >= worker.deadline_s:
                self.change(lives=agent.lives + 1)
                self.move(worker, Stage.STARTING, life=agent.lives + 1, generation=0)
                self.do(ForkWorker(worker.slot, agent.lives + 1))
            return
        if worker.stage is Stage.LEAVING and self.now_s >= worker.deadline_s:
            self._kill(worker, "did not let go in time")
            return
        if generation is None:
            return
        if worker.stage in IN_GROUP:
            self._settle_in_group(worker, generation)
            worker = self.agent.workers[worker.slot]
        ranks = self.my_ranks()
        due = worker.stage is Stage.READY and worker.generation < generation.number
        if due and worker.slot in ranks and not self.is_broken():
            self._form(worker, generation, ranks)

    def _settle_in_group(self, worker: Worker, generation: GenerationRecord) -> None:
        older = worker.generation < generation.number
        if not older and not self.is_broken():
            return
        planned = (
            generation.at_step is not None
            and not self.is_broken()
            and worker.generation == generation.number - 1
            and self.policy.managed
        )
        if planned and worker.stage is Stage.RUNNING:
            assert generation.at_step is not None
            ahead_s = (generation.at_step - self.agent.step + 1) * self.agent.step_s
            deadline_s = self.now_s + max(0.0, ahead_s) + 2 * self.policy.timeouts.let_go_s
            self.move(worker, Stage.YIELDING, deadline_s)
            self.do(
                Tell(
                    worker.slot,
                    worker.life,
                    messages.Yield(generation=worker.generation, at_step=generation.at_step, why=generation.why),
                )
            )
        elif worker.stage is Stage.YIELDING and planned and self.now_s < worker.deadline_s:
            return
        else:
            self._let_go(worker, generation.why if older else "generation is broken")

    def _let_go(self, worker: Worker, why: str) -> None:
        if not self.policy.managed:
            if worker.stage is Stage.DONE:
                self.move(worker, Stage.READY)
            else:
                self._kill(worker, why)
            return
        self.do(Tell(worker.slot, worker.life, messages.LetGo(generation=worker.generation, why=why)))
        # The call in flight raises only when its step gets to it: a long step needs as long.
        patience_s = max(self.policy.timeouts.let_go_s, 3 * self.agent.step_s)
        self.move(worker, Stage.LEAVING, self.now_s + patience_s)

    def _form(self, worker: Worker, generation: GenerationRecord, ranks: dict[int, int]) -> None:
        if not self.policy.managed:
            self.change(lives=self.agent.lives + 1)
            life = self.agent.lives
            self.move(worker, Stage.RUNNING, generation=generation.number, life=life)
            self.do(ForkPlain(worker.slot, life, generation))
            return
        places = generation.places
        group_rank = next(i for i, p in enumerate(places) if p.node == self.policy.node)
        self.move(worker, Stage.FORMING, generation=generation.number)
        form = messages.Form(
            generation=generation.number,
            rank=ranks[worker.slot],
            world=generation.world,
            group_rank=group_rank,
            group_world=len(places),
            local_rank=sorted(ranks.values()).index(ranks[worker.slot]),
            local_world=len(ranks),
            store_host=generation.store_host,
            store_port=generation.store_port,
            restore=generation.restore,
            timeout_s=self.policy.timeouts.group_s,
        )
        self.do(Tell(worker.slot, worker.life, form))

    def _settle_standbys(self) -> None:
        if not self.policy.managed or not self.policy.standbys:
            return
        if not self.agent.standbys:
            # Only once the real workers stand: they come first.
            if any(w.stage in (Stage.STARTING, Stage.GONE) for w in self.agent.workers.values()):
                return
            fresh = tuple(
                Worker(slot=-1, life=0, stage=Stage.GONE, deadline_s=self.now_s) for _ in range(self.policy.standbys)
            )
            self.change(standbys=fresh)
        for i, standby in enumerate(self.agent.standbys):
            if standby.stage is Stage.GONE and self.now_s >= standby.deadline_s:
                life = self.agent.lives + 1
                started = replace(standby, life=life, stage=Stage.STARTING, since_s=self.now_s, deadline_s=math.inf)
                standbys = (*self.agent.standbys[:i], started, *self.agent.standbys[i + 1 :])
                self.change(lives=life, standbys=standbys)
                self.do(ForkWorker(-1, life, standby=True))

    def _member_record(self) -> MemberRecord:
        agent, policy = self.agent, self.policy
        before = agent.published.ready if agent.published else ()
        starting = (Stage.STARTING, Stage.GONE, Stage.KILLED)
        standing = tuple(s for s, w in sorted(agent.workers.items()) if w.stage not in starting)
        if policy.shrink and policy.managed and before:
            ready = standing
        else:
            ready = tuple(range(policy.slots)) if before or len(standing) == policy.slots else ()
        number = agent.generation.number if agent.generation else 0
        return MemberRecord(
            node=policy.node,
            incarnation=policy.incarnation,
            host=policy.host,
            port=policy.port,
            slots=policy.slots,
            ready=ready,
            draining=agent.draining,
            done=number if self.done_here() else 0,
        )

    def _settle_member(self) -> None:
        wanted = self._member_record()
        if self.agent.joined and wanted != self.agent.published:
            self.change(published=wanted)
            self.do(PutMember(wanted))

    # ── the leader's part ───────────────────────────────────────────────────────────────────────────────────

    def _lead(self) -> None:
        agent, view = self.agent, self.agent.view
        if not (agent.joined and agent.connected) or agent.publishing or view.spec is None:
            return
        if agent.generation is not None and view.generation != agent.generation:
            return  # etcd does not have it back yet
        if leader(view, agent.dead, agent.generation) != self.policy.node:
            return
        if self._all_done():
            if view.state.phase is not Phase.SUCCEEDED:
                self.ask(PutPhase(Phase.SUCCEEDED, "", view.state_revision), f"succeeded {view.state_revision}")
            return
        limits = self.limits()
        ready = sum(1 for m in view.members.values() if m.record.ready)
        if ready < limits.min_nodes:
            self.change(min_reached_s=None)
        elif agent.min_reached_s is None:
            self.change(min_reached_s=self.now_s)
        reached = self.agent.min_reached_s
        verdict = next_generation(
            view,
            agent.generation,
            limits,
            agent.dead,
            steps_advance=self.steps_advance(),
            settled=not self.policy.managed
            or (agent.generation is not None and agent.settled >= agent.generation.number),
            in_place=self.policy.managed,
            min_reached_for_s=self.now_s - reached if reached is not None else 0.0,
            blind=self.now_s < self._blind_until_s(),
        )
        wiped = self.now_s < agent.wiped_until_s
        if wiped and not isinstance(verdict, Wait) and verdict.planned:
            verdict = Wait("a planned change waits: etcd has lost its data a moment ago")
        if not isinstance(verdict, Wait) and verdict.planned and self.done_here():
            verdict = Wait("training is complete; the others are finishing")
        if isinstance(verdict, Wait):
            self._wait(verdict)
            return
        number = agent.generation.number + 1 if agent.generation else 1
        if wiped and agent.generation:
            number += 1  # somebody may hold one more, published just before etcd was wiped
        lead = max(2, math.ceil(LEAD_S / agent.step_s)) if agent.step_s > 0 else 2
        at_step = agent.step + lead if verdict.planned and self.policy.managed else None
        charge = (
            view.broken
            if view.broken and agent.generation and view.broken.generation == agent.generation.number
            else None
        )
        self.change(publishing=number, reason="", below_min=False)
        self.do(Publish(number, verdict, view.generation_revision, at_step, charge))

    def _blind_until_s(self) -> float:
        """Until when absence proves nothing. Longer when all who hold the job's state are absent and none is known
        to be dead: they may train on without etcd, and to go on without them costs steps."""
        agent = self.agent
        members = agent.view.members
        current = agent.generation
        places = [p for p in current.places if not bereft(current, p.node, agent.view.broken)] if current else []
        if not places or any(p.node in members or (p.node, p.incarnation) in agent.dead for p in places):
            self.change(orphaned_s=None)
            return agent.blind_until_s
        if agent.orphaned_s is None:
            self.change(orphaned_s=self.now_s)
        assert self.agent.orphaned_s is not None
        return max(agent.blind_until_s, self.agent.orphaned_s + self.policy.timeouts.form_s)

    def _all_done(self) -> bool:
        generation, members = self.agent.generation, self.agent.view.members
        if generation is None or self.is_broken():
            return False
        # A rank is done only when all have got to the end. So who is not there any more need not say it too.
        there = [m for p in generation.places if (m := members.get(p.node)) and m.record.incarnation == p.incarnation]
        return bool(there) and all(m.record.done == generation.number for m in there)

    def _wait(self, verdict: Wait) -> None:
        view, reason = self.agent.view, verdict.reason
        if self.agent.draining and verdict.below_min and not self.policy.spec.checkpoint.dir:
            reason += "; the job has no checkpoint.dir, so its state would be lost"
        self.change(reason="" if verdict.fine else reason, below_min=verdict.below_min)
        if verdict.below_min and any(m.record.draining for m in view.members.values()):
            # The one who leaves may not hold rank 0, and only rank 0 hears this.
            self.ask(SaveNow("a node leaves, and the job falls below its minimum", stop=True), "save")
        lost = self.is_broken() or not self.steps_advance()
        if verdict.below_min and lost and self.agent.generation and view.state.phase is Phase.RUNNING:
            self.ask(PutPhase(Phase.WAITING, verdict.reason, view.state_revision), f"waiting {view.state_revision}")
