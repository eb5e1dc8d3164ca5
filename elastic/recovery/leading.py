"""The leader's part: whether a next generation is formed, and the job's phase."""

from __future__ import annotations

import math

from elastic.contract.records.job_records import BrokenRecord, Phase
from elastic.contract.records.phases import PhaseTrigger, after
from elastic.contract.records.reasons import Code, Text, listed, reason
from elastic.contract.structs import replace
from elastic.contract.texts import one_line
from elastic.recovery.facts import membership
from elastic.recovery.facts.evidence import bad_numbers
from elastic.recovery.facts.restart_budget import Charge, backoff_s, charge, failed_formations_in_a_row, lacking
from elastic.recovery.facts.state_holders import all_workers_lost
from elastic.recovery.machine.effects import Publish, PutState, SaveNow
from elastic.recovery.machine.model import DecisionInputs, is_leader
from elastic.recovery.machine.turn import Turn

LEAD_S = 0.35
"""How far ahead a planned step boundary is set, so that every rank is told of it before it gets there: 0.15 s beside
`beat_s`, by which the leader's own knowledge of the newest step may be late."""

DISPUTE_S = 1.0
"""From the newest dispute until it decides anything. The two sides of a partition report it up to a second apart, and
only all reports together show which nodes are partitioned."""

PUBLISH_AGAIN_S = 5.0
"""A generation that the view does not show this long after it was ordered is decided on anew. Should the order still be
under way, the compare-and-swap lets one of the two win."""


def lead(turn: Turn) -> None:
    view = turn.etcd.view
    if not (turn.etcd.joined and turn.etcd.connected) or publishes(turn) or view.spec is None:
        return
    if not view.has_all_members:
        _follow(turn)
        return
    formed = turn.formed.generation
    if formed is not None and view.generation != formed:
        return  # etcd has lost it, and it is not restored yet
    me = view.members.get(turn.policy.node)
    if me is None or me.record.incarnation != turn.policy.incarnation:
        return  # the view is older than our registration: it may show the previous agent of this node
    if not is_leader(turn.agent):
        _follow(turn)
        return
    if _all_done(turn):
        if view.state.phase is not Phase.SUCCEEDED:
            _put_phase(turn, PhaseTrigger.COMPLETED)
        return
    decision = _decision(turn)
    if isinstance(decision, membership.Wait):
        _wait(turn, decision)
    elif pause := _pauses(turn):
        turn.lead = replace(turn.lead, reason=pause)
    else:
        _publish(turn, decision)


def publishes(turn: Turn) -> bool:
    """Whether a generation is in flight. One that the view does not show in time may never come: etcd may have lost it
    after it was written, and a view at a higher revision of the etcd that was set up anew does not show the loss. Or
    the view is late: then every further order fails, and the next one waits as long (see `PublishFailed`)."""
    lead = turn.lead
    return bool(lead.publishing) and turn.now_s - lead.publishing_since_s < PUBLISH_AGAIN_S


def _follow(turn: Turn) -> None:
    """Another agent decides; this one only shows whether its node is left out, and why."""
    view, node = turn.etcd.view, turn.policy.node
    out = view.disputes and node in membership.cut_off(view, turn.peers.dead, turn.formed.generation)
    why = reason(Code.LEFT_OUT, membership.unreached(view, node)) if out else ""
    if turn.lead.reason != why or turn.lead.below_min:
        turn.lead = replace(turn.lead, reason=why, below_min=False, halted=False)


def _decision(turn: Turn) -> membership.Change | membership.Wait:
    view, limits = turn.etcd.view, turn.limits()
    ready = sum(1 for m in view.members.values() if m.record.ready)
    if ready < limits.min_nodes:
        turn.lead = replace(turn.lead, min_reached_s=None)
    elif turn.lead.min_reached_s is None:
        turn.lead = replace(turn.lead, min_reached_s=turn.now_s)
    settled = not turn.policy.managed or (
        turn.formed.generation is not None and turn.progress.settled >= turn.formed.generation.number
    )
    advance, blind = turn.steps_advance(), turn.now_s < _absence_ignored_until_s(turn)
    # Most ticks change nothing: with the same inputs, skip what would be a pass over all members.
    inputs = DecisionInputs(turn.peers.dead, settled, advance, blind)
    if turn.lead.steady_for == inputs:
        return membership.NO_CHANGE
    state = lacking(view.state, [m.record for m in view.members.values()], managed=turn.policy.managed)
    if state != view.state:
        turn.ask(PutState(state, view.state_revision), f"excluded {state.excluded_nodes}")
    reached = turn.lead.min_reached_s
    broken = _reported(turn)
    situation = membership.Situation(
        view if broken == view.broken else replace(view, broken=broken),
        turn.formed.generation,
        limits,
        turn.peers.dead,
        steps_advance=advance,
        settled=settled,
        in_place=turn.policy.managed,
        min_reached_for_s=turn.now_s - reached if reached is not None else 0.0,
        blind=blind,
        last_committed=turn.formed.last_committed,
    )
    decision = membership.next_generation(situation)
    if decision == membership.NO_CHANGE:
        turn.lead = replace(turn.lead, steady_for=inputs)
    if isinstance(decision, membership.Wait):
        return decision
    if not decision.planned:
        unsure = view.disputes and turn.now_s - turn.peers.disputed_s < DISPUTE_S
        return membership.Wait(reason(Code.CHECKING)) if unsure else decision
    if turn.done_here():
        return membership.Wait(reason(Code.OTHERS_FINISH))
    if turn.now_s < turn.etcd.wiped_until_s:
        return membership.Wait(reason(Code.ETCD_LOST_DATA))
    return decision


