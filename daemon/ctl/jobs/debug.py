"""`elasticctl debug`: a job's gradients and weights in one step, by layer and rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import click
import msgspec

from elasticd.base import safe_text
from elasticd.base.command_answers import Gradients
from elasticd.ctl.client import Client, Failed, name
from elasticd.ctl.completion import JOB
from elasticd.ctl.output import command, print_json, read

LEAST_WAIT_S = 20.0
POLL_S = 0.5
TRIES = 3
"""How often a sample is requested while the ranks pass its step before the order is there: a job that goes on after a
failure is faster than it was."""


@command()
@JOB
@click.option("--gradients", is_flag=True, help="Sample a step that is a few seconds ahead, and show it.")
@click.option(
    "--ranks", "by_rank", is_flag=True, help="The norm of each rank, instead of the smallest and the largest."
)
def debug(client: Client, job: str, gradients: bool, by_rank: bool, as_json: bool) -> None:
    """Show the norms of JOB's gradients and weights, and what is wrong with them.

    Without --gradients: the newest sample that there is, such as one that debug.gradients_every_steps has made.
    Training is not changed, and no rank waits for another one.
    """
    path = f"/v1/jobs/{name(job)}/gradients"
    sample = sampled(client, job) if gradients else read(client.get(path), Gradients, safe=False)
    if as_json:
        return print_json(msgspec.to_builtins(sample))
    if not sample.ranks:
        raise Failed(
            404, f"{job} has no sample of its gradients: elasticctl debug {job} --gradients makes one while it trains"
        )
    for text in table(sample, by_rank=by_rank):
        click.echo(safe_text.line(text))
    return None


def sampled(client: Client, job: str) -> Gradients:
    """A new sample of all ranks; of some, where no try gives more. Raises Failed if there is none."""
    for _ in range(TRIES):
        if not (sample := _asked(client, job)).passed:
            break
    if sample.ranks:
        return sample
    why = "the job is past it: ask again" if sample.passed else "it makes no step"
    raise Failed(504, f"no rank of {job} has sampled step {sample.step}, {why}: elasticctl status {job}")


def _asked(client: Client, job: str) -> Gradients:
    """Request a sample, and wait until all ranks have made it, or have passed its step."""
    asked = client.post(f"/v1/jobs/{name(job)}/debug")
    step, rate = asked["step"], asked["steps_per_s"]
    wait_s = LEAST_WAIT_S + (20.0 / rate if rate else 60.0)
    end_s = time.monotonic() + wait_s
    while True:
        time.sleep(POLL_S)
        sample = read(client.get(f"/v1/jobs/{name(job)}/gradients", {"step": step}), Gradients, safe=False)
        there = sample.world_size and len(sample.ranks) >= sample.world_size
        if there or sample.passed or time.monotonic() > end_s:
            return sample


def table(sample: Gradients, *, by_rank: bool) -> list[str]:
    ranks, world = len(sample.ranks), sample.world_size
    missing = f"; {world - ranks} of {world} ranks have no sample of it" if ranks < world else ""
    wide = max([5, *(len(row.layer) for row in sample.layers)])
    lines = [
        f"{sample.job}: gradients and weights of step {sample.step}, {ranks} ranks{missing}",
        *(f"  {node} does not answer: {why}" for node, why in sample.unanswered.items()),
        f"{'layer':{wide}}  {'own gradient':>24}  {'mean':>10}  {'weights':>10}",
    ]
    for row in sample.layers:
        each = ", ".join(f"{rank}: {value:.4g}" for rank, value in row.own.items()) or "-"
        own = each if by_rank else _span(list(row.own.values()))
        lines.append(f"{row.layer:{wide}}  {own:>24}  {_first(row.mean):>10}  {_first(row.weight):>10}")
    return [*lines, *(f"! {text}" for text in sample.findings or ())] + (
        [] if sample.findings else ["nothing is wrong with them"]
    )


def _span(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _first(values: Mapping[str, float]) -> str:
    return f"{next(iter(values.values())):.4g}" if values else "-"
