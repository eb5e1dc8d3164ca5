"""How each event changes the agent's state."""

from __future__ import annotations

import dataclasses
import math

from msgspec.structs import replace

from elastic.contract.worker.messages import (
    BadNumbers,
    CollectiveFailed,
    Done,
    Formed,
    FromWorker,
    GroupClosed,
    Managed,
    Ready,
    Stepping,
    Synced,
)
from elastic.recovery.facts.evidence import merged
from elastic.recovery.facts.restart_budget import STORE
from elastic.recovery.facts.state_holders import all_workers_lost
from elastic.recovery.facts.transitions import IN_GROUP, Stage, Trigger
from elastic.recovery.facts.view import JobView
from elastic.recovery.incidents.ended_incidents import left_out
from elastic.recovery.machine.effects import Rejoin
from elastic.recovery.machine.events import (
    CheckpointSaved,
    Drain,
    Event,
    GroupStuck,
    Joined,
    LeaseLost,
    PeerDead,
    PeerReachable,
    PeerUnreachable,
    Progress,
    PublishFailed,
    RanksStill,
    Saving,
    Start,
    StillBusy,
    StoreClosed,
    Tick,
    Undrain,
    Viewed,
    WorkerEvent,
    WorkerExited,
    WorkerFailed,
    WorkerSaid,
    WorkerStarted,
    WorkerUnhealthy,
)
from elastic.recovery.machine.model import Agent, Worker
from elastic.recovery.machine.turn import Turn
from elastic.recovery.workers.announce import group_failed, member_record, report_failure
from elastic.recovery.workers.bad_numbers import take_bad_numbers
from elastic.recovery.workers.exits import exited, failed


def learn(turn: Turn) -> None:
    """Switch to managed workers if the newest view shows that the job's are."""
    if turn.policy.managed:
        return
    view = turn.agent.etcd.view
    formed, progress = view.generation, view.progress
    # Plain workers report no steps. The progress record counts, too, since all agents may have died after writing it.
    stepped = progress is not None and progress.step > 0
    if stepped or (formed is not None and formed.managed) or any(m.record.managed for m in view.members.values()):
        manage(turn)


def manage(turn: Turn) -> None:
    """Record that this job's workers call `elastic.run`. Idempotent."""
    if turn.policy.managed:
        return
    turn.agent = replace(turn.agent, policy=replace(turn.policy, managed=True))
    for worker in tuple(turn.agent.local.workers.values()):
        if worker.stage is Stage.RUNNING:
            # It has its rank and is in its set-up: it forms this generation, unless that breaks meanwhile.
            turn.move(worker, Trigger.MANAGED, generation=0, seat=worker.generation)
        elif worker.stage in (Stage.READY, Stage.DONE):
            turn.move(worker, Trigger.MANAGED, turn.now_s, generation=0)  # a plain worker has no process there
    if not turn.my_ranks():
        turn.change(published=None)  # the slots published as ready have no worker yet


BEHIND = "a failure before the step boundary: a rank that leaves may be the only one that has committed the last step"


