"""Why a job makes no step: what each agent publishes of its ranks, and what follows from all of that. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from elastic.contract.job.spec import Hang
from elastic.contract.records.reasons import Code, Text, reason
from elastic.contract.records.standings import FIRST_STEP_S, Standing, Stillness
from elastic.contract.worker.beat import WITH_OTHERS, Beat, Doing

from .hang_rules import FORMING, SETTING_UP, STOPPED_STATE, Position, RankWait, position

DEAF_S = 2.0
"""Without a pulse from the worker's pulse thread for this long, the process probably runs no Python."""

_FINISHES = Doing.FINISHING.name.lower()


def still_s(step_s: float, rules: Hang) -> float:
    """Without a step for this many seconds, a job stands still."""
    return max(rules.floor_s, rules.factor * step_s) if step_s > 0 else max(rules.floor_s, FIRST_STEP_S)


def standing(beat: Beat, process_state: str, in_collective_s: float | None, now_s: float) -> Standing:
    """How far a worker has got. `in_collective_s`: since when its stack shows it in a collective of the script."""
    in_collective = in_collective_s is not None
    since_s = beat.beat_at_s if in_collective_s is None else in_collective_s
    stopped = process_state == STOPPED_STATE
    return Standing(
        rank=beat.rank,
        position=position(beat, in_collective),
        doing=beat.doing.name.lower(),
        silent_s=round(now_s - since_s, 3),
        gap_s=round(beat.gap_s, 3),
        waits=not stopped and (in_collective or beat.doing in WITH_OTHERS - {Doing.WAITING}),
        stopped=stopped,
        deaf=not stopped and beat.pulse_s > 0 and now_s - beat.pulse_s >= DEAF_S,
        quiet=now_s < beat.quiet_until_s,
    )


def same(one: Standing, other: Standing) -> bool:
    """Whether both are equal, durations aside."""
    return (one.rank, one.position, one.doing, one.waits, one.stopped, one.deaf, one.quiet) == (
        other.rank, other.position, other.doing, other.waits, other.stopped, other.deaf, other.quiet,
    )  # fmt: skip


def worth_telling(
    standings: tuple[Standing, ...], before: tuple[Standing, ...], *, crowd: bool
) -> tuple[Standing, ...] | None:
    """What to publish instead of `before`; None: nothing new. In a large job the first few nodes publish ranks that
    wait; the others (`crowd`: this is one of them) publish only what may be the cause."""
    if crowd:
        standings = tuple(s for s in standings if not s.waits or s.deaf)
    if not standings:
        return None  # what was published shows by its positions that it is stale: not worth a write
    if len(standings) == len(before) and all(map(same, standings, before)):
        return None
    return standings


class StillRank(msgspec.Struct, frozen=True):
    """A rank that shows no progress, as far as this agent has learnt."""

    node: str
    standing: Standing
    since_s: float
    """Instant of its last sign of progress, on this agent's clock."""

    def wait(self) -> RankWait | None:
        if not self.standing.waits:
            return None
        return RankWait(self.standing.position, self.since_s, self.standing.gap_s)


def all_ahead(here: Position, others: Collection[StillRank], world_size: int) -> bool:
    """Whether every other rank of the generation is known to have committed the step that a rank at `here` is in. (A
    later position within the step is no proof: a rank may have returned from `train`, or have skipped an exchange.)"""
    return len({k.standing.rank for k in others if k.standing.position[:2] > here[:2]}) >= world_size - 1


def explain(still: Collection[StillRank], nodes: Mapping[int, str], generation: int, wall_s: float = 0.0) -> Stillness:
    """Why no step is made since `wall_s`, and at which rank that probably lies. `nodes`: rank -> node, for all ranks of
    `generation`."""
    current = [k for k in still if k.standing.position[0] == generation and nodes.get(k.standing.rank) == k.node]
    newest = max((k.standing.position[1] for k in current), default=-1)
    # Ranks are at most one step apart: older positions were written in an earlier standstill.
    ranks = {k.standing.rank: k for k in current if k.standing.position[1] >= newest - 1}
    furthest = max((k.standing.position for k in ranks.values()), default=(0, 0, 0))
    in_order = sorted(ranks.values(), key=lambda k: (k.standing.position, k.standing.rank))
    some_go_on = any(k.standing.doing != _FINISHES for k in in_order)
    signs: tuple[tuple[Code, Callable[[Standing], bool]], ...] = (
        (Code.STOPPED, lambda s: s.stopped),
        (Code.DEAF, lambda s: s.deaf),
        (Code.IN_QUIET, lambda s: s.quiet and not s.waits),
        (Code.DOES_NOT_WAIT, lambda s: not s.waits),
        (Code.HAS_RETURNED, lambda s: s.doing == _FINISHES and some_go_on),
        (Code.BEHIND, lambda s: s.position < furthest),
    )
    for code, shows in signs:
        if suspects := [k for k in in_order if shows(k.standing)]:
            rank, node, doing = suspects[0].standing.rank, suspects[0].node, suspects[0].standing.doing
            place = _place(suspects[0].standing.position)
            why = reason(code, _others(suspects), doing=doing, place=place, furthest=_place(furthest))
            return Stillness(wall_s, why, rank, node, declared=code is Code.IN_QUIET)
    if unheard := [rank for rank in nodes if rank not in ranks]:
        return Stillness(wall_s, reason(Code.UNKNOWN_RANK, _others(unheard)), unheard[0], nodes[unheard[0]])
    return Stillness(wall_s, reason(Code.ALL_WAIT, count=len(nodes), place=_place(furthest)))


def _others(suspects: Collection[object]) -> Text:
    return reason(Code.AND_OTHERS, count=len(suspects) - 1) if len(suspects) > 1 else ""


def _place(at: Position) -> str:
    if at[1] >= 0:
        return f"step {at[1] + 1}"
    if at[1] == FORMING:
        return f"the forming of generation {at[0]}"
    return f"{'setup' if at[2] == SETTING_UP else 'the hand-over of state'} in generation {at[0]}"
