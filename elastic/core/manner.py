"""Whether a job's workers are managed or plain, which shows only when they run.

Every worker is started with its rank, as under torchrun, and counts as plain. One whose script calls `elastic.run`
says so, and from then on all workers of the job are managed: they keep their processes over re-formations. Agents that
come later read it in the records of the others.
"""

from __future__ import annotations

from msgspec.structs import replace

from .transitions import Stage, Trigger
from .turn import Turn


def learn(turn: Turn) -> None:
    """Take over what the newest view says of the job's workers."""
    if turn.policy.managed:
        return
    view = turn.agent.view
    formed, progress = view.generation, view.progress
    stepped = progress is not None and progress.step > 0  # all agents may have died since: plain workers have no steps
    if stepped or (formed is not None and formed.managed) or any(m.record.managed for m in view.members.values()):
        manage(turn)


def manage(turn: Turn) -> None:
    """This job's workers call `elastic.run`. Again does nothing."""
    if turn.policy.managed:
        return
    turn.change(policy=replace(turn.policy, managed=True))
    for worker in tuple(turn.agent.workers.values()):
        if worker.stage is Stage.RUNNING:
            # It has its rank, and sets up: it forms this very generation unless that breaks meanwhile.
            turn.move(worker, Trigger.MANAGED, generation=0, seat=worker.generation)
        elif worker.stage in (Stage.READY, Stage.DONE):
            turn.move(worker, Trigger.MANAGED, turn.now_s, generation=0)  # a plain one in these stages has no process
    if not turn.my_ranks():
        turn.change(published=None)  # what was said to be ready has still to set up
