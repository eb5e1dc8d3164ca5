"""How each event changes the agent's state."""

from __future__ import annotations

import math
from collections.abc import Callable

from elastic.contract.records.incident_account import Outcome
from elastic.contract.records.reasons import Code, reason
from elastic.contract.structs import replace
from elastic.contract.worker import messages
from elastic.recovery.facts.evidence import merged
from elastic.recovery.facts.restart_budget import STORE
from elastic.recovery.facts.state_holders import all_workers_lost
from elastic.recovery.facts.transitions import IN_GROUP, Stage, Trigger
from elastic.recovery.facts.view import JobView
from elastic.recovery.machine import events
from elastic.recovery.machine.effects import Rejoin
from elastic.recovery.machine.model import Agent, Worker
from elastic.recovery.machine.turn import Turn
from elastic.recovery.workers import announce
from elastic.recovery.workers.bad_numbers import take_bad_numbers
from elastic.recovery.workers.exits import exited, failed


def mark_managed(turn: Turn) -> None:
    """Record that this job's workers call `elastic.run`. Idempotent."""
    if turn.policy.managed:
        return
    turn.policy = replace(turn.policy, managed=True)
    for worker in tuple(turn.local.workers.values()):
        if worker.stage is Stage.RUNNING:
            # It has its rank and is in its set-up: it forms this generation, unless that breaks meanwhile.
            turn.move(replace(worker, generation=0, seat=worker.generation), Trigger.MANAGED)
        elif worker.stage in (Stage.READY, Stage.DONE):
            turn.move(replace(worker, generation=0), Trigger.MANAGED, turn.now_s)  # it has no process there
    if not turn.my_ranks():
        turn.etcd = replace(turn.etcd, published=None)  # the slots published as ready have no worker yet


# One case per event, none inside another: a list to be read, whatever its length.
def apply(turn: Turn, event: events.Event) -> None:  # noqa: C901
    match event:
        case events.Start():
            _start(turn)
        case events.Joined():
            turn.etcd = replace(turn.etcd, joined=True)
        case events.LeaseLost():
            turn.etcd = replace(turn.etcd, joined=False)
            _rejoin(turn)
        case events.Viewed(view, connected):
            _viewed(turn, view, connected)
        case events.PublishFailed(number):
            if turn.lead.publishing == number and not turn.lead.publishing_again:
                turn.lead = replace(turn.lead, publishing=0)
        case events.NewestSaved():
            turn.newest_saved = event
        case events.PeerEvent():
            _apply_peer(turn, event)
        case events.Progress(generation, at_step, step_s):
            if at_step > turn.progress.step or generation > turn.progress.settled:
                turn.progress = replace(turn.progress, stepped_at_s=turn.now_s)
            turn.progress = replace(
                turn.progress,
                step=at_step,
                step_in=generation,
                step_s=step_s,
                settled=max(turn.progress.settled, generation),
            )
            turn.reaches(generation, at_step)
            _forgive(turn)  # a Progress event comes in place of a Tick
        case events.RanksStill(standings):
            turn.local = replace(turn.local, standings=standings)
        case events.Drain(why, deadline_s):
            saved = turn.drain.drain_saved if turn.drain.draining is not None else (0, 0)
            turn.drain = replace(turn.drain, draining=why, drain_deadline_s=deadline_s, drain_saved=saved)
        case events.Undrain():
            turn.drain = replace(turn.drain, draining=None, drain_deadline_s=math.inf)
            current = turn.formed.generation
            if current and any(
                w.stage is Stage.READY and w.generation == current.number for w in turn.local.workers.values()
            ):
                announce.report_failure(
                    turn, announce.uncharged(announce.failure(turn, "undrain", reason(Code.CALLED_OFF)))
                )
        case events.StoreClosed(number, why):
            if (held := turn.formed.generation) and held.number == number:
                announce.group_failed(turn, why, STORE)
        case events.CheckpointSaved(generation, at_step):
            turn.drain = replace(turn.drain, drain_saved=(generation, at_step))
        case events.Saving(saving):
            turn.local = replace(turn.local, saving=saving)
        case events.Tick():
            _forgive(turn)
        case events.WorkerEvent():
            _take_from_worker(turn, event)
        case events.WorkersEnter(said):
            for each in said:
                _take_from_worker(turn, each)
        case _:
            raise AssertionError(f"no transition on {event!r}")


