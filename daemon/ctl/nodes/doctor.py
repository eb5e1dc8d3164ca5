"""`elasticctl doctor`: what is wrong or about to be, with the fix of each; and `elasticctl stacks`."""

from __future__ import annotations

import sys

import click

from elasticd.base import answers, command_answers, safe_text
from elasticd.ctl.client import Client, name
from elasticd.ctl.completion import JOB
from elasticd.ctl.output import DEGRADED, ERROR, OK, command, print_json, read

CODES = {"ok": OK, "warning": DEGRADED, "error": ERROR}
"""Exit codes by the worst finding."""
COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}
ANSWER_S = 60.0


@command()
@click.option("--all", "every", is_flag=True, help="Passed checks, too.")
def doctor(client: Client, every: bool, as_json: bool) -> None:
    """Check all nodes and etcd: names, addresses, disk, limits, clocks, versions. Each finding comes with its fix.

    Exit code: 0 all is right, 3 there are warnings, 1 there are errors.
    """
    data = client.get("/v1/doctor", timeout_s=ANSWER_S)
    diagnosis = read(data, answers.Diagnosis)
    if as_json:
        print_json(data)
    else:
        for line, level in lines(diagnosis, every):
            click.secho(line, fg=COLOURS.get(level))
    sys.exit(CODES.get(diagnosis.worst, ERROR))


def lines(data: answers.Diagnosis, every: bool) -> list[tuple[str, str]]:
    """(line, level): errors first, then warnings; with `every` also what is right; and a summary."""
    order = ("error", "warning", "ok")
    findings = sorted(data.findings, key=lambda row: (order.index(row.level), row.node, row.check))
    shown = []
    for row in findings:
        if row.level == "ok" and not every:
            continue
        where = f"{row.node}: " if row.node else ""
        shown.append((f"{row.level:<8}{row.check:<10}{where}{row.text}", row.level))
        if row.fix:
            shown.append((f"{'':<18}→ {row.fix}", ""))
    count = {level: sum(row.level == level for row in findings) for level in order}
    counts = [f"{n} {level}{'s' if n != 1 else ''}" for level, n in count.items() if level != "ok" and n]
    many = f"{len(data.versions)} node{'s' if len(data.versions) != 1 else ''}"
    shown.append((f"{', '.join(counts) or 'all is right'}; {len(findings)} checks on {many}", ""))
    return shown


@command()
@JOB
@click.option("--rank", type=click.IntRange(0), help="Only this rank.")
def stacks(client: Client, job: str, rank: int | None, as_json: bool) -> None:
    """Print the Python stack of each thread of JOB's workers, on all nodes. They are not paused for it."""
    data = client.get(f"/v1/jobs/{name(job)}/stacks", {} if rank is None else {"rank": rank}, timeout_s=ANSWER_S)
    if as_json:
        print_json(data)
    else:
        for row in read(data, command_answers.Stacks).stacks:
            who = f"rank {row.rank}" if row.rank >= 0 else "no rank"
            head = f"── {who} on {row.node}, slot {row.slot}, process {row.pid}: {row.phase}, step {row.step}"
            click.secho(head, bold=True)
            click.echo(row.stack.rstrip())
        for node, why in data["unanswered"].items():
            click.secho(safe_text.line(f"no stacks from {node}: {why}"), fg="red", err=True)
    sys.exit(ERROR if data["unanswered"] else OK)
