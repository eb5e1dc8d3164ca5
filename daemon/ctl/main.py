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

from .client import Client, Failed, Unreachable
from .output import DENIED, ERROR, INTERRUPTED, NO_DAEMON, NO_ETCD, OK, USAGE, print_json

LATE = {
    "bundle": ".nodes.bundle:bundle",
    "checkpoint": ".jobs.checkpoint_commands:checkpoint",
    "completion": ".completion:completion",
    "config": ".nodes.node_commands:config",
    "cordon": ".nodes.node_commands:cordon",
    "debug": ".jobs.debug:debug",
    "doctor": ".nodes.doctor:doctor",
    "drain": ".nodes.node_commands:drain",
    "events": ".show.course:events",
    "forget": ".jobs.lifecycle:forget",
    "gc": ".nodes.node_commands:gc",
    "incidents": ".show.lists:incidents",
    "install-service": ".nodes.install:install_service",
    "jobs": ".show.lists:jobs",
    "logs": ".jobs.follow:logs",
    "loss": ".show.course:loss",
    "nodes": ".show.lists:nodes",
    "report": ".show.course:report",
    "restart": ".jobs.lifecycle:restart",
    "run": ".jobs.run_command:run",
    "scale": ".jobs.lifecycle:scale",
    "stacks": ".nodes.doctor:stacks",
    "status": ".show.lists:status",
    "stop": ".jobs.lifecycle:stop",
    "submit": ".jobs.run_command:submit",
    "top": ".jobs.top:top",
    "uncordon": ".nodes.node_commands:uncordon",
    "wait": ".jobs.lifecycle:wait",
}
"""Command -> where it is. Its module is imported when it is called: `elasticctl status` must not pay for the others."""


class Main(click.Group):
    """Turns errors into text, or JSON if requested, and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(LATE)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if not (place := LATE.get(cmd_name)):
            return None
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


def _die(message: str, code: int, as_json: bool = False, status: int | None = None, hint: str = "") -> NoReturn:
    """End with `code`. As JSON on stdout, in the form of the API's errors; else as text on stderr."""
    if as_json:
        from elasticd.base.answers import error

        print_json(error(status, message, exit_code=code))
    else:
        if hint:
            click.echo(safe_text.block(hint), err=True)
        click.echo(safe_text.block(f"elasticctl: {message}", most=safe_text.LINE_CHARS), err=True)
    sys.exit(code)
