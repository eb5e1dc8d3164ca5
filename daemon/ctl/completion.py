"""`elasticctl completion`: the script that teaches a shell to complete elasticctl's words."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_ELASTICCTL_COMPLETE"
"""The variable by which the shell asks elasticctl for completions; click derives it from the program's name."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL: eval "$(elasticctl completion bash)" in its start-up file."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "elasticctl", VARIABLE).source())


COMMANDS: dict[str, click.Command] = {"completion": completion}
