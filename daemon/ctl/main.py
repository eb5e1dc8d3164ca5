"""The command `elasticctl`: inspects and controls a cluster through the daemon of this node.

Exit codes: 0 ok · 1 refused or failed · 2 wrong usage, or an invalid value · 3 degraded: needs attention · 4 the job
has failed · 5 no daemon answers · 6 etcd cannot be reached, and the command needs it · 7 another user's job, or
a command for admins.
"""

from __future__ import annotations

import difflib
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

COMMANDS = {
    "Jobs": {
        "run": ".jobs.run_command:run",
        "submit": ".jobs.run_command:submit",
        "stop": ".jobs.lifecycle:stop",
        "wait": ".jobs.lifecycle:wait",
        "restart": ".jobs.lifecycle:restart",
        "scale": ".jobs.lifecycle:scale",
        "checkpoint": ".jobs.checkpoint_commands:checkpoint",
        "forget": ".jobs.lifecycle:forget",
        "fault": ".jobs.fault:fault",
    },
    "Look": {
        "status": ".show.lists:status",
        "top": ".jobs.top:top",
        "jobs": ".show.lists:jobs",
        "logs": ".jobs.follow:logs",
        "events": ".show.course:events",
        "incidents": ".show.lists:incidents",
        "loss": ".show.course:loss",
        "report": ".show.course:report",
        "stacks": ".nodes.doctor:stacks",
        "debug": ".jobs.debug:debug",
        "bundle": ".nodes.bundle:bundle",
    },
    "Nodes": {
        "nodes": ".show.lists:nodes",
        "doctor": ".nodes.doctor:doctor",
        "cordon": ".nodes.node_commands:cordon",
        "drain": ".nodes.node_commands:drain",
        "uncordon": ".nodes.node_commands:uncordon",
        "gc": ".nodes.node_commands:gc",
    },
    "Set up": {
        "install-service": ".nodes.install:install_service",
        "config": ".nodes.node_commands:config",
        "completion": ".completion:completion",
        "version": ".main:version",
        "help": ".main:help_",
    },
}
"""Group of the help -> command -> where it is. Its module is imported when it is called: `elasticctl status` must not
pay for the others."""
LATE = {name: place for group in COMMANDS.values() for name, place in group.items()}
INSTEAD = {
    "attach": "`logs -f JOB`", "cancel": "`stop JOB`", "delete": "`stop JOB`, `forget JOB`",
    "describe": "`status JOB`, `nodes`", "kill": "`stop JOB`", "list": "`jobs`, `nodes`", "ls": "`jobs`, `nodes`",
    "ps": "`jobs`, `top`",
}  # fmt: skip
"""What is typed after the habit of other programs -> what there is."""


class Main(click.Group):
    """Turns errors into text, or JSON if requested, and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(LATE)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if not (place := LATE.get(cmd_name)):
            return None
        module, _, function = place.partition(":")
        command: click.Command = getattr(importlib.import_module(module, __package__), function)
        _take_socket(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in LATE and not args[0].startswith("-"):
            if (see := INSTEAD.get(args[0])) is None:
                near = difflib.get_close_matches(args[0], LATE, 1)
                see = f"`{near[0]}`" if near else "`elasticctl help`"
            ctx.fail(f"there is no {args[0]!r}: see {see}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, names in COMMANDS.items():
            rows = [
                (name, command.get_short_help_str(1000)) for name in names if (command := self.get_command(ctx, name))
            ]
            with formatter.section(group):
                formatter.write_dl(rows)

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


def _take_socket(command: click.Command) -> None:
    """--socket is understood after the command, too, and after one of a group."""
    if not any(param.name == "socket" for param in command.params):
        callback = _use_socket
        command.params.append(click.Option(["--socket"], hidden=True, expose_value=False, callback=callback))
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        _take_socket(inner)


def _use_socket(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path:
        ctx.obj = Client(path)
        ctx.find_root().params["socket"] = path


@click.group(
    cls=Main,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=__doc__.partition("\n\n")[2],
)
@click.option(
    "--socket",
    default=None,
    metavar="PATH",
    help="The daemon's socket; default: $ELASTICCTL_SOCKET, else the usual one.",
)
@click.version_option(elastic.__version__, prog_name="elasticctl")
@click.pass_context
def main(ctx: click.Context, socket: str | None) -> None:
    """Run jobs on an elasticd cluster, inspect it and control it.

    \b
    elasticctl run --workers 2 --checkpoints ckpt -- train.py
    """
    ctx.obj = Client(socket or "")


@click.command()
def version() -> None:
    """Print the version of elasticctl; that of each node is in `elasticctl nodes`."""
    click.echo(f"elasticctl, version {elastic.__version__}")


@click.command("help")
@click.argument("command", nargs=-1)
@click.pass_context
def help_(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Show the help of COMMAND, such as `checkpoint export`, or this one."""
    shown = ctx.find_root()
    for word in command:
        group = shown.command
        found = group.get_command(shown, word) if isinstance(group, click.Group) else None
        if found is None:
            shown.fail(f"there is no {' '.join(command)!r}")
        shown = click.Context(found, parent=shown, info_name=word)
    click.echo(shown.get_help())


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