def _apply_peer(turn: Turn, event: events.PeerEvent) -> None:
    peer, peers = (event.node, event.incarnation), turn.peers
    match event:
        case events.PeerReachable():
            turn.peers = replace(
                peers,
                unreachable=peers.unreachable - {peer},
                falsely_suspected=peers.falsely_suspected - {peer},
            )
        case events.PeerDead() if peer not in peers.falsely_suspected:
            turn.peers = replace(
                peers,
                dead=peers.dead | {peer},
                dead_since_s={**peers.dead_since_s, peer: turn.now_s},
                unreachable=peers.unreachable - {peer},
            )
        case _:
            _unreachable(turn, *peer)


def _forgive(turn: Turn) -> None:
    """An agent marked dead whose lease is still renewed after more than one TTL was falsely suspected."""
    if not turn.etcd.connected or not turn.peers.dead:
        return
    limit_s = turn.policy.timeouts.lease_ttl_s + 1.0
    standing = {m.id for m in turn.etcd.view.members.values()}
    alive = {d for d in turn.peers.dead & standing if turn.now_s - turn.peers.dead_since_s.get(d, turn.now_s) > limit_s}
    if alive:
        turn.peers = replace(
            turn.peers, dead=turn.peers.dead - alive, falsely_suspected=turn.peers.falsely_suspected | alive
        )


def _unreachable(turn: Turn, node: str, incarnation: str) -> None:
    if (member := turn.etcd.view.members.get(node)) and member.id == (node, incarnation):
        turn.peers = replace(turn.peers, unreachable=turn.peers.unreachable | {member.id})


def _take_from_worker(turn: Turn, event: events.WorkerEvent) -> None:
    match event:
        case events.WorkerExited():
            exited(turn, event)
        case events.WorkerFailed():
            failed(turn, event)
        case events.WorkerSaid(_, worker_id, messages.Ready()) if standby := turn.standby(worker_id):
            if standby.stage is Stage.STARTING:
                turn.put_standby(standby, turn.moved(standby, Trigger.SET_UP))
        case _:
            if worker := turn.find(event.slot, event.worker_id):  # else from a replaced process
                _heard(turn, worker, event)


def _heard(turn: Turn, worker: Worker, event: events.WorkerEvent) -> None:
    match event:
        case events.WorkerSaid(_, _, message):
            _said(turn, worker, message)
        case events.WorkerStarted():
            turn.put(replace(worker, started=True, lacks=worker.lacks if turn.policy.managed else ""))
        case events.WorkerUnhealthy(_, _, kind, evidence, stacks):
            if worker.stage in IN_GROUP | {Stage.STARTING, Stage.READY}:
                if worker.slot in turn.my_ranks():
                    record = announce.worker_failure(turn, worker, kind, evidence)
                    announce.report_failure(turn, replace(record, fingerprint=kind, stacks=dict(stacks)))
                turn.kill(worker, evidence)
        case events.GroupStuck(_, _, evidence):
            if worker.stage is Stage.RUNNING and worker.slot in turn.my_ranks():
                announce.group_failed(turn, evidence)
        case events.StillBusy():
            if worker.stage in (Stage.ABORTING, Stage.STOPPING_AT_STEP):
                turn.put(replace(worker, deadline_s=turn.now_s + turn.policy.timeouts.abort_s))
        case _:
            raise AssertionError(f"no transition on {event!r}")


# One case per message.
def _said(turn: Turn, worker: Worker, message: messages.FromWorker) -> None:
    match message:
        case messages.Managed():
            mark_managed(turn)
        case messages.Ready():
            if worker.stage is Stage.STARTING:
                turn.move(replace(worker, lacks=""), Trigger.SET_UP)
        case messages.Formed(generation=generation):
            turn.put(replace(worker, formed=max(worker.formed, generation)))
        case messages.Synced(generation=generation, step=at_step):
            if worker.stage is Stage.FORMING and generation == worker.generation:
                turn.move(replace(worker, step=at_step, synced=generation), Trigger.SYNCED)
                turn.reaches(generation, at_step)
        case messages.Stepping(generation=generation, step=at_step):
            if generation == worker.generation:
                turn.put(replace(worker, step=at_step, synced=generation, crashes=0))
                turn.reaches(generation, at_step)
                turn.progress = replace(
                    turn.progress, settled=max(turn.progress.settled, generation), stepped_at_s=turn.now_s
                )
        case messages.GroupClosed() | messages.CollectiveFailed():
            _released(turn, worker, message)
        case messages.Done(generation=generation, step=at_step):
            if worker.stage in IN_GROUP - {Stage.DONE} and generation == worker.generation:
                turn.move(replace(worker, step=at_step), Trigger.TRAINED)
        case messages.BadNumbers():
            take_bad_numbers(turn, worker, message)
        case _:
            raise AssertionError(f"no transition on {message!r}")


