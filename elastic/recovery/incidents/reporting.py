"""When an incident begins, what each turn adds to it, and when it is over.

Every agent tracks the incident, and only the leader writes it to etcd: when it begins, when more is known about its
cause, and when it is over. So a leader that is lost meanwhile is replaced by an agent with the same information.
"""

from __future__ import annotations

from elastic.contract.origin import Origin
from elastic.contract.records.job_records import Phase
from elastic.contract.structs import replace
from elastic.contract.worker.messages import Synced
from elastic.recovery.facts.evidence import weight
from elastic.recovery.facts.incident import KEPT_REPEATS, Closed, Incident, Sync, causes, open_record
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.leading import publishes
from elastic.recovery.machine.effects import AddCauses
from elastic.recovery.machine.events import Event, WorkerSaid
from elastic.recovery.machine.model import Agent, is_leader, led_by
from elastic.recovery.machine.turn import Turn

from .ended_incidents import (
    close_abandoned,
    close_superseded,
    dropped_nodes,
    put,
    supplement,
    supplement_ended,
    with_lost_nodes,
)

FREE = (Stage.READY, Stage.FORMING, Stage.RUNNING, Stage.GONE, Stage.STARTING, Stage.KILLED)
"""Stages of a worker that no longer holds the group of the failed generation."""


def report(turn: Turn, before: Agent, event: Event) -> None:
    supplement(turn)
    close_superseded(turn)
    if (late := turn.incidents.unwritten) is not None and is_leader(turn.agent):
        turn.incidents = replace(turn.incidents, unwritten=None)
        turn.do(late)
    known = turn.incidents.incident
    incident = _numbered(turn, _renewed(turn, before, known)) if known else _opened(turn, before)
    if known and incident and incident.key > known.key:
        turn.incidents = replace(turn.incidents, followed=known)
    supplement_ended(turn)
    if incident is None:
        close_abandoned(turn)
        return
    incident = _observed(turn, before, event, incident)
    outcome = _outcome(turn, incident)
    leads = is_leader(turn.agent)
    if leads and (seen := turn.etcd.view.incident) is not None:
        incident = incident.with_recorded(*seen)
    if outcome:
        _close(turn, incident, outcome, leads)
        return
    if _without_cause(turn, incident):
        turn.incidents = replace(turn.incidents, incident=incident)
        return
    assert turn.formed.generation is not None
    if not leads and turn.formed.generation.number > incident.generations[0].number and not turn.my_ranks():
        turn.incidents = replace(
            turn.incidents, incident=None
        )  # the job goes on without this node, which does not observe the outcome
        return
    # Right after an etcd outage, the agents that go on without this node may only not have registered again yet.
    sees_all = bool(turn.my_ranks()) or turn.now_s >= turn.etcd.absence_ignored_until_s
    if leads and sees_all:
        record = open_record(incident, counted=_counted(turn, incident))
        if incident.told != record.causes:
            turn.do(put(turn, incident, record))
            incident = replace(incident, told=record.causes)
    if incident is not known:
        turn.incidents = replace(turn.incidents, incident=incident)


def _close(turn: Turn, incident: Incident, outcome: str, leads: bool) -> None:
    generation, counted = turn.formed.generation, _counted(turn, incident)
    assert generation is not None
    incident = incident.with_mark(outcome, turn.now_s)
    if outcome == "given_up":
        incident = _without_leavers(turn, incident)
        if _without_cause(turn, incident):
            turn.incidents = replace(turn.incidents, incident=None)
            return
    # An agent without a rank in the generation that failed may know only of steps that were lost before it.
    witnessed = incident.generations[0].at(turn.policy.node) is not None
    # If the job is stopped just after a failure, the leader may have left already: the reporting node writes, too.
    mine = outcome == "given_up" and any(report.node == turn.policy.node for report in incident.reports)
    over = Closed(
        incident, generation, recovered=outcome == "stepping", counted=counted, witnessed=witnessed,
        written=leads or mine,
    )  # fmt: skip
    record = over.record()
    turn.incidents = replace(turn.incidents, incident=None, reported=incident.key, closed=over)
    if leads or mine:
        turn.do(put(turn, incident, record))
    elif led_by(turn.agent) is None:
        turn.incidents = replace(turn.incidents, unwritten=put(turn, incident, record))
    if mine:  # an earlier leader may have closed the record without the report
        turn.do(AddCauses(incident.key, record))


