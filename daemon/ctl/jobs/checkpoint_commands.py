"""elasticctl checkpoint list, verify, export: runs `python -m elastic.checkpoint` as a separate process.

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


def show_list(client: Client, where: str, as_json: bool) -> int:
    """Returns 0, even if there is none."""
    rows = _rows(client, where, "list")
    if as_json:
        _print(rows)
    elif rows:
        from elasticd.ctl.show import render

        render.checkpoints(rows)
    else:
        click.echo(safe_text.line(f"no checkpoints in {where}"))
    return 0


def show_verify(client: Client, where: str, as_json: bool) -> int:
    """Returns 1 if one is damaged, or there is none."""
    rows = [row for row in _rows(client, where, "verify") if row["state"] not in ("quarantined", UNFINISHED)]
    if as_json:
        _print(rows)
    for row in () if as_json else rows:
        good = row["state"] == "good"
        verdict = "good" if good else f"DAMAGED ({row['state']}): {row['detail']}"
        click.secho(safe_text.line(f"{row['path']}: {verdict}"), fg=None if good else "red")
    if not rows and not as_json:
        click.echo(safe_text.line(f"no checkpoints in {where}"), err=True)
    return int(not rows or any(row["state"] != "good" for row in rows))


def export(path: str, target: str, form: str, as_json: bool) -> int:
    if not os.path.isdir(path):
        raise Failed(404, f"{path!r} is no folder here: give that of one checkpoint, CHECKPOINT_DIR/step-N")
    done = _ask("export", os.path.abspath(path), os.path.abspath(target), "--format", form)
    if done.returncode:
        raise Failed(500, done.stderr.strip() or f"ended with exit code {done.returncode}")
    content = {"schema": SCHEMA, "exported": target, "format": form}
    click.echo(json.dumps(content) if as_json else safe_text.line(f"{target} is written"))
    return 0


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


def _print(rows: list[Json]) -> None:
    click.echo(json.dumps({"schema": SCHEMA, "checkpoints": rows}, indent=2))