def _viewed(turn: Turn, view: JobView, connected: bool) -> None:
    before = turn.agent
    if (not connected and view.revision == 0) or _is_of_no_job_of_ours(before, view):
        view = before.etcd.view  # a restarted watch that has received nothing yet, or records of another job
    if view.progress is None and before.etcd.view.progress is not None:  # until a step is on record again
        view = replace(view, progress=before.etcd.view.progress)
    turn.etcd = replace(turn.etcd, view=view, connected=connected)
    turn.lead = replace(turn.lead, steady_for=None)
    for learn_from in _FROM_A_VIEW:
        learn_from(turn, before, view)


def _learn_loss(turn: Turn, before: Agent, view: JobView) -> None:
    """etcd was wiped or unavailable, or this agent is new. The other agents register again with their next lease
    renewals, each at its own time."""
    wiped = view.revision < before.etcd.view.revision or (before.etcd.view.spec is not None and view.spec is None)
    if not turn.etcd.connected or (before.etcd.connected and not wiped):
        return
    until_s = turn.now_s + turn.policy.timeouts.lease_ttl_s
    turn.etcd = replace(turn.etcd, absence_ignored_until_s=until_s)
    if not wiped:
        return
    # Lost with it is what this agent may have published, or has asked for.
    turn.etcd = replace(turn.etcd, wiped_until_s=until_s, asked={})
    turn.lead = replace(turn.lead, publishing=0)
    turn.etcd = replace(turn.etcd, lost_at=before.formed.generation.number if before.formed.generation else 0)
    # What is told of the last incident is lost, or a backup has its beginning alone: it is to be told anew.
    turn.incidents = replace(turn.incidents, unwritten=before.incidents.last is not None)


def _learn_step(turn: Turn, before: Agent, view: JobView) -> None:
    last, shown = before.etcd.view.progress, view.progress
    newer = last and shown and (shown.stepped_in, shown.step) > (last.stepped_in, last.step)
    if newer and shown and not any(a.outcome is Outcome.OPEN and a.first >= shown.stepped_in for a in view.accounts):
        turn.progress = replace(turn.progress, shown_at_s=turn.now_s)


def _detect_managed(turn: Turn, before: Agent, view: JobView) -> None:
    """Switch to managed workers if the view shows that the job's are."""
    # Plain workers report no steps. The progress record counts, too, since all agents may have died after writing it.
    stepped = view.progress is not None and view.progress.step > 0
    managed = view.generation is not None and view.generation.managed
    if stepped or managed or (not turn.policy.managed and any(m.record.managed for m in view.members.values())):
        mark_managed(turn)


def _forget_peers(turn: Turn, before: Agent, view: JobView) -> None:
    """Keep only incarnations that are members; of the dead those with a place, too."""
    peers = before.peers
    if not (peers.dead or peers.unreachable or peers.falsely_suspected):
        return
    members = {m.id for m in view.members.values()}
    formed = (held for held in (before.formed.generation, view.generation) if held is not None)
    dead = peers.dead & members.union((p.node, p.incarnation) for held in formed for p in held.nodes)
    turn.peers = replace(
        peers,
        dead=dead,
        dead_since_s={peer: at for peer, at in peers.dead_since_s.items() if peer in dead},
        unreachable=peers.unreachable & members,
        falsely_suspected=peers.falsely_suspected & members,
    )


def _revive(turn: Turn, before: Agent, view: JobView) -> None:
    """The leader that has just gone on without this node is alive, even if this agent has marked it dead or is about
    to: a firewall that refuses connections looks like a dead peer from both sides. Each side would re-form alone
    forever, over the other's steps. Published as unreachable instead, the peer is judged alike by all agents."""
    formed, previous = view.generation, before.formed.generation
    if formed is None or previous is None or formed.number <= previous.number or formed.at_step is not None:
        return
    me, publisher = (turn.policy.node, turn.policy.incarnation), view.members.get(formed.leader)
    if (
        publisher is None
        or formed.node_of(*publisher.id) is None
        or all_workers_lost(previous, turn.policy.node, turn.formed.broken_record)
    ):
        return
    if previous.node_of(*me) is not None and formed.node_of(*me) is None:
        peer = {publisher.id}
        turn.peers = replace(
            turn.peers,
            dead=turn.peers.dead - peer,
            falsely_suspected=turn.peers.falsely_suspected | peer,
            unreachable=turn.peers.unreachable | turn.peers.dead & peer,
        )


