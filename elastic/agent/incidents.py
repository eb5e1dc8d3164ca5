"""The time line of each recovery, drawn up by the leader from what it sees of its own turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.membership import cut_off
from ..core.model import Agent, Stage
from ..core.records import BrokenRecord, IncidentRecord, Phase, WorkerError


@dataclass(slots=True)
class _Open:
    began_s: float
    wall_s: float
    kind: str
    node: str
    ranks: tuple[int, ...]
    detail: str
    step: int
    world_before: int
    error: WorkerError | None = None
    timeline_s: dict[str, float] = field(default_factory=dict)
    restored_from: str = ""
    resumed_step: int | None = None
    stacks: dict[str, str] = field(default_factory=dict)
    causes: int = 1
    replaced: tuple[Agent, Agent] | None = None
    """Before and after the turn in which a generation without some of its nodes followed: it was not called broken."""


class Incidents:
    """Call `turn` after each turn of the recovery machine; to who leads then, it returns a record when a recovery is
    over: complete, or given up with the job."""

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._stacks: dict[str, str] = {}

    def stacks(self, stacks: dict[str, str]) -> None:
        """Stacks saved before a kill go into the incident that it begins."""
        self._stacks = stacks

    def synced(self, step: int, source: str) -> None:
        if self._open is not None:
            self._open.restored_from = self._open.restored_from or source
            self._open.resumed_step = step if self._open.resumed_step is None else self._open.resumed_step

    def started_over(self, step: int, why: str) -> None:
        """Nothing was left of the job's state, though `step` steps were known to be committed."""
        if self._open is not None and not self._open.detail.endswith(why):
            self._open.step = max(self._open.step, step)
            self._open.detail += f"; {why}"

    def turn(
        self,
        before: Agent,
        after: Agent,
        local_broken: BrokenRecord | None,
        newest_step: Callable[[], int],
        leads: Callable[[], bool],
        now_s: float,
        wall_s: float,
    ) -> IncidentRecord | None:
        self._begin(before, after, local_broken, newest_step, now_s, wall_s)
        if self._open is None:
            return None
        self._mark(before, after, newest_step, now_s)
        return self._end(after, leads, now_s)

    def _begin(
        self,
        before: Agent,
        after: Agent,
        local_broken: BrokenRecord | None,
        newest_step: Callable[[], int],
        now_s: float,
        wall_s: float,
    ) -> None:
        number = before.generation.number if before.generation else 0
        broke = number and before.broken < number <= after.broken
        replaced = after.generation is not None and number and after.generation.number > number
        if not (broke or replaced):
            return
        record = local_broken or after.view.broken
        if self._open is not None:
            if broke:
                self._open.causes += 1  # again, while the recovery was under way
            return
        assert before.generation is not None
        planned = replaced and after.generation is not None and after.generation.at_step is not None
        opened = _Open(
            began_s=now_s,
            wall_s=wall_s,
            kind="planned" if planned else "lost",
            node="",
            ranks=(),
            detail=after.generation.why if after.generation else "",
            step=max(newest_step(), after.step),
            world_before=before.generation.world,
            stacks=self._stacks,
        )
        self._stacks = {}
        if not broke and not planned and after.generation is not None:
            opened.replaced = before, after
        if broke and record is not None:
            opened.kind, opened.node, opened.ranks, opened.detail = (
                record.kind,
                record.node,
                record.ranks,
                record.detail,
            )
            opened.error = record.error
        self._open = opened

    def _mark(self, before: Agent, after: Agent, newest_step: Callable[[], int], now_s: float) -> None:
        """Write down each phase when it is first complete for all workers of this node."""
        opened = self._open
        assert opened is not None
        times, elapsed_s = opened.timeline_s, now_s - opened.began_s
        if after.generation != before.generation:
            times["published"] = elapsed_s
            if opened.detail == "" and after.generation is not None:
                opened.detail = after.generation.why
        stages = [w.stage for w in after.workers.values()]
        if opened.kind == "planned" and "boundary" not in times and Stage.READY in stages:
            # Until the boundary the old world steps on: what the change costs is counted from there.
            opened.began_s, elapsed_s = now_s, 0.0
            opened.timeline_s = times = {"boundary": 0.0}
            opened.step = newest_step()
        free = (Stage.READY, Stage.FORMING, Stage.RUNNING, Stage.GONE, Stage.STARTING, Stage.KILLED)
        if "let_go" not in times and all(s in free for s in stages):
            times["let_go"] = elapsed_s
        number = after.generation.number if after.generation else 0
        placed = [w for w in after.workers.values() if w.generation == number]
        if "synced" not in times and placed and all(w.stage in (Stage.RUNNING, Stage.DONE) for w in placed):
            times["synced"] = elapsed_s

    def _end(self, after: Agent, leads: Callable[[], bool], now_s: float) -> IncidentRecord | None:
        opened, generation = self._open, after.generation
        assert opened is not None
        if generation is None:
            return None
        recovered = after.settled >= generation.number > after.broken
        if not recovered and after.view.state.phase is not Phase.FAILED:
            return None
        opened.timeline_s["stepping" if recovered else "given_up"] = now_s - opened.began_s
        self._open = None
        if not leads():
            return None
        if opened.replaced is not None:
            _name_the_lost(opened, *opened.replaced)
        lost = max(0, opened.step - opened.resumed_step) if opened.resumed_step is not None else None
        again = f" (and {opened.causes - 1} more while recovering)" if opened.causes > 1 else ""
        return IncidentRecord(
            generation=generation.number + (0 if recovered else 1),
            kind=opened.kind,
            node=opened.node,
            ranks=opened.ranks,
            detail=opened.detail + again,
            wall_s=opened.wall_s,
            timeline_s={name: round(at, 4) for name, at in opened.timeline_s.items()},
            step=opened.step,
            steps_lost=lost,
            world_before=opened.world_before,
            world_after=generation.world if recovered else 0,
            restored_from=opened.restored_from if recovered else "nothing",
            stacks=opened.stacks,
            error=opened.error,
        )


def _name_the_lost(opened: _Open, before: Agent, after: Agent) -> None:
    assert before.generation is not None
    assert after.generation is not None
    gone = sorted(before.generation.order.keys() - after.generation.order.keys())
    opened.node = ", ".join(gone)
    if cut_off(after.view, after.dead, before.generation).intersection(gone):
        opened.kind = "unreachable"
