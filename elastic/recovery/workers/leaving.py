"""How an agent leaves: drained, with the job's state saved or held elsewhere, or because the job is over."""

from __future__ import annotations

from elastic.contract.records.job_records import Phase
from elastic.contract.records.reasons import Code, Reason, reason
from elastic.contract.structs import replace
from elastic.contract.worker import messages
from elastic.recovery.facts.transitions import IN_GROUP, Stage, Trigger
from elastic.recovery.machine.effects import Kill, Leave, SaveNow, Send
from elastic.recovery.machine.model import Worker, has_process
from elastic.recovery.machine.turn import Turn

from .announce import failure, report_failure, settle_member, uncharged


def check_drain(turn: Turn) -> None:
    draining = turn.drain.draining
    if draining is None or turn.drain.leaving is not None:
        return
    if not turn.my_ranks():
        free = all(w.stage not in IN_GROUP | {Stage.ABORTING} for w in turn.local.workers.values())
        if free and not _is_needed(turn):
            turn.drain = replace(turn.drain, leaving=reason(Code.DRAINED, draining))
        return
    due = turn.now_s >= turn.drain.drain_deadline_s
    stay = [
        m
        for m in turn.etcd.view.members.values()
        if m.record.node != turn.policy.node and m.record.ready and m.record.draining is None
    ]
    if len(stay) < turn.limits().min_nodes and not due:
        due = _may_fall_below_min(turn, bool(stay))
    if due:
        settle_member(turn)  # so that the next generation is formed without this node
        step_in, at_step = max([turn.progress.reached, *((w.synced, w.step) for w in turn.local.workers.values())])
        record = uncharged(failure(turn, "drain", draining, tuple(turn.my_ranks())))
        report_failure(turn, replace(record, step=at_step, step_in=step_in))
        turn.drain = replace(turn.drain, leaving=reason(Code.DRAINED, draining))


def _is_needed(turn: Turn) -> bool:
    """Whether the generation that goes on without this node has not stepped yet. If it breaks before it does, by a
    failure at the same moment, this node may be the only one that has committed the last step."""
    generation = turn.formed.generation
    if generation is None or not turn.policy.managed or not turn.progress.reached[1]:
        return False
    if all(w.synced == 0 for w in turn.local.workers.values()):
        return False
    progress = turn.etcd.view.progress
    stepped = progress is not None and progress.stepped_in >= generation.number
    due_s = min(turn.drain.drain_deadline_s, turn.formed.formed_at_s + turn.policy.timeouts.form_s)
    return turn.etcd.view.has_all_members and not stepped and turn.now_s < due_s


def _may_fall_below_min(turn: Turn, others: bool) -> bool:
    """Whether this node may leave though that stops the job: once its state is saved. All ranks stop at that step."""
    if not turn.policy.spec.checkpoint.dir:
        return others  # the other nodes keep the state, and wait
    stopped = all(w.stage is Stage.READY for w in turn.local.workers.values() if w.slot in turn.my_ranks())
    workers = turn.local.workers.values()
    if stopped and all(_is_saved(turn, worker) for worker in workers) and any(worker.step for worker in workers):
        return True
    turn.ask(SaveNow(reason(Code.LEAVES, turn.drain.draining or "", node=turn.policy.node), stop=True), "save")
    return False


def _is_saved(turn: Turn, worker: Worker) -> bool:
    """Whether the newest checkpoint has what this worker holds. After the job has gone back, one of the course that it
    left may have a larger step: the generation in which a step was committed comes first."""
    generation, step = max(turn.drain.drain_saved, (turn.etcd.view.saved_generation, turn.etcd.view.saved_step))
    if not generation or turn.progress.settled < worker.synced:
        return step >= worker.step  # in which generation one of the two was committed is not known
    return (generation, step) >= (worker.synced, worker.step)


def check_end(turn: Turn) -> None:
    if turn.drain.leaving is None and turn.is_taken():
        turn.drain = replace(turn.drain, leaving=reason(Code.NAME_REUSED))
    state = turn.etcd.view.state
    if turn.drain.leaving is None and (state.phase.over or state.phase is Phase.STOPPING):
        turn.drain = replace(turn.drain, leaving=reason(Code.JOB_OVER, state.reason, phase=state.phase.value))


def leave(turn: Turn) -> None:
    """End every worker, then the agent."""
    leaving, done = turn.drain.leaving, Phase.SUCCEEDED
    # Also where that was withdrawn since: what the other ranks still do, as to save the model, they do to its end.
    was = leaving.values.get("phase") if isinstance(leaving, Reason) else ""
    succeeded = turn.etcd.view.state.phase is done or was == done.value
    busy = False
    for worker in tuple(turn.local.workers.values()):
        if not has_process(worker, turn.policy.managed):
            continue
        busy = True
        if worker.stage is Stage.DONE and succeeded:
            turn.do(Send(worker.slot, worker.worker_id, messages.Finish()))
            turn.move(worker, Trigger.FINISH, turn.now_s + turn.policy.spec.exit_timeout_s)
        elif worker.stage is Stage.ABORTING and succeeded:
            if turn.now_s >= worker.deadline_s:
                turn.kill(worker, reason(Code.LATE_END))
        elif worker.stage is not Stage.KILLED:
            turn.kill(worker, leaving or "", graceful=True)
    for standby in turn.local.standbys:
        if standby.stage in (Stage.STARTING, Stage.READY):
            turn.do(Kill(-1, standby.worker_id, leaving or ""))
            turn.put_standby(standby, turn.moved(standby, Trigger.KILL))
        busy = busy or standby.stage is not Stage.GONE
    if not busy and leaving is not None and not turn.drain.left:
        turn.drain = replace(turn.drain, left=True)
        turn.lead = replace(turn.lead, reason=leaving)
        turn.do(Leave(leaving))
