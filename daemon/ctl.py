"""The command `elasticctl`: shows and controls a cluster through the daemon of this node.

Exit codes: 0 ok · 1 refused or failed · 2 wrong usage, or an invalid value · 3 degraded: needs attention · 4 a job has
failed · 5 no daemon answers · 6 etcd cannot be reached, and the command needs it.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

import elastic

from . import ctl_text
from .ctl_client import Client, Failed, Unreachable, default_socket, name

Json = dict[str, Any]

OK, ERROR, USAGE, DEGRADED, FAILED, NO_DAEMON, NO_ETCD = range(7)
INTERRUPTED = 130
OVER = ("succeeded", "failed", "stopped")
HEALTH = {"healthy": OK, "degraded": DEGRADED, "failed": FAILED}

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, as docs/api.md describes it.")


class Main(click.Group):
    """Turns errors into text, or JSON if requested, and an exit code."""

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
            _die(str(error), {400: USAGE, 503: NO_ETCD}.get(error.status, ERROR), as_json, error.status)
        except click.UsageError as error:
            _die(error.format_message(), USAGE, as_json, hint=error.ctx.get_usage() if error.ctx else "")
        except click.ClickException as error:
            _die(error.format_message(), error.exit_code, as_json)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else OK)


@click.group(cls=Main, context_settings={"help_option_names": ["-h", "--help"]}, epilog=__doc__.partition("\n\n")[2])
@click.option(
    "--socket", default=None, metavar="PATH", help="The daemon's socket; else $ELASTICCTL_SOCKET, else found."
)
@click.version_option(elastic.__version__, prog_name="elasticctl")
@click.pass_context
def main(ctx: click.Context, socket: str | None) -> None:
    """Show and control elasticd and its jobs."""
    ctx.obj = Client(socket or default_socket())


@main.command()
@click.argument("job", required=False)
@click.option("-w", "--watch", is_flag=True, help="Show it anew every second, until Ctrl-C.")
@as_json
@click.pass_obj
def status(client: Client, job: str | None, watch: bool, as_json: bool) -> None:
    """Show the cluster, or one JOB with its ranks."""
    path = f"/v1/jobs/{name(job)}" if job else "/v1/status"
    data = client.get(path)
    if as_json:
        _print(data)
    else:
        from . import ctl_views

        show = ctl_views.job if job else ctl_views.status
        if watch:
            ctl_views.watch(lambda: show(client.get(path)))
            return
        show(data)
    sys.exit(max(HEALTH[data["health"]], OK if data["etcd"]["connected"] else DEGRADED))


@main.command()
@as_json
@click.pass_obj
def jobs(client: Client, as_json: bool) -> None:
    """All jobs, running ones first."""
    data = client.get("/v1/jobs")
    if as_json:
        return _print(data)
    from . import ctl_views

    return ctl_views.jobs(data["jobs"])


@main.command()
@as_json
@click.pass_obj
def nodes(client: Client, as_json: bool) -> None:
    """The nodes of the cluster."""
    data = client.get("/v1/nodes")
    if as_json:
        return _print(data)
    from . import ctl_views

    return ctl_views.nodes(data["nodes"])


@main.command()
@click.argument("job", required=False)
@click.option("--last", default=0, help="Only the newest N.")
@click.option("--full", is_flag=True, help="With time line, stacks and traceback of each.")
@as_json
@click.pass_obj
def incidents(client: Client, job: str | None, last: int, full: bool, as_json: bool) -> None:
    """Failures and planned changes, with the cost of each."""
    data = client.get("/v1/incidents", {"job": job or "", "last": last})
    if as_json:
        return _print(data)
    from . import ctl_views

    found = data["incidents"]
    if full and found:
        for row in found:
            ctl_views.incident(row)
        return None
    return ctl_views.incidents(found)


@main.command()
@click.argument("file")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Override a field: checkpoint.keep=5.")
@click.option("--replace", is_flag=True, help="Take the name of a job that is over; its records go.")
@as_json
@click.pass_obj
def submit(client: Client, file: str, settings: tuple[str, ...], replace: bool, as_json: bool) -> None:
    """Submit the job that FILE (job.toml) describes."""
    from . import ctl_jobs

    try:
        raw = ctl_jobs.from_file(Path(file))
        ctl_jobs.override(raw, settings)
        ctl_jobs.resolve(raw, Path.cwd())
        if raw.get("module"):
            ctl_jobs.check_module(raw, client.get("/v1/status")["python"])
    except ctl_jobs.InvalidJob as error:
        raise Failed(400, str(error)) from None
    data = client.post("/v1/jobs", {"spec": raw, "replace": replace})
    _say(data, as_json, f"{data['job']} is submitted; see: elasticctl status {data['job']}")


@main.command(context_settings={"ignore_unknown_options": False})
@click.option("--name", "job_name", help="Name of the job; else the script's, with a number where it is taken.")
@click.option("--nodes", metavar="MIN:MAX", help="How many nodes. Default 1:1.")
@click.option("-w", "--workers", metavar="N", help="Workers on each node; default: as many as it has slots.")
@click.option("-m", "--module", is_flag=True, help="The first word is a module, as for python -m.")
@click.option(
    "-e",
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A variable for the workers, as text; without =VALUE as it is in this shell.",
)
@click.option("--python", metavar="PATH", help="Interpreter with torch and elastic; default: the daemon's own.")
@click.option("--checkpoints", metavar="DIR", help="Folder for checkpoints.")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Any other field of a job.")
@click.option("--detach", is_flag=True, help="Submit only; do not follow.")
@as_json
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def run(
    client: Client,
    job_name: str | None,
    nodes: str | None,
    workers: str | None,
    module: bool,
    env: tuple[str, ...],
    python: str | None,
    checkpoints: str | None,
    settings: tuple[str, ...],
    detach: bool,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Submit a script, follow its log, and end with its result: elasticctl run --nodes 1:2 -- train.py --lr 0.1

    Options go before the script; what follows it are the script's own. Ctrl-C asks whether to detach (the job
    continues) or to stop it.
    """
    from . import ctl_jobs

    try:
        raw = ctl_jobs.from_command(command, module)
        options = {"nodes": nodes, "workers_per_node": workers, "checkpoint.dir": checkpoints, "python": python}
        for field, value in options.items():
            if value is not None:
                ctl_jobs.put(raw, field, ctl_jobs.number(value) if field == "workers_per_node" else value)
        ctl_jobs.environment(raw, env)
        ctl_jobs.override(raw, settings)
        ctl_jobs.resolve(raw, Path.cwd())
        cluster = client.get("/v1/status")
        ctl_jobs.check_module(raw, cluster["python"])
    except ctl_jobs.InvalidJob as error:
        raise Failed(400, str(error)) from None
    raw["name"] = job_name or ctl_jobs.free_name(raw["name"], [row["job"] for row in cluster["jobs"]])
    if not as_json and "python" not in raw and cluster["python"] != sys.executable:
        click.echo(ctl_text.line(f"it runs with {cluster['python']}; --python takes another"), err=True)
    data = client.post("/v1/jobs", {"spec": raw})
    _say(data, as_json, f"{data['job']} is submitted", err=True)
    if not detach:
        from . import ctl_follow

        sys.exit(ctl_follow.until_over(client, data["job"], as_json))