# One case per event, none inside another: a list to be read, whatever its length.
def take(turn: Turn, event: Event) -> None:  # noqa: C901
    match event:
        case Start():
            _start(turn)
        case Joined():
            turn.change(joined=True)
        case LeaseLost():
            turn.change(joined=False)
            _rejoin(turn)
        case Viewed(view, connected):
            _viewed(turn, view, connected)
        case PublishFailed(number):
            if turn.agent.lead.publishing == number and not turn.agent.lead.publishing_again:
                turn.change(publishing=0)
        case PeerDead(node, incarnation) if (node, incarnation) in turn.agent.peers.falsely_suspected:
            _unreachable(turn, node, incarnation)
        case PeerDead(node, incarnation):
            turn.change(
                dead=turn.agent.peers.dead | {(node, incarnation)},
                dead_since_s={**turn.agent.peers.dead_since_s, (node, incarnation): turn.now_s},
                unreachable=turn.agent.peers.unreachable - {(node, incarnation)},
            )
        case PeerUnreachable(node, incarnation):
            _unreachable(turn, node, incarnation)
        case PeerReachable(node, incarnation):
            peers, peer = turn.agent.peers, {(node, incarnation)}
            turn.change(unreachable=peers.unreachable - peer, falsely_suspected=peers.falsely_suspected - peer)
        case Progress(generation, at_step, step_s):
            if at_step > turn.agent.progress.step or generation > turn.agent.progress.settled:
                turn.change(stepped_at_s=turn.now_s)
            turn.change(
                step=at_step, step_in=generation, step_s=step_s, settled=max(turn.agent.progress.settled, generation)
            )
            turn.reaches(generation, at_step)
            _forgive(turn)  # a Progress event comes in place of a Tick
        case RanksStill(standings):
            turn.change(standings=standings)
        case Drain(reason, deadline_s):
            saved = turn.agent.drain.drain_saved if turn.agent.drain.draining is not None else (0, 0)
            turn.change(draining=reason, drain_deadline_s=deadline_s, drain_saved=saved)
        case Undrain():
            turn.change(draining=None, drain_deadline_s=math.inf)
            current = turn.agent.formed.generation
            if current and any(
                w.stage is Stage.READY and w.generation == current.number for w in turn.agent.local.workers.values()
            ):
                report_failure(turn, "undrain", "stopped for a drain that was called off", (), charged=False)
        case StoreClosed(number, why):
            if (held := turn.agent.formed.generation) and held.number == number:
                group_failed(turn, why, STORE)
        case CheckpointSaved(generation, at_step):
            turn.change(drain_saved=(generation, at_step))
        case Saving(saving):
            turn.change(saving=saving)
        case Tick():
            _forgive(turn)
        case _:
            _take_from_worker(turn, event)


def _forgive(turn: Turn) -> None:
    """An agent marked dead whose lease is still renewed after more than one TTL was falsely suspected."""
    agent = turn.agent
    if not agent.etcd.connected or not agent.peers.dead:
        return
    limit_s = turn.policy.timeouts.lease_ttl_s + 1.0
    standing = {m.id for m in agent.etcd.view.members.values()}
    alive = {
        d for d in agent.peers.dead & standing if turn.now_s - agent.peers.dead_since_s.get(d, turn.now_s) > limit_s
    }
    if alive:
        turn.change(dead=agent.peers.dead - alive, falsely_suspected=agent.peers.falsely_suspected | alive)


def _unreachable(turn: Turn, node: str, incarnation: str) -> None:
    if (member := turn.agent.etcd.view.members.get(node)) and member.id == (node, incarnation):
        turn.change(unreachable=turn.agent.peers.unreachable | {member.id})


def _revive(turn: Turn) -> None:
    """The leader that has just gone on without this node is alive, even if this agent has marked it dead or is about
    to: a firewall that refuses connections looks like a dead peer from both sides. Each side would re-form alone
    forever, over the other's steps. Published as unreachable instead, the peer is judged alike by all agents."""
    agent, formed, held = turn.agent, turn.agent.etcd.view.generation, turn.agent.formed.generation
    if formed is None or held is None or formed.number <= held.number or formed.at_step is not None:
        return
    me, publisher = (turn.policy.node, turn.policy.incarnation), agent.etcd.view.members.get(formed.leader)
    if (
        publisher is None
        or formed.node_of(*publisher.id) is None
        or all_workers_lost(held, turn.policy.node, agent.formed.broken_record)
    ):
        return
    if held.node_of(*me) is not None and formed.node_of(*me) is None:
        peer = {publisher.id}
        turn.change(
            dead=agent.peers.dead - peer,
            falsely_suspected=agent.peers.falsely_suspected | peer,
            unreachable=agent.peers.unreachable | agent.peers.dead & peer,
        )


def _take_from_worker(turn: Turn, event: WorkerEvent) -> None:
    match event:
        case WorkerExited():
            exited(turn, event)
        case WorkerFailed():
            failed(turn, event)
        case WorkerSaid(_, worker_id, Ready()) if standby := turn.standby(worker_id):
            if standby.stage is Stage.STARTING:
                turn.move_standby(standby, Trigger.SET_UP)
        case _:
            if worker := turn.find(event.slot, event.worker_id):  # else from a replaced process
                _heard(turn, worker, event)


