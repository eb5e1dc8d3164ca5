"""What follows for the workers: which are forked, told to form, told to stop at a step or to abort, and killed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from elastic.contract.records.job_records import GenerationRecord
from elastic.contract.records.reasons import Code, Text, reason
from elastic.contract.structs import replace
from elastic.contract.worker import messages
from elastic.recovery.facts.transitions import IN_GROUP, Stage, Trigger, after
from elastic.recovery.machine.effects import ForkPlain, ForkWorker, Kill, Send
from elastic.recovery.machine.model import Worker
from elastic.recovery.machine.turn import Turn


def promote(turn: Turn, slot: int) -> bool:
    """A ready standby takes the place of `slot`'s process; False when there is none."""
    standby = next((w for w in turn.local.standbys if w.stage is Stage.READY), None)
    if standby is None or turn.is_over():
        return False
    # Its place among the standbys is empty, and a new standby is due there now.
    empty = Worker(slot=-1, worker_id=0, stage=Stage.GONE, deadline_s=turn.now_s, crashes=standby.crashes)
    turn.put_standby(standby, empty)
    replaced = turn.local.workers[slot]
    taken = replace(standby, slot=slot, stage=after(replaced.stage, Trigger.PROMOTE), since_s=turn.now_s)
    turn.put(replace(taken, crashes=replaced.crashes))
    turn.do(Send(slot, standby.worker_id, messages.Assign(slot=slot)))
    return True


def settle_standbys(turn: Turn) -> None:
    if not turn.policy.managed or not turn.policy.spec.standby:
        return
    if not turn.local.standbys:
        # Only once the workers have started: they come first.
        if any(w.stage in (Stage.STARTING, Stage.GONE) for w in turn.local.workers.values()):
            return
        fresh = tuple(
            Worker(slot=-1, worker_id=0, stage=Stage.GONE, deadline_s=turn.now_s)
            for _ in range(turn.policy.spec.standby)
        )
        turn.local = replace(turn.local, standbys=fresh)
    _overtake(turn)
    for standby in turn.local.standbys:
        if standby.stage is Stage.GONE and turn.now_s >= standby.deadline_s:
            worker_id = turn.new_worker_id()
            turn.put_standby(standby, turn.moved(replace(standby, worker_id=worker_id), Trigger.FORK))
            turn.do(ForkWorker(-1, worker_id, standby=True))


def _overtake(turn: Turn) -> None:
    """A standby that is ready before a dead worker's replacement takes its place. The replacement is killed and not
    kept as a standby: its set-up may already hold the device of that slot."""
    for worker in tuple(turn.local.workers.values()):
        if (
            worker.stage in (Stage.STARTING, Stage.GONE)
            and promote(turn, worker.slot)
            and worker.stage is not Stage.GONE
        ):
            turn.do(Kill(worker.slot, worker.worker_id, reason(Code.OVERTAKEN)))


def settle_worker(turn: Turn, worker: Worker) -> None:
    generation = turn.formed.generation
    if worker.stage is Stage.GONE:
        if turn.now_s >= worker.deadline_s:
            worker_id = turn.new_worker_id()
            turn.move(
                replace(worker, worker_id=worker_id, generation=0, synced=0, step=0, told_to_end=False), Trigger.FORK
            )
            turn.do(ForkWorker(worker.slot, worker_id))
        return
    if worker.lacks and worker.stage is Stage.READY and turn.now_s >= worker.deadline_s:
        turn.put(worker := replace(worker, lacks="", deadline_s=math.inf))  # a plain one: it can be given a rank again
    if worker.stage is Stage.ABORTING and turn.now_s >= worker.deadline_s:
        turn.kill(worker, reason(Code.LATE_ABORT))
        return
    if generation is None:
        return
    if worker.stage in IN_GROUP:
        _settle_in_group(turn, worker, generation)
        worker = turn.local.workers[worker.slot]
    ranks = turn.my_ranks()
    due = worker.stage is Stage.READY and worker.generation < generation.number
    if due and worker.slot in ranks and not turn.is_broken():
        _form(turn, worker, generation, ranks)


def _settle_in_group(turn: Turn, worker: Worker, generation: GenerationRecord) -> None:
    older = worker.generation < generation.number
    if not older and not turn.is_broken():
        return
    planned = (
        generation.at_step is not None
        and not turn.is_broken()
        and worker.generation == generation.before
        and turn.policy.managed
    )
    if planned and worker.stage is Stage.RUNNING:
        assert generation.at_step is not None
        ahead_s = (generation.at_step - turn.progress.step + 1) * turn.progress.step_s
        # An order that comes too late leaves the step under way to be completed: see `worker.session`.
        patience_s = 2 * max(turn.policy.timeouts.abort_s, turn.progress.step_s)
        deadline_s = turn.now_s + max(0.0, ahead_s) + patience_s
        turn.move(worker, Trigger.STOP_AT_STEP, deadline_s)
        order = messages.StopAtStep(generation=worker.generation, at_step=generation.at_step, why=generation.why)
        turn.do(Send(worker.slot, worker.worker_id, order))
    elif worker.stage is Stage.STOPPING_AT_STEP and planned and turn.now_s < worker.deadline_s:
        return
    else:
        _abort(turn, worker, generation.why if older else reason(Code.GENERATION_BROKEN))


def _abort(turn: Turn, worker: Worker, why: Text) -> None:
    if not turn.policy.managed:
        if worker.stage is Stage.DONE:
            turn.move(worker, Trigger.GENERATION_OVER)
        else:
            turn.kill(worker, why)
        return
    turn.do(Send(worker.slot, worker.worker_id, messages.AbortGroup(generation=worker.generation, why=why)))
    # An aborted collective raises only when the step gets to it: a long step takes as long.
    patience_s = max(turn.policy.timeouts.abort_s, 3 * turn.progress.step_s)
    turn.move(worker, Trigger.ABORT, turn.now_s + patience_s)


def _form(turn: Turn, worker: Worker, generation: GenerationRecord, ranks: Mapping[int, int]) -> None:
    if not turn.policy.managed:
        worker_id = turn.new_worker_id()
        turn.move(replace(worker, generation=generation.number, worker_id=worker_id, started=False), Trigger.FORK_PLAIN)
        turn.do(ForkPlain(worker.slot, worker_id, generation))
        return
    at = generation.at(turn.policy.node)
    assert at is not None  # it has `ranks` in this generation
    turn.move(replace(worker, generation=generation.number), Trigger.FORM)
    form = messages.Form(
        generation=generation.number,
        rank=ranks[worker.slot],
        world_size=generation.world_size,
        group_rank=at,
        group_world_size=len(generation.nodes),
        local_rank=sorted(ranks.values()).index(ranks[worker.slot]),
        local_world_size=len(ranks),
        store_host=generation.store_host,
        store_port=generation.store_port,
        store_secret=generation.store_secret,
        restore=generation.restore,
        timeout_s=turn.policy.timeouts.group_s,
        saved_step=turn.etcd.view.saved_step,
        saved_generation=turn.etcd.view.saved_generation,
        reached=turn.progress.reached,
    )
    turn.do(Send(worker.slot, worker.worker_id, form))
