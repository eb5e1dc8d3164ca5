"""elasticctl events: the cluster's time line."""

from __future__ import annotations

import json
import time

import click

from elasticd.base import answers
from elasticd.base.safe_text import line
from elasticd.ctl.client import Client
from elasticd.ctl.completion import job_names, node_names
from elasticd.ctl.output import Json, as_of, command, length, print_json, read


@command()
@click.option("-f", "--follow", is_flag=True, help="Go on with new ones as they come, until Ctrl-C.")
@click.option("--job", default="", shell_complete=job_names, help="Only those of this job.")
@click.option("--node", default="", shell_complete=node_names, help="Only those of this node.")
@click.option("--since", "since_s", type=length, metavar="TIME", help="Only those of the last TIME, e.g. 2h.")
@click.option("--last", default=0, help="Only the newest N.")
def events(client: Client, follow: bool, job: str, node: str, since_s: float | None, last: int, as_json: bool) -> None:
    """One time line: requests and their users, nodes, etcd, generations, incidents. Oldest first."""
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
    for event in client.lines("/v1/events", query | {"follow": 1}):
        click.echo(json.dumps(event) if as_json else in_words(read(event, answers.Event)))


def in_words(event: answers.Event) -> str:
    """'11-23 00:31:07  node.gone          n2  its lease ended …'; requests end with their user and process."""
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.when_wall_s))
    target = " ".join(part for part in (event.job, event.node) if part)
    user = event.user or (f"uid {event.uid}" if event.uid is not None else "")
    by = f" (by {user}{f', pid {pid}' if (pid := event.pid) else ''})" if user else ""
    return line(f"{when}  {event.kind:<20}  {target:<14}  {event.text}{by}".rstrip())
