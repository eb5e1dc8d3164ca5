"""elasticctl checkpoint now, list, verify, export. All but the first run `python -m elastic.checkpoint` as a process.

So neither torch nor the checkpoint code is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click

from elasticd.base import safe_text
from elasticd.base.answers import SCHEMA
from elasticd.ctl.client import Client, Failed, Json, Unreachable, name
from elasticd.ctl.completion import JOB
from elasticd.ctl.output import ERROR, OK, as_json, command, print_json, say
from elasticd.ctl.show import render


@click.group()
def checkpoint() -> None:
    """Take a checkpoint now; list, verify and export those that there are."""


@command("now", group=checkpoint)
@JOB
def now(client: Client, job: str, as_json: bool) -> None:
    """Request a checkpoint of JOB at the next step that all ranks agree on."""
    say(client.post(f"/v1/jobs/{name(job)}/checkpoint"), as_json, f"{job} is asked for a checkpoint")


@command("list", group=checkpoint)
@click.argument("where", metavar="DIR|JOB")
def show_list(client: Client, where: str, as_json: bool) -> None:
    """The checkpoints in DIR, or in JOB's directory: newest first, then quarantined ones."""
    rows = _rows(client, where, "list")
    if as_json:
        print_json({"schema": SCHEMA, "checkpoints": rows})
    elif rows:
        render.checkpoints(rows)
    else:
        click.echo(safe_text.line(f"no checkpoints in {where}"))


@command("verify", group=checkpoint)
@click.argument("where", metavar="PATH|DIR|JOB")
def show_verify(client: Client, where: str, as_json: bool) -> None:
    """Check every byte of one checkpoint, or of all in a directory. Exit code 1: one is damaged."""
    rows = [row for row in _rows(client, where, "verify") if row["state"] not in ("quarantined", UNFINISHED)]
    if as_json:
        print_json({"schema": SCHEMA, "checkpoints": rows})
    for row in () if as_json else rows:
        good = row["state"] == "good"
        verdict = "good" if good else f"DAMAGED ({row['state']}): {row['detail']}"
        click.secho(safe_text.line(f"{row['path']}: {verdict}"), fg=None if good else "red")
    if not rows and not as_json:
        click.echo(safe_text.line(f"no checkpoints in {where}"), err=True)
    sys.exit(ERROR if not rows or any(row["state"] != "good" for row in rows) else OK)


@checkpoint.command("export")
@click.argument("path")
@click.argument("target")
@click.option("--format", "form", type=click.Choice(["torch", "dcp"]), default="torch", show_default=True,
              help="One file for torch.load, or a torch.distributed.checkpoint directory.")  # fmt: skip
@as_json
def export(path: str, target: str, form: str, as_json: bool) -> None:
    """Write the checkpoint at PATH to TARGET in the format of another tool. Every byte is checked."""
    if not os.path.isdir(path):
        raise Failed(404, f"{path!r} is no folder here: give that of one checkpoint, CHECKPOINT_DIR/step-N")
    done = _ask("export", os.path.abspath(path), os.path.abspath(target), "--format", form)
    if done.returncode:
        raise Failed(500, done.stderr.strip() or f"ended with exit code {done.returncode}")
    content = {"schema": SCHEMA, "exported": target, "format": form}
    click.echo(json.dumps(content) if as_json else safe_text.line(f"{target} is written"))


UNFINISHED = "being written, or left over"


def _rows(client: Client, where: str, command: str) -> list[Json]:
    """The rows of a directory; for a job's directory, those of that job and those without a known job."""
    directory, job = _folder(client, where)
    done = _ask(command, directory, "--json")
    try:
        rows: list[Json] = json.loads(done.stdout)
    except ValueError:
        raise Failed(500, done.stderr.strip() or f"ended with exit code {done.returncode}") from None
    return [row for row in rows if job is None or row.get("job", job) == job]


def _folder(client: Client, where: str) -> tuple[str, str | None]:
    """A directory as given; else that of the job of this name."""
    if "\0" not in where and os.path.isdir(where):
        return os.path.abspath(where), None  # so that a name with a leading dash is no option
    try:
        spec = client.get(f"/v1/jobs/{name(where)}")["spec"]
    except Failed as error:
        raise Failed(404, f"{where!r} is no folder here, and as a job: {error}") from None
    except Unreachable as error:
        raise Unreachable(f"{where!r} is no folder here, and as a job: {error}") from None
    folder = str((spec or {}).get("checkpoint", {}).get("dir", ""))
    if not folder:
        raise Failed(404, f"job {where!r} writes no checkpoints (checkpoint.dir is empty)")
    return folder, where


def _ask(*args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "elastic.checkpoint", *args]
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, errors="backslashreplace", check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, ValueError) as error:  # a path too long for one argument; a NUL in it
        raise Failed(400, f"{args[1]!r}: {error}") from None