def _without_leavers(turn: Turn, incident: Incident) -> Incident:
    """Without nodes that were taken for lost because their agents left as told before this one had learnt that the job
    ends. Such an agent takes its member key with it; that of a lost one stays for half of its lease at least."""
    since_s = turn.now_s - turn.policy.timeouts.lease_ttl_s / 2
    left = {node for node, gone_s in incident.gone_s if gone_s > since_s} - turn.etcd.view.members.keys()
    return replace(incident, gone=tuple(cause for cause in incident.gone if cause.node not in left))


def _without_cause(turn: Turn, incident: Incident) -> bool:
    """Whether the job is being stopped and all that is known are failed collectives: the worker at their other end may
    have been stopped a moment earlier. What is on record already, or about to be, stays there."""
    seen = turn.etcd.view.incident
    told = incident.told is not None or (seen is not None and seen[0] == incident.key)
    known = told or incident.planned or turn.lead.halted or any(weight(c.kind) for c in causes(incident))
    return turn.is_over() and not known and len(incident.generations) == 1


def _counted(turn: Turn, incident: Incident) -> bool:
    """Whether steps are known. An agent that has just started may not have learnt yet that the workers are managed."""
    return turn.policy.managed or incident.generations[0].managed


# ── its beginning ───────────────────────────────────────────────────────────────────────────────────────────


def _opened(turn: Turn, before: Agent) -> Incident | None:
    held = before.formed.generation
    generation = turn.formed.generation
    if generation is None or before.etcd.view.state.phase.over:
        return None
    broke = turn.formed.broken >= generation.number > before.formed.broken
    replaced = held is not None and generation.number > held.number
    halted = turn.lead.halted and not before.lead.halted
    # A job that is stopped while a failed collective still has no known cause has had a failure all the same.
    cut_short = turn.is_over() and before.local.suspicious_since_s is not None and not before.etcd.view.state.phase.over
    if not (broke or replaced or halted or cut_short):
        return None
    last_committed = held if replaced and held is not None else generation
    incident = Incident(
        key=last_committed.number + 1,
        generations=(last_committed,),
        began_s=turn.now_s,
        noticed_wall_s=turn.wall_s,
        planned=(replaced and generation.at_step is not None) or (halted and not broke and _drains(turn)),
        why=generation.why if replaced else turn.local.suspicion if cut_short else turn.lead.reason,
        reached=_reached(turn),
        stepped_s=min(turn.now_s, max(before.progress.stepped_at_s, before.progress.shown_at_s)),
    )
    return _continued(turn, incident)


def _renewed(turn: Turn, before: Agent, incident: Incident) -> Incident:
    """The incident that this agent tracks, or a newer one: the job has recovered and failed again while this agent
    could not observe it. What belongs to that is kept: its record may come after its hand-over, which is told once."""
    seen = turn.etcd.view.incident
    if seen is not None and seen[0] > incident.key:
        key, record = seen
        generations = tuple(g for g in incident.generations if g.number >= key - 1) or incident.generations[-1:]
        return replace(
            incident.since(generations, key),
            repeat=record.repeat,
            began_wall_s=record.wall_s,
            inherited=record.causes,
            reached=max(record.step or 0, turn.progress.reached[1]),
        )
    incident = _split_from_previous(turn, incident)
    progress = turn.etcd.view.progress
    if progress is None or progress.stepped_in < incident.key:
        return incident
    known = (*incident.generations, before.formed.generation, turn.formed.generation)
    stepped = next((g for g in known if g is not None and g.number == progress.stepped_in), None)
    if stepped is None or stepped.at(turn.policy.node) is not None:
        return incident  # an agent with a rank there observes the recovery itself
    generations = (stepped, *(g for g in incident.generations if g.number > stepped.number))
    return replace(
        incident.since(generations, stepped.number + 1),
        began_s=turn.now_s,
        noticed_wall_s=turn.wall_s,
        began_wall_s=progress.step_wall_s,
        reached=max((progress.stepped_in, progress.step), turn.progress.reached)[1],
    )


