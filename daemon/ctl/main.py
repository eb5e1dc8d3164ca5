"""The command `elasticctl`: inspects and controls a cluster through the daemon of this node.

Exit codes: 0 ok · 1 refused or failed · 2 wrong usage, or an invalid value · 3 degraded: needs attention · 4 the job
has failed · 5 no daemon answers · 6 etcd cannot be reached, and the command needs it · 7 another user's job, or
a command for admins.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

import elastic
from elasticd.base import safe_text

from .client import Client, Failed, Unreachable, name
from .completion import JOB, NODE, job_names
from .output import (
    AS_USER,
    DEGRADED,
    DENIED,
    ERROR,
    FAILED,
    INTERRUPTED,
    NO_DAEMON,
    NO_ETCD,
    OK,
    OVER,
    USAGE,
    WITHOUT_DAEMON,
    as_json,
    as_of,
    command,
    read,
)  # fmt: skip
from .output import print_json as _print
from .output import say as _say

HEALTH = {"healthy": OK, "degraded": DEGRADED, "failed": FAILED}


LATE = {
    "bundle": ".nodes.bundle:bundle",
    "completion": ".completion:completion",
    "config": ".nodes.node_commands:config",
    "debug": ".jobs.debug:debug",
    "doctor": ".nodes.doctor:doctor",
    "drain": ".nodes.node_commands:drain",
    "events": ".show.course:events",
    "forget": ".jobs.lifecycle:forget",
    "gc": ".nodes.node_commands:gc",
    "install-service": ".nodes.install:install_service",
    "logs": ".jobs.follow:logs",
    "loss": ".show.course:loss",
    "report": ".show.course:report",
    "restart": ".jobs.lifecycle:restart",
    "run": ".jobs.run_command:run",
    "stacks": ".nodes.doctor:stacks",
    "stop": ".jobs.lifecycle:stop",
    "top": ".jobs.top:top",
    "wait": ".jobs.lifecycle:wait",
}
"""Commands whose modules are imported only when they are called: `elasticctl status` must not pay for them."""


class Main(click.Group):
    """Turns errors into text, or JSON if requested, and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *LATE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if not (place := LATE.get(cmd_name)):
            return super().get_command(ctx, cmd_name)
        module, _, function = place.partition(":")
        command: click.Command = getattr(importlib.import_module(module, __package__), function)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # here, and not at interpreter exit, where it could not be caught
        except BrokenPipeError:  # head or less has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(OK)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a locale without '→' must not end a command
        words = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in words[: words.index("--") if "--" in words else None]
        try:
            code = super().main(words, *rest, **options | {"standalone_mode": False})
        except Unreachable as error:
            _die(str(error), NO_DAEMON, as_json)
        except Failed as error:
            _die(str(error), {400: USAGE, 403: DENIED, 503: NO_ETCD}.get(error.status, ERROR), as_json, error.status)
        except click.UsageError as error:
            _die(error.format_message(), USAGE, as_json, hint=error.ctx.get_usage() if error.ctx else "")
        except click.ClickException as error:
            _die(error.format_message(), error.exit_code, as_json)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else OK)


@click.group(cls=Main, context_settings={"help_option_names": ["-h", "--help"]}, epilog=__doc__.partition("\n\n")[2])
@click.option(
    "--socket",
    default=None,
    metavar="PATH",
    help="The daemon's socket; default: $ELASTICCTL_SOCKET, else the usual one.",
)
@click.version_option(elastic.__version__, prog_name="elasticctl")
@click.pass_context
def main(ctx: click.Context, socket: str | None) -> None:
    """Inspect and control an elasticd cluster."""
    ctx.obj = Client(socket or "")


@command(group=main)
@click.argument("job", required=False, shell_complete=job_names)
@click.option("-w", "--watch", is_flag=True, help="Show it anew every second, until Ctrl-C.")
@click.option("--all", "every", is_flag=True, help="Also the jobs that are over beyond the newest hundred.")
def status(client: Client, job: str | None, watch: bool, every: bool, as_json: bool) -> None:
    """Show the cluster, or one JOB with its ranks."""
    from elasticd.base.answers import JobDetail, Status

    path = f"/v1/jobs/{name(job)}" if job else f"/v1/status{'?all=1' if every else ''}"

    def show() -> JobDetail | Status:
        from .show import render

        if job:
            render.job(detail := read(client.get(path), JobDetail))
            return detail
        render.status(cluster := read(client.get(path), Status))
        return cluster

    if watch and not as_json:
        from .show import render

        return render.watch(show)
    if as_json:
        _print(data := client.get(path))
        seen: JobDetail | Status = read(data, JobDetail) if job else read(data, Status)
    else:
        seen = show()
    sys.exit(max(HEALTH[seen.health], OK if seen.etcd.connected else DEGRADED))


@command(group=main)
def jobs(client: Client, as_json: bool) -> None:
    """All jobs, running ones first."""
    data = client.get("/v1/jobs")
    if as_json:
        return _print(data)
    from elasticd.base.answers import Status

    from .show import render

    render.jobs(read(data, Status).jobs)
    return as_of(data)


@main.group(invoke_without_command=True)
@as_json
@click.pass_context
def nodes(ctx: click.Context, as_json: bool) -> None:
    """The nodes of the cluster, also those that are lost; or forget one of them."""
    if ctx.invoked_subcommand:
        return None
    client: Client = ctx.obj
    data = client.get("/v1/nodes")
    if as_json:
        return _print(data)
    from elasticd.base.answers import Status

    from .show import render

    render.nodes(read(data, Status).nodes)
    return as_of(data)


