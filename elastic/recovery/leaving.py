"""How an agent leaves: drained, with the job's state saved or held elsewhere, or because the job is over."""

from __future__ import annotations

from ..contract import messages
from ..contract.records import Phase
from .announce import report_failure, settle_member
from .effects import Kill, Leave, SaveNow, Send
from .model import has_process
from .transitions import IN_GROUP, Stage, Trigger
from .turn import Turn

TOO_LATE = "did not end in time"
"""Why a worker that was told to end by itself is killed."""


def check_drain(turn: Turn) -> None:
    agent = turn.agent
    if agent.draining is None or agent.leaving is not None:
        return
    if not turn.my_ranks():
        free = all(w.stage not in IN_GROUP | {Stage.ABORTING} for w in agent.workers.values())
        if free and not _is_needed(turn):
            turn.change(leaving=f"drained: {agent.draining}")
        return
    due = turn.now_s >= agent.drain_deadline_s
    stay = [
        m
        for m in agent.view.members.values()
        if m.record.node != turn.policy.node and m.record.ready and m.record.draining is None
    ]
    if len(stay) < turn.limits().min_nodes and not due:
        due = _may_fall_below_min(turn, bool(stay))
    if due:
        settle_member(turn)  # so that the next generation is formed without this node
        at_step = max([agent.step, *(w.step for w in agent.workers.values())])
        report_failure(turn, "drain", agent.draining, tuple(turn.my_ranks()), step=at_step, charged=False)
        turn.change(leaving=f"drained: {agent.draining}")


def _is_needed(turn: Turn) -> bool:
    """Whether the generation that goes on without this node has not stepped yet. If it breaks before it does, by a
    failure at the same moment, this node may be the only one that has committed the last step."""
    agent, generation = turn.agent, turn.agent.generation
    if generation is None or not turn.policy.managed or not agent.reached[1]:
        return False
    if all(w.synced == 0 for w in agent.workers.values()):
        return False
    progress = agent.view.progress
    stepped = progress is not None and progress.stepped_in >= generation.number
    due_s = min(agent.drain_deadline_s, agent.formed_at_s + turn.policy.timeouts.form_s)
    return agent.view.whole and not stepped and turn.now_s < due_s


def _may_fall_below_min(turn: Turn, others: bool) -> bool:
    """Whether this node may leave though that stops the job: once its state is saved. All ranks stop at that step."""
    agent = turn.agent
    if not turn.policy.spec.checkpoint.dir:
        return others  # the other nodes keep the state, and wait
    stopped = all(w.stage is Stage.READY for w in agent.workers.values() if w.slot in turn.my_ranks())
    at_step = max((w.step for w in agent.workers.values()), default=0)
    if stopped and max(agent.drain_saved, agent.view.saved_step) >= at_step > 0:
        return True
    turn.ask(SaveNow(f"drain: {agent.draining}", stop=True), "save")
    return False


def check_end(turn: Turn) -> None:
    phase, reason = turn.agent.view.state.phase, turn.agent.view.state.reason
    if turn.agent.leaving is None and (phase.over or phase is Phase.STOPPING):
        turn.change(leaving=f"{phase.value}: {reason}" if reason else phase.value)


def leave(turn: Turn) -> None:
    """End every worker, then the agent."""
    succeeded = turn.agent.view.state.phase is Phase.SUCCEEDED
    busy = False
    for worker in tuple(turn.agent.workers.values()):
        if not has_process(worker, turn.policy.managed):
            continue
        busy = True
        if worker.stage is Stage.DONE and succeeded:
            turn.do(Send(worker.slot, worker.worker_id, messages.Finish()))
            turn.move(worker, Trigger.FINISH, turn.now_s + turn.policy.spec.exit_timeout_s)
        elif worker.stage is Stage.ABORTING and succeeded:
            if turn.now_s >= worker.deadline_s:
                turn.kill(worker, TOO_LATE)
        elif worker.stage is not Stage.KILLED:
            turn.kill(worker, turn.agent.leaving or "", graceful=True)
    for standby in turn.agent.standbys:
        if standby.stage in (Stage.STARTING, Stage.READY):
            turn.do(Kill(-1, standby.worker_id, "the job is over here"))
            turn.move_standby(standby, Trigger.KILL)
        busy = busy or standby.stage is not Stage.GONE
    if not busy and turn.agent.leaving is not None and not turn.agent.reason.startswith("left"):
        turn.change(reason=f"left: {turn.agent.leaving}")
        turn.do(Leave(turn.agent.leaving))
