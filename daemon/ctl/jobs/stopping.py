"""A job that a person stops saves its steps first, where it has a folder for checkpoints."""

from __future__ import annotations

import contextlib
import time

import click

from elasticd.base import safe_text
from elasticd.base.answers import JobDetail
from elasticd.ctl.client import Client, Failed, Json, name
from elasticd.ctl.output import read

SAVE_S = 20.0
"""Longest wait for that checkpoint: a job whose ranks stand still takes none."""


def stop(client: Client, job: str, reason: str = "", *, discard: bool = False) -> Json:
    """Order the stop, after the checkpoint; returns its answer. Raises Failed."""
    if not discard:
        with contextlib.suppress(Failed):  # the stop is refused for the same reason, and says it
            _save(client, job)
    return client.post(f"/v1/jobs/{name(job)}/stop", {"reason": reason} if reason else {})


def _save(client: Client, job: str) -> None:
    now = read(client.get(f"/v1/jobs/{name(job)}"), JobDetail)
    wanted, saves = now.step, bool((now.spec or {}).get("checkpoint", {}).get("dir"))
    if now.phase != "running" or wanted is None or not saves or _saved(now) >= wanted:
        return
    client.post(f"/v1/jobs/{name(job)}/checkpoint")
    click.echo(safe_text.line(f"{job} saves its steps first, which may take {SAVE_S:g} s"), err=True)
    end_s = time.monotonic() + SAVE_S
    while now.phase == "running" and _saved(now) < wanted:
        if time.monotonic() > end_s:
            lost = f"the steps after {_saved(now)} are lost" if _saved(now) >= 0 else "all of its steps are lost"
            click.echo(safe_text.line(f"{job} has saved none within {SAVE_S:g} s: {lost}"), err=True)
            return
        time.sleep(0.2)
        now = read(client.get(f"/v1/jobs/{name(job)}"), JobDetail)
    if _saved(now) >= wanted:
        text = f"{job} has saved step {_saved(now)}: it goes on there when it is started again"
        click.echo(safe_text.line(text), err=True)


def _saved(job: JobDetail) -> int:
    """Step of its newest checkpoint; -1: it has none."""
    return -1 if job.checkpoint is None or job.checkpoint.step is None else job.checkpoint.step