@command("forget", group=nodes)
@NODE
def nodes_forget(client: Client, node: str, as_json: bool) -> None:
    """Forget NODE, which is lost or off and does not come back, with its cordon or drain."""
    _say(client.delete(f"/v1/nodes/{name(node)}"), as_json, f"{node} is forgotten")


@command(group=main)
@click.argument("job", required=False, shell_complete=job_names)
@click.option("--last", default=0, help="Only the newest N.")
@click.option("--full", is_flag=True, help="With verdict, time line, stacks and traceback of each.")
def incidents(client: Client, job: str | None, last: int, full: bool, as_json: bool) -> None:
    """Failures and planned changes, with the cost of each."""
    data = client.get("/v1/incidents", {"job": job or "", "last": last})
    if as_json:
        return _print(data)
    from elasticd.base.answers import Incident

    from .show import render

    rows = [read(row, Incident) for row in data["incidents"]]
    if full and rows:
        for row in rows:
            render.incident(row)
    else:
        render.incidents(rows)
    return as_of(data)


@command(group=main)
@click.argument("file")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Override a field: checkpoint.keep=5.")
@click.option("--replace", is_flag=True, help="Take the name of a job that is over; its records go.")
@AS_USER
def submit(client: Client, file: str, settings: tuple[str, ...], replace: bool, user: str, as_json: bool) -> None:
    """Submit the job that FILE (job.toml) describes."""
    from pathlib import Path

    from .jobs import job_file

    try:
        raw = job_file.from_file(Path(file))
        job_file.override(raw, settings)
        job_file.resolve(raw, Path.cwd())
        job_file.check_source(raw, client.get("/v1/status")["python"])
    except job_file.InvalidJob as error:
        raise Failed(400, str(error)) from None
    data = client.post("/v1/jobs", {"spec": raw, "replace": replace, "as": user})
    note = f"; it {data['note']}" if data.get("note") else ""
    _say(data, as_json, f"{data['job']} is submitted{note}; see: elasticctl status {data['job']}")


@command(group=main)
@JOB
@click.argument("nodes", metavar="MIN:MAX")
def scale(client: Client, job: str, nodes: str, as_json: bool) -> None:
    """Change the number of nodes that JOB may have; no step is lost."""
    data = client.post(f"/v1/jobs/{name(job)}/scale", {"nodes": nodes})
    many = "1 node" if nodes in ("1", "1:1") else f"{nodes} nodes"
    when = f"when it is started again: it is over ({phase})" if (phase := data.get("phase")) in OVER else "now"
    _say(data, as_json, f"{job} may have {many} {when}")


@command(group=main)
@NODE
@click.option("--reason", default="", help="Why, for the record and for status.")
def cordon(client: Client, node: str, reason: str, as_json: bool) -> None:
    """Assign no new work to NODE; running work continues."""
    data = client.post(f"/v1/nodes/{name(node)}/cordon", {"reason": reason} if reason else {})
    _say(data, as_json, f"{node} takes no new work")


@command(group=main)
@NODE
def uncordon(client: Client, node: str, as_json: bool) -> None:
    """Undo a cordon or drain of NODE, and let the jobs that excluded it use it again."""
    data = client.post(f"/v1/nodes/{name(node)}/uncordon")
    text = f"{node} takes work again"
    if (state := data.get("state", "ready")) in WITHOUT_DAEMON:
        text = f"{node} may take work again, once its elasticd runs: now none does"
    elif state == "unhealthy":
        text = f"{node} is neither cordoned nor drained any more, and takes no work still: {data['reason']}"
    _say(data, as_json, text)


@main.group()
def checkpoint() -> None:
    """Checkpoints: take one now, list, verify, export."""


@command("now", group=checkpoint)
@JOB
def checkpoint_now(client: Client, job: str, as_json: bool) -> None:
    """Request a checkpoint of JOB at the next step that all ranks agree on."""
    _say(client.post(f"/v1/jobs/{name(job)}/checkpoint"), as_json, f"{job} is asked for a checkpoint")


@command("list", group=checkpoint)
@click.argument("where", metavar="DIR|JOB")
def checkpoint_list(client: Client, where: str, as_json: bool) -> None:
    """The checkpoints in DIR, or in JOB's directory: newest first, then quarantined ones."""
    from .jobs import checkpoint_commands

    sys.exit(checkpoint_commands.show_list(client, where, as_json))


@command("verify", group=checkpoint)
@click.argument("where", metavar="PATH|DIR|JOB")
def checkpoint_verify(client: Client, where: str, as_json: bool) -> None:
    """Check every byte of one checkpoint, or of all in a directory. Exit code 1: one is damaged."""
    from .jobs import checkpoint_commands

    sys.exit(checkpoint_commands.show_verify(client, where, as_json))


@checkpoint.command("export")
@click.argument("path")
@click.argument("target")
@click.option("--format", "form", type=click.Choice(["torch", "dcp"]), default="torch", show_default=True,
              help="One file for torch.load, or a torch.distributed.checkpoint directory.")  # fmt: skip
@as_json
def checkpoint_export(path: str, target: str, form: str, as_json: bool) -> None:
    """Write the checkpoint at PATH to TARGET in the format of another tool. Every byte is checked."""
    from .jobs import checkpoint_commands

    sys.exit(checkpoint_commands.export(path, target, form, as_json))


def _die(message: str, code: int, as_json: bool = False, status: int | None = None, hint: str = "") -> NoReturn:
    """End with `code`. As JSON on stdout, in the form of the API's errors; else as text on stderr."""
    if as_json:
        from elasticd.base.answers import error

        _print(error(status, message, exit_code=code))
    else:
        if hint:
            click.echo(safe_text.block(hint), err=True)
        click.echo(safe_text.block(f"elasticctl: {message}", most=safe_text.LINE_CHARS), err=True)
    sys.exit(code)
