"""Whether a job's workers are managed or plain, which shows only when they run.

Every worker is started with its rank, as under torchrun, and counts as plain. A worker whose script calls `elastic.run`
reports that, and from then on all workers of the job are managed: their processes survive re-formations. Agents that
start later read it in the records of the others.
"""

from __future__ import annotations

from msgspec.structs import replace

from .transitions import Stage, Trigger
from .turn import Turn


def learn(turn: Turn) -> None:
    """Switch to managed workers if the newest view shows that the job's are."""
    if turn.policy.managed:
        return
    view = turn.agent.etcd.view
    formed, progress = view.generation, view.progress
    # Plain workers report no steps. The progress record counts, too, since all agents may have died after writing it.
    stepped = progress is not None and progress.step > 0
    if stepped or (formed is not None and formed.managed) or any(m.record.managed for m in view.members.values()):
        manage(turn)


def manage(turn: Turn) -> None:
    """Record that this job's workers call `elastic.run`. Idempotent."""
    if turn.policy.managed:
        return
    turn.agent = replace(turn.agent, policy=replace(turn.policy, managed=True))
    for worker in tuple(turn.agent.local.workers.values()):
        if worker.stage is Stage.RUNNING:
            # It has its rank and is in its set-up: it forms this generation, unless that breaks meanwhile.
            turn.move(worker, Trigger.MANAGED, generation=0, seat=worker.generation)
        elif worker.stage in (Stage.READY, Stage.DONE):
            turn.move(worker, Trigger.MANAGED, turn.now_s, generation=0)  # a plain worker has no process there
    if not turn.my_ranks():
        turn.change(published=None)  # the slots published as ready have no worker yet
