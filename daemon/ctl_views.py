"""How elasticctl shows what the daemon says. Rich is imported here only, and only the parts that are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.table import Table
from rich.text import Text

Json = dict[str, Any]

COLOURS = {
    **dict.fromkeys(("running", "succeeded", "ready", "healthy"), "green"),
    **dict.fromkeys(("pending", "stopping", "cordoned", "draining", "degraded", "starting"), "yellow"),
    **dict.fromkeys(("waiting", "no daemon"), "bold yellow"),
    **dict.fromkeys(("failed", "unhealthy"), "bold red"),
    "stopped": "dim",
}


OVER = ("succeeded", "failed", "stopped")

NARROW = 110
"""Columns of a terminal below which the table of jobs is cut."""


def console() -> Console:
    """Wide enough for a table when its output is not a terminal and nobody says how wide it is."""
    made = Console(highlight=False, soft_wrap=False)
    return made if made.is_terminal or os.environ.get("COLUMNS") else Console(highlight=False, width=200)


def watch(show: Callable[[], None]) -> None:
    """Call `show` every second on a cleared screen, until Ctrl-C."""
    pause = threading.Event()
    try:
        while True:
            console().control(Control.home(), Control.clear())
            show()
            pause.wait(1.0)
    except KeyboardInterrupt:
        pass  # the way to end it


def status(data: Json) -> None:
    """One screen: cluster, nodes, jobs, what wants attention."""
    out = console()
    head = Text.assemble("cluster ", (data["cluster"], "bold"), "  node ", (data["node"], "bold"), "  ", _health(data))
    out.print(head)
    out.print(etcd_line(data["etcd"]))
    for problem in data["problems"]:
        out.print(Text(f"! {problem}", "yellow"))
    out.print()
    out.print(nodes_table(data["nodes"]))
    out.print()
    narrow = out.width < NARROW
    if data["jobs"]:
        out.print(jobs_table(data["jobs"], narrow))
    else:
        out.print("no jobs. Submit one: elasticctl submit job.toml, or: elasticctl run -- train.py")
    for job in data["jobs"]:
        if narrow and job["last_incident"]:
            out.print(f"  {job['job']}: last incident {_incident_short(job['last_incident'])}", soft_wrap=True)
        _remarks(out, job)


def etcd_line(etcd: Json) -> Text:
    where = "embedded" if etcd["embedded"] else ", ".join(etcd["endpoints"])
    version = f" {etcd['version']}" if etcd["version"] else ""
    if etcd["connected"]:
        return Text.assemble(f"etcd{version} ({where}) ", ("connected", "green"))
    seen = "never seen" if etcd["age_s"] is None else f"last seen {ago(etcd['age_s'])}; all below is as of then"
    return Text.assemble(f"etcd{version} ({where}) ", ("not connected", "bold red"), f", {seen}: {etcd['error']}")


def nodes_table(rows: Sequence[Json]) -> Table:
    table = _table("node", "state", ">slots", ">gpus", "address", "jobs", "reason")
    for row in rows:
        slots = f"{row['slots_used']}/{row['slots']}" if row["slots"] is not None else str(row["slots_used"])
        table.add_row(
            row["node"], _coloured(row["state"]), slots, _or(row["gpus"]), row["address"], ", ".join(row["jobs"]),
            row["reason"],
        )  # fmt: skip
    return table


def jobs_table(rows: Sequence[Json], narrow: bool = False) -> Table:
    """`narrow`: without the columns that a terminal of 80 has no room for."""
    last = () if narrow else (">restarts", "last incident")
    table = _table("job", "phase", ">gen", ">world", ">nodes", ">step", ">step/s", ">loss", ">checkpoint", *last)
    for row in rows:
        live = row["phase"] in ("running", "stopping")
        more = () if narrow else (str(row["restarts"]), _incident_short(row["last_incident"]))
        table.add_row(
            row["job"],
            _coloured(row["phase"]),
            str(row["generation"] or "-"),
            str(row["world"] or "-"),
            f"{row['members']} of {row['nodes']}" if row["phase"] not in OVER else row["nodes"] or "-",
            _or(row["step"]),
            f"{row['steps_per_s']:.1f}" if live and row["steps_per_s"] is not None else "-",
            f"{row['loss']:.4g}" if row["loss"] is not None else "-",
            _checkpoint(row["checkpoint"]),
            *more,
        )
    return table


def job(data: Json) -> None:
    """One job with its ranks and its last incidents."""
    out = console()
    spec = data["spec"] or {}
    out.print(Text.assemble("job ", (data["job"], "bold"), "  ", _coloured(data["phase"]), "  ", _health(data)))
    if not data["etcd"]["connected"]:
        out.print(etcd_line(data["etcd"]))
    runs = spec.get("script") or f"-m {spec.get('module', '?')}"
    facts = [
        ("runs", " ".join([runs, *spec.get("args", ())])),
        ("submitted", f"{clock(data['submitted_wall_s'])} by {data['submitted_by']}" if spec else "unknown"),
        ("nodes", f"{data['members']} of {data['nodes']}"),
        ("generation", f"{data['generation']}, world {data['world']}: {data['why_generation']}"),
        ("step", f"{_or(data['step'])}" + (f", {data['steps_per_s']:.2f} a second" if data["steps_per_s"] else "")),
        ("loss", f"{data['loss']:.6g}" if data["loss"] is not None else "-"),
        ("checkpoint", _checkpoint_long(data["checkpoint"])),
        ("restarts", f"{data['restarts']}, {data['failures_in_window']} within the window"),
        ("set aside", ", ".join(data["avoid"])),
        ("reason", data["reason"]),
        ("waiting for", data["waiting_for"]),
    ]
    for name, value in facts:
        if value and value != "-":
            out.print(Text.assemble((f"{name:>12}  ", "dim"), value), soft_wrap=True)
    if data["ranks"]:
        out.print()
        out.print(ranks_table(data["ranks"]))
    if data["recent_incidents"]:
        out.print()
        out.print(incidents_table(data["recent_incidents"]))
    if data["error"]:
        out.print()
        print_error(out, data["error"])


def ranks_table(rows: Sequence[Json]) -> Table:
    table = _table(">rank", "node", ">slot", ">pid", "phase", ">step", ">life", ">memory")
    for row in rows:
        memory = f"{row['rss_mb']:.0f} MB" if row["rss_mb"] is not None else "-"
        rank = str(row["rank"]) if row["rank"] >= 0 else "-"
        life, step = _or(row["incarnation"]), _or(row["step"])
        table.add_row(rank, row["node"], str(row["slot"]), str(row["pid"] or "-"), row["phase"], step, life, memory)
    return table


def incidents_table(rows: Sequence[Json]) -> Table:
    table = _table("when", "job", ">gen", "kind", "node", "ranks", ">took", ">lost", "from", "world", "what happened")
    for row in rows:
        table.add_row(
            clock(row["wall_s"]),
            row["job"],
            str(row["generation"]),
            row["kind"],
            row["node"],
            ", ".join(map(str, row["ranks"])),
            seconds(row["took_s"]),
            "-" if row["steps_lost"] is None else f"{row['steps_lost']} steps",
            row["restored_from"],
            f"{row['world_before']} → {row['world_after']}",
            row["detail"],
        )
    return table


def incident(row: Json) -> None:
    """One incident in full: its time line, stacks and error."""
    out = console()
    out.print(f"{clock(row['wall_s'])}  {row['kind']} on {row['node']}, ranks {row['ranks']}: {row['detail']}")
    for phase, at_s in sorted(row["timeline_s"].items(), key=lambda item: float(item[1])):
        out.print(f"  {at_s * 1000:8.0f} ms  {phase}")
    for who, stack in row["stacks"].items():
        out.print(Text(f"  stack of {who}:", "bold"))
        out.print(Text(stack))
    if row["error"]:
        print_error(out, row["error"])


def print_error(out: Console, error: Json) -> None:
    how = error["signal"] or (f"exit code {error['exit_code']}" if error["exit_code"] is not None else "")
    step = f" at step {error['step']}" if error["step"] is not None else ""
    out.print(Text(f"rank {error['rank']} on {error['node']} failed first{step} {how and f'({how})'}", "bold red"))
    out.print(Text(error["traceback"].rstrip() or error["message"]), soft_wrap=True)


def checkpoints(rows: Sequence[Json]) -> None:
    table = _table("checkpoint", ">step", ">gen", "job", ">world", ">size", "written", "state")
    for row in rows:
        good = row["state"] == "good"
        size = f"{row['nbytes'] / 1e6:.1f} MB" if "nbytes" in row else "-"
        state = Text("committed") if good else Text(f"{row['state']} {row['detail']}".strip(), "red")
        table.add_row(
            row["path"].rpartition("/")[2], _or(row.get("step")), _or(row.get("generation")), row.get("job", ""),
            _or(row.get("world")), size, clock(row.get("created_wall_s")), state,
        )  # fmt: skip
    console().print(table)


def config(data: Json, explain: bool) -> None:
    out = console()
    table = _table("setting", "value", "from")
    for row in data["settings"]:
        value = row["value"]
        shown = ", ".join(value) if isinstance(value, list) else str(value).lower() if value in (True, False) else value
        table.add_row(row["name"], str(shown), row["source"])
        if explain:
            table.add_row("", Text(row["doc"], "dim"), "")
    out.print(table)
    out.print("\nThe hierarchy of time-outs, checked at start:")
    for row in data["hierarchy"]:
        times = f"{row['factor']:g} × " if row["factor"] != 1 else ""
        rule = f"{times}{row['below']} ({row['below_s']:g} s) < {row['above']} ({row['above_s']:g} s)"
        out.print(Text.assemble(f"  {rule}", (f"  {row['why']}", "dim")))


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


def clock(wall_s: float | None) -> str:
    import time

    return time.strftime("%m-%d %H:%M:%S", time.localtime(wall_s)) if wall_s else "-"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table


def _remarks(out: Console, job: Json) -> None:
    remarks: Iterable[tuple[str, str]] = (
        ("waits for", job["waiting_for"]),
        ("reason", job["reason"] if job["phase"] in ("failed", "waiting", "stopping") else ""),
        ("checkpoint failed", (job["checkpoint"] or {}).get("error") or ""),
    )
    for what, text in remarks:
        if text:
            out.print(Text.assemble((f"! {job['job']} ", "yellow"), f"{what}: {text}"), soft_wrap=True)


def _health(data: Json) -> Text:
    return _coloured(data["health"])


def _coloured(word: str) -> Text:
    return Text(word, COLOURS.get(word, ""))


def _or(value: object) -> str:
    return "-" if value is None else str(value)


def _checkpoint(checkpoint: Json | None) -> str:
    if checkpoint is None or (checkpoint["step"] is None and not checkpoint["error"]):
        return "-"
    step = f"step {checkpoint['step']}, {ago(checkpoint['age_s'])}" if checkpoint["step"] is not None else "none"
    return f"{step} (failed)" if checkpoint["error"] else step


def _checkpoint_long(checkpoint: Json | None) -> str:
    if checkpoint is None:
        return "-"
    skipped = f"{checkpoint['skipped']} skipped" if checkpoint["skipped"] else ""
    said = _checkpoint(checkpoint).replace("-", "none yet")
    parts = [said, checkpoint["interval"], skipped, checkpoint["error"] or ""]
    return "; ".join(part for part in parts if part)


def _incident_short(row: Json | None) -> str:
    if row is None:
        return "-"
    lost = "" if row["steps_lost"] is None else f", {row['steps_lost']} lost"
    return f"{row['kind']} {seconds(row['took_s'])}{lost}, {ago(row['age_s'])}"
