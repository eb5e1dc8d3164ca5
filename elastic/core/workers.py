"""What follows for the workers: who is forked, told to let go, told to form, killed."""

from __future__ import annotations

from collections.abc import Mapping

from . import messages
from .effects import ForkPlain, ForkWorker, Tell
from .model import Worker
from .records import GenerationRecord
from .transitions import IN_GROUP, Stage, Trigger
from .turn import Turn


def settle_worker(turn: Turn, worker: Worker) -> None:
    agent, generation = turn.agent, turn.agent.generation
    if worker.stage is Stage.GONE:
        if turn.now_s >= worker.deadline_s:
            turn.change(lives=agent.lives + 1)
            turn.move(worker, Trigger.FORK, life=agent.lives + 1, generation=0, synced=0, step=0, told_to_end=False)
            turn.do(ForkWorker(worker.slot, agent.lives + 1))
        return
    if worker.stage is Stage.LEAVING and turn.now_s >= worker.deadline_s:
        turn.kill(worker, "did not let go in time")
        return
    if generation is None:
        return
    if worker.stage in IN_GROUP:
        _settle_in_group(turn, worker, generation)
        worker = turn.agent.workers[worker.slot]
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
        and worker.generation == generation.number - 1
        and turn.policy.managed
    )
    if planned and worker.stage is Stage.RUNNING:
        assert generation.at_step is not None
        ahead_s = (generation.at_step - turn.agent.step + 1) * turn.agent.step_s
        deadline_s = turn.now_s + max(0.0, ahead_s) + 2 * turn.policy.timeouts.let_go_s
        turn.move(worker, Trigger.STOP_AT_STEP, deadline_s)
        order = messages.Yield(generation=worker.generation, at_step=generation.at_step, why=generation.why)
        turn.do(Tell(worker.slot, worker.life, order))
    elif worker.stage is Stage.YIELDING and planned and turn.now_s < worker.deadline_s:
        return
    else:
        _let_go(turn, worker, generation.why if older else "generation is broken")


def _let_go(turn: Turn, worker: Worker, why: str) -> None:
    if not turn.policy.managed:
        if worker.stage is Stage.DONE:
            turn.move(worker, Trigger.GENERATION_OVER)
        else:
            turn.kill(worker, why)
        return
    turn.do(Tell(worker.slot, worker.life, messages.LetGo(generation=worker.generation, why=why)))
    # The call in flight raises only when its step gets to it: a long step needs as long.
    patience_s = max(turn.policy.timeouts.let_go_s, 3 * turn.agent.step_s)
    turn.move(worker, Trigger.ABORT, turn.now_s + patience_s)


def _form(turn: Turn, worker: Worker, generation: GenerationRecord, ranks: Mapping[int, int]) -> None:
    if not turn.policy.managed:
        turn.change(lives=turn.agent.lives + 1)
        life = turn.agent.lives
        turn.move(worker, Trigger.FORK_PLAIN, generation=generation.number, life=life)
        turn.do(ForkPlain(worker.slot, life, generation))
        return
    at = generation.at(turn.policy.node)
    assert at is not None  # `ranks` are its
    turn.move(worker, Trigger.FORM, generation=generation.number)
    form = messages.Form(
        generation=generation.number,
        rank=ranks[worker.slot],
        world=generation.world,
        group_rank=at,
        group_world=len(generation.places),
        local_rank=sorted(ranks.values()).index(ranks[worker.slot]),
        local_world=len(ranks),
        store_host=generation.store_host,
        store_port=generation.store_port,
        restore=generation.restore,
        timeout_s=turn.policy.timeouts.group_s,
        saved_step=turn.agent.view.saved_step,
        reached=turn.agent.reached,
    )
    turn.do(Tell(worker.slot, worker.life, form))
