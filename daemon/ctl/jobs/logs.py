"""`elasticctl logs`: the output of a job's workers, on whatever node they run."""

from __future__ import annotations

import click

from elasticd.ctl.client import Client
from elasticd.ctl.completion import JOB
from elasticd.ctl.output import command, length

from . import follow as follow_job


@command()
@JOB
@click.option("-f", "--follow", is_flag=True, help="Go on as more is written, until the job is over.")
@click.option("--rank", type=int, help="Only this rank, on whatever node it runs.")
@click.option("-n", "--tail", default=100, show_default=True, help="Begin with so many lines of each node.")
@click.option("--since", "since_s", type=length, metavar="TIME",
              help="Only workers that have written within this time, e.g. 10m.")  # fmt: skip
@click.option("-p", "--previous", is_flag=True, help="The worker before the present one, in each slot.")
@click.option("--earlier", is_flag=True, help="Also of earlier jobs of this name.")
@click.option("-t", "--timestamps", is_flag=True, help="With -f: put before each line the time at which it arrived.")
def logs(
    client: Client, job: str, follow: bool, rank: int | None, tail: int, since_s: float | None, previous: bool,
    earlier: bool, timestamps: bool, as_json: bool,
) -> None:  # fmt: skip
    """The output of JOB's workers, each line with its rank.

    Earlier lines come from all nodes. With -f the workers of this node are followed; with --rank one on any node.
    """
    if previous and follow:
        raise click.UsageError("--previous has ended: it cannot be followed")
    chosen: dict[str, object] = {"previous": 1} if previous else {}
    if earlier:
        chosen["earlier"] = 1
    if since_s:
        chosen["since_s"] = since_s
    follow_job.show(
        client, job, follow=follow, rank=rank, tail=tail, as_json=as_json, chosen=chosen, stamps=timestamps
    )  # fmt: skip
