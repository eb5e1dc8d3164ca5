"""The leader's part: whether a next generation is formed, and the job's phase."""

from __future__ import annotations

import math
from dataclasses import replace

from elastic.contract.records.job_records import BrokenRecord, Phase
from elastic.contract.records.phases import PhaseTrigger, after
from elastic.contract.texts import one_line
from elastic.recovery.facts.evidence import bad_numbers
from elastic.recovery.facts.membership import AS_IT_SHOULD_BE, Change, Wait, cut_off, living, next_generation, unreached
from elastic.recovery.facts.restart_budget import Charge, backoff_s, charge, in_vain, lacking
from elastic.recovery.facts.state_holders import all_workers_lost
from elastic.recovery.machine.effects import Publish, PutState, SaveNow
from elastic.recovery.machine.model import is_leader
from elastic.recovery.machine.turn import Turn

LEAD_S = 0.35
"""How far ahead a planned step boundary is set, so that every rank is told of it before it gets there: 0.15 s beside
`beat_s`, by which the leader's own knowledge of the newest step may be late."""

DISPUTE_S = 1.0
"""From the newest dispute until it decides anything. The two sides of a partition report it up to a second apart, and
only all reports together show which nodes are partitioned."""

SAVING = "the last checkpoint to be saved"
"""What a job waits for whose training is complete."""

PUBLISH_AGAIN_S = 5.0
"""A generation that the view does not show this long after it was ordered is decided on anew. Should the order still be
under way, the compare-and-swap lets one of the two win."""


def lead(turn: Turn) -> None:
    agent, view = turn.agent, turn.agent.etcd.view
    if not (agent.etcd.joined and agent.etcd.connected) or publishes(turn) or view.spec is None:
        return
    if not view.whole:
        _follow(turn)
        return
    known = agent.formed.generation
    if known is not None and view.generation is not known and view.generation != known:
        return  # etcd has lost it, and it is not restored yet
    me = view.members.get(turn.policy.node)
    if me is None or me.record.incarnation != turn.policy.incarnation:
        return  # the view is older than our registration: it may show the previous agent of this node
    if not is_leader(agent):
        _follow(turn)
        return
    if _all_done(turn):
        if view.state.phase is not Phase.SUCCEEDED:
            _put_phase(turn, PhaseTrigger.COMPLETED)
        return
    decision = _decision(turn)
    if isinstance(decision, Wait):
        _wait(turn, decision)
    elif reason := _pauses(turn):
        turn.change(reason=reason)
    else:
        _publish(turn, decision)


def publishes(turn: Turn) -> bool:
    """Whether a generation is in flight. One that the view does not show in time may never come: etcd may have lost it
    after it was written, and a view at a higher revision of the etcd that was set up anew does not show the loss. Or
    the view is late: then every further order fails, and the next one waits as long (see `PublishFailed`)."""
    lead = turn.agent.lead
    return bool(lead.publishing) and turn.now_s - lead.publishing_since_s < PUBLISH_AGAIN_S


def _follow(turn: Turn) -> None:
    """Another agent decides; this one only shows whether its node is left out, and why."""
    view, node = turn.agent.etcd.view, turn.policy.node
    out = view.disputes and node in cut_off(view, turn.agent.peers.dead, turn.agent.formed.generation)
    reason = f"{unreached(view, node)}: it waits with its state" if out else ""
    if turn.agent.lead.reason != reason or turn.agent.lead.below_min:
        turn.change(reason=reason, below_min=False, halted=False)


