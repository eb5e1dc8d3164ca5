"""What each command of elasticctl shows, and how it is laid out; the columns themselves: `elasticd.api.views.columns`.

Texts are safe (`answers.read`), and the console reads no markup: no text in an answer can break the output.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from elasticd.api.views import columns
from elasticd.api.views.columns import Column, ago, clock, failed_first, incident_short, number
from elasticd.base.answers import EtcdContact, Incident, Job, JobDetail, Json, Status, WorkerError
from elasticd.base.safe_text import shown

from .screen import HOME_AND_CLEAR, Console, Rows, Text, WatchScreen, coloured

if TYPE_CHECKING:
    from elasticd.base.command_answers import Config


def watch(show: Callable[[], object]) -> None:
    """Call `show` every second on a cleared screen, until Ctrl-C. On a terminal it is cut at the last line: what comes
    first, such as the line of why, must not scroll away."""
    pause = threading.Event()
    try:
        while True:
            page = WatchScreen(sys.stdout)
            with contextlib.redirect_stdout(page):
                show()
            sys.stdout.write(f"{HOME_AND_CLEAR}{page.cut(Console().height)}")
            sys.stdout.flush()
            pause.wait(1.0)
    except KeyboardInterrupt:
        pass  # the regular way to end it


def status(data: Status) -> None:
    """Cluster, nodes, jobs and problems."""
    out = Console()
    head = Text.assemble("cluster ", (data.cluster, "bold"), "  node ", (data.node, "bold"), "  ")
    head = Text.assemble(head, coloured(data.health), *_job_counts(data.jobs))
    out.say(head)
    out.say(etcd_line(data.etcd))
    if data.address_why:
        on = f" on {data.interface}" if data.interface else ", on no interface of this machine"
        out.say(f"address {data.address}{on} ({data.address_why})")
    for problem in data.problems:
        out.say(f"! {problem}", "yellow")
    out.print()
    Rows(columns.NODES, data.nodes).print(out)
    out.print()
    rows = Rows(columns.JOBS, data.jobs)
    if data.jobs:
        rows.print(out)
    else:
        out.say("no jobs. Submit one: elasticctl submit job.toml, or: elasticctl run -- train.py")
    if data.jobs_left_out:
        out.say(f"and {data.jobs_left_out} older jobs that are over: elasticctl status --all", "dim")
    narrow = "last incident" in rows.left_out(out.width)
    for job in data.jobs:
        if narrow and job.last_incident:
            out.say(f"  {job.job}: last incident {incident_short(job.last_incident)}")
        well = job.health == "healthy"  # one line of why for each job, always
        out.say(Text.assemble((f"{' ' if well else '!'} {job.job} ", "dim" if well else "yellow"), job.why))


def table(columns: Sequence[Column], rows: Sequence[object], none: str) -> None:
    out = Console()
    Rows(columns, rows).print(out) if rows else out.say(none)


def etcd_line(etcd: EtcdContact) -> Text:
    where = "embedded" if etcd.embedded else ", ".join(etcd.endpoints)
    where += "; takes writes from anyone" if etcd.anonymous else ""
    where += f"; records signed, key {etcd.key_id}" if etcd.signed else "; records unsigned"
    version = f" {etcd.version}" if etcd.version else ""
    if etcd.connected:
        return Text.assemble(f"etcd{version} ({where}) ", ("connected", "green"))
    seen = "never seen" if etcd.age_s is None else f"last seen {ago(etcd.age_s)}; all below is as of then"
    return Text.assemble(f"etcd{version} ({where}) ", ("not connected", "bold red"), f", {seen}: {etcd.error}")


def job(data: JobDetail) -> None:
    """One job with its ranks and its last incidents."""
    out = Console()
    out.say(Text.assemble("job ", (data.job, "bold"), "  ", coloured(data.phase), "  ", coloured(data.health)))
    if not data.etcd.connected:
        out.say(etcd_line(data.etcd))
    _facts(out, columns.job_facts(data), 12)
    if data.ranks:
        out.print()
        Rows(_rank_columns(data), data.ranks).print(out)
        if far := sorted({row.node for row in data.ranks if row.step is None}):
            ask = f"what the ranks on {', '.join(far)} do is known there: elasticctl status {data.job}"
            out.say(f"({ask})", "dim")
    if data.recent_incidents:
        out.print()
        Rows([each for each in columns.INCIDENTS if each.title != "job"], data.recent_incidents).print(out)
    newest = data.last_incident
    if newest and (newest.open or newest.verdict.person):
        out.print()
        out.say(Text.assemble(("the newest incident: ", "bold"), newest.verdict.what))
        _facts(out, columns.verdict_facts(newest.verdict, newest.lost))
    if data.error:
        out.print()
        print_error(out, data.error)


def _rank_columns(data: JobDetail) -> list[Column]:
    shown = columns.ranks(data.managed)
    del shown["behind"], shown["step time"]
    if not any(row.age_s for row in data.ranks):
        del shown["as of"]
    return list(shown.values())


def incident(row: Incident) -> None:
    """One incident in full: its verdict, time line, stacks and error."""
    out, verdict = Console(), row.verdict
    out.say(Text.assemble(clock(row.wall_s), f"  {row.job}  ", (verdict.cls, "bold"), f"  {verdict.what}"))
    _facts(out, columns.verdict_facts(verdict, row.lost))
    before = {"last step": -row.still_s} if row.still_s else {}
    for phase, at_s in sorted((before | row.timeline_s).items(), key=lambda item: item[1]):
        out.say(f"  {at_s * 1000:8.0f} ms  {phase}")
    for worker, stack in row.stacks.items():
        out.say(f"  stack of {worker}:", "bold")
        out.say(stack)
    if row.last_lines:
        out.say("  the last lines of its log:", "bold")
        out.say("\n".join(row.last_lines))
    if row.error:
        print_error(out, row.error)


def _facts(out: Console, facts: columns.Facts, width: int = 11) -> None:
    for name, value in facts:
        if value.strip("-"):
            style = "bold red" if (name, value) == ("person", "needed") else ""
            out.say(Text.assemble((f"{name:>{width}}  ", "dim"), (value, style)))


def print_error(out: Console, error: WorkerError) -> None:
    code = f"exit code {error.exit_code}" if error.exit_code is not None else ""
    how = " after ".join(part for part in (code, error.signal) if part)
    out.say(f"{failed_first(error)}{how and f' ({how})'}", "bold red")
    out.say(error.traceback.rstrip() or error.message)
    lines = error.last_lines
    if not all(line.strip() in error.traceback for line in lines):  # most often they are the traceback's own
        out.say(Text.assemble(("the last lines of its log:\n", "dim"), "\n".join(lines)))


CHECKPOINTS = (
    Column("checkpoint", lambda row: row["path"].rpartition("/")[2]),
    Column("step", lambda row: number(row.get("step")), right=True),
    Column("gen", lambda row: number(row.get("generation")), 3, right=True),
    Column("job", lambda row: row.get("job", ""), 2),
    Column("world", lambda row: number(row.get("world_size")), 4, right=True),
    Column("size", lambda row: f"{row['nbytes'] / 1e6:.1f} MB" if "nbytes" in row else "-", 1, right=True),
    Column("written", lambda row: clock(row.get("created_wall_s")), 5),
    Column("state", lambda row: "committed" if row["state"] == "good"
           else Text(f"{row['state']} {row['detail']}".strip(), "red"), flex=True),
)  # fmt: skip


def checkpoints(rows: Sequence[Json]) -> None:
    Rows(CHECKPOINTS, shown(rows)).print(Console())


SETTINGS = (
    Column("setting", lambda row: row[0]),
    Column("value", lambda row: row[1], flex=True),
    Column("from", lambda row: row[2], 1),
)


def config(data: Config, explain: bool) -> None:
    out = Console()
    rows: list[tuple[object, ...]] = []
    for row in data.settings:
        value = row.value
        plain = ", ".join(value) if isinstance(value, list) else str(value).lower() if value in (True, False) else value
        rows += [(row.name, plain, row.source)] + [("", Text(row.doc, "dim"), "")] * explain
    Rows(SETTINGS, rows).print(out)
    out.say("\nThe hierarchy of time-outs, checked at start:")
    for rule in data.hierarchy:
        times = f"{rule.factor:g} × " if rule.factor != 1 else ""
        text = f"  {times}{rule.below} ({rule.below_s:g} s) < {rule.above} ({rule.above_s:g} s)"
        out.say(Text.assemble(text, (f"  {rule.why}", "dim")))


def _job_counts(rows: Sequence[Job]) -> Iterable[Text]:
    """'  jobs: 1 failed, 2 queued, 3 running', what needs a look first. Of those that are over the failed ones only."""
    kinds = ["queued" if row.queue_position else row.phase for row in rows]
    order = ("failed", "waiting", "queued", "pending", "stopping", "running")
    counts = [coloured(kind, f"{n} {kind}") for kind in order if (n := kinds.count(kind))]
    return (Text.assemble(", " if at else "  jobs: ", text) for at, text in enumerate(counts))
