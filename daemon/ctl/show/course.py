"""What has happened: `elasticctl events`, the time line; `loss` and `report`, the course of a job."""

from __future__ import annotations

import csv
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from elastic.util.files import replace_file
from elasticd.base import answers, masking, safe_text
from elasticd.base.safe_text import line
from elasticd.ctl.client import Client, Failed, Json, name
from elasticd.ctl.completion import JOB, job_names, node_names
from elasticd.ctl.output import as_of, command, length, print_json, read, streamed

from .screen import size

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"
FIELDS = ("wall_s", "step", "loss", "steps_per_s", "world_size")
NARROWEST, WIDEST = 20, 200


@command()
@JOB
@click.option("--csv", "as_csv", is_flag=True, help="Print the points as CSV, with a header.")
def loss(client: Client, job: str, as_csv: bool, as_json: bool) -> None:
    """Show the loss of JOB over its steps.

    In at most 1,000 points, kept on each of its nodes.
    """
    data = client.get(f"/v1/jobs/{name(job)}/history")
    if as_json:
        return print_json(data)
    if as_csv:
        writer = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
        writer.writeheader()
        return writer.writerows({field: point[field] for field in FIELDS} for point in data["points"])
    encoding = sys.stdout.encoding or "ascii"
    width = max(NARROWEST, min(WIDEST, size()[0]))
    for text in summary(read(data, answers.History), width, BLOCKS if encoding.lower().startswith("utf") else ASCII):
        click.echo(safe_text.line(text))
    return None


def summary(data: answers.History, width: int, levels: str) -> list[str]:
    """Lines of at most `width` characters."""
    losses = [(point.step, point.loss) for point in data.points if point.loss is not None]
    if not losses:
        return [f"{data.job}: no loss is reported (job.commit(state, loss))"]
    (first, begin), (last, end) = losses[0], losses[-1]
    at, lowest = min(losses, key=lambda point: (point[1], point[0]))
    return [
        f"{data.job}: loss {begin:.6g} at step {first}, {end:.6g} at step {last}",
        sparkline([value for _, value in losses], width, levels),
        f"lowest {lowest:.6g} at step {at}",
    ]


def sparkline(values: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """`values` as at most `width` characters, each the mean of its part; equal values are all in the lowest level."""
    cells = min(width, len(values))
    bounds = [len(values) * i // cells for i in range(cells + 1)] if cells else []
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    top = len(levels) - 1
    return "".join(levels[round((mean - low) / (high - low) * top) if high > low else 0] for mean in means)


@click.command()
@JOB
@click.option("-o", "--output", "path", required=True, metavar="FILE", help="Where the page goes; - is stdout.")
@click.pass_obj
def report(client: Client, job: str, path: str) -> None:
    """Write a report of JOB as one HTML page.

    Time line, loss, rate, incidents, where the time went.
    """
    from elasticd.api.page import report as report_page

    status = read(client.get("/v1/status"), answers.Status)
    detail = read(client.get(f"/v1/jobs/{name(job)}"), answers.JobDetail)
    detail.spec = detail.spec and masking.masked(detail.spec)  # a file is passed on
    rows = client.get("/v1/incidents", {"job": job})["incidents"]
    incidents = [read(row, answers.Incident) for row in rows]
    try:
        history: answers.History | None = read(client.get(f"/v1/jobs/{name(job)}/history"), answers.History)
    except Failed as error:
        if error.status != 404:
            raise
        history = None
        click.echo(safe_text.line(f"without curves: {error}"), err=True)
    text = report_page.page(detail, incidents, history, status.wall_s)
    if path == "-":
        click.echo(text, nl=False)
        return
    try:
        _replace(Path(path), text)
    except OSError as error:
        raise Failed(0, f"cannot write {path}: {error.strerror or error}") from None
    click.echo(safe_text.line(f"{path}: {len(text) // 1024 + 1} KiB"))


def _replace(path: Path, text: str) -> None:
    """Write the whole file or nothing, with the modes of a new file."""
    target = path.resolve()
    if target.exists() and not target.is_file():  # a terminal, a pipe, /dev/null
        target.write_text(text, encoding="utf-8")
        return
    replace_file(target, text.encode(), mode=0o666)


@command()
@click.option("-f", "--follow", is_flag=True, help="Go on with new ones as they come, until Ctrl-C.")
@click.option("--job", default="", shell_complete=job_names, help="Only those of this job.")
@click.option("--node", default="", shell_complete=node_names, help="Only those of this node.")
@click.option("--since", "since_s", type=length, metavar="TIME", help="Only those of the last TIME, e.g. 2h.")
@click.option("-n", "--last", default=0, help="Only the newest N.")
def events(client: Client, follow: bool, job: str, node: str, since_s: float | None, last: int, as_json: bool) -> None:
    """Show what happened: requests, nodes, etcd, generations, incidents. Oldest first."""
    query: Json = {"job": job, "node": node, "last": last}
    if since_s is not None:
        query["since_wall_s"] = max(0.0, time.time() - since_s)
    if not follow:
        data = client.get("/v1/events", query)
        if as_json:
            print_json(data)
        else:
            for event in data["events"]:
                click.echo(in_words(read(event, answers.Event)))
            if not data["events"]:
                click.echo("no events")
            as_of(data)
        return

    def after(event: Json) -> Json:
        return {"last": 0, "since_wall_s": event["when_wall_s"] + 1e-3}

    for event in streamed(client, "/v1/events", query | {"follow": 1}, after):
        click.echo(json.dumps(event) if as_json else in_words(read(event, answers.Event)))


def in_words(event: answers.Event) -> str:
    """'11-23 00:31:07  node.gone          n2  its lease ended …'; requests end with their user and process."""
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.when_wall_s))
    target = " ".join(part for part in (event.job, event.node) if part)
    user = event.user or (f"uid {event.uid}" if event.uid is not None else "")
    by = f" (by {user}{f', pid {pid}' if (pid := event.pid) else ''})" if user else ""
    return line(f"{when}  {event.kind:<20}  {target:<14}  {event.text}{by}".rstrip())