def _heard(turn: Turn, worker: Worker, event: WorkerEvent) -> None:
    match event:
        case WorkerSaid(_, _, message):
            _said(turn, worker, message)
        case WorkerStarted():
            turn.put(replace(worker, started=True, lacks=worker.lacks if turn.policy.managed else ""))
        case WorkerUnhealthy(_, _, kind, evidence, stacks):
            if worker.stage in IN_GROUP | {Stage.STARTING, Stage.READY}:
                if worker.slot in turn.my_ranks():
                    report_failure(
                        turn, kind, evidence, (worker.slot,), step=worker.step, step_in=worker.synced,
                        fingerprint=kind, stacks=dict(stacks),
                    )  # fmt: skip
                turn.kill(worker, evidence)
        case GroupStuck(_, _, evidence):
            if worker.stage is Stage.RUNNING and worker.slot in turn.my_ranks():
                group_failed(turn, evidence)
        case StillBusy():
            if worker.stage in (Stage.ABORTING, Stage.STOPPING_AT_STEP):
                turn.put(replace(worker, deadline_s=turn.now_s + turn.policy.timeouts.abort_s))
        case _:
            raise AssertionError(f"no transition on {event!r}")


# As `take`: one case per message.
def _said(turn: Turn, worker: Worker, message: FromWorker) -> None:
    match message:
        case Managed():
            manage(turn)
        case Ready():
            if worker.stage is Stage.STARTING:
                turn.move(worker, Trigger.SET_UP, lacks="")
        case Formed(generation=generation):
            turn.put(replace(worker, formed=max(worker.formed, generation)))
        case Synced(generation=generation, step=at_step):
            if worker.stage is Stage.FORMING and generation == worker.generation:
                turn.move(worker, Trigger.SYNCED, step=at_step, synced=generation)
                turn.reaches(generation, at_step)
        case Stepping(generation=generation, step=at_step):
            if generation == worker.generation:
                turn.put(replace(worker, step=at_step, synced=generation, crashes=0))
                turn.reaches(generation, at_step)
                turn.change(settled=max(turn.agent.progress.settled, generation), stepped_at_s=turn.now_s)
        case GroupClosed() | CollectiveFailed():
            _released(turn, worker, message)
        case Done(generation=generation, step=at_step):
            if worker.stage in IN_GROUP - {Stage.DONE} and generation == worker.generation:
                turn.move(worker, Trigger.TRAINED, step=at_step)
        case BadNumbers():
            take_bad_numbers(turn, worker, message)
        case _:
            raise AssertionError(f"no transition on {message!r}")


def _viewed(turn: Turn, view: JobView, connected: bool) -> None:
    before = turn.agent
    if not connected and view.revision == 0:
        view = before.etcd.view  # a restarted watch that has received nothing yet
    if _is_of_no_job_of_ours(before, view):
        view = before.etcd.view
    wiped = view.revision < before.etcd.view.revision or (before.etcd.view.spec is not None and view.spec is None)
    if connected and (wiped or not before.etcd.connected):
        # etcd was wiped or unavailable, or this agent is new. The other agents register again with their next lease
        # renewals, each at its own time.
        turn.change(absence_ignored_until_s=turn.now_s + turn.policy.timeouts.lease_ttl_s)
        if wiped:  # and with it what this agent may have published, or has asked for
            turn.change(wiped_until_s=turn.agent.etcd.absence_ignored_until_s, publishing=0, asked={})
            turn.change(lost_at=before.formed.generation.number if before.formed.generation else 0)
            over = before.incidents.closed
            if over is not None and not over.is_open(view.incident):  # as it is in a backup
                turn.change(closed=None)  # its record is lost, and its number among those of its key is free again
    if view.progress is None and before.etcd.view.progress is not None:  # until a step is on record again
        view = dataclasses.replace(view, progress=before.etcd.view.progress)
    last, shown = before.etcd.view.progress, view.progress
    newer = last and shown and (shown.stepped_in, shown.step) > (last.stepped_in, last.step)
    if newer and view.incident is None:
        turn.change(shown_at_s=turn.now_s)
    turn.change(view=view, connected=connected)
    learn(turn)
    if before.peers.dead:  # forget those that no member key and no place names any more
        places = {p for held in (before.formed.generation, view.generation) if held is not None for p in held.nodes}
        known = {m.id for m in view.members.values()} | {(p.node, p.incarnation) for p in places}
        dead = frozenset(d for d in before.peers.dead if d in known)
        turn.change(dead=dead, dead_since_s={d: at for d, at in before.peers.dead_since_s.items() if d in dead})
    if before.peers.unreachable:  # only of incarnations that are members
        there = {node: m.id for node, m in view.members.items()}
        turn.change(unreachable=frozenset(u for u in before.peers.unreachable if there.get(u[0]) == u))
    if before.peers.falsely_suspected:
        turn.change(
            falsely_suspected=frozenset(
                u for u in before.peers.falsely_suspected if (m := view.members.get(u[0])) and m.id == u
            )
        )
    _revive(turn)
    if view.disputes - before.etcd.view.disputes:
        turn.change(disputed_s=turn.now_s)
    # A state or spec that etcd has lost is kept, for `Restore`.
    turn.change(state=view.state if view.state_revision else before.etcd.state, spec=view.spec or before.etcd.spec)
    if view.broken and view.generation and view.broken.generation == view.generation.number:
        if view.broken.generation > before.formed.broken:
            turn.change(broken=view.broken.generation, broken_record=view.broken, broken_at_s=turn.now_s)
        elif view.broken.generation == before.formed.broken:  # other nodes have reported more
            held = before.formed.broken_record
            turn.change(broken_record=view.broken if held is None else merged(view.broken, held))