def _learn_dispute(turn: Turn, before: Agent, view: JobView) -> None:
    if view.disputes - before.etcd.view.disputes:
        turn.peers = replace(turn.peers, disputed_s=turn.now_s)


def _keep_state(turn: Turn, before: Agent, view: JobView) -> None:
    """A state or spec that etcd has lost is kept, for `Restore`."""
    state = view.state if view.state_revision else before.etcd.state
    turn.etcd = replace(turn.etcd, state=state, spec=view.spec or before.etcd.spec)


def _learn_failure(turn: Turn, before: Agent, view: JobView) -> None:
    broken, formed = view.broken, before.formed
    if broken is None or view.generation is None or broken.generation != view.generation.number:
        return
    if broken.generation > formed.broken:
        turn.formed = replace(turn.formed, broken=broken.generation, broken_record=broken, broken_at_s=turn.now_s)
    elif broken.generation == formed.broken:  # other nodes have reported more
        record = merged(broken, formed.broken_record) if formed.broken_record else broken
        turn.formed = replace(turn.formed, broken_record=record)


_FROM_A_VIEW: tuple[Callable[[Turn, Agent, JobView], None], ...] = (
    _learn_loss,
    _learn_step,
    _detect_managed,
    _forget_peers,
    _revive,
    _learn_dispute,
    _keep_state,
    _learn_failure,
)
"""What a view teaches, in order: each gets the turn, which shows the view already, and the agent before."""


def _is_of_no_job_of_ours(agent: Agent, view: JobView) -> bool:
    """Whether this agent's job is over, and its records are gone: removed (`elasticctl forget`), lost, or those of a
    job that has taken its name. Its workers may still be ending, and what they have for that depends on how the job
    ended."""
    own_spec = agent.etcd.spec
    other = view.spec is not None and own_spec is not None and view.spec.submission != own_spec.submission
    return agent.etcd.state.phase.over and (other or not view.state.phase.over)


def _start(turn: Turn) -> None:
    for slot in range(turn.policy.slots):
        stage = Stage.GONE if turn.policy.managed else Stage.READY
        turn.put(Worker(slot=slot, worker_id=0, stage=stage, since_s=turn.now_s, deadline_s=turn.now_s))
    _rejoin(turn)


def _rejoin(turn: Turn) -> None:
    record = announce.member_record(turn)
    turn.etcd = replace(turn.etcd, published=record)
    turn.do(Rejoin(record))


def _may_be_behind(turn: Turn, message: messages.CollectiveFailed) -> bool:
    """Whether a failure has ended a generation short of the boundary of a planned change, and a rank that this leaves
    out may have committed a step more. If it leaves out one rank only, that has failed, or the next generation has."""
    current, before = turn.formed.generation, turn.formed.last_committed
    if current is None or before is None or before.number != message.generation:
        return False
    if current.at_step is None or message.step >= current.at_step:
        return False
    leave = [p for p in before.absent(current) if p.node in turn.etcd.view.members]
    return sum(len(p.slots) for p in leave) > 1


def _released(turn: Turn, worker: Worker, message: messages.GroupClosed | messages.CollectiveFailed) -> None:
    if message.generation != worker.generation or worker.stage not in IN_GROUP | {Stage.ABORTING}:
        return
    untold = worker.stage in (Stage.FORMING, Stage.RUNNING, Stage.DONE)
    failed = message if isinstance(message, messages.CollectiveFailed) else None
    left = message.generation if isinstance(message, messages.GroupClosed) and message.between else worker.left
    turn.move(replace(worker, step=message.step, left=left, consistent=message.clean), Trigger.GROUP_CLOSED)
    turn.reaches(worker.synced, message.step)
    # Exactly: a look at the page shows a commit late, or not at all if the group closes before the next one.
    if message.stepless_s is not None and turn.progress.reached == (worker.synced, message.step):
        turn.progress = replace(turn.progress, stepped_at_s=turn.now_s - message.stepless_s)
    current = turn.formed.generation
    if current is None or current.number != message.generation:
        if failed and _may_be_behind(turn, failed):
            announce.report_failure(
                turn, announce.uncharged(announce.failure(turn, "boundary", reason(Code.AT_BOUNDARY)))
            )
        return
    if failed and failed.altered:
        announce.group_failed(turn, reason(Code.STORE_ALTERED, key=failed.altered), STORE)
    elif failed and untold and not turn.is_broken():
        turn.local = replace(turn.local, suspicion=failed.error)
        if turn.local.suspicious_since_s is None:
            turn.local = replace(turn.local, suspicious_since_s=turn.now_s)
