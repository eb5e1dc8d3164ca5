"""`elasticctl help` and `elasticctl version`, as commands for those who look for them there."""

from __future__ import annotations

import click

import elastic


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
