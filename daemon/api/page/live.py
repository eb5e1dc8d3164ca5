"""The live page, as HTML from the answers of the API: a document, and the fragment that it shows. Pure.

Without JavaScript the document is a static page that is loaded again every 10 s. With it, each fragment that the stream
of server-sent events brings replaces the one before. Every text is made visible by `shown` and escaped by `text`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from elasticd.api.views import columns
from elasticd.api.views.columns import Column
from elasticd.base.answers import Event, History, Incident, JobDetail, Status, printable
from elasticd.base.safe_text import shown

from . import report
from .report import Html, class_of, clock, table, text

MOST_JOBS, MOST_NODES, MOST_RANKS = 100, 300, 256
"""Rows of a table; the rest is counted in its last line."""
LAST_EVENTS = 20

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
.word { overflow-wrap: normal; }
td.why { color: var(--dim); padding-top: 0; } tr.first td { border-bottom: 0; padding-bottom: 0; }
@media (max-width: 640px) { body { padding: 14px; } .far { display: none; } th, td { padding-right: 8px; } }
"""
)

SCRIPT = """
"use strict";
{
  const main = document.querySelector("main"), note = document.getElementById("live");
  let source = null, later = 0;
  const parts = () => [...main.querySelectorAll(".fit, .plot, pre")];
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
    refresh = '<noscript><meta http-equiv=refresh content="10"></noscript>\n'
    return report.document(title, STYLE, body, refresh, f' data-events="{text(events)}"')


def refusal(said: str) -> str:
    """The whole page of a request that is refused: names nothing of the cluster but what is said."""
    return report.document("elasticd", STYLE, f'<main>\n{message(said)}<p><a href="/">the cluster</a></p></main>')


def message(said: str) -> str:
    return f"<p>{text(shown(said))}</p>\n"


def cluster(status: Status, events: Sequence[Event]) -> str:
    """`status`: the answer of /v1/status; `events`: the newest, oldest first."""
    status, events = printable(status), [printable(event) for event in events]
    etcd = status.etcd
    contact = "etcd answers" if etcd.connected else f"etcd does not answer: {etcd.error or 'no contact yet'}"
    head = (
        f"<h1>Cluster {text(status.cluster)} <span class={class_of(status.health)}>{text(status.health)}</span>"
        f"</h1>\n<p class=dim>seen from node {text(status.node)}, elasticd {text(status.version)}; "
        f"{text(contact)}</p>"
    )
    problems = "".join(f"<p>{text(problem)}</p>" for problem in status.problems)
    problems = f"<div class=problems>{problems}</div>" if problems else ""
    jobs = "<p class=dim>none: submit one with elasticctl run</p>"
    if status.jobs:
        jobs = table([_linked(column) for column in JOBS], status.jobs, MOST_JOBS, why=lambda row: row.why)
    ordered = sorted(status.nodes, key=lambda row: (row.state == "ready", row.node))  # first what needs attention
    nodes = table([_linked(column) for column in NODES], ordered, MOST_NODES, why=lambda row: row.why)
    tables = ["<h2>Jobs</h2>", jobs, "<h2>Nodes</h2>", nodes]
    return "\n".join([head, problems, *tables, "<h2>Newest events</h2>", _events(events)]) + "\n"


def job(
    detail: JobDetail, incidents: Sequence[Incident], history: History | None, events: Sequence[Event], now_s: float
) -> str:
    """Arguments as for `report.page`, and the job's newest events."""
    head, sections = report.parts(detail, incidents, history, now_s)
    detail = printable(detail)
    shown = columns.picked(list(columns.ranks(detail.managed).values()), *RANKS)
    ranks = ["<h2>Ranks</h2>", table(shown, detail.ranks, MOST_RANKS)] if detail.ranks else []
    newest = ["<h2>Newest events</h2>", _events([printable(event) for event in events])]
    return "\n".join([head, *ranks, sections, *newest]) + "\n"


def server_sent(fragment: str) -> bytes:
    """The fragment as one event. A carriage return would end a line of the stream."""
    lines = fragment.replace("\r", " ").split("\n")
    return ("event: page\n" + "".join(f"data: {line}\n" for line in lines) + "\n").encode("utf-8", "replace")


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────


JOBS = (
    *columns.picked(columns.JOBS, "job", "phase", "step", "step/s", "loss", "world"),
    Column("goodput", lambda row: columns.share(row.goodput.goodput if row.goodput else None), 1, right=True),
    Column("incidents", lambda row: row.incidents, 1, right=True),
    Column("owner", lambda row: row.owner, 1),
)
NODES = columns.picked(columns.NODES, "node", "state", "slots", "address", "jobs")
RANKS = ("rank", "node", "slot", "phase", "step", "step time", "memory", "pid", "as of")
EVENTS = (
    Column("when", lambda row: clock(row.when_wall_s)),
    Column("event", lambda row: Html(f"<span class=word>{text(row.kind).replace('.', '.<wbr>')}</span>")),
    Column("about", lambda row: Html(" ".join(filter(None, (_link(row.job) if row.job else "", text(row.node)))))),
    Column("what", lambda row: f"{row.text} by {row.user}" if row.user else row.text, flex=True),
)


def _link(name: str) -> str:
    return f'<a href="/job/{quote(name, safe="")}">{text(name)}</a>'


def _linked(column: Column) -> Column:
    """The column with each job as a link to its page."""
    cells: dict[str, Callable[[Any], object]] = {
        "job": lambda row: Html(_link(row.job)),
        "jobs": lambda row: Html(", ".join(map(_link, row.jobs))),
    }
    return msgspec.structs.replace(column, cell=cells[column.title], spare=0) if column.title in cells else column


def _events(rows: Sequence[Event]) -> str:
    """Newest first."""
    return f"<div class=long>{table(EVENTS, rows[::-1], LAST_EVENTS)}</div>" if rows else "<p class=dim>none</p>"