def _decision(turn: Turn) -> Change | Wait:
    agent, view, limits = turn.agent, turn.agent.etcd.view, turn.limits()
    ready = sum(1 for m in view.members.values() if m.record.ready)
    if ready < limits.min_nodes:
        turn.change(min_reached_s=None)
    elif agent.lead.min_reached_s is None:
        turn.change(min_reached_s=turn.now_s)
    settled = not turn.policy.managed or (
        agent.formed.generation is not None and agent.progress.settled >= agent.formed.generation.number
    )
    advance, blind = turn.steps_advance(), turn.now_s < _absence_ignored_until_s(turn)
    # Most ticks change nothing: with the same inputs, skip what would be a pass over all members.
    same = view.members, view.state, view.broken, agent.formed.generation, agent.peers.dead
    equal = view.generation_revision, limits, settled, advance, blind
    if (
        agent.lead.fine
        and agent.lead.fine[1] == equal
        and all(a is b for a, b in zip(agent.lead.fine[0], same, strict=True))
    ):
        return AS_IT_SHOULD_BE
    state = lacking(view.state, [m.record for m in view.members.values()], managed=turn.policy.managed)
    if state != view.state:
        turn.ask(PutState(state, view.state_revision), f"excluded {state.excluded_nodes}")
    reached = turn.agent.lead.min_reached_s
    decision = next_generation(
        view if (broken := _reported(turn)) == view.broken else replace(view, broken=broken),
        agent.formed.generation,
        limits,
        agent.peers.dead,
        steps_advance=advance,
        settled=settled,
        in_place=turn.policy.managed,
        min_reached_for_s=turn.now_s - reached if reached is not None else 0.0,
        blind=blind,
        last_committed=agent.formed.last_committed,
    )
    if decision == AS_IT_SHOULD_BE:
        turn.change(fine=(same, equal))
    if isinstance(decision, Wait):
        return decision
    if not decision.planned:
        unsure = view.disputes and turn.now_s - agent.peers.disputed_s < DISPUTE_S
        return Wait("nodes are checking their connections to each other") if unsure else decision
    if turn.done_here():
        return Wait("training is complete; the others are finishing")
    if turn.now_s < agent.etcd.wiped_until_s:
        return Wait("a planned change waits: etcd has lost its data a moment ago")
    return decision


def _pauses(turn: Turn) -> str:
    """Why the next generation has to wait: the last ones all broke before their first step. '' when it need not."""
    broken = turn.agent.etcd.view.broken
    if broken is None or not turn.is_broken() or broken.generation != turn.agent.formed.broken:
        return ""
    count = in_vain(turn.agent.etcd.view.state, broken)
    pause_s = backoff_s(count, turn.policy.spec.restarts, jitter=1.0)
    if turn.now_s >= turn.agent.formed.broken_at_s + pause_s:
        return ""
    return f"{count} generations in a row broke before their first step; again within {pause_s:g} s: {broken.detail}"


def _survives(turn: Turn, broken: BrokenRecord) -> bool:
    """Whether a worker of the failed generation lives, and so holds the state."""
    formed = turn.agent.formed.generation
    if formed is None:
        return False
    there = {member.id for member in living(turn.agent.etcd.view, turn.agent.peers.dead).values()}
    seats = [place for place in formed.nodes if (place.node, place.incarnation) in there]
    return any(not all_workers_lost(formed, place.node, broken) for place in seats)


def _has_stepped(turn: Turn) -> bool | None:
    """Whether any step of the job is known, of its earlier agents too; None: it is plain, of which none would be."""
    progress, view = turn.agent.progress, turn.agent.etcd.view
    recorded = view.progress.step if view.progress else 0
    known = bool(progress.step or progress.reached[1] or view.saved_step or recorded)
    return known if known or turn.policy.managed else None


def _publish(turn: Turn, change: Change) -> None:
    agent, view = turn.agent, turn.agent.etcd.view
    number = agent.formed.generation.number + 1 if agent.formed.generation else 1
    if turn.now_s < agent.etcd.wiped_until_s and agent.formed.generation:
        number += 1  # an agent may hold one more, published just before etcd was wiped
    ahead = max(2, math.ceil(LEAD_S / agent.progress.step_s)) if agent.progress.step_s > 0 else 2
    at_step = agent.progress.step + ahead if change.planned and turn.policy.managed else None
    broken = _reported(turn)
    told = (
        broken is not None
        and agent.formed.generation is not None
        and broken.generation == agent.formed.generation.number
    )
    charged = Charge(view.state)
    if broken is not None and told:
        before = agent.formed.generation.before if agent.formed.generation else None
        charged = charge(
            view.state, broken, turn.policy.spec.restarts, turn.wall_s, _spare(turn), before=before,
            stepped=_has_stepped(turn), survives=_survives(turn, broken),
        )  # fmt: skip
        # Its agent stops the job, too, and tries once: etcd may have been away, or the state changed at that moment.
        if turn.policy.spec.on_bad_numbers == "stop" and (bad := bad_numbers(broken)):
            charged = Charge(after(view.state, PhaseTrigger.FAILED, bad.detail, turn.wall_s), bad.detail)
    turn.change(reason="", below_min=False, halted=False)
    if charged.stopped:
        turn.ask(PutState(charged.state, view.state_revision), f"failed {view.state_revision}")
        return
    again = bool(agent.lead.publishing)
    turn.change(publishing=number, publishing_since_s=turn.now_s, publishing_again=again)
    state = charged.state
    if state.phase is not Phase.RUNNING:
        state = after(state, PhaseTrigger.PUBLISHED, "", turn.wall_s)
    new = state if state != view.state else None
    counted = bool(told and broken and broken.charged)
    formed = agent.formed.generation.number if agent.formed.generation else 0
    after_loss = agent.etcd.lost_at >= formed
    turn.do(Publish(number, change, view.generation_revision, at_step, new, counted, turn.policy.managed, after_loss))


