"""The output of elasticctl.

Texts are safe (`answers.read`), and the console reads no markup: no text in an answer can break the output.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence

from elasticd.base.answers import (
    Checkpoint,
    Cost,
    EtcdContact,
    Incident,
    InMemorySnapshot,
    Job,
    JobDetail,
    Json,
    Node,
    Rank,
    Status,
    Verdict,
    WorkerError,
)  # fmt: skip
from elasticd.base.safe_text import shown
from elasticd.diagnosis import goodput, step_time

from .screen import HOME_AND_CLEAR, Console, Text, WatchScreen
from .table import Column, Rows

COLOURS = {
    **dict.fromkeys(("running", "succeeded", "ready", "healthy"), "green"),
    **dict.fromkeys(("pending", "stopping", "cordoned", "draining", "degraded", "starting"), "yellow"),
    **dict.fromkeys(("waiting", "no daemon"), "bold yellow"),
    **dict.fromkeys(("failed", "unhealthy", "lost"), "bold red"),
    **dict.fromkeys(("stopped", "off"), "dim"),
}

OVER = ("succeeded", "failed", "stopped")
LIVE = ("running", "stopping")
"""Phases in which a job makes steps; in any other its rate is that of its last steps."""


def console() -> Console:
    return Console(sys.stdout)


def watch(show: Callable[[], object]) -> None:
    """Call `show` every second on a cleared screen, until Ctrl-C. On a terminal it is cut at the last line: what comes
    first, such as the line of why, must not scroll away."""
    pause = threading.Event()
    try:
        while True:
            page = WatchScreen(sys.stdout)
            with contextlib.redirect_stdout(page):
                show()
            sys.stdout.write(f"{HOME_AND_CLEAR}{page.cut(console().height)}")
            sys.stdout.flush()
            pause.wait(1.0)
    except KeyboardInterrupt:
        pass  # the regular way to end it


def status(data: Status) -> None:
    """Cluster, nodes, jobs and problems."""
    out = console()
    head = Text.assemble("cluster ", (data.cluster, "bold"), "  node ", (data.node, "bold"), "  ")
    head = Text.assemble(head, _coloured(data.health), *_job_counts(data.jobs))
    _say(out, head)
    _say(out, etcd_line(data.etcd))
    if data.address_why:
        on = f" on {data.interface}" if data.interface else ", on no interface of this machine"
        _say(out, Text(f"address {data.address}{on} ({data.address_why})"))
    for problem in data.problems:
        _say(out, Text(f"! {problem}", "yellow"))
    out.print()
    _nodes(data.nodes).print(out)
    out.print()
    rows = _jobs(data.jobs)
    if data.jobs:
        rows.print(out)
    else:
        _say(out, Text("no jobs. Submit one: elasticctl submit job.toml, or: elasticctl run -- train.py"))
    if data.jobs_left_out:
        _say(out, Text(f"and {data.jobs_left_out} older jobs that are over: elasticctl status --all", "dim"))
    narrow = "last incident" in rows.left_out(out.width)
    for job in data.jobs:
        if narrow and job.last_incident:
            _say(out, Text(f"  {job.job}: last incident {_incident_short(job.last_incident)}"))
        _remarks(out, job)


def jobs(rows: Sequence[Job]) -> None:
    out = console()
    _jobs(rows).print(out) if rows else _say(out, Text("no jobs"))


def nodes(rows: Sequence[Node]) -> None:
    _nodes(rows).print(console())


def incidents(rows: Sequence[Incident]) -> None:
    out = console()
    _incidents(rows).print(out) if rows else _say(out, Text("no incidents"))


def etcd_line(etcd: EtcdContact) -> Text:
    where = "embedded" if etcd.embedded else ", ".join(etcd.endpoints)
    where += "; takes writes from anyone" if etcd.anonymous else ""
    where += f"; records signed, key {etcd.key_id}" if etcd.signed else "; records unsigned"
    version = f" {etcd.version}" if etcd.version else ""
    if etcd.connected:
        return Text.assemble(f"etcd{version} ({where}) ", ("connected", "green"))
    seen = "never seen" if etcd.age_s is None else f"last seen {ago(etcd.age_s)}; all below is as of then"
    return Text.assemble(f"etcd{version} ({where}) ", ("not connected", "bold red"), f", {seen}: {etcd.error}")


_MANNER = {
    True: "managed: it has called elastic.run, and keeps its processes over failures",
    False: "plain so far: it has not called elastic.run, and until it does it is started anew after each failure",
    None: "",
}
_MANNER_OVER = _MANNER | {
    True: "managed: it has called elastic.run",
    False: "plain: it has not called elastic.run",
}


def job(data: JobDetail) -> None:
    """One job with its ranks and its last incidents."""
    out = console()
    spec = data.spec or {}
    _say(
        out,
        Text.assemble("job ", (data.job, "bold"), "  ", _coloured(data.phase), "  ", _coloured(data.health)),
    )
    if not data.etcd.connected:
        _say(out, etcd_line(data.etcd))
    runs = spec.get("script") or spec.get("program") or f"-m {spec.get('module', '?')}"
    generation = f"{data.generation}, world {data.world_size}: {data.why_generation}".rstrip(": ")
    is_over, rate = data.phase in OVER, data.steps_per_s if data.phase in LIVE else None
    logged = {**data.logged, **data.logged_not_finite}
    facts = [
        ("why", data.why),
        ("runs", " ".join([runs, *spec.get("args", ())])),
        ("script", (_MANNER_OVER if is_over else _MANNER)[data.managed] if data.generation else ""),
        ("submitted", f"{clock(data.submitted_wall_s)} by {data.submitted_by}{_of(data)}" if spec else "unknown"),
        ("nodes", f"{data.members} of {data.nodes}"),
        ("generation", generation if data.generation else "none yet"),
        ("step", _steps(data.managed, data.step) + (f", {rate:.2f} a second" if rate else "")),
        ("loss", f"{data.loss:.6g}" if data.loss is not None else "-"),
        ("logged", ", ".join(f"{name} {v if isinstance(v, str) else f'{v:.6g}'}" for name, v in logged.items())),
        ("step time", step_time.text(data.step_time)),
        ("goodput", goodput.text(data.goodput) or (goodput.UNKNOWN if data.managed is False else "")),
        ("rank time", goodput.summed_text(data.rank_time)),
        ("checkpoint", _checkpoint_long(data.checkpoint)),
        ("resumed", f"from step {data.resumed.step}: {data.resumed.source}" if data.resumed else ""),
        ("snapshot", _snapshot(data.snapshot)),
        ("restarts", f"{data.restarts}, {data.failures_in_window} within the window"),
        ("excluded", ", ".join(data.excluded_nodes)),
    ]
    for name, value in facts:
        if value and value != "-":
            _say(out, Text.assemble((f"{name:>12}  ", "dim"), value))
    if data.ranks:
        out.print()
        _ranks(data.ranks, data.managed).print(out)
        if far := sorted({row.node for row in data.ranks if row.step is None}):
            ask = f"what the ranks on {', '.join(far)} do is known there: elasticctl status {data.job}"
            _say(out, Text(f"({ask})", "dim"))
    if data.recent_incidents:
        out.print()
        _incidents(data.recent_incidents, of_one_job=True).print(out)
    newest = data.last_incident
    if newest and (newest.open or newest.verdict.person):
        out.print()
        _say(out, Text.assemble(("the newest incident: ", "bold"), newest.verdict.what))
        _verdict(out, newest.verdict, newest.lost)
    if data.error:
        out.print()
        print_error(out, data.error)


def incident(row: Incident) -> None:
    """One incident in full: its verdict, time line, stacks and error."""
    out = console()
    verdict = row.verdict
    _say(
        out,
        Text.assemble(clock(row.wall_s), f"  {row.job}  ", (verdict.cls, "bold"), f"  {verdict.what}"),
    )
    _verdict(out, verdict, row.lost)
    for phase, at_s in sorted(row.timeline_s.items(), key=lambda item: float(item[1])):
        _say(out, Text(f"  {at_s * 1000:8.0f} ms  {phase}"))
    for worker, stack in row.stacks.items():
        _say(out, Text(f"  stack of {worker}:", "bold"))
        _say(out, Text(stack))
    if row.last_lines:
        _say(out, Text("  the last lines of its log:", "bold"))
        _say(out, Text("\n".join(row.last_lines)))
    if row.error:
        print_error(out, row.error)


def _verdict(out: Console, verdict: Verdict, lost: str) -> None:
    facts = [("evidence", f"{e.line}  ({e.source})") for e in verdict.evidence]
    facts += [("followed", text) for text in verdict.followed]
    facts += [("done", verdict.done), ("waits for", verdict.held_by), ("cost", _cost(verdict.cost, lost))]
    facts += [("person", "needed" if verdict.person else "not needed"), ("fix", verdict.fix)]
    for name, value in facts:
        if value:
            _say(out, Text.assemble((f"  {name:>9}  ", "dim"), (value, "bold red" if value == "needed" else "")))


def _cost(cost: Cost, lost: str) -> str:
    unit, spent_s = ("GPU", cost.gpu_s) if cost.gpu_s is not None else ("rank", cost.rank_s)
    steps = "an unknown number of steps" if lost == "unknown" else lost
    return f"{steps} to repeat, {'unknown' if spent_s is None else f'{spent_s:.1f}'} {unit}-seconds"


def print_error(out: Console, error: WorkerError) -> None:
    code = f"exit code {error.exit_code}" if error.exit_code is not None else ""
    how = " after ".join(part for part in (code, error.signal) if part)
    _say(out, Text(f"{failed_first(error)}{how and f' ({how})'}", "bold red"))
    _say(out, Text(error.traceback.rstrip() or error.message))
    lines = error.last_lines
    if not all(line.strip() in error.traceback for line in lines):  # most often they are the traceback's own
        _say(out, Text.assemble(("the last lines of its log:\n", "dim"), "\n".join(lines)))


def failed_first(error: WorkerError) -> str:
    """'rank 1 on a failed first at step 39'; before its first generation a worker has a slot and no rank."""
    worker = f"rank {error.rank}" if error.rank >= 0 else f"the worker in slot {error.slot}"
    step = f" at step {error.step}" if error.step is not None else ""
    return f"{worker} on {error.node} failed first{step}"


def checkpoints(rows: Sequence[Json]) -> None:
    found = Rows([Column("checkpoint"), Column("step", right=True), Column("gen", 3, right=True), Column("job", 2),
                  Column("world", 4, right=True), Column("size", 1, right=True), Column("written", 5),
                  Column("state", flex=True)])  # fmt: skip
    for row in shown(rows):
        good = row["state"] == "good"
        size = f"{row['nbytes'] / 1e6:.1f} MB" if "nbytes" in row else "-"
        state = Text("committed") if good else Text(f"{row['state']} {row['detail']}".strip(), "red")
        found.add(
            row["path"].rpartition("/")[2], _or(row.get("step")), _or(row.get("generation")), row.get("job", ""),
            _or(row.get("world_size")), size, clock(row.get("created_wall_s")), state,
        )  # fmt: skip
    found.print(console())


def config(data: Json, explain: bool) -> None:
    out, data = console(), shown(data)
    table = Rows([Column("setting"), Column("value", flex=True), Column("from", 1)])
    for row in data["settings"]:
        value = row["value"]
        plain = ", ".join(value) if isinstance(value, list) else str(value).lower() if value in (True, False) else value
        table.add(row["name"], plain, row["source"])
        if explain:
            table.add("", Text(row["doc"], "dim"), "")
    table.print(out)
    _say(out, Text("\nThe hierarchy of time-outs, checked at start:"))
    for row in data["hierarchy"]:
        times = f"{row['factor']:g} × " if row["factor"] != 1 else ""
        rule = f"{times}{row['below']} ({row['below_s']:g} s) < {row['above']} ({row['above_s']:g} s)"
        _say(out, Text.assemble(f"  {rule}", (f"  {row['why']}", "dim")))


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────


def _nodes(rows: Sequence[Node]) -> Rows:
    found = Rows([Column("node"), Column("state"), Column("slots", right=True), Column("gpus", 3, right=True),
                  Column("address", 2), Column("jobs", 1, flex=True), Column("why", flex=True)])  # fmt: skip
    for row in rows:
        slots = f"{row.slots_used}/{row.slots}" if row.slots is not None else str(row.slots_used)
        found.add(
            row.node, _coloured(row.state), slots, _or(row.gpus), row.address, ", ".join(row.jobs),
            row.why,
        )  # fmt: skip
    return found


def _jobs(rows: Sequence[Job]) -> Rows:
    found = Rows([
        Column("job"), Column("phase"), Column("gen", 6, right=True), Column("world", 3, right=True),
        Column("nodes", 2, right=True), Column("step", right=True), Column("step/s", 4, right=True),
        Column("loss", 1, right=True), Column("checkpoint", 5, right=True), Column("restarts", 7, right=True),
        Column("last incident", 8),
    ])  # fmt: skip
    for row in rows:
        live = row.phase in LIVE
        found.add(
            row.job,
            _coloured(row.phase),
            str(row.generation or "-"),
            str(row.world_size or "-"),
            f"{row.members} of {row.nodes}" if row.phase not in OVER else row.nodes or "-",
            _steps(row.managed, row.step),
            f"{row.steps_per_s:.1f}" if live and row.steps_per_s is not None else "-",
            f"{row.loss:.4g}" if row.loss is not None else "-",
            _checkpoint(row.checkpoint),
            str(row.restarts),
            _incident_short(row.last_incident),
        )
    return found


def _steps(managed: bool | None, known: int | None) -> str:
    """'-' of a script that has not called `elastic.run`: it commits no steps."""
    return "-" if known is None or (managed is False and not known) else str(known)


def _ranks(rows: Sequence[Rank], managed: bool | None) -> Rows:
    old = any(row.age_s for row in rows)
    found = Rows([
        Column("rank", right=True), Column("node"), Column("slot", 3, right=True), Column("pid", 4, right=True),
        Column("phase"), Column("step", right=True), Column("worker", 3, right=True), Column("memory", 1, right=True),
        Column("goodput", 2, right=True), *([Column("as of", 3, right=True)] if old else []),
    ])  # fmt: skip
    for row in rows:
        memory = f"{row.rss_mb:.0f} MB" if row.rss_mb is not None else "-"
        found.add(
            str(row.rank) if row.rank >= 0 else "-", row.node, str(row.slot), str(row.pid or "-"),
            row.phase or "-", _steps(managed, row.step), _or(row.incarnation), memory,
            goodput.percent(row.time.goodput) if row.time and row.time.goodput is not None else "-",
            *([as_of(row.age_s, row.step)] if old else []),
        )  # fmt: skip
    return found


def as_of(age_s: float | None, step: int | None) -> str:
    """Of a rank: '8 s ago'."""
    return ago(age_s) if age_s else "now" if step is not None else "-"


def _incidents(rows: Sequence[Incident], of_one_job: bool = False) -> Rows:
    found = Rows([
        Column("when", 1), *([] if of_one_job else [Column("job")]), Column("gen", 7, right=True), Column("class"),
        Column("kind", 6), Column("node", 2), Column("ranks", 3, flex=True), Column("took", 2, right=True),
        Column("lost", right=True), Column("from", 5), Column("world", 4), Column("what happened", flex=True),
    ])  # fmt: skip
    for row in rows:
        after = "-" if row.open and not row.world_size_after else row.world_size_after
        found.add(
            clock(row.wall_s),
            *([] if of_one_job else [row.job]),
            str(row.generation),
            row.verdict.cls,
            row.kind,
            row.node,
            ", ".join(map(str, row.ranks)),
            seconds(row.took_s),
            "-" if row.open else row.lost,
            row.restored_from,
            f"{row.world_size_before} → {after}",
            f"{'person needed: ' if row.verdict.person else ''}{row.verdict.cause}",
        )
    return found


# ── small parts ─────────────────────────────────────────────────────────────────────────────────────────────


def ago(age_s: float | None) -> str:
    """'12 s ago', '3 min ago', '2 h ago', '5 d ago'."""
    if age_s is None:
        return "-"
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if age_s >= 2 * size:
            return f"{age_s / size:.0f} {unit} ago"
    return f"{age_s:.0f} s ago"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _of(data: Job) -> str:
    """' for alice', if another user than the job's submitted it."""
    return f" for {data.owner}" if data.owner not in ("", data.submitted_by) else ""


