"""`elasticctl drain`: with a preview of what it would do to jobs, and a wait for the node to be empty."""

from __future__ import annotations

import sys
import time

import click

from elasticd.base import safe_text
from elasticd.ctl.client import Client, name
from elasticd.ctl.completion import NODE
from elasticd.ctl.output import ABSENT, ERROR, OK, WITHOUT_DAEMON, Json, command, length, print_json, say

LONGEST_ANSWER_S = 60.0


@command()
@NODE
@click.option("--reason", default="", help="Why, for the record and for status.")
@click.option(
    "--deadline", "deadline_s", type=length, default="0", metavar="TIME",
    help="When the node goes away, whether it is empty or not.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only show what it would do to the jobs there.")
@click.option("--wait", "wait_", is_flag=True, help="Return when no agent of a job runs on NODE any more.")
@click.option("--timeout", "timeout_s", type=length, default="1h", show_default=True, metavar="TIME",
              help="With --wait: give up after this long, with exit code 1. The drain goes on.")  # fmt: skip
def drain(
    client: Client, node: str, reason: str, deadline_s: float, dry_run: bool, wait_: bool, timeout_s: float,
    as_json: bool,
) -> None:  # fmt: skip
    """Move all work off NODE at a step boundary, and assign it no new work.

    A job that would fall below its minimum of nodes is named: it saves a checkpoint, if it has checkpoint.dir, and
    waits for another node.
    """
    data = client.get(f"/v1/nodes/{name(node)}/drain")
    if not as_json:
        for row in data["jobs"]:
            mark = "! " if row["effect"] == "stops" else ""
            click.echo(safe_text.line(f"{mark}{row['text']}"), err=not dry_run)
    if dry_run:
        if as_json:
            print_json(data)
        elif not data["jobs"]:
            click.echo(safe_text.line(f"no job runs on {node}"))
        return
    body: Json = {"deadline_s": deadline_s} | ({"reason": reason} if reason else {})
    answer = client.post(f"/v1/nodes/{name(node)}/drain", body) | {"jobs": data["jobs"]}
    down = answer.get("state") in WITHOUT_DAEMON
    if down and answer["state"] in ABSENT:
        text = f"{node} is {answer['state']} {answer['reason']}; it takes no new work if it comes back"
        say(answer, as_json, text)
        sys.exit(ERROR if wait_ and answer["state"] == "lost" else OK)
    if not wait_:
        later = f"{node} takes no new work, and is drained when elasticd runs there again: now none does"
        say(answer, as_json, later if down else f"{node} is being drained")
        return
    left = until_empty(client, node, timeout_s)
    if as_json:
        print_json(answer | {"jobs_left": left["jobs"], "empty": left["empty"], "state": left["state"]})
    elif left["state"] in ABSENT:
        click.echo(safe_text.line(f"{node} is {left['state']} {left['reason']}"), err=True)
    elif not left["empty"]:
        then = f"it is drained when elasticd runs on {node} again" if down else "the drain goes on"
        has = f"still has {', '.join(left['jobs'])}" if left["jobs"] else "has not seen the drain"
        click.echo(safe_text.line(f"{node} {has} after {timeout_s:g} s; {then}"), err=True)
    else:
        click.echo(safe_text.line(f"{node} is drained: no agent runs there"))
    sys.exit(OK if left["empty"] and left["state"] not in ABSENT else ERROR)


def until_empty(client: Client, node: str, timeout_s: float) -> Json:
    """The node's answer once no agent runs there or its elasticd is lost, or at the timeout."""
    end_s = time.monotonic() + timeout_s
    while True:
        left_s = min(LONGEST_ANSWER_S, max(0.0, end_s - time.monotonic()))
        data = client.get(f"/v1/nodes/{name(node)}", {"wait_empty_s": left_s}, timeout_s=left_s + 10)
        if data["empty"] or time.monotonic() >= end_s:
            return data