@main.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on as more is written, until the job is over.")
@click.option("--rank", type=int, help="Only this rank.")
@click.option("-n", "--tail", default=100, show_default=True, help="Begin with so many lines.")
@as_json
@click.pass_obj
def logs(client: Client, job: str, follow: bool, rank: int | None, tail: int, as_json: bool) -> None:
    """The output of JOB's workers on this node, each line with its rank."""
    from . import ctl_follow

    ctl_follow.show(client, job, follow=follow, rank=rank, tail=tail, as_json=as_json)


@main.command()
@click.argument("job")
@click.option("--reason", default="", help="Why, for the record.")
@click.option("--wait", "wait_s", default=0.0, metavar="SECONDS", help="Wait until it has ended.")
@as_json
@click.pass_obj
def stop(client: Client, job: str, reason: str, wait_s: float, as_json: bool) -> None:
    """End JOB: its workers get SIGTERM, and SIGKILL after its stop_grace_s."""
    data = client.post(f"/v1/jobs/{name(job)}/stop", {"reason": reason} if reason else {})
    until_s = time.monotonic() + wait_s
    while data["phase"] not in OVER and (left_s := min(until_s - time.monotonic(), 60.0)) > 0:  # 60: the longest answer
        data = client.get(f"/v1/jobs/{name(job)}", {"wait_over_s": left_s}, timeout_s=left_s + 10)
    is_over = data["phase"] in ("succeeded", "failed")
    _say(data, as_json, f"{job} {'has' if is_over else 'is'} {data['phase']}")


@main.command()
@click.argument("job")
@click.argument("nodes", metavar="MIN:MAX")
@as_json
@click.pass_obj
def scale(client: Client, job: str, nodes: str, as_json: bool) -> None:
    """Change the number of nodes that JOB may have; no step is lost."""
    data = client.post(f"/v1/jobs/{name(job)}/scale", {"nodes": nodes})
    _say(data, as_json, f"{job} may have {nodes} nodes now")