def _split_from_previous(turn: Turn, incident: Incident) -> Incident:
    """A new leader continues the open record of the leader before it. That one may have closed the record since, as its
    last act: then the job had recovered, and the failure that ended that leader is another incident."""
    first = incident.generations[0]
    over = turn.etcd.view.ended.get(incident.key)
    if over is None or over.repeat != incident.repeat or first.number < max(incident.key, over.generation):
        return incident
    return replace(
        incident.since(incident.generations, first.number + 1),
        planned=incident.planned,
        why=incident.why,
        reached=_reached(turn),
        timeline_s=incident.timeline_s,
    )


def _numbered(turn: Turn, incident: Incident) -> Incident:
    """With the number that it has among the incidents of its key. An open record there is of this incident. One of a
    false alarm is of an incident before, if the generation has failed since, or if this agent has closed it itself."""
    number, over = turn.etcd.view.repeats.get(incident.key), turn.incidents.closed
    generation, seen = turn.formed.generation, turn.etcd.view.incident
    if number is None or generation is None:
        return incident  # none is on record
    repeat = incident.repeat
    if (seen is not None and seen[0] == incident.key) or turn.is_broken() or generation.number >= incident.key:
        repeat = max(repeat, number)
    if over is not None and over.incident.key == incident.key and over.false_alarm and over.written:
        repeat = max(repeat, over.incident.repeat + 1)
    repeat = min(repeat, KEPT_REPEATS)
    return replace(incident, repeat=repeat, told=None) if repeat != incident.repeat else incident


def _drains(turn: Turn) -> bool:
    return any(member.record.draining is not None for member in turn.etcd.view.members.values())


def _reached(turn: Turn) -> int:
    """The newest step that is known, of the newest generation that has one: a job that was set back while this agent
    was absent or had no rank has not reached what it had before."""
    progress, own = turn.etcd.view.progress, turn.progress.reached
    return max((progress.stepped_in, progress.step), own)[1] if progress is not None else own[1]


def _continued(turn: Turn, incident: Incident) -> Incident:
    """With what precedes this agent: the record that an earlier leader has begun, and how far the job had got."""
    seen, progress = turn.etcd.view.incident, turn.etcd.view.progress
    incident = _numbered(turn, replace(incident, repeat=turn.etcd.view.repeats.get(incident.key, 0)))
    this_one = seen is not None and (seen[0], seen[1].repeat) == (incident.key, incident.repeat)
    if seen is not None and (turn.incidents.reported < seen[0] <= incident.key or this_one):
        key, record = seen
        incident = replace(
            incident,
            key=key,
            repeat=record.repeat,
            began_wall_s=record.wall_s,
            inherited=record.causes,
            reached=max(incident.reached, record.step or 0),
        )
    here = incident.generations[0].node_of(turn.policy.node, turn.policy.incarnation)
    if here is not None or turn.progress.settled:
        return incident
    # This agent started after the outage had begun, or joins in this change.
    told = (progress.stepped_in, progress.step) if progress is not None else (0, 0)
    incident = replace(incident, reached=max(incident.reached, _reached(turn)))
    stepped_in = progress.stepped_in if progress is not None else 0
    incident = replace(incident, reached_before=0 < stepped_in < incident.generations[0].number)
    if incident.planned:
        return incident
    left_wall_s = turn.incidents.left_wall_s
    if left_wall_s and turn.progress.reached >= told:  # the clock of the node that wrote the progress may be wrong
        return replace(incident, began_wall_s=incident.began_wall_s or left_wall_s, left_wall_s=left_wall_s)
    last_seen_s = max(progress.step_wall_s if progress else 0.0, turn.incidents.left_wall_s)
    return replace(incident, began_wall_s=incident.began_wall_s or last_seen_s)


# ── what a turn adds ────────────────────────────────────────────────────────────────────────────────────────


def _observed(turn: Turn, before: Agent, event: Event, incident: Incident) -> Incident:
    view = turn.etcd.view
    if known := turn.incidents.incident:
        reports = (report for report in known.reports if report.generation >= incident.first)
        incident = replace(incident, reports=tuple(reports))  # with those made in this turn
    for record in (*view.broken_before, view.broken, turn.formed.broken_record):
        if record is not None:
            incident = incident.with_report(record)
    incident = _with_generation(turn, before, incident)
    incident = incident.with_left(worker.left for worker in turn.local.workers.values())
    if isinstance(event, WorkerSaid) and isinstance(event.message, Synced):
        incident = _with_sync(turn, incident, event.message)
    return _with_marks(turn, incident)


