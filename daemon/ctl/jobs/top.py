"""`elasticctl top`: every rank of the running jobs, anew every second."""

from __future__ import annotations

import threading

import click
import msgspec

from elasticd.api.views import columns
from elasticd.base import answers
from elasticd.base.command_answers import Top
from elasticd.ctl.client import Client, Failed, name
from elasticd.ctl.completion import job_names
from elasticd.ctl.output import OVER, command, print_json, read
from elasticd.ctl.show.screen import HOME_AND_CLEAR, Console, Rows, Text
from elasticd.diagnosis import step_time

from .follow import progress_text

OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""To the terminal's other screen, without a cursor, and back: what was there before stays."""


@command()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("--once", is_flag=True, help="Print it once, without clearing the screen.")
@click.option("--every", "every_s", default=1.0, show_default=True, metavar="SECONDS",
              type=click.FloatRange(0.2, 3600), help="Time between two looks.")  # fmt: skip
def top(client: Client, job: str | None, once: bool, every_s: float, as_json: bool) -> None:
    """Show the ranks of JOB, or of all running jobs, until Ctrl-C.

    Phase, step, time of a step, memory.
    """
    if as_json:
        return print_json(msgspec.to_builtins(look(client, job)))
    out = Console()
    if once or not out.is_terminal:
        return out.print(*screen(answers.printable(look(client, job)), out.width, live=False))
    seen = answers.printable(look(client, job))  # a refusal is told on the screen that stays
    pause = threading.Event()
    out.out.write(OTHER_SCREEN)
    try:
        while True:
            out = Console()  # its size may have changed
            out.out.write(HOME_AND_CLEAR)
            out.print(*screen(seen, out.width, out.height))
            out.out.flush()
            pause.wait(every_s)
            seen = answers.printable(look(client, job))
    except KeyboardInterrupt:
        pass  # the regular way to end it
    finally:
        out.out.write(FIRST_SCREEN)
    return None


def look(client: Client, job: str | None) -> Top:
    """The state of one job, or of all that are not over, with all texts as they are."""
    status = read(client.get("/v1/status"), answers.Status, safe=False)
    jobs = []
    for each in [job] if job else [row.job for row in status.jobs if row.phase not in OVER]:
        try:
            jobs.append(read(client.get(f"/v1/jobs/{name(each)}"), answers.JobDetail, safe=False))
        except Failed as error:
            if job or error.status != 404:
                raise  # else forgotten since the list was read
    return Top(cluster=status.cluster, wall_s=status.wall_s, etcd=status.etcd, nodes=status.nodes, jobs=jobs)


def screen(data: Top, width: int, height: int | None = None, live: bool = True) -> list[Text]:
    """For a screen of `width` cells; cut at `height` lines."""
    etcd = "" if data.etcd.connected else "  etcd cannot be reached: other nodes as last seen"
    lines = [Text(f"cluster {data.cluster}  {columns.clock(data.wall_s)}{etcd}{'  Ctrl-C ends' if live else ''}")]
    left = None if height is None else height - 2
    for job in data.jobs:
        slow = job.step_time.slow_ranks[: 3 if live else None] if job.step_time else []
        head = [Text(), Text(f"{job.job}  {progress_text(job)}", "bold")]
        lines += [*head, *(Text(step_time.slow_text(each), "yellow") for each in slow)]
        left = None if left is None else left - len(slow)
        room = len(job.ranks) if left is None else max(0, left - 3)
        if job.ranks:
            lines += Rows(_columns(), job.ranks[:room]).lines(width)
        if (more := len(job.ranks) - room) > 0:
            lines.append(Text(f"… and {more} more ranks: elasticctl top --once", "dim"))
        left = None if left is None else left - 3 - min(room, len(job.ranks))
    return lines if data.jobs else [*lines, Text(), Text("no job runs")]


def _columns() -> list[columns.Column]:
    shown = columns.ranks(managed=None)
    shown["phase"] = msgspec.structs.replace(shown["phase"], state=True)
    shown["behind"] = msgspec.structs.replace(shown["behind"], cell=_behind)
    return [column for title, column in shown.items() if title not in ("worker", "goodput")]


def _behind(row: answers.Rank) -> Text:
    return Text(columns.number(row.behind), "yellow" if row.behind and row.behind > 1 else "")
