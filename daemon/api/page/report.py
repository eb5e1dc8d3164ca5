"""The report of a job as one HTML page, and its parts for the live page. Pure.

Nothing in it is loaded from elsewhere, and it runs no script.

Every text that comes from a user, a worker or a record is escaped.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs

from elasticd.api.views import columns
from elasticd.api.views.columns import Column
from elasticd.base.answers import (
    Account,
    Goodput,
    History,
    Incident,
    JobDetail,
    Point,
    SlotTime,
    WorkerError,
    printable,
)
from elasticd.base.phrases import age
from elasticd.diagnosis import goodput

from . import svg

BUCKETS = ("stepping", *goodput.WORDS)
KEYS = {"stepping": "training", "setup": "set-up", "failed": "incident", "planned": "planned change"}
"""Of the time line."""
LONGEST_TEXT = 4_000
MOST_RANKS = 64
"""Accounts of ranks that are shown one by one."""
STYLE = """
:root { color-scheme: light dark; --bg: #fff; --text: #1c2024; --dim: #60666d; --grid: #e3e6ea; --line: #2563a8;
  --stepping: #2e8b57; --checkpoint: #3b82c4; --detect: #c0392b; --abort: #a9673a; --form: #e59a3c; --sync: #d9b83a;
  --redo: #9b3d63; --waiting: #8a94a0; --setup: #8e7cc3; --idle: #c5ccd3; --planned: #3b82c4; --failed: #c0392b;
  --standstill: #5b2333; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --text: #e4e7ea; --dim: #9aa3ab; --grid: #2b3036;
  --line: #6fb1f2; --stepping: #3fa06b; --idle: #4a525a; --waiting: #737d88; --detect: #e5604f; --failed: #e5604f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 20px; background: var(--bg); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .dim, th { color: var(--dim); font-weight: normal; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--text); font-size: 12px; }
svg .tick { fill: var(--dim); } svg .inside { fill: #fff; } .grid { stroke: var(--grid); }
.line { fill: none; stroke: var(--line); stroke-width: 1.6; stroke-linejoin: round; } .dot { fill: var(--line); }
.mark { stroke-width: 1.2; stroke-dasharray: 3 3; opacity: .8; } .mark.failed { stroke: var(--failed); }
.mark.planned { stroke: var(--planned); }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td { overflow-wrap: anywhere; } td.now { white-space: nowrap; } .fit, .plot { overflow-x: auto; }
.long td:not(.what) { overflow-wrap: break-word; } .long td:first-child { white-space: nowrap; }
@media (max-width: 640px) { .plot svg { min-width: 620px; }
  .long table, .long tbody, .long td { display: block; border: 0; } .long tr:first-child { display: none; }
  .long tr { display: flex; flex-wrap: wrap; gap: 0 12px; border-bottom: 1px solid var(--grid); padding: 6px 0; }
  .long td { padding: 0; } .long td.what { flex: 1 0 100%; } }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; }
pre { overflow-x: auto; font-size: .82rem; background: color-mix(in srgb, var(--dim) 12%, transparent); padding: 10px; }
""" + "\n".join(f"rect.{n} {{ fill: var(--{n}); }} .key.{n} {{ background: var(--{n}); }}"
                for n in (*BUCKETS, "planned", "failed"))  # fmt: skip


def page(job: JobDetail, incidents: Sequence[Incident], history: History | None, made_wall_s: float) -> str:
    """`job`, `incidents`, `history`: answers of the API; `history` None: this node has none."""
    head, sections = parts(job, incidents, history, made_wall_s)
    policy = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
    body = f"{head}\n<p class=dim>as of {clock(made_wall_s)}</p>\n{sections}"
    return document(printable(job).job, STYLE, body, policy)


def document(title: str, style: str, body: str, head: str = "", attributes: str = "") -> str:
    """A whole page. `head`: further elements of it; `attributes`: of its body."""
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8>\n{head}"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{style}</style></head>\n<body{attributes}>\n{body}\n</body></html>\n"
    )


def parts(job: JobDetail, incidents: Sequence[Incident], history: History | None, now_wall_s: float) -> tuple[str, str]:
    """The head and the sections below it, as HTML; arguments as for `page`."""
    job, incidents = printable(job), [printable(row) for row in incidents]
    points = history.points if history else []
    axis = _axis(job, incidents, points, now_wall_s)
    marks = [(row.wall_s, _kind(row)) for row in incidents]
    loss = [(p.wall_s, p.loss) for p in points]
    rate = [(p.wall_s, p.steps_per_s) for p in points]
    missing = "" if points else "<p class=dim>No curves: this node has had no rank of the job.</p>"
    keys = (f'<span class="key {kind}"></span>{words} &nbsp; ' for kind, words in KEYS.items())
    body = [
        "<h2>Time line</h2>",
        _plot(svg.timeline(axis, _spans(job, incidents, points, axis), "Generations and incidents over time")),
        f"<p class=dim>{''.join(keys)}</p>",
        missing,
    ]
    if any(value is not None for _, value in loss):
        body += ["<h2>Loss</h2>", _plot(svg.curve(axis, loss, marks, "Loss over time"))]
    if rate:
        body += ["<h2>Steps per second</h2>", _plot(svg.curve(axis, rate, marks, "Steps per second", from_zero=True))]
    body += _ledger(job.goodput) + _accounts(job)
    shown = f"<div class=long>{table(INCIDENTS, incidents)}</div>" if incidents else "<p class=dim>none</p>"
    body += ["<h2>Incidents</h2>", shown, *_error(job.error), *_spec(job.spec)]
    state = f"<span class={class_of(job.phase)}>{text(job.phase)}</span>"
    reason = f"<p>{text(job.reason)}</p>" if job.reason else ""
    return f"<h1>{text(job.job)} {state}</h1>\n{reason}{_facts(columns.job_facts(job))}", "\n".join(body)


def _plot(drawn: str) -> str:
    return f"<div class=plot>{drawn}</div>"


def text(value: object, most: int = LONGEST_TEXT) -> str:
    """Any text, escaped, and cut if it is long. The caller has made control characters visible."""
    plain = str(value)
    return html.escape(plain if len(plain) <= most else f"{plain[:most]}…")


def _axis(job: JobDetail, incidents: Sequence[Incident], points: Sequence[Point], now_s: float) -> svg.Axis:
    times = [row.wall_s for row in incidents] + [p.wall_s for p in points]
    begin = job.submitted_wall_s or min(times, default=now_s - 1)
    end = job.since_wall_s if job.phase in columns.OVER and job.since_wall_s > begin else now_s
    return svg.Axis(begin, max(end, begin + 1))


def _kind(row: Incident) -> str:
    return "planned" if row.kind == "planned" else "failed"


def _spans(job: JobDetail, incidents: Sequence[Incident], points: Sequence[Point], axis: svg.Axis) -> list[svg.Span]:
    """Set-up until the first known step, then generations, with the incidents over them."""
    first = min([p.wall_s for p in points[:1]] + [row.wall_s for row in incidents[:1]], default=None)
    if first is None:
        first = axis.low if job.step else axis.high
    spans = [svg.Span(axis.low, first, "setup", f"set-up, {length(first - axis.low)}", "set-up")]
    begin, number, world = first, None, None
    for row in incidents:
        before = row.generation - 1 if number is None else number
        ranks = row.world_size_before if world is None else world
        spans.append(_generation(begin, row.wall_s - row.still_s, before, ranks))
        begin = row.wall_s - row.still_s + (row.took_s or 0.0)
        number, world = row.generation, row.world_size_after
    if job.step:
        spans.append(_generation(begin, axis.high, number or job.generation, world or job.world_size))
    for row in incidents:
        took, since = row.took_s or 0.0, row.wall_s - row.still_s
        title = f"{clock(row.wall_s)} {row.kind}, {length(took)}, {row.lost} lost: {row.detail}"
        spans.append(svg.Span(since, since + took, _kind(row), title[:LONGEST_TEXT]))
    return spans


def _generation(begin: float, end: float, number: int, ranks: int) -> svg.Span:
    title = f"generation {number}, {ranks} ranks, {length(end - begin)}"
    return svg.Span(begin, max(begin, end), "stepping", title, f"gen {number}")


def _ledger(known: Goodput | None) -> list[str]:
    if known is None:
        return []
    share: dict[str, float] = {"stepping": known.goodput, **known.badput}
    words = {"stepping": "steps that count", **goodput.WORDS}
    shares = [(n, share[n], f"{words[n]}: {goodput.percent(share[n])}") for n in BUCKETS if share.get(n)]
    rows = "".join(
        f'<tr><td><span class="key {n}"></span>{text(words[n])}</td><td class=n>{goodput.percent(value)}</td>'
        f"<td class=n>{length(value * known.wall_s)}</td></tr>"
        for n, value, _ in shares
    )
    return [
        f"<h2>Where the time went: {goodput.percent(known.goodput)} goodput</h2>",
        _plot(svg.stacked(shares, "Share of the time of all ranks by what it went into")),
        f"<table><tr><th>of {length(known.wall_s)}, mean over the ranks<th class=n>share<th class=n>time</tr>"
        f"{rows}</table>",
    ]


def _accounts(job: JobDetail) -> list[str]:
    """What the ranks' own accounts add up to, and each of those that made the least steps that count."""
    summed = job.rank_time
    if summed is None:
        return []
    rows = summed.accounts or [
        Account(rank=row.rank, node=row.node, slot=row.slot, **structs.asdict(row.time))
        for row in job.ranks
        if row.time
    ]
    least = sorted(rows, key=lambda row: 1.0 if row.goodput is None else row.goodput)[:MOST_RANKS]
    of_all = SlotTime(
        until_wall_s=summed.rank_wall_s, goodput=summed.goodput, seconds=summed.rank_seconds,
        open_seconds=summed.open_rank_seconds,
    )  # fmt: skip
    accounts: list[tuple[str, str, SlotTime]] = [("all", "", of_all)]
    for row in least:
        rank = f"rank {row.rank}" if row.rank >= 0 else "none now"
        accounts.append((rank, f"{row.node}, slot\N{NO-BREAK SPACE}{row.slot}", row))
    stands = goodput.STANDSTILL in summed.badput
    columns_ = (
        Column("account", lambda row: row[0]),
        Column("where", lambda row: row[1]),
        Column("time", lambda row: length(row[2].until_wall_s - row[2].since_wall_s), right=True),
        Column("goodput", lambda row: columns.share(row[2].goodput), right=True),
        Column("badput", lambda row: _badput(row[2], stands), flex=True),
    )
    few = f"; the {len(least)} with the least goodput" if len(least) < len(rows) else ""
    about = f"{summed.ranks} ranks, each by its own agent's account from the first agent of its node on{few}"
    return [
        f"<h2>Rank by rank: {goodput.percent(summed.goodput)} goodput</h2>",
        f"<p class=dim>{text(about)}</p>",
        f"<div class=long>{table(columns_, accounts)}</div>",
    ]


def _badput(of: SlotTime, stands: bool) -> str:
    spent_s = of.until_wall_s - of.since_wall_s
    lost_s = of.seconds | {goodput.STANDSTILL: of.open_seconds if stands else 0.0, "stepping": 0.0}
    causes = [(name, seconds) for name, seconds in lost_s.items() if seconds > 0 and spent_s > 0]
    return ", ".join(
        f"{goodput.WORDS.get(name, name)} {goodput.percent(min(1.0, seconds / spent_s))}"
        for name, seconds in sorted(causes, key=lambda item: -item[1])
    )


INCIDENTS = (
    Column("when", lambda row: clock(row.wall_s)),
    *columns.picked(columns.INCIDENTS, "class", "node"),
    Column("took", lambda row: "open" if row.open else length(row.took_s), right=True),
    Column("lost", lambda row: "so far" if row.open else row.lost, right=True),
    Column("what happened", lambda row: _what(row), flex=True),
)


def _what(row: Incident) -> Html:
    fix = f"<p class=dim>{text(row.verdict.fix)}</p>" if row.verdict.fix else ""
    return Html(f"{text(row.verdict.what or row.detail)}{fix}")


def _error(error: WorkerError | None) -> list[str]:
    if error is None:
        return []
    details = error.traceback.rstrip() or error.message
    where = f"rank {error.rank} on {error.node}"
    return [f"<h2>Newest error: {text(where)}</h2>", f"<pre>{text(details, 20_000)}</pre>"]


def _spec(spec: dict[str, Any] | None) -> list[str]:
    if not spec:
        return []
    given = [(name, setting(value)) for name, value in sorted(spec.items()) if value not in ("", [], {})]
    return ["<h2>Settings of the job</h2>", _facts(given)]


def _facts(facts: columns.Facts) -> str:
    """Names and values; those that say nothing are left out."""
    shown = ((name, value) for name, value in facts if value.strip("-"))
    rows = "".join(f"<tr><td class='now dim'>{text(name)}</td><td>{text(value)}</td></tr>" for name, value in shown)
    return f"<div class=fit><table>{rows}</table></div>"


class Html(str):
    """Markup: all text in it is escaped."""


def table(
    columns: Sequence[Column], rows: Sequence[Any], most: int = sys.maxsize, why: Callable[[Any], str] = lambda _: ""
) -> str:
    """The first `most` rows. `why`: a sentence below a row, '' for none."""
    body = []
    for row in rows[:most]:
        values = [(column, column.cell(row)) for column in columns]
        cells = "".join(f"<td{_classes(c, v)}>{v if isinstance(v, Html) else text(v)}</td>" for c, v in values)
        below = f"<tr><td colspan={len(columns)} class=why>{text(sentence)}</td></tr>" if (sentence := why(row)) else ""
        body.append(f"<tr{' class=first' if below else ''}>{cells}</tr>{below}")
    head = "".join(f"<th{_classes(column)}>{text(column.title)}" for column in columns)
    left_out = len(rows) - most
    more = f"<tr><td colspan={len(columns)} class=dim>and {left_out} more</td></tr>" if left_out > 0 else ""
    return f"<div class=fit><table><tr>{head}</tr>{''.join(body)}{more}</table></div>"


def _classes(column: Column, value: object = None) -> str:
    """Of a cell, or without `value` of the column's head."""
    state = ["now", class_of(str(value))] if column.state and value else []
    names = ["n"] * column.right + ["far"] * bool(column.spare) + ["what"] * column.flex + state
    return "" if not names else f" class={names[0]}" if len(names) == 1 else f" class='{' '.join(names)}'"


def class_of(state: str) -> str:
    """A state as a class of the style: letters only."""
    return "".join(c for c in state if "a" <= c <= "z") or "none"


def setting(value: Any) -> str:
    """As in job.toml; of a table only what is set."""
    if isinstance(value, dict):
        return ", ".join(f"{key} = {setting(each)}" for key, each in value.items() if each not in ("", [], {}))
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def clock(wall_s: float | None) -> str:
    return columns.clock(wall_s, "%Y-%m-%d %H:%M:%S")


def length(seconds: float | None) -> str:
    return age(seconds, ".1f") if seconds is not None and seconds >= 120 else columns.seconds(seconds)