def _is_of_no_job_of_ours(agent: Agent, view: JobView) -> bool:
    """Whether this agent's job is over, and its records are gone: removed (`elasticctl forget`), lost, or those of a
    job that has taken its name. Its workers may still be ending, and what they have for that depends on how the job
    ended."""
    known = agent.etcd.spec
    other = view.spec is not None and known is not None and view.spec.submission != known.submission
    return agent.etcd.state.phase.over and (other or not view.state.phase.over)


def _start(turn: Turn) -> None:
    for slot in range(turn.policy.slots):
        stage = Stage.GONE if turn.policy.managed else Stage.READY
        turn.put(Worker(slot=slot, worker_id=0, stage=stage, since_s=turn.now_s, deadline_s=turn.now_s))
    _rejoin(turn)


def _rejoin(turn: Turn) -> None:
    record = member_record(turn)
    turn.change(published=record)
    turn.do(Rejoin(record))


def _may_be_behind(turn: Turn, message: CollectiveFailed) -> bool:
    """Whether a failure has ended a generation short of the boundary of a planned change, and a rank that this leaves
    out may have committed a step more. If it leaves out one rank only, that has failed, or the next generation has."""
    current, before = turn.agent.formed.generation, turn.agent.formed.last_committed
    if current is None or before is None or before.number != message.generation:
        return False
    if current.at_step is None or message.step >= current.at_step:
        return False
    leave = [p for p in left_out(before, current) if p.node in turn.agent.etcd.view.members]
    return sum(len(p.slots) for p in leave) > 1


def _released(turn: Turn, worker: Worker, message: GroupClosed | CollectiveFailed) -> None:
    if message.generation != worker.generation or worker.stage not in IN_GROUP | {Stage.ABORTING}:
        return
    untold = worker.stage in (Stage.FORMING, Stage.RUNNING, Stage.DONE)
    failed = message if isinstance(message, CollectiveFailed) else None
    left = message.generation if isinstance(message, GroupClosed) and message.between else worker.left
    turn.move(worker, Trigger.GROUP_CLOSED, step=message.step, left=left, consistent=message.clean)
    turn.reaches(worker.synced, message.step)
    current = turn.agent.formed.generation
    if current is None or current.number != message.generation:
        if failed and _may_be_behind(turn, failed):
            report_failure(turn, "boundary", BEHIND, (), charged=False)
        return
    if failed and failed.altered:
        group_failed(turn, failed.altered, STORE)
    elif failed and untold and not turn.is_broken():
        turn.change(suspicion=failed.error or "a collective failed")
        if turn.agent.local.suspicious_since_s is None:
            turn.change(suspicious_since_s=turn.now_s)
