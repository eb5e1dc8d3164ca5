"""Where the time of a step goes, for the API and the screen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from elasticd.base import answers

from .goodput import percent

if TYPE_CHECKING:  # elasticctl imports this for `text`, and must not wait for the records
    from elastic.contract.records.job_records import ProgressRecord, RankRow
    from elastic.contract.records.rank_records import RanksRecord
    from elastic.contract.step_parts import SlowRank, StepParts

PARTS = ("data", "compute", "collectives", "optimizer", "snapshot")


def slow_ranks(records: Mapping[str, RanksRecord], generation: int) -> list[SlowRank]:
    """The ranks of the whole job whose own time of a step was longer than that of the median rank, in each of their
    newest windows. The windows of two nodes are of the same length, and begin within seconds of each other."""
    from elastic.contract.step_parts import WINDOWS, SlowRank
    from elastic.contract.step_parts import slow_ranks as slow

    rows = [(node, each) for node, r in records.items() if r.generation == generation for each in r.ranks]
    own = {each.rank: (node, each.own_s) for node, each in rows if each.rank >= 0 and len(each.own_s) == WINDOWS}
    windows = [{rank: own_s[i] for rank, (_, own_s) in own.items()} for i in range(WINDOWS)]
    return [SlowRank(rank=r, node=own[r][0], ratio=ratio) for r, ratio in slow(windows)]


def row(
    progress: ProgressRecord | None, records: Mapping[str, RanksRecord], generation: int
) -> answers.StepTime | None:
    """Means over the ranks whose parts are known; None: none are. `records`: by node."""
    rows: Iterable[RankRow] = progress.ranks if progress else ()
    parts = [each.parts for each in rows if each.parts is not None and each.parts.step_s > 0]
    if progress is None or not parts:
        return None
    of_job = slow_ranks(records, generation)
    named = {each.rank for each in of_job}
    slow = [*of_job, *(each for each in progress.slow_ranks if each.rank not in named)]
    return answers.StepTime(
        ranks=len(parts),
        step_s=_mean(parts, "step") or 0.0,
        parts_s={part: _mean(parts, part) for part in PARTS},
        slow_ranks=[answers.SlowRank(rank=s.rank, node=s.node, ratio=s.ratio) for s in slow],
    )


def _mean(rows: list[StepParts], part: str) -> float | None:
    values = [value for parts in rows if (value := getattr(parts, f"{part}_s")) is not None]
    return round(sum(values) / len(values), 6) if values else None


def text(step_time: answers.StepTime | None) -> str:
    """'120 ms: compute 60.1 %, collectives 30.2 %, data 2.0 %; rank 3 on b takes 1.8 times as long as …'."""
    if step_time is None:
        return ""
    measured = {name: value for name, value in step_time.parts_s.items() if value is not None}
    largest = sorted(measured.items(), key=lambda item: -item[1])
    whole_s = max(step_time.step_s, sum(measured.values()))  # the parts and the step are means of their own
    shares = ", ".join(f"{name} {percent(value / whole_s)}" for name, value in largest if value > 0)
    sentences = [f"{step_time.step_s * 1000:.4g} ms" + (f": {shares}" if shares else "")]
    if len(measured) < len(PARTS):
        sentences.append("the rest is not measured yet")
    return "; ".join(sentences + [slow_text(slow) for slow in step_time.slow_ranks])


def slow_text(slow: answers.SlowRank) -> str:
    """'rank 3 on b takes 1.8 times as long as the others'."""
    return f"rank {slow.rank} on {slow.node} takes {slow.ratio:g} times as long as the others"