@main.command()
@click.argument("job")
@as_json
@click.pass_obj
def forget(client: Client, job: str, as_json: bool) -> None:
    """Remove the records of a finished JOB. Logs and checkpoints stay."""
    _say(client.delete(f"/v1/jobs/{name(job)}"), as_json, f"{job} is forgotten")


@main.command()
@click.argument("node")
@click.option("--reason", default="", help="Why, for the record and for status.")
@click.option(
    "--deadline", "deadline_s", default=0.0, metavar="SECONDS", help="When the node goes away, come what may."
)
@as_json
@click.pass_obj
def drain(client: Client, node: str, reason: str, deadline_s: float, as_json: bool) -> None:
    """Move all work off NODE at a step boundary, and assign it no new work."""
    body: Json = {"deadline_s": deadline_s} | ({"reason": reason} if reason else {})
    _say(client.post(f"/v1/nodes/{name(node)}/drain", body), as_json, f"{node} is being drained")


@main.command()
@click.argument("node")
@click.option("--reason", default="", help="Why, for the record and for status.")
@as_json
@click.pass_obj
def cordon(client: Client, node: str, reason: str, as_json: bool) -> None:
    """Assign no new work to NODE; running work continues."""
    data = client.post(f"/v1/nodes/{name(node)}/cordon", {"reason": reason} if reason else {})
    _say(data, as_json, f"{node} takes no new work")


@main.command()
@click.argument("node")
@as_json
@click.pass_obj
def uncordon(client: Client, node: str, as_json: bool) -> None:
    """Undo a cordon or drain of NODE, and let the jobs that excluded it use it again."""
    _say(client.post(f"/v1/nodes/{name(node)}/uncordon"), as_json, f"{node} takes work again")


@main.group()
def config() -> None:
    """The daemon's settings."""


@config.command("show")
@click.option("--explain", is_flag=True, help="With what each setting means.")
@as_json
@click.pass_obj
def config_show(client: Client, explain: bool, as_json: bool) -> None:
    """Settings in effect, the source of each, and the hierarchy of timeouts."""
    data = client.get("/v1/config")
    if as_json:
        return _print(data)
    from . import ctl_views

    return ctl_views.config(data, explain)


@main.group()
def checkpoint() -> None:
    """Checkpoints: take one now, list, verify, export."""


@checkpoint.command("now")
@click.argument("job")
@as_json
@click.pass_obj
def checkpoint_now(client: Client, job: str, as_json: bool) -> None:
    """Request a checkpoint of JOB at the next step that all ranks agree on."""
    _say(client.post(f"/v1/jobs/{name(job)}/checkpoint"), as_json, f"{job} is asked for a checkpoint")


@checkpoint.command("list")
@click.argument("where", metavar="DIR|JOB")
@as_json
@click.pass_obj
def checkpoint_list(client: Client, where: str, as_json: bool) -> None:
    """The checkpoints in DIR, or in JOB's directory: newest first, then quarantined ones."""
    from . import ctl_checkpoints

    sys.exit(ctl_checkpoints.show_list(client, where, as_json))


@checkpoint.command("verify")
@click.argument("where", metavar="PATH|DIR|JOB")
@as_json
@click.pass_obj
def checkpoint_verify(client: Client, where: str, as_json: bool) -> None:
    """Check every byte of one checkpoint, or of all in a directory. Exit code 1: one is damaged."""
    from . import ctl_checkpoints

    sys.exit(ctl_checkpoints.show_verify(client, where, as_json))


@checkpoint.command("export")
@click.argument("path")
@click.argument("target")
@click.option("--format", "form", type=click.Choice(["torch", "dcp"]), default="torch", show_default=True,
              help="One file for torch.load, or a torch.distributed.checkpoint directory.")  # fmt: skip
@as_json
def checkpoint_export(path: str, target: str, form: str, as_json: bool) -> None:
    """Write the checkpoint at PATH to TARGET in the format of another tool. Every byte is checked."""
    from . import ctl_checkpoints

    sys.exit(ctl_checkpoints.export(path, target, form, as_json))


def _print(data: Json) -> None:
    click.echo(json.dumps(data, indent=2))


def _say(data: Json, as_json: bool, text: str, err: bool = False) -> None:
    if as_json:
        _print(data)
    else:
        click.echo(ctl_text.line(text), err=err)


def _die(message: str, code: int, as_json: bool = False, status: int | None = None, hint: str = "") -> NoReturn:
    """End with `code`. As JSON on stdout, in the form of the API's errors; else as text on stderr."""
    if as_json:
        _print({"schema": 1, "error": {"status": status, "message": message, "exit_code": code}})
    else:
        if hint:
            click.echo(ctl_text.block(hint), err=True)
        click.echo(ctl_text.block(f"elasticctl: {message}", most=ctl_text.LINE_CHARS), err=True)
    sys.exit(code)
