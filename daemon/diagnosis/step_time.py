"""Where the time of a step goes, for the API and the screen. Pure; docs/api.md defines the fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .goodput import percent

if TYPE_CHECKING:  # elasticctl imports this for `text`, and must not wait for msgspec
    from elastic.contract.records import ProgressRecord, RankRow
    from elastic.contract.step_parts import StepParts

Json = dict[str, Any]

PARTS = ("data", "compute", "collectives", "optimizer", "snapshot")


def row(progress: ProgressRecord | None) -> Json | None:
    """Means over the ranks whose parts are known; None: none are."""
    rows: Iterable[RankRow] = progress.ranks if progress else ()
    known = [each.parts for each in rows if each.parts is not None and each.parts.step_s > 0]
    if progress is None or not known:
        return None
    return {
        "ranks": len(known),
        "step_s": _mean(known, "step"),
        "parts_s": {part: _mean(known, part) for part in PARTS},
        "slow_ranks": [{"rank": s.rank, "node": s.node, "ratio": s.ratio} for s in progress.slow_ranks],
    }


def _mean(known: list[StepParts], part: str) -> float | None:
    import statistics

    values = [value for parts in known if (value := getattr(parts, f"{part}_s")) is not None]
    return round(statistics.fmean(values), 6) if values else None


def text(known: Mapping[str, Any] | None) -> str:
    """'120 ms: compute 60.1 %, collectives 30.2 %, data 2.0 %; rank 3 on b takes 1.8 times as long as …'."""
    if known is None:
        return ""
    measured = {name: value for name, value in known["parts_s"].items() if value is not None}
    largest = sorted(measured.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {percent(min(1.0, value / known['step_s']))}" for name, value in largest if value > 0)
    said = [f"{known['step_s'] * 1000:.4g} ms" + (f": {shares}" if shares else "")]
    if len(measured) < len(PARTS):
        said.append("the rest is not measured on a GPU")
    for slow in known["slow_ranks"]:
        said.append(f"rank {slow['rank']} on {slow['node']} takes {slow['ratio']:g} times as long as the others there")
    return "; ".join(said)
