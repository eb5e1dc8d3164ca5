"""The live page, as HTML from the answers of the API: a document, and the fragment that it shows. Pure.

Without JavaScript the document is a static page that is loaded again every 10 s. With it, each fragment that the stream
of server-sent events brings replaces the one before. Every text is made visible by `shown` and escaped by `text`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from elasticd.base.answers import Event, History, Incident, Job, JobDetail, Node, Rank, Status, printable
from elasticd.base.safe_text import shown
from elasticd.diagnosis import goodput

from . import report, svg
from .report import clock, text

MOST_JOBS, MOST_NODES, MOST_RANKS = 100, 300, 256
"""Rows of a table; the rest is counted in its last line."""
LAST_EVENTS = 20
PROBLEM = ("failed", "degraded")
"""A job's health that matters more than its phase."""

STYLE = (
    report.STYLE
    + """
:root { --good: #1f7a48; --bad: #c0392b; --warn: #9a6212; }
@media (prefers-color-scheme: dark) { :root { --good: #57c08a; --bad: #f0796b; --warn: #e3a94f; } }
a { color: var(--line); text-decoration: none; } a:hover { text-decoration: underline; }
nav { display: flex; justify-content: space-between; gap: 20px; margin-bottom: 1rem; font-size: .92rem; }
.healthy, .ready, .running, .succeeded { color: var(--good); } .failed, .unhealthy, .lost { color: var(--bad); }
.degraded, .waiting, .draining, .cordoned, .nodaemon { color: var(--warn); }
.problems { border-left: 3px solid var(--warn); padding-left: 10px; margin: 1rem 0; }
.fit { overflow-x: auto; } td.word { overflow-wrap: normal; } .near { display: none; }
td.why { color: var(--dim); padding-top: 0; } tr.first td { border-bottom: 0; padding-bottom: 0; }
@media (max-width: 640px) { body { padding: 14px; } .far { display: none; } .near { display: table-row; }
  th, td { padding-right: 8px; } tr.narrow td { border-bottom: 0; padding-bottom: 0; } }
"""
)

SCRIPT = """
"use strict";
{
  const main = document.querySelector("main"), note = document.getElementById("live");
  let source = null, later = 0;
  const parts = () => [...main.querySelectorAll(".fit, .wide, .plot, pre")];
  const show = event => {
    const chosen = getSelection();
    if (!chosen.isCollapsed && main.contains(chosen.anchorNode)) return;
    const before = parts().map(part => part.scrollLeft);
    main.innerHTML = event.data;
    parts().forEach((part, n) => { part.scrollLeft = before[n] || 0; });
  };
  const leave = () => { clearTimeout(later); if (source) source.close(); source = null; note.textContent = ""; };
  const follow = () => {
    leave();
    if (document.hidden) return;
    source = new EventSource(document.body.dataset.events);
    source.addEventListener("page", show);
    source.onopen = () => { note.textContent = "live"; };
    source.onerror = () => {
      note.textContent = "no connection: this is the last that was seen";
      if (source.readyState === EventSource.CLOSED) later = setTimeout(follow, 5000);
    };
  };
  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", leave);
  addEventListener("pageshow", follow);
  for (const part of main.querySelectorAll(".plot")) part.scrollLeft = part.scrollWidth;
}
"""
"""Follows the stream while the page is seen. A part that is selected is left alone; plots begin at their newest end."""


