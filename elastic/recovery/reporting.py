"""When an incident begins, what each turn adds to it, and when it is over.

Every agent tracks the incident, and whoever leads writes its account of it to etcd: when it begins, when more nodes are
known to be gone, and when it is over. The reader makes the incident from these and from the failure reports: see
`elastic.contract.records.incident_fold`.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.contract.origin import Origin
from elastic.contract.records.incident_account import Outcome, Sync, kind_of, weight
from elastic.contract.records.job_records import Cause, GenerationNode, GenerationRecord, Phase
from elastic.contract.records.reasons import Code, Reason, reason
from elastic.contract.structs import replace
from elastic.contract.worker.messages import Synced
from elastic.recovery.facts.incident import KEPT_REPEATS, AccountFacts, Incident, account
from elastic.recovery.facts.membership import cut_off, unreached
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.leading import publishes
from elastic.recovery.machine.effects import PutBroken, PutIncident
from elastic.recovery.machine.events import Event, WorkerSaid, WorkersEnter
from elastic.recovery.machine.model import Agent, is_leader
from elastic.recovery.machine.turn import Turn

FREE = (Stage.READY, Stage.FORMING, Stage.RUNNING, Stage.GONE, Stage.STARTING, Stage.KILLED)
"""Stages of a worker that no longer holds the group of the failed generation."""


def report(turn: Turn, before: Agent, event: Event) -> None:
    _tell_last(turn)
    tracked = turn.incidents.incident
    incident = _renewed(turn, before, tracked) if tracked else _opened(turn, before)
    if incident is None:
        return
    incident = _observed(turn, before, event, incident)
    if outcome := _outcome(turn, incident):
        _close(turn, incident, outcome)
        return
    assert turn.formed.generation is not None
    leads = is_leader(turn.agent)
    if _without_cause(turn, incident):
        pass
    elif not leads and turn.formed.generation.number > incident.first and not turn.my_ranks():
        incident = None  # the job goes on without this node, which does not observe the outcome
    elif leads and incident.told != incident.gone and _sees_all(turn):
        turn.do(_account(turn, _facts(turn, incident, Outcome.OPEN)))
        incident = replace(incident, told=incident.gone)
    if incident is not tracked:
        turn.incidents = replace(turn.incidents, incident=incident)


def _sees_all(turn: Turn) -> bool:
    """Right after an etcd outage, the agents that go on without this node may only not have registered again yet."""
    return bool(turn.my_ranks()) or turn.now_s >= turn.etcd.absence_ignored_until_s


def _close(turn: Turn, incident: Incident, outcome: Outcome) -> None:
    incident = incident.with_mark(outcome, turn.now_s)
    turn.incidents = replace(turn.incidents, incident=None)
    if outcome is Outcome.GIVEN_UP:
        incident = _without_leavers(turn, incident)
        if _without_cause(turn, incident):
            return
    last = _facts(turn, incident, outcome)
    # If the job is stopped just after a failure, the leader may have left already: the reporting node writes, too.
    own = outcome is Outcome.GIVEN_UP and any(report.node == turn.policy.node for report in incident.reports)
    writes = is_leader(turn.agent) or incident.told is not None or own
    turn.incidents = replace(turn.incidents, last=last, unwritten=not writes)
    if writes:
        _write(turn, last)


def _tell_last(turn: Turn) -> None:
    """As leader, once, unless it is on record how the last incident has ended: who led then may have been lost before
    it wrote that, or none led."""
    last, view = turn.incidents.last, turn.etcd.view
    if last is None or not (turn.incidents.unwritten and view.has_all_members and is_leader(turn.agent)):
        return
    turn.incidents = replace(turn.incidents, unwritten=False)
    if not any(a.outcome is not Outcome.OPEN and a.last == last.newest.number for a in view.accounts):
        _write(turn, last)


def _write(turn: Turn, last: AccountFacts) -> None:
    turn.do(_account(turn, last))
    shown = {
        report.generation for report in (*turn.etcd.view.broken_before, turn.etcd.view.broken) if report is not None
    }
    for report in last.incident.reports:
        if report.generation not in shown:  # etcd has lost it
            turn.do(PutBroken(report))


def _facts(turn: Turn, incident: Incident, outcome: Outcome) -> AccountFacts:
    assert turn.formed.generation is not None
    return AccountFacts(incident, turn.formed.generation, outcome, _reached(turn), _counted(turn, incident))


def _account(turn: Turn, facts: AccountFacts) -> PutIncident:
    return PutIncident(account(facts, node=turn.policy.node, by=turn.policy.incarnation), facts.incident.reports)


def _without_leavers(turn: Turn, incident: Incident) -> Incident:
    """Without nodes that were taken for lost because their agents left as told before this one had learnt that the job
    ends. Such an agent takes its member key with it; that of a lost one stays for half of its lease at least."""
    since_s = turn.now_s - turn.policy.timeouts.lease_ttl_s / 2
    left = {node for node, gone_s in incident.gone_s if gone_s > since_s} - turn.etcd.view.members.keys()
    return replace(incident, gone=tuple(cause for cause in incident.gone if cause.node not in left))


def _without_cause(turn: Turn, incident: Incident) -> bool:
    """Whether the job is being stopped and all that is known are failed collectives: the worker at their other end may
    have been stopped a moment earlier. What is on record already, or about to be, stays there."""
    on_record = incident.told is not None or any(shown.first == incident.first for shown in turn.etcd.view.accounts)
    has_cause = on_record or incident.planned or turn.lead.halted or _has_cause(incident)
    return turn.is_over() and not has_cause and len(incident.generations) == 1


def _has_cause(incident: Incident) -> bool:
    """Whether more is known of it than failed collectives."""
    reported = (kind for report in incident.reports for kind in (kind_of(report), *(loss.kind for loss in report.also)))
    return bool(incident.gone) or any(map(weight, reported))


def _counted(turn: Turn, incident: Incident) -> bool:
    """Whether steps are known. An agent that has just started may not have learnt yet that the workers are managed."""
    return turn.policy.managed or incident.generations[0].managed


# ── its beginning ───────────────────────────────────────────────────────────────────────────────────────────


def _opened(turn: Turn, before: Agent) -> Incident | None:
    previous = before.formed.generation
    generation = turn.formed.generation
    if generation is None or before.etcd.view.state.phase.over:
        return None
    broke = turn.formed.broken >= generation.number > before.formed.broken
    replaced = previous is not None and generation.number > previous.number
    halted = turn.lead.halted and not before.lead.halted
    # A job that is stopped while a failed collective still has no known cause has had a failure all the same.
    cut_short = turn.is_over() and before.local.suspicious_since_s is not None and not before.etcd.view.state.phase.over
    if not (broke or replaced or halted or cut_short):
        return None
    last_committed = previous if replaced and previous is not None else generation
    incident = Incident(
        first=last_committed.number,
        generations=(last_committed,),
        began_s=turn.now_s,
        noticed_wall_s=turn.wall_s,
        planned=(replaced and generation.at_step is not None) or (halted and not broke and _drains(turn)),
        why=generation.why if replaced else turn.local.suspicion if cut_short else turn.lead.reason,
        repeat=_repeat(turn, last_committed.number),
        stepped_in=_stepped_in(turn),
        reached=_reached(turn),
        stepped_s=min(turn.now_s, max(before.progress.stepped_at_s, before.progress.shown_at_s)),
    )
    return _continued(turn, incident)


def _repeat(turn: Turn, first: int) -> int:
    """How many false alarms of this generation this agent has seen end."""
    last = turn.incidents.last
    again = last is not None and last.incident.first == last.newest.number == first
    return min(last.incident.repeat + 1, KEPT_REPEATS) if last is not None and again else 0


def _renewed(turn: Turn, before: Agent, incident: Incident) -> Incident:
    """The incident that this agent tracks, or a newer one: the job has recovered and failed again while this agent
    could not observe it. What belongs to either is kept: the hand-over of the newer one may have been told already."""
    stepped_in, progress = _stepped_in(turn), turn.etcd.view.progress
    if stepped_in <= incident.first:
        return incident
    generations = (*incident.generations, before.formed.generation, turn.formed.generation)
    stepped = next((g for g in generations if g is not None and g.number == stepped_in), None)
    if stepped is not None and stepped.at(turn.policy.node) is not None:
        return incident  # an agent with a rank there observes the recovery itself
    later = tuple(g for g in incident.generations if g.number > stepped_in)
    shown = progress is not None and progress.stepped_in == stepped_in
    return replace(
        incident,
        first=stepped_in,
        stepped_in=stepped_in,
        repeat=0,
        generations=(stepped, *later) if stepped is not None else later or incident.generations[-1:],
        began_s=turn.now_s,
        noticed_wall_s=turn.wall_s,
        still_s=0.0,
        began_wall_s=progress.step_wall_s if progress is not None and shown else 0.0,
        planned=False,
        why="",
        reached=_reached(turn),
        timeline_s=(),
        told=None,
    )


def _stepped_in(turn: Turn) -> int:
    """The newest generation that is known to have stepped."""
    progress, accounts = turn.etcd.view.progress, turn.etcd.view.accounts
    shown = [a.last for a in accounts if a.outcome is Outcome.STEPPING]
    return max([turn.progress.settled, progress.stepped_in if progress is not None else 0, *shown])


def _drains(turn: Turn) -> bool:
    return any(member.record.draining is not None for member in turn.etcd.view.members.values())


def _reached(turn: Turn) -> tuple[int, int]:
    """(generation, step) of the newest commit that is known: a job that was set back while this agent was absent or had
    no rank has not reached what it had before."""
    progress, own = turn.etcd.view.progress, turn.progress.reached
    return max((progress.stepped_in, progress.step), own) if progress is not None else own


def _continued(turn: Turn, incident: Incident) -> Incident:
    """With what precedes this agent, if it started after the outage had begun."""
    here = incident.generations[0].node_of(turn.policy.node, turn.policy.incarnation)
    if here is not None or turn.progress.settled or incident.planned:
        return incident
    progress, left_wall_s = turn.etcd.view.progress, turn.incidents.left_wall_s
    on_record = (progress.stepped_in, progress.step) if progress is not None else (0, 0)
    if left_wall_s and turn.progress.reached >= on_record:  # the clock of the node that wrote the progress may be wrong
        return replace(incident, began_wall_s=left_wall_s, left_wall_s=left_wall_s)
    return replace(incident, began_wall_s=max(progress.step_wall_s if progress else 0.0, left_wall_s))


# ── what a turn adds ────────────────────────────────────────────────────────────────────────────────────────


def _observed(turn: Turn, before: Agent, event: Event, incident: Incident) -> Incident:
    view = turn.etcd.view
    if tracked := turn.incidents.incident:
        reports = (report for report in tracked.reports if report.generation >= incident.first)
        incident = replace(incident, reports=tuple(reports))  # with those made in this turn
    for record in (*view.broken_before, view.broken, turn.formed.broken_record):
        if record is not None:
            incident = incident.with_report(record)
    still_s = incident.began_s - turn.progress.stepped_at_s
    if turn.progress.settled == incident.first and still_s >= 0.0 and not incident.planned:  # else it steps again
        incident = replace(incident, still_s=round(still_s, 4))
    incident = _with_generation(turn, before, incident)
    incident = incident.with_left(worker.left for worker in turn.local.workers.values())
    for said in (event,) if isinstance(event, WorkerSaid) else event.said if isinstance(event, WorkersEnter) else ():
        if isinstance(said.message, Synced):
            incident = _with_sync(turn, incident, said.message)
    return _with_marks(turn, incident)


def _with_generation(turn: Turn, before: Agent, incident: Incident) -> Incident:
    """With what a new generation, or the lack of one, shows of the nodes of the one before."""
    previous, generation = before.formed.generation, turn.formed.generation
    assert generation is not None
    if previous is None or generation.number != previous.number:
        if previous is not None and generation.at_step is None:
            incident = with_lost_nodes(turn, incident, previous, previous.absent(generation))
        if generation.number > incident.generations[-1].number:
            incident = replace(incident, generations=(*incident.generations, generation))
        return incident.with_mark("published", turn.now_s)
    news = turn.peers.dead != before.peers.dead or turn.lead.halted or turn.incidents.incident is None
    if news and (turn.lead.halted or turn.is_broken()):
        incident = with_lost_nodes(turn, incident, generation, generation.nodes)
    return incident


def with_lost_nodes(
    turn: Turn, incident: Incident, formed: GenerationRecord, places: Iterable[GenerationNode]
) -> Incident:
    """With those nodes of the generation `formed` that are lost or unreachable, of `places`, as causes."""
    explained = {(c.generation, c.node) for c in incident.gone}
    explained |= {(r.generation, r.node) for r in incident.reports if r.kind == "drain"}  # it left as ordered
    cut = cut_off(turn.etcd.view, turn.peers.dead, formed)
    newest = turn.formed.generation
    decided = newest is None or formed.number != newest.number
    causes = []
    for p in places:
        if (formed.number, p.node) in explained or not (why := _why_gone(turn, p, cut, decided)):
            continue
        kind, detail = why
        ranks = tuple(sorted(formed.ranks(p.node).values()))
        causes.append(Cause(generation=formed.number, node=p.node, kind=kind, ranks=ranks, detail=detail))
    gone_s = tuple((gone.node, turn.now_s) for gone in causes if gone.node in turn.etcd.view.members)
    return replace(incident, gone=(*incident.gone, *causes), gone_s=(*incident.gone_s, *gone_s)) if causes else incident


def _why_gone(turn: Turn, place: GenerationNode, cut: frozenset[str], decided: bool) -> tuple[str, Reason] | None:
    """(kind, evidence) of a lost or unreachable node; None: it is there as far as is known, or leaves as ordered.
    `decided`: the job goes on without it."""
    member = turn.etcd.view.members.get(place.node)
    if (place.node, place.incarnation) in turn.peers.dead:
        return "lost", reason(Code.PORT_REFUSES, node=place.node)
    if place.node in cut:
        return "unreachable", unreached(turn.etcd.view, place.node)
    if not turn.etcd.connected or not turn.etcd.view.has_all_members:
        return None
    if member is not None and member.record.incarnation != place.incarnation:
        return "lost", reason(Code.AGENT_RESTARTED, node=place.node)
    # Absent when the next generation was formed, and registered again since.
    returned = decided and member is not None and member.create_revision > turn.etcd.view.generation_revision
    # Within the time after an outage of etcd, absence alone proves nothing.
    absent = member is None and (decided or turn.now_s >= turn.etcd.absence_ignored_until_s)
    if returned or absent:
        return "lost", reason(Code.LEASE_EXPIRED, node=place.node)
    return None


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
    older = message.origin is Origin.LIVE and message.step > message.reached
    sync = Sync(message.generation, message.step, max(message.reached, 0), message.origin, message.source, older)
    return replace(incident, syncs=(*incident.syncs, sync))


def _with_marks(turn: Turn, incident: Incident) -> Incident:
    """With each phase marked at the instant when it was first complete for all workers of this node."""
    stages = [w.stage for w in turn.local.workers.values()]
    if (
        incident.planned
        and not incident.marked("boundary")
        and Stage.READY in stages
        and not (incident.reports or incident.gone)
    ):
        # Until the boundary the old generation steps on: the cost of the change is counted from there.
        incident = replace(
            incident, began_s=turn.now_s, noticed_wall_s=turn.wall_s, timeline_s=(), reached=turn.progress.reached
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


def _outcome(turn: Turn, incident: Incident) -> Outcome:
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
    formed = followed and turn.formed.broken < generation.number and not turn.lead.halted
    if formed and (
        turn.progress.settled >= generation.number
        or turn.done_here()
        or (not _counted(turn, incident) and _plain_runs(turn))
    ):
        return Outcome.STEPPING
    if phase is Phase.SUCCEEDED:
        return Outcome.STEPPING
    if phase is Phase.STOPPING and _without_cause(turn, incident):
        return Outcome.OPEN
    return Outcome.GIVEN_UP if phase.over or phase is Phase.STOPPING else Outcome.OPEN


def _plain_runs(turn: Turn) -> bool:
    """A script without `elastic` reports no steps: it has recovered when its workers' processes run again."""
    number = turn.formed.generation.number if turn.formed.generation else 0
    workers = [w for s, w in turn.local.workers.items() if s in turn.my_ranks()]
    running = all(w.stage in (Stage.RUNNING, Stage.DONE) and w.generation == number and w.started for w in workers)
    return not turn.policy.managed and bool(workers) and running
