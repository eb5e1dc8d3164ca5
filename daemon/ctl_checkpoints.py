"""elasticctl checkpoint list, verify, export: asks `python -m elastic.checkpoint`, a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click

from .ctl_client import Client, Failed, Json, Unreachable, name
from .views import SCHEMA


def show_list(client: Client, where: str, as_json: bool) -> int:
    directory, job = _folder(client, where)
    code, data = _ask("list", directory, *(("--job", job) if job else ()))
    if as_json or "error" in data:
        return _print(data, code, as_json)
    if not data["checkpoints"]:
        click.echo(f"no checkpoints in {directory}")
        return code
    from . import ctl_views

    ctl_views.checkpoints(data["checkpoints"])
    return code


def show_verify(client: Client, where: str, as_json: bool) -> int:
    directory, _ = _folder(client, where)
    code, data = _ask("verify", directory)
    if as_json or "error" in data:
        return _print(data, code, as_json)
    for row in data["checkpoints"]:
        said = "good" if row["good"] else f"DAMAGED ({row['reason']}): {row['detail']}"
        click.secho(f"{row['path']}: {said}", fg=None if row["good"] else "red")
    if not data["checkpoints"]:
        click.echo(f"no checkpoints in {directory}")
    return code


def export(path: str, target: str, form: str, as_json: bool) -> int:
    code, data = _ask("export", path, target, "--format", form)
    if as_json or "error" in data:
        return _print(data, code, as_json)
    click.echo(f"{data['exported']} is written")
    return code


def _folder(client: Client, where: str) -> tuple[str, str | None]:
    """A folder as it is; else the one of the job of that name."""
    if os.path.isdir(where):
        return where, None
    try:
        spec = client.get(f"/v1/jobs/{name(where)}")["spec"]
    except (Failed, Unreachable) as error:
        raise Failed(404, f"{where!r} is no folder here, and as a job: {error}") from None
    folder = str((spec or {}).get("checkpoint", {}).get("dir", ""))
    if not folder:
        raise Failed(404, f"job {where!r} writes no checkpoints (checkpoint.dir is empty)")
    return folder, where


def _ask(*args: str) -> tuple[int, Json]:
    argv = [sys.executable, "-m", "elastic.checkpoint", *args]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False, stdin=subprocess.DEVNULL)
    try:
        data: Json = json.loads(done.stdout)
    except ValueError:
        return done.returncode or 1, {"error": done.stdout.strip() or f"ended with exit code {done.returncode}"}
    return done.returncode, {"schema": SCHEMA} | data


def _print(data: Json, code: int, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps(data, indent=2))
    else:
        click.echo(f"elasticctl: {data['error']}", err=True)
    return code