def _hash(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


POLICY = (
    f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: no script and no style but these two, nothing from elsewhere."""


def document(cluster: str, job: str, fragment: str) -> str:
    """The whole page around a fragment; `job` empty: the cluster's."""
    title = f"{job} · {cluster}" if job else f"cluster {cluster}"
    events = f"/events?job={quote(job, safe='')}" if job else "/events"
    body = (
        f'<nav><a href="/">cluster {text(cluster)}</a><span id=live class=dim role=status></span></nav>\n'
        f"<main>\n{fragment}</main>\n<script>{SCRIPT}</script>"
    )
    refresh = '<noscript><meta http-equiv=refresh content="10"></noscript>'
    return _html(title, f' data-events="{text(events)}"', body, refresh)


def refusal(said: str) -> str:
    """The whole page of a request that is refused: names nothing of the cluster but what is said."""
    return _html("elasticd", "", f'<main>\n{message(said)}<p><a href="/">the cluster</a></p></main>')


def _html(title: str, attributes: str, body: str, head: str = "") -> str:
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>{head}</head>\n"
        f"<body{attributes}>\n{body}\n</body></html>\n"
    )


def message(said: str) -> str:
    """A fragment with one sentence."""
    return f"<p>{text(shown(said))}</p>\n"


def cluster(status: Status, events: Sequence[Event]) -> str:
    """`status`: the answer of /v1/status; `events`: the newest, oldest first."""
    status, events = printable(status), [printable(event) for event in events]
    etcd = status.etcd
    contact = "etcd answers" if etcd.connected else f"etcd does not answer: {etcd.error or 'no contact yet'}"
    head = (
        f"<h1>Cluster {text(status.cluster)} <span class={_class(status.health)}>{text(status.health)}</span>"
        f"</h1>\n<p class=dim>seen from node {text(status.node)}, elasticd {text(status.version)}; "
        f"{text(contact)}</p>"
    )
    problems = "".join(f"<p>{text(problem)}</p>" for problem in status.problems)
    body = [
        head,
        f"<div class=problems>{problems}</div>" if problems else "",
        "<h2>Jobs</h2>",
        _jobs(status.jobs),
        "<h2>Nodes</h2>",
        _nodes(status.nodes),
        "<h2>Newest events</h2>",
        _events(events),
    ]
    return "\n".join(body) + "\n"


def job(
    detail: JobDetail, incidents: Sequence[Incident], history: History | None, events: Sequence[Event], now_s: float
) -> str:
    """Arguments as for `report.page`, and the job's newest events."""
    head, sections = report.parts(detail, incidents, history, now_s)
    detail = printable(detail)
    why = f"<p class={_class(detail.health)}>{text(detail.why)}</p>" if detail.why else ""
    ranks = ["<h2>Ranks</h2>", _ranks(detail.ranks)] if detail.ranks else []
    told = ["<h2>Newest events</h2>", _events([printable(event) for event in events])]
    return "\n".join([head, why, *ranks, sections, *told]) + "\n"


def server_sent(fragment: str) -> bytes:
    """The fragment as one event. A carriage return would end a line of the stream."""
    lines = fragment.replace("\r", " ").split("\n")
    return ("event: page\n" + "".join(f"data: {line}\n" for line in lines) + "\n").encode("utf-8", "replace")


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────


def _class(state: str) -> str:
    """A state as a class of the style: letters only."""
    return "".join(c for c in state if "a" <= c <= "z") or "none"


def _table(head: str, rows: Iterable[str], columns: int, left_out: int = 0) -> str:
    more = f"<tr><td colspan={columns} class=dim>and {left_out} more</td></tr>" if left_out > 0 else ""
    return f"<div class=fit><table><tr>{head}</tr>{''.join(rows)}{more}</table></div>"


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else svg.number(value) + unit


def _link(name: str) -> str:
    return f'<a href="/job/{quote(name, safe="")}">{text(name)}</a>'


def _jobs(rows: Sequence[Job]) -> str:
    if not rows:
        return "<p class=dim>none: submit one with elasticctl run</p>"
    head = (
        "<th>job<th>phase<th class=n>step<th class=n>steps/s<th class='n far'>loss<th class=n>ranks"
        "<th class='n far'>goodput<th class='n far'>incidents<th class=far>owner"
    )
    return _table(head, (_job(row) for row in rows[:MOST_JOBS]), 9, len(rows) - MOST_JOBS)


def _job(row: Job) -> str:
    state = row.health if row.health in PROBLEM else row.phase
    good = goodput.percent(row.goodput.goodput) if row.goodput else "-"
    step = "-" if row.step is None or (row.managed is False and not row.step) else row.step
    why = f"<tr><td colspan=9 class=why>{text(row.why)}</td></tr>" if row.why else ""
    return (
        f"<tr{' class=first' if why else ''}><td>{_link(row.job)}</td>"
        f"<td class='now {_class(state)}'>{text(row.phase)}</td><td class=n>{step}</td>"
        f"<td class=n>{_number(row.steps_per_s)}</td><td class='n far'>{_number(row.loss)}</td>"
        f"<td class=n>{row.world_size}</td><td class='n far'>{good}</td>"
        f"<td class='n far'>{row.incidents}</td><td class=far>{text(row.owner)}</td></tr>{why}"
    )


def _nodes(rows: Sequence[Node]) -> str:
    """Those that need attention first."""
    ordered = sorted(rows, key=lambda row: (row.state == "ready", row.node))
    head = "<th>node<th>state<th class=n>slots<th class=far>address<th>jobs<th class=far>why"
    out = []
    for row in ordered[:MOST_NODES]:
        slots = f"{row.slots_used}/{row.slots if row.slots is not None else '?'}"
        tells = row.state != "ready" and row.why
        why = f"<tr class=near><td colspan=6 class=why>{text(row.why)}</td></tr>" if tells else ""
        out.append(
            f"<tr{' class=narrow' if why else ''}><td>{text(row.node)}</td>"
            f"<td class='now {_class(row.state)}'>{text(row.state)}</td>"
            f"<td class=n>{slots}</td><td class=far>{text(row.address)}</td>"
            f"<td>{', '.join(map(_link, row.jobs))}</td><td class=far>{text(row.why)}</td></tr>{why}"
        )
    return _table(head, out, 6, len(rows) - MOST_NODES)


def _ranks(rows: Sequence[Rank]) -> str:
    head = (
        "<th class=n>rank<th>node<th class=n>slot<th>phase<th class=n>step<th class=n>step time"
        "<th class='n far'>memory<th class='n far'>process"
    )
    out = []
    for row in rows[:MOST_RANKS]:
        step_s = row.step_s
        out.append(
            f"<tr><td class=n>{row.rank if row.rank >= 0 else '-'}</td><td>{text(row.node)}</td>"
            f"<td class=n>{row.slot}</td><td>{text(row.phase or '-')}{_as_of(row.age_s)}</td>"
            f"<td class=n>{row.step if row.step is not None else '-'}</td>"
            f"<td class=n>{_number(step_s * 1000 if step_s else None, ' ms')}</td>"
            f"<td class='n far'>{_number(row.rss_mb, ' MB')}</td>"
            f"<td class='n far'>{row.pid if row.pid is not None else '-'}</td></tr>"
        )
    return _table(head, out, 8, len(rows) - MOST_RANKS)


def _as_of(age_s: float | None) -> str:
    return f" <span class=dim>{age_s:.0f} s ago</span>" if age_s else ""


def _events(rows: Sequence[Event]) -> str:
    """Newest first."""
    if not rows:
        return "<p class=dim>none</p>"
    out = []
    for row in reversed(rows):
        job_, node = row.job, row.node
        about = " ".join(([_link(job_)] if job_ else []) + ([text(node)] if node else []))
        day, _, hour = clock(row.when_wall_s).rpartition(" ")
        kind = text(row.kind).replace(".", ".<wbr>")
        user = f" by {row.user}" if row.user else ""
        out.append(
            f"<tr><td class='now dim'><span class=far>{day} </span>{hour}</td><td class=word>{kind}</td>"
            f"<td>{about}</td><td class=what>{text(row.text + user)}</td></tr>"
        )
    return f"<div class=long>{_table('<th>when<th>event<th>about<th>what', out, 4)}</div>"