def _pauses(turn: Turn) -> Text:
    """Why the next generation has to wait: the last ones all broke before their first step. '' when it need not."""
    broken = turn.etcd.view.broken
    if broken is None or not turn.is_broken() or broken.generation != turn.formed.broken:
        return ""
    count = failed_formations_in_a_row(turn.etcd.view.state, broken)
    pause_s = backoff_s(count, turn.policy.spec.restarts, jitter=1.0)
    if turn.now_s >= turn.formed.broken_at_s + pause_s:
        return ""
    return reason(Code.PAUSES, broken.detail, count=count, pause_s=pause_s)


def _survives(turn: Turn, broken: BrokenRecord) -> bool:
    """Whether a worker of the failed generation lives, and so holds the state."""
    formed = turn.formed.generation
    if formed is None:
        return False
    there = {member.id for member in membership.living(turn.etcd.view, turn.peers.dead).values()}
    seats = [place for place in formed.nodes if (place.node, place.incarnation) in there]
    return any(not all_workers_lost(formed, place.node, broken) for place in seats)


def _has_stepped(turn: Turn) -> bool | None:
    """Whether any step of the job is known, of its earlier agents too; None: it is plain, of which none would be."""
    progress, view = turn.progress, turn.etcd.view
    recorded = view.progress.step if view.progress else 0
    stepped = bool(progress.step or progress.reached[1] or view.saved_step or recorded)
    return stepped if stepped or turn.policy.managed else None


def _publish(turn: Turn, change: membership.Change) -> None:
    view = turn.etcd.view
    ahead = max(2, math.ceil(LEAD_S / turn.progress.step_s)) if turn.progress.step_s > 0 else 2
    at_step = turn.progress.step + ahead if change.planned and turn.policy.managed else None
    broken = _reported(turn)
    reported = (
        broken is not None and turn.formed.generation is not None and broken.generation == turn.formed.generation.number
    )
    charged = Charge(view.state)
    if broken is not None and reported:
        before = turn.formed.generation.before if turn.formed.generation else None
        charged = charge(
            view.state, broken, turn.policy.spec.restarts, turn.wall_s, _spare(turn), before=before,
            stepped=_has_stepped(turn), survives=_survives(turn, broken),
        )  # fmt: skip
        # Its agent stops the job, too, and tries once: etcd may have been away, or the state changed at that moment.
        if turn.policy.spec.on_bad_numbers == "stop" and (bad := bad_numbers(broken)):
            charged = Charge(after(view.state, PhaseTrigger.FAILED, bad.detail, turn.wall_s), bad.detail)
    turn.lead = replace(turn.lead, reason="", below_min=False, halted=False)
    if charged.stopped:
        turn.ask(PutState(charged.state, view.state_revision), f"failed {view.state_revision}")
        return
    if (number := number_of(turn, change)) is None:
        return
    again = bool(turn.lead.publishing)
    turn.lead = replace(turn.lead, publishing=number, publishing_since_s=turn.now_s, publishing_again=again)
    state = charged.state
    if state.phase is not Phase.RUNNING:
        state = after(state, PhaseTrigger.PUBLISHED, "", turn.wall_s)
    new = state if state != view.state else None
    counted = bool(reported and broken and broken.charged)
    turn.do(Publish(number, change, view.generation_revision, at_step, new, counted, turn.policy.managed))


def number_of(turn: Turn, change: membership.Change) -> int | None:
    """Of the next generation; None: the newest checkpoint is to be found first.

    The record in etcd says how far the numbers are, unless etcd has lost its data or was set back to a backup: then no
    agent is left of the generation on record, or one that lives has seen the loss, or the record was written back by an
    agent that may have been away while others formed newer ones. In that case numbers continue from those in the
    job's checkpoints, so that newer state always has the larger one.

    As long as an agent of that generation is left, a folder that one node alone sees does not count: it may be an
    earlier job's, and a number above that one would have its checkpoint outrank the state that lives.
    """
    view, rules, formed = turn.etcd.view, turn.policy.spec.checkpoint, turn.formed.generation
    number = formed.number + 1 if formed else 1
    if turn.now_s < turn.etcd.wiped_until_s and formed:
        number += 1  # an agent may hold one more, published just before etcd was wiped
    before = view.generation
    kept = before is not None and any(before.node_of(p.node, p.incarnation) for p in change.nodes)
    after_loss = view.written_back or turn.etcd.lost_at >= (formed.number if formed else 0)
    if (kept and not (rules.shared and after_loss)) or not rules.dir:
        return number
    if (saved := turn.find_newest_saved(remote=not kept)) is None:
        return None
    if saved.error:
        _show_reason(turn, f"checkpoint.dir cannot be read: {saved.error}")
        return None
    return max(number, 1 + saved.generation, *(1 + member.record.saved_generation for member in view.members.values()))


