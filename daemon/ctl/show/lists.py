"""`elasticctl status`, and the lists of jobs, nodes and incidents."""

from __future__ import annotations

import sys

import click

from elasticd.api.views import columns
from elasticd.base.answers import Incident, JobDetail, Status
from elasticd.ctl.client import Client, name
from elasticd.ctl.completion import NODE, job_names
from elasticd.ctl.output import DEGRADED, FAILED, OK, as_json, as_of, command, print_json, read, say

from . import render

HEALTH = {"healthy": OK, "degraded": DEGRADED, "failed": FAILED}


@command()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("-w", "--watch", is_flag=True, help="Show it anew every second, until Ctrl-C.")
@click.option("--all", "every", is_flag=True, help="Also the jobs that are over beyond the newest hundred.")
def status(client: Client, job: str | None, watch: bool, every: bool, as_json: bool) -> None:
    """Show the cluster, or one JOB with its ranks."""
    path = f"/v1/jobs/{name(job)}" if job else f"/v1/status{'?all=1' if every else ''}"

    def show() -> JobDetail | Status:
        data = client.get(path)
        if as_json:
            print_json(data)
        seen: JobDetail | Status = read(data, JobDetail) if job else read(data, Status)
        if not as_json:
            render.job(seen) if isinstance(seen, JobDetail) else render.status(seen)
        return seen

    if watch and not as_json:
        return render.watch(show)
    seen = show()
    sys.exit(max(HEALTH[seen.health], OK if seen.etcd.connected else DEGRADED))


@command()
def jobs(client: Client, as_json: bool) -> None:
    """List all jobs, running ones first."""
    data = client.get("/v1/jobs")
    if as_json:
        return print_json(data)
    render.table(columns.JOBS, read(data, Status).jobs, "no jobs")
    return as_of(data)


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def nodes(ctx: click.Context, as_json: bool) -> None:
    """List the nodes, also those that are lost; or forget one of them."""
    if ctx.invoked_subcommand:
        return None
    client: Client = ctx.obj
    data = client.get("/v1/nodes")
    if as_json:
        return print_json(data)
    render.table(columns.NODES, read(data, Status).nodes, "no nodes")
    return as_of(data)


@command("forget", group=nodes)
@NODE
def nodes_forget(client: Client, node: str, as_json: bool) -> None:
    """Forget NODE, which is lost or off and does not come back, with its cordon or drain."""
    say(client.delete(f"/v1/nodes/{name(node)}"), as_json, f"{node} is forgotten")


@command()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("-n", "--last", default=0, help="Only the newest N.")
@click.option("--full", is_flag=True, help="With verdict, time line, stacks and traceback of each.")
def incidents(client: Client, job: str | None, last: int, full: bool, as_json: bool) -> None:
    """List failures and planned changes, with the cost of each."""
    data = client.get("/v1/incidents", {"job": job or "", "last": last})
    if as_json:
        return print_json(data)
    rows = [read(row, Incident) for row in data["incidents"]]
    if full and rows:
        for row in rows:
            render.incident(row)
    else:
        render.table(columns.INCIDENTS, rows, "no incidents")
    return as_of(data)
