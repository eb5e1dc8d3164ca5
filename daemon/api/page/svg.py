"""Small plots as inline SVG, for the report. Pure. Colours are classes of the page's style: light and dark."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH, LEFT, RIGHT = 960, 64, 12
TICKS = 6
THINNEST = 2.0
"""A span that would be narrower, in units of WIDTH, is drawn this wide: a recovery of 0.2 s in a day is still seen."""

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Span:
    begin: float
    end: float
    kind: str
    """A class of the style."""
    title: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values from `low` to `high` to positions on the horizontal axis."""

    low: float
    high: float

    def at(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span > 0 else 0.0
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)


def ticks(low: float, high: float, most: int = TICKS) -> list[float]:
    """Round numbers from `low` to `high`, `most` at most: multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low] if math.isfinite(low) else []
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(span_s: float) -> list[tuple[float, str]]:
    """(seconds since the beginning, label), at round lengths of time."""
    sizes = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200]
    days = (86400 * factor * 10**power for power in range(9) for factor in (1, 2, 5))
    step = next((size for size in (*sizes, *days) if span_s / size <= TICKS), None)
    if step is None or span_s <= 0:
        return [(0.0, "0")]
    unit, size = next(((u, n) for u, n in (("d", 86400), ("h", 3600), ("min", 60)) if step >= n), ("s", 1))
    return [(n * step, f"{n * step / size:g} {unit}") for n in range(int(span_s // step) + 1)]


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{html.escape(words)}</text>'


def _svg(height: float, parts: Iterable[str], title: str) -> str:
    inner = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{html.escape(title)}">\n{inner}\n</svg>'


def _time_axis(axis: Axis, top: float, bottom: float) -> list[str]:
    parts = []
    for seconds, label in time_ticks(axis.high - axis.low):
        x = axis.at(axis.low + seconds)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}"/>')
        anchor = "end" if x > WIDTH - 3 * RIGHT else "middle"  # the last label would leave the picture
        parts.append(text(x, bottom + 14, label, f'class="tick" text-anchor="{anchor}"'))
    return parts


def timeline(axis: Axis, spans: Sequence[Span], title: str) -> str:
    """One bar over time; later spans are drawn over earlier ones. Labels where they fit."""
    top, bar = 4.0, 34.0
    parts = _time_axis(axis, top, top + bar)
    for span in spans:
        x = axis.at(span.begin)
        wide = max(THINNEST, axis.at(span.end) - x)
        x = min(x, WIDTH - RIGHT - wide)
        tip = f"<title>{html.escape(span.title)}</title>" if span.title else ""
        parts.append(f'<rect class="{span.kind}" x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{bar}">{tip}</rect>')
        if span.label and wide > 7 * len(span.label) + 8:
            parts.append(text(x + wide / 2, top + bar / 2 + 4, span.label, 'class="inside" text-anchor="middle"'))
    return _svg(top + bar + 22, parts, title)


def curve(
    axis: Axis, points: Points, marks: Sequence[tuple[float, str]], title: str, *, from_zero: bool = False
) -> str:
    """A line through `points` (x, value), with a gap where a value is None; vertical lines at `marks` (x, kind)."""
    top, bottom, height = 10.0, 194.0, 220.0
    values = [value for _, value in points if value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    low = min(low, 0.0) if from_zero else low
    if low == high:
        low, high = low - abs(low) * 0.1 - 0.5, high + abs(high) * 0.1 + 0.5
    parts = _time_axis(axis, top, bottom)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    for value in ticks(low, high, 5):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(text(LEFT - 8, y(value) + 4, f"{value:.4g}", 'class="tick" text-anchor="end"'))
    for at, kind in marks:
        x = axis.at(at)
        parts.append(f'<line class="mark {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}"/>')
    for _, part in itertools.groupby(points, lambda point: point[1] is None):
        drawn = [(axis.at(x), y(value)) for x, value in part if value is not None]
        if drawn:
            line = " ".join(f"{x:.1f},{at:.1f}" for x, at in drawn)
            parts.append(f'<polyline class="line" points="{line}"/>')
        if len(drawn) == 1:
            parts.append(f'<circle class="dot" cx="{drawn[0][0]:.1f}" cy="{drawn[0][1]:.1f}" r="2.5"/>')
    return _svg(height, parts, title)


def stacked(shares: Sequence[tuple[str, float, str]], title: str) -> str:
    """One bar of parts (class, share of the whole, title)."""
    bar, x, parts = 34.0, float(LEFT), []
    for kind, share, tip in shares:
        wide = share * (WIDTH - LEFT - RIGHT)
        parts.append(
            f'<rect class="{kind}" x="{x:.2f}" y="0" width="{wide:.2f}" height="{bar}">'
            f"<title>{html.escape(tip)}</title></rect>"
        )
        x += wide
    return _svg(bar, parts, title)
