"""Commands on a job as a whole: stop it, wait for its end, start it again, remove its records."""

from __future__ import annotations

import sys

import click

from elasticd.base.answers import JobDetail, Status
from elasticd.ctl.client import Client, Failed, Json, name
from elasticd.ctl.completion import JOB, job_names
from elasticd.ctl.output import ERROR, OF_PHASE, OVER, awaited, command, length, read, say

from . import follow, stopping


@command()
@JOB
@click.option("--reason", default="", help="Why, for the record.")
@click.option("--discard", is_flag=True, help="At once, without a checkpoint of the newest steps.")
@click.option("--wait", "wait_", is_flag=True, help="Return when it has ended.")
@click.option("--timeout", "timeout_s", type=length, default="10m", show_default=True, metavar="TIME",
              help="With --wait: give up after this long, with exit code 1. The stop goes on.")  # fmt: skip
def stop(client: Client, job: str, reason: str, discard: bool, wait_: bool, timeout_s: float, as_json: bool) -> None:
    """End JOB: its workers get SIGTERM, and SIGKILL after its stop_grace_s.

    Where it has a folder for checkpoints it saves its steps first. The steps that it makes during that save are
    done again when the job is started again.
    """
    data = stopping.stop(client, job, reason, discard=discard)
    if wait_ and data["phase"] not in OVER:
        data = until_over(client, job, timeout_s)
    phase = data["phase"]
    if wait_ and phase not in OVER:
        say(data, as_json, f"{job} is still {phase} after {timeout_s:g} s; the stop goes on", err=True)
        sys.exit(ERROR)
    say(data, as_json, f"{job} {'has' if phase in ('succeeded', 'failed') else 'is'} {phase}")


@command()
@JOB
@click.option("--timeout", "timeout_s", type=length, metavar="TIME", help="Give up after this long, e.g. 10m.")
def wait(client: Client, job: str, timeout_s: float | None, as_json: bool) -> None:
    """Wait until JOB is over, and all its processes have ended.

    Exit code: 0 succeeded, 4 failed, 1 stopped or still running at the timeout.
    """
    data = until_over(client, job, timeout_s)
    phase, ended = data["phase"], follow.has_ended(data)
    late = f"{job} is still {phase}" if phase not in OVER else f"{job} has {phase}, and its processes have not ended"
    say(
        data, as_json, follow.ended(read(data, JobDetail)) if ended else f"{late} after {timeout_s or 0:g} s", not ended
    )
    sys.exit(OF_PHASE[phase] if ended else ERROR)


def until_over(client: Client, job: str, timeout_s: float | None) -> Json:
    """The job once it is over, or as it is at the timeout. Raises Failed if another job takes the name meanwhile: how
    that one ends is not the result of this one."""
    data, submitted_wall_s = {}, None
    for data in awaited(client, f"/v1/jobs/{name(job)}", "wait_over_s", timeout_s):
        follow.check_same(data, submitted_wall_s)
        if follow.has_ended(data):
            break
        submitted_wall_s = submitted_wall_s or data.get("submitted_wall_s")
    return data


@command()
@JOB
@click.option("--timeout", "timeout_s", type=length, default="10m", show_default=True, metavar="TIME",
              help="How long to wait for a running job to stop.")  # fmt: skip
def restart(client: Client, job: str, timeout_s: float, as_json: bool) -> None:
    """Start JOB again, with the same description: stops it first if it runs.

    It resumes from its newest checkpoint, if it has any; its earlier records are removed.
    """
    data = client.get(f"/v1/jobs/{name(job)}")
    if data["phase"] not in OVER:
        stopping.stop(client, job, "stopped to be restarted")
        data = until_over(client, job, timeout_s)
        if data["phase"] not in OVER:
            raise Failed(409, f"{job} is still {data['phase']} after {timeout_s:g} s; restart it again when it is over")
    say(client.post(f"/v1/jobs/{name(job)}/restart"), as_json, f"{job} is submitted again")


@command()
@JOB
@click.argument("nodes", metavar="MIN:MAX")
def scale(client: Client, job: str, nodes: str, as_json: bool) -> None:
    """Change the number of nodes that JOB may have; no step is lost."""
    data = client.post(f"/v1/jobs/{name(job)}/scale", {"nodes": nodes})
    many = "1 node" if nodes in ("1", "1:1") else f"{nodes} nodes"
    when = f"when it is started again: it is over ({phase})" if (phase := data.get("phase")) in OVER else "now"
    say(data, as_json, f"{job} may have {many} {when}")


@command()
@click.argument("jobs", metavar="[JOB]...", nargs=-1, shell_complete=job_names)
@click.option("--over", is_flag=True, help="All jobs that are over and that you may forget.")
@click.option("--older-than", "older_s", type=length, default="0", metavar="TIME",
              help="With --over: only those that ended this long ago, e.g. 7d.")  # fmt: skip
def forget(client: Client, jobs: tuple[str, ...], over: bool, older_s: float, as_json: bool) -> None:
    """Remove the records of finished JOBs. Checkpoints stay; logs stay for as long as `retention` in the settings
    says."""
    if bool(jobs) == over:
        raise click.UsageError(
            "name the jobs to forget, or give --over" if not jobs else "give JOB or --over, not both"
        )
    if older_s and not over:
        raise click.UsageError("--older-than needs --over")
    if over:
        return _forget_over(client, older_s, as_json)
    for job in jobs:
        say(client.delete(f"/v1/jobs/{name(job)}"), as_json, f"{job} is forgotten")
    return None


def _forget_over(client: Client, older_s: float, as_json: bool) -> None:
    """In pages, and on stderr how far it is."""
    status = read(client.get("/v1/status", {"all": 1}, timeout_s=60.0), Status)
    names = [row.job for row in status.jobs if row.phase in OVER and status.wall_s - row.since_wall_s >= older_s]
    forgotten: list[str] = []
    for at in range(0, len(names), PAGE):
        forgotten += client.post("/v1/forget", {"jobs": names[at : at + PAGE]}, timeout_s=60.0)["forgotten"]
        if len(names) > PAGE:
            click.echo(f"{min(at + PAGE, len(names))} of {len(names)}", err=True)
    shown = ", ".join(forgotten) if len(forgotten) <= NAMED else f"{len(forgotten)} jobs"
    text = f"forgotten: {shown}" if forgotten else "no job is over for that long"
    say({"schema": 1, "forgotten": forgotten}, as_json, text if forgotten or older_s else "no job is over")


PAGE = 512
"""Jobs in one request to forget them: its answer waits until the daemon sees them gone."""
NAMED = 100
"""So many forgotten jobs are told by name."""