def _with_generation(turn: Turn, before: Agent, incident: Incident) -> Incident:
    """With what a new generation, or the lack of one, shows of the nodes of the one before."""
    held, generation = before.formed.generation, turn.formed.generation
    assert generation is not None
    if held is None or generation.number != held.number:
        if held is not None and generation.at_step is None:
            incident = with_lost_nodes(turn, incident, held, dropped_nodes(held, generation))
        if generation.number > incident.generations[-1].number:
            incident = replace(incident, generations=(*incident.generations, generation))
        return incident.with_mark("published", turn.now_s)
    news = turn.peers.dead != before.peers.dead or turn.lead.halted or turn.incidents.incident is None
    if news and (turn.lead.halted or turn.is_broken()):
        incident = with_lost_nodes(turn, incident, generation, generation.nodes)
    return incident


def _with_sync(turn: Turn, incident: Incident, message: Synced) -> Incident:
    number = turn.formed.generation.number if turn.formed.generation else 0
    fresh = number > incident.generations[0].number
    if (
        message.generation != number
        or not fresh
        or turn.is_broken()
        or any(sync.generation == number for sync in incident.syncs)
    ):
        return incident
    reached = message.reached
    if not incident.syncs:
        reached = max(reached, incident.reached if causes(incident) or not incident.planned else 0)
    older = message.origin is Origin.LIVE and message.step > message.reached
    sync = Sync(message.generation, message.step, max(reached, 0), message.origin, message.source, older)
    return replace(incident, syncs=(*incident.syncs, sync))


def _with_marks(turn: Turn, incident: Incident) -> Incident:
    """With each phase marked at the instant when it was first complete for all workers of this node."""
    stages = [w.stage for w in turn.local.workers.values()]
    if incident.planned and not incident.marked("boundary") and Stage.READY in stages and not causes(incident):
        # Until the boundary the old generation steps on: the cost of the change is counted from there.
        incident = replace(
            incident, began_s=turn.now_s, noticed_wall_s=turn.wall_s, timeline_s=(), reached=turn.progress.reached[1]
        )
        incident = incident.with_mark("boundary", turn.now_s)
    if not incident.marked("aborted") and all(s in FREE for s in stages):
        incident = incident.with_mark("aborted", turn.now_s)
    number = turn.formed.generation.number if turn.formed.generation else 0
    placed = [w for w in turn.local.workers.values() if w.generation == number]
    if not incident.marked("synced") and placed and all(w.stage in (Stage.RUNNING, Stage.DONE) for w in placed):
        incident = incident.with_mark("synced", turn.now_s)
    return incident


# ── its end ─────────────────────────────────────────────────────────────────────────────────────────────────


def _outcome(turn: Turn, incident: Incident) -> str:
    """'stepping', 'given_up', or '' while it lasts."""
    phase = turn.etcd.view.state.phase
    generation = turn.formed.generation
    assert generation is not None
    # Without a report it is a planned change, a halt, or a failure that the end of the job has cut short.
    no_failure = not incident.reports and (incident.planned or not turn.is_over())
    # It has not gone on if it is being replaced, or if no step follows yet: an outage of etcd hides who is absent.
    no_failure = no_failure and not publishes(turn) and (turn.steps_advance() or not turn.policy.managed)
    # An agent that was away when the first one failed knows only those that followed.
    failed = incident.generations[0].number if turn.is_over() else incident.first
    followed = generation.number > failed or no_failure
    whole = followed and turn.formed.broken < generation.number and not turn.lead.halted
    if whole and (
        turn.progress.settled >= generation.number
        or turn.done_here()
        or (not _counted(turn, incident) and _plain_runs(turn))
    ):
        return "stepping"
    if phase is Phase.SUCCEEDED:
        return "stepping"
    if phase is Phase.STOPPING and _without_cause(turn, incident):
        return ""
    return "given_up" if phase.over or phase is Phase.STOPPING else ""


def _plain_runs(turn: Turn) -> bool:
    """A script without `elastic` reports no steps: it has recovered when its workers' processes run again."""
    number = turn.formed.generation.number if turn.formed.generation else 0
    mine = [w for s, w in turn.local.workers.items() if s in turn.my_ranks()]
    running = all(w.stage in (Stage.RUNNING, Stage.DONE) and w.generation == number and w.started for w in mine)
    return not turn.policy.managed and bool(mine) and running
