"""`elasticctl run`, which submits a script and follows it to its end; and `elasticctl submit`, of a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from elasticd.base import safe_text
from elasticd.ctl.client import Client, Failed, Json, Unreachable
from elasticd.ctl.output import AS_USER, OVER, as_json, command, say

from . import follow, job_file, torchrun

STARTING_S = 10.0
"""How long to wait for a daemon that is starting."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--name", "job_name", help="Name of the job; else the script's, with a number where it is taken.")
@click.option("--nodes", metavar="MIN:MAX", help="How many nodes. Default 1:1.")
@click.option("-w", "--workers", metavar="N", help="Workers on each node; default: as many as it has slots.")
@click.option("-m", "--module", is_flag=True, envvar="PET_MODULE", help="The first word is a module, as for python -m.")
@click.option(
    "-e",
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A variable for the workers, as text; without =VALUE as it is in this shell.",
)
@click.option("--env-file", metavar="FILE", help="Lines NAME=VALUE, read on each node: secrets stay out of etcd.")
@click.option(
    "--python",
    metavar="PATH",
    help="Interpreter with torch and elastic. Default: that of elasticctl, if it is in a virtual environment; else the "
    "daemon's own, which --python daemon takes in any case.",
)
@click.option("--checkpoints", metavar="DIR", help="Folder for checkpoints.")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Any other field of a job.")
@click.option("--replace", is_flag=True, help="Take the name of a job that is over; its records go.")
@click.option("--detach", is_flag=True, help="Submit only; do not follow.")
@AS_USER
@as_json
@torchrun.options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    job_name: str | None,
    nodes: str | None,
    workers: str | None,
    module: bool,
    env: tuple[str, ...],
    env_file: str | None,
    python: str | None,
    checkpoints: str | None,
    settings: tuple[str, ...],
    replace: bool,
    detach: bool,
    user: str,
    as_json: bool,
    command: tuple[str, ...],
    **options: str | bool | None,
) -> None:
    """Submit a script, follow its log, and end with its result.

    elasticctl run --nodes 1:2 train.py --lr 0.1: options go before the script, what follows it are the script's own.
    torchrun's options are accepted, too: see docs/torchrun.md. Ctrl-C asks whether to detach or to stop the job.
    """
    client: Client = ctx.obj
    given = torchrun.given(ctx, options)
    cluster = ready_cluster(client)
    taken = job_file.interpreter(python, cluster["python"]) or None
    meant = torchrun.translate(given, gpus=any(row["gpus"] for row in cluster["nodes"]))
    fields = {"nodes": nodes, "workers_per_node": workers and job_file.number(workers), "env_file": env_file,
              "checkpoint.dir": checkpoints, "python": taken}  # fmt: skip
    raw = torchrun.unite(meant, fields, given) | job_file.from_command(command, module, meant.program)
    job_file.environment(raw, [*(["PATH"] if meant.program else []), *env])
    job_file.override(raw, settings)
    job_file.resolve(raw, Path.cwd())
    job_file.check_source(raw, cluster["python"])
    for note in meant.notes if not as_json else ():
        click.echo(safe_text.line(note), err=True)
    if not as_json and python is None and not meant.program and cluster["python"] != sys.executable:
        other = "--python daemon takes the daemon's" if taken else "--python takes another"
        click.echo(safe_text.line(f"it runs with {raw.get('python') or cluster['python']}; {other}"), err=True)
    by_id = "" if job_name else meant.name and job_file.job_name(meant.name)
    names = [row["job"] for row in cluster["jobs"] if not by_id or row["phase"] in OVER]
    raw["name"] = job_name or job_file.free_name(by_id or raw["name"], [] if replace else names)
    began_s: float | None = time.monotonic()
    try:
        data = client.post("/v1/jobs", {"spec": raw, "replace": replace, "as": user})
        note = f"; it {data['note']}" if data.get("note") else ""
        say(data, as_json, f"{raw['name']} is submitted{note}", err=True)
        _mention_others(checkpoints or "", raw["name"])
    except Failed as error:
        if not by_id or error.status != 409:
            raise
        say({"job": by_id}, as_json, f"{raw['name']} runs already, with this --rdzv-id: following it", err=True)
        began_s = None
    if not detach:
        sys.exit(follow.until_over(client, raw["name"], as_json, meant.local_ranks, began_s))


@command()
@click.argument("file")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Override a field: checkpoint.keep=5.")
@click.option("--replace", is_flag=True, help="Take the name of a job that is over; its records go.")
@AS_USER
def submit(client: Client, file: str, settings: tuple[str, ...], replace: bool, user: str, as_json: bool) -> None:
    """Submit the job that FILE (job.toml) describes."""
    raw = job_file.from_file(Path(file))
    job_file.override(raw, settings)
    job_file.resolve(raw, Path.cwd())
    job_file.check_source(raw, client.get("/v1/status")["python"])
    data = client.post("/v1/jobs", {"spec": raw, "replace": replace, "as": user})
    note = f"; it {data['note']}" if data.get("note") else ""
    say(data, as_json, f"{data['job']} is submitted{note}; see: elasticctl status {data['job']}")


def ready_cluster(client: Client, wait_s: float = STARTING_S) -> Json:
    """The status, once a daemon answers that has reached its etcd: `elasticd &` may just have been called. After
    `wait_s` seconds whatever the status is. Raises Unreachable."""
    end_s, announced = time.monotonic() + wait_s, False
    while True:
        late = time.monotonic() > end_s
        try:
            status = client.get("/v1/status")
            if late or status["etcd"]["connected"] or status["etcd"]["age_s"] is not None:
                return status  # it has seen its etcd, so it is not starting
            why = "elasticd has not reached its etcd yet"
        except Unreachable as error:
            if late or not error.absent:
                raise
            why = f"no elasticd listens on {client.tried} yet"
        if not announced:
            click.echo(safe_text.line(f"{why}: waiting for up to {wait_s:g} s"), err=True)
        announced = True
        client.find_again()
        time.sleep(0.2)


def _mention_others(checkpoints: str, job: str) -> None:
    """Say so where the folder has checkpoints of another job only: that job was to go on, most likely."""
    if checkpoints and (other := job_file.other_job(Path(checkpoints), job)):
        what = f"{checkpoints} has checkpoints of {other}, and {job} begins at step 0"
        click.echo(safe_text.line(f"{what}: --name {other} --replace goes on with them"), err=True)