def _reported(turn: Turn) -> BrokenRecord | None:
    """The failure report in etcd, with what this agent has reported and etcd may not show yet: after an outage of etcd
    another agent's failed collective may be there first, and the bad numbers from which the job is to go back not."""
    shown, known = turn.agent.etcd.view.broken, turn.agent.formed.broken_record
    return known if shown is not None and known is not None and known.generation == shown.generation else shown


def _spare(turn: Turn) -> int:
    """Living nodes that are ready to take part, beyond the job's minimum."""
    alive = living(turn.agent.etcd.view, turn.agent.peers.dead).values()
    fit = sum(1 for m in alive if m.record.ready and m.record.draining is None)
    return max(0, fit - turn.limits().min_nodes)


def _absence_ignored_until_s(turn: Turn) -> float:
    """Until when absence proves nothing. Longer if all nodes that hold the job's state are absent and none is known to
    be dead: they may train on without etcd, and to go on without them costs steps."""
    agent = turn.agent
    members = agent.etcd.view.members
    current = agent.formed.generation
    places = (
        [p for p in current.nodes if not all_workers_lost(current, p.node, agent.etcd.view.broken)] if current else []
    )
    if not places or any(p.node in members or (p.node, p.incarnation) in agent.peers.dead for p in places):
        turn.change(orphaned_s=None)
        return agent.etcd.absence_ignored_until_s
    if agent.etcd.orphaned_s is None:
        turn.change(orphaned_s=turn.now_s)
    assert turn.agent.etcd.orphaned_s is not None
    return max(agent.etcd.absence_ignored_until_s, turn.agent.etcd.orphaned_s + turn.policy.timeouts.form_s)


def _all_done(turn: Turn) -> bool:
    generation, members = turn.agent.formed.generation, turn.agent.etcd.view.members
    if generation is None or turn.is_broken():
        return False
    # A rank is done only when all ranks have reached the end, so members that have left need not report it.
    there = [m for p in generation.nodes if (m := members.get(p.node)) and m.record.incarnation == p.incarnation]
    return bool(there) and all(m.record.done == generation.number for m in there)


def _wait(turn: Turn, decision: Wait) -> None:
    view, reason = turn.agent.etcd.view, decision.reason
    if turn.agent.drain.draining and decision.below_min and not turn.policy.spec.checkpoint.dir:
        reason += "; the job has no checkpoint.dir, so its state would be lost"
    if turn.agent.formed.generation is None and view.state.error is not None:
        reason += f"; the newest failure, on {view.state.error.node}: {one_line(view.state.error.message)}"
    if decision.below_min:
        short = (m.record for m in view.members.values() if m.record.lacks)
        reason += "".join(f"; {m.node} is tried again and again: {m.lacks}" for m in short)
    lost = turn.is_broken() or not turn.steps_advance()
    halted = decision.below_min and lost and turn.agent.formed.generation is not None
    if decision.fine:
        reason = SAVING if turn.done_here() and turn.policy.spec.checkpoint.dir else ""
    turn.change(reason=reason, below_min=decision.below_min, halted=halted)
    if decision.below_min and any(m.record.draining for m in view.members.values()):
        # Any rank passes this request on to the others; the draining node may have none.
        turn.ask(SaveNow("a node leaves, and the job falls below its minimum", stop=True), "save")
    if halted and view.state.phase is Phase.RUNNING:
        _put_phase(turn, PhaseTrigger.BELOW_MIN, decision.reason)
    elif not lost and view.state.phase is Phase.WAITING:  # absent members are back, and no new generation was needed
        _put_phase(turn, PhaseTrigger.STEPS_ON)


def _put_phase(turn: Turn, trigger: PhaseTrigger, reason: str = "") -> None:
    view = turn.agent.etcd.view
    state = after(view.state, trigger, reason, turn.wall_s)
    turn.ask(PutState(state, view.state_revision), f"{state.phase.value} {view.state_revision}")