def clock(wall_s: float | None) -> str:
    try:
        return time.strftime("%m-%d %H:%M:%S", time.localtime(wall_s)) if wall_s else "-"
    except (OverflowError, ValueError, OSError):  # a record may hold any number
        return "?"


def _say(out: Console, text: Text) -> None:
    """On a terminal folded at words; in a pipe one line as it is, for grep."""
    if out.is_terminal:
        out.print(text)
    else:
        out.write([text])


def _remarks(out: Console, job: Job) -> None:
    """One line of why for each job, always."""
    well = job.health == "healthy"
    _say(out, Text.assemble((f"{' ' if well else '!'} {job.job} ", "dim" if well else "yellow"), job.why))


def _job_counts(rows: Sequence[Job]) -> list[Text]:
    """'  jobs: 1 failed, 2 queued, 3 running', what needs a look first. Of those that are over the failed ones only."""
    kinds = ["queued" if row.queue_position else row.phase for row in rows]
    order = ("failed", "waiting", "queued", "pending", "stopping", "running")
    found = [Text(f"{n} {kind}", COLOURS.get(kind, "")) for kind in order if (n := kinds.count(kind))]
    return [Text.assemble(", " if at else "  jobs: ", text) for at, text in enumerate(found)]


def _coloured(word: str) -> Text:
    return Text(word, COLOURS.get(word, ""))