def _show_reason(turn: Turn, reason: str) -> None:
    """Put into the job's state why it does not start, for users."""
    view = turn.etcd.view
    if not view.state.phase.over and view.state.reason != reason:
        changed = replace(view.state, reason=reason, since_wall_s=turn.wall_s)
        turn.ask(PutState(changed, view.state_revision), f"reason {view.state_revision}")


def _reported(turn: Turn) -> BrokenRecord | None:
    """The failure report in etcd, with what this agent has reported and etcd may not show yet: after an outage of etcd
    another agent's failed collective may be there first, and the bad numbers from which the job is to go back not."""
    shown, own = turn.etcd.view.broken, turn.formed.broken_record
    return own if shown is not None and own is not None and own.generation == shown.generation else shown


def _spare(turn: Turn) -> int:
    """Living nodes that are ready to take part, beyond the job's minimum."""
    alive = membership.living(turn.etcd.view, turn.peers.dead).values()
    fit = sum(1 for m in alive if m.record.ready and m.record.draining is None)
    return max(0, fit - turn.limits().min_nodes)


def _absence_ignored_until_s(turn: Turn) -> float:
    """Until when absence proves nothing. Longer if all nodes that hold the job's state are absent and none is known to
    be dead: they may train on without etcd, and to go on without them costs steps."""
    members = turn.etcd.view.members
    current = turn.formed.generation
    places = (
        [p for p in current.nodes if not all_workers_lost(current, p.node, turn.etcd.view.broken)] if current else []
    )
    if not places or any(p.node in members or (p.node, p.incarnation) in turn.peers.dead for p in places):
        turn.etcd = replace(turn.etcd, orphaned_s=None)
        return turn.etcd.absence_ignored_until_s
    if turn.etcd.orphaned_s is None:
        turn.etcd = replace(turn.etcd, orphaned_s=turn.now_s)
    assert turn.etcd.orphaned_s is not None
    return max(turn.etcd.absence_ignored_until_s, turn.etcd.orphaned_s + turn.policy.timeouts.form_s)


def _all_done(turn: Turn) -> bool:
    generation, members = turn.formed.generation, turn.etcd.view.members
    if generation is None or turn.is_broken():
        return False
    # A rank is done only when all ranks have reached the end, so members that have left need not report it.
    there = [m for p in generation.nodes if (m := members.get(p.node)) and m.record.incarnation == p.incarnation]
    return bool(there) and all(m.record.done == generation.number for m in there)


def _wait(turn: Turn, decision: membership.Wait) -> None:
    view, why = turn.etcd.view, [decision.reason]
    if turn.drain.draining and decision.below_min and not turn.policy.spec.checkpoint.dir:
        why.append(reason(Code.WOULD_BE_LOST))
    if turn.formed.generation is None and (error := view.state.error) is not None:
        why.append(reason(Code.NEWEST_FAILURE, one_line(error.message), node=error.node))
    if decision.below_min:
        short = (m.record for m in view.members.values() if m.record.lacks)
        why += [reason(Code.TRIED_AGAIN, m.lacks, node=m.node) for m in short]
    if decision.steady:
        why = [reason(Code.SAVING)] if turn.done_here() and turn.policy.spec.checkpoint.dir else []
    lost = turn.is_broken() or not turn.steps_advance()
    halted = decision.below_min and lost and turn.formed.generation is not None
    turn.lead = replace(turn.lead, reason=listed(*why), below_min=decision.below_min, halted=halted)
    if decision.below_min and any(m.record.draining for m in view.members.values()):
        # Any rank passes this request on to the others; the draining node may have none.
        turn.ask(SaveNow(decision.reason, stop=True), "save")
    if halted and view.state.phase is Phase.RUNNING:
        _put_phase(turn, PhaseTrigger.BELOW_MIN, decision.reason)
    elif not lost and view.state.phase is Phase.WAITING:  # absent members are back, and no new generation was needed
        _put_phase(turn, PhaseTrigger.STEPS_ON)


def _put_phase(turn: Turn, trigger: PhaseTrigger, why: Text = "") -> None:
    view = turn.etcd.view
    state = after(view.state, trigger, why, turn.wall_s)
    turn.ask(PutState(state, view.state_revision), f"{state.phase.value} {view.state_revision}")
