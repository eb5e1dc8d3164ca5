"""`elasticctl top`: every rank of the running jobs, anew every second."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import click

from elasticd.ctl.client import Client, Failed, name
from elasticd.ctl.completion import job_names
from elasticd.ctl.output import OVER, Json, as_json, print_json
from elasticd.ctl.show.screen import HOME_AND_CLEAR, Text

OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""To the terminal's other screen, without a cursor, and back: what was there before stays."""
WAITS = frozenset({"exchanging", "waiting"})
"""Phases in which a rank waits for the others."""


@click.command()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("--once", is_flag=True, help="Print it once, without clearing the screen.")
@click.option("--every", "every_s", default=1.0, show_default=True, metavar="SECONDS",
              type=click.FloatRange(0.2, 3600), help="Time between two looks.")  # fmt: skip
@as_json
@click.pass_obj
def top(client: Client, job: str | None, once: bool, every_s: float, as_json: bool) -> None:
    """Show the ranks of JOB, or of all running jobs, until Ctrl-C: phase, step, time of a step, memory."""
    if as_json:
        return print_json(look(client, job))
    from elasticd.ctl.show.render import console

    out = console()
    if once or not out.is_terminal:
        return out.print(*screen(look(client, job), out.width, live=False))
    seen = look(client, job)  # a refusal is told on the screen that stays
    pause = threading.Event()
    out.out.write(OTHER_SCREEN)
    try:
        while True:
            out = console()  # its size may have changed
            out.out.write(HOME_AND_CLEAR)
            out.print(*screen(seen, out.width, out.height))
            out.out.flush()
            pause.wait(every_s)
            seen = look(client, job)
    except KeyboardInterrupt:
        pass  # the regular way to end it
    finally:
        out.out.write(FIRST_SCREEN)
    return None


def look(client: Client, job: str | None) -> Json:
    """The state of one job, or of all that are not over."""
    status = client.get("/v1/status")
    wanted = [job] if job else [row["job"] for row in status["jobs"] if row["phase"] not in OVER]
    jobs = []
    for each in wanted:
        try:
            jobs.append(of_job(client.get(f"/v1/jobs/{name(each)}")))
        except Failed as error:
            if job or error.status != 404:
                raise  # else forgotten since the list was read
    states = [{key: row[key] for key in ("node", "state", "slots", "slots_used")} for row in status["nodes"]]
    return {"schema": 1, "cluster": status["cluster"], "wall_s": status["wall_s"], "etcd": status["etcd"]["connected"],
            "nodes": states, "jobs": jobs}  # fmt: skip


def of_job(data: Json) -> Json:
    """A job's answer reduced to what `top` shows. `behind`: steps behind the foremost rank; null: not known here,
    as while etcd is away, through which the steps of other nodes come."""
    ranks = data["ranks"] if data.get("etcd", {}).get("connected", True) else []
    first = max((row["step"] for row in ranks if row["step"] is not None), default=None)
    kept = ("job", "phase", "health", "generation", "world_size", "step", "steps_per_s", "loss", "waiting_for")
    return {key: data[key] for key in kept} | {
        "step_s": round(1 / data["steps_per_s"], 4) if data["steps_per_s"] else None,
        "slow_ranks": data["step_time"]["slow_ranks"] if data["step_time"] else [],
        "ranks": [
            {key: row.get(key) for key in ("rank", "node", "slot", "pid", "phase", "step", "rss_mb", "step_s", "age_s")}
            | {"behind": None if first is None or row["step"] is None or row.get("age_s") else first - row["step"]}
            for row in data["ranks"]
        ],
    }


def screen(data: Json, width: int, height: int | None = None, live: bool = True) -> list[Text]:
    """The answer of `look` for a screen of `width` cells; cut at `height` lines."""
    import msgspec

    from elasticd.base.answers import SlowRank
    from elasticd.base.safe_text import shown
    from elasticd.ctl.show import render
    from elasticd.ctl.show.table import Column, Rows
    from elasticd.diagnosis import step_time

    data = shown(data)
    etcd = "" if data["etcd"] else "  etcd cannot be reached: other nodes as last seen"
    parts = [Text(f"cluster {data['cluster']}  {render.clock(data['wall_s'])}{etcd}{'  Ctrl-C ends' if live else ''}")]
    left = None if height is None else height - 2
    for job in data["jobs"]:
        parts.append(Text())
        parts.append(Text(headline(job), "bold"))
        slow = [
            Text(step_time.slow_text(msgspec.convert(each, SlowRank)), "yellow")
            for each in job["slow_ranks"][: 3 if live else None]
        ]
        parts += slow
        left = None if left is None else left - len(slow)
        rows = Rows([
            Column("rank", right=True), Column("node"), Column("slot", 5, right=True), Column("pid", 4, right=True),
            Column("phase"), Column("step", right=True), Column("behind", 2, right=True),
            Column("step time", 1, right=True), Column("memory", 3, right=True), Column("as of", 6, right=True),
        ])  # fmt: skip
        room = len(job["ranks"]) if left is None else max(0, left - 3)
        for row in job["ranks"][:room]:
            rows.add(*_cells(row))
        if job["ranks"]:
            parts += rows.lines(width)
        if (more := len(job["ranks"]) - room) > 0:
            parts.append(Text(f"… and {more} more ranks: elasticctl top --once", "dim"))
        left = None if left is None else left - 3 - min(room, len(job["ranks"]))
    if not data["jobs"]:
        parts += [Text(), Text("no job runs")]
    return parts


def headline(job: Json) -> str:
    """'train  running  step 40  9.9 steps/s  loss 0.25  world 4'."""
    from .follow import progress_text

    return f"{job['job']}  {progress_text(job)}"


def _cells(row: Json) -> Sequence[object]:
    from elasticd.ctl.show.render import as_of

    phase = row["phase"] or "-"
    late = row["behind"] is not None and row["behind"] > 1
    return (
        row["rank"] if row["rank"] >= 0 else "-",
        row["node"],
        row["slot"],
        row["pid"] or "-",
        Text(phase, "" if phase in WAITS else "green" if phase == "computing" else ""),
        "-" if row["step"] is None else row["step"],
        Text("-" if row["behind"] is None else str(row["behind"]), "yellow" if late else ""),
        f"{row['step_s'] * 1000:.0f} ms" if row["step_s"] else "-",
        f"{row['rss_mb']:.0f} MB" if row["rss_mb"] is not None else "-",
        as_of(row["age_s"], row["step"]),
    )