def _or(value: object) -> str:
    return "-" if value is None else str(value)


def _checkpoint(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None or (checkpoint.step is None and not checkpoint.error):
        return "-"
    return f"{_saved(checkpoint)} (failed)" if checkpoint.error else _saved(checkpoint)


def _saved(checkpoint: Checkpoint) -> str:
    if checkpoint.step is None:
        return "none"
    age = f", {ago(checkpoint.age_s)}" if checkpoint.age_s is not None else ""  # unknown if by an earlier agent
    return f"step {checkpoint.step}{age}"


def _snapshot(snapshot: InMemorySnapshot | None) -> str:
    """The in-memory snapshot of the leader's node."""
    if snapshot is None:
        return ""
    step = f"step {snapshot.step}" if snapshot.step is not None else "none yet"
    every = f"every {snapshot.interval}" if snapshot.interval[:1].isdigit() else snapshot.interval
    return ", ".join(part for part in (step, every, f"{snapshot.memory_mb:.0f} MB a node") if part)


def _checkpoint_long(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return "-"
    saved = _saved(checkpoint) if checkpoint.step is not None else "none yet"
    skipped = f"{checkpoint.skipped} skipped" if checkpoint.skipped else ""
    failed = f"the newest one failed: {checkpoint.error}" if checkpoint.error else ""
    return "; ".join(part for part in (saved, checkpoint.interval, skipped, failed) if part)


def _incident_short(row: Incident | None) -> str:
    if row is None:
        return "-"
    lost = ", not over yet" if row.open else f", {row.lost}{' steps' if row.lost == 'unknown' else ''} lost"
    return f"{row.verdict.cls} {seconds(row.took_s)}{lost}, {ago(row.age_s)}"
