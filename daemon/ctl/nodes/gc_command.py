"""`elasticctl gc`: removes old job folders and logs from this node now, rather than within the hour."""

from __future__ import annotations

import sys

import click

from elasticd.base import safe_text
from elasticd.ctl.client import Client
from elasticd.ctl.output import ERROR, OK, Json, command, print_json

ANSWER_S = 300.0
"""A node may have a hundred thousand log files."""


@command()
@click.option("--dry-run", is_flag=True, help="Only show what it would remove.")
def gc(client: Client, dry_run: bool, as_json: bool) -> None:
    """Remove old job folders and logs from this daemon's node.

    Old is what the settings in [retention] do not keep: folders of jobs that etcd no longer has, logs of ended workers.
    The daemon does the same once an hour. Checkpoints stay.

    Exit code 1: not everything could be removed.
    """
    data = client.get("/v1/gc", timeout_s=ANSWER_S) if dry_run else client.post("/v1/gc", timeout_s=ANSWER_S)
    if as_json:
        print_json(data)
    else:
        for line in lines(data):
            click.echo(safe_text.line(line))
        if not data.get("jobs_known", True):
            click.echo("etcd cannot be reached: the folders of forgotten jobs stay until it can", err=True)
        for problem in data["problems"]:
            click.echo(safe_text.line(f"not removed: {problem}"), err=True)
    sys.exit(ERROR if data["problems"] else OK)


def lines(data: Json) -> list[str]:
    """One line for each removal, and a summary."""
    said = [f"{row['folder']}: {_what(row)}, {row['mb']:g} MB: {row['why']}" for row in data["removed"]]
    if not said:
        return [f"{data['node']}: nothing to remove"]
    return [*said, f"{data['node']}: {data['freed_mb']:g} MB {'would be freed' if data['dry_run'] else 'freed'}"]


def _what(row: Json) -> str:
    names = row["names"]
    if row["what"] == "middle":
        return str(names[0])
    many = names[0] if len(names) == 1 else f"{len(names)} files"
    return f"folder with {many if names else 'no files'}" if row["what"] == "folder" else f"logs, {many}"
