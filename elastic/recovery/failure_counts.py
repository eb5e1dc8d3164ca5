"""Failures outside any generation, such as a worker that does not even start, are counted against the restart budget.

The agent of the worker counts each in the job's state, by compare-and-swap, until a view shows it. A failure of a
generation is counted by the leader, together with the next generation: see `leading`.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.contract.records.job_records import Failure
from elastic.contract.structs import replace
from elastic.recovery.facts.restart_budget import charge
from elastic.recovery.machine.effects import PutState
from elastic.recovery.machine.turn import Turn


def count_failures(turn: Turn) -> None:
    state = turn.etcd.view.state
    if not turn.etcd.uncounted or not (turn.etcd.joined and turn.etcd.connected) or turn.etcd.view.spec is None:
        return
    if state.phase.over or turn.is_taken():
        turn.etcd = replace(turn.etcd, uncounted=())
        return
    left = tuple(u for u in turn.etcd.uncounted if u.written is None or not _shown(u.written, state.failures))
    if left:
        first, later = left[0], left[1:]
        counted = charge(state, first.record, turn.policy.spec.restarts, first.wall_s, None).state
        effect = PutState(counted, turn.etcd.view.state_revision)
        if counted.failures != state.failures:
            turn.ask(effect, f"count {turn.etcd.view.state_revision}")
            changed = (f for f in reversed(counted.failures) if f not in state.failures)
            left = (replace(first, written=next(changed, counted.failures[-1])), *later)
        else:  # it follows from a failure that is counted; its error is recorded
            turn.do(effect)
            left = later
    turn.etcd = replace(turn.etcd, uncounted=left)


def _shown(written: Failure, failures: Iterable[Failure]) -> bool:
    """Not compared by its texts: etcd may have them with characters replaced. The leader may have added slots to it."""
    this = written.wall_s, written.generation, written.node
    return any((f.wall_s, f.generation, f.node) == this and set(written.slots) <= set(f.slots) for f in failures)
