"""Standbys: processes that have finished their set-up and have no rank yet, to replace the next worker that dies."""

from __future__ import annotations

from msgspec.structs import replace

from elastic.contract.worker import messages

from .effects import ForkWorker, Kill, Send
from .model import Worker
from .transitions import Stage, Trigger, after
from .turn import Turn


def promote(turn: Turn, slot: int) -> bool:
    """A ready standby takes the place of `slot`'s process; False when there is none."""
    standby = next((w for w in turn.agent.local.standbys if w.stage is Stage.READY), None)
    if standby is None or turn.is_over():
        return False
    # Its place among the standbys is empty, and a new standby is due there now.
    empty = Worker(slot=-1, worker_id=0, stage=Stage.GONE, deadline_s=turn.now_s, crashes=standby.crashes)
    turn.change(standbys=tuple(empty if w is standby else w for w in turn.agent.local.standbys))
    replaced = turn.agent.local.workers[slot]
    taken = replace(standby, slot=slot, stage=after(replaced.stage, Trigger.PROMOTE), since_s=turn.now_s)
    turn.put(replace(taken, crashes=replaced.crashes))
    turn.do(Send(slot, standby.worker_id, messages.Assign(slot=slot)))
    return True


def settle_standbys(turn: Turn) -> None:
    if not turn.policy.managed or not turn.policy.spec.standby:
        return
    if not turn.agent.local.standbys:
        # Only once the workers have started: they come first.
        if any(w.stage in (Stage.STARTING, Stage.GONE) for w in turn.agent.local.workers.values()):
            return
        fresh = tuple(
            Worker(slot=-1, worker_id=0, stage=Stage.GONE, deadline_s=turn.now_s)
            for _ in range(turn.policy.spec.standby)
        )
        turn.change(standbys=fresh)
    _overtake(turn)
    for standby in turn.agent.local.standbys:
        if standby.stage is Stage.GONE and turn.now_s >= standby.deadline_s:
            worker_id = turn.agent.local.spawned + 1
            turn.change(spawned=worker_id)
            turn.move_standby(standby, Trigger.FORK, worker_id=worker_id, since_s=turn.now_s)
            turn.do(ForkWorker(-1, worker_id, standby=True))


def _overtake(turn: Turn) -> None:
    """A standby that is ready before a dead worker's replacement takes its place. The replacement is killed and not
    kept as a standby: its set-up may already hold the device of that slot."""
    for worker in tuple(turn.agent.local.workers.values()):
        if (
            worker.stage in (Stage.STARTING, Stage.GONE)
            and promote(turn, worker.slot)
            and worker.stage is not Stage.GONE
        ):
            turn.do(Kill(worker.slot, worker.worker_id, "a standby was ready before it"))
