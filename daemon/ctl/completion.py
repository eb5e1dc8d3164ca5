"""`elasticctl completion`: the script that teaches a shell to complete elasticctl's words."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .client import Client, Failed, Unreachable

ANSWER_S = 1.0
"""Longest wait for the daemon: a key press must not hang."""


def job_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return _names(ctx, "job", incomplete)


def node_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return _names(ctx, "node", incomplete)


def _names(ctx: click.Context, kind: str, incomplete: str) -> list[str]:
    """Names that begin with `incomplete`; none if no daemon answers."""
    try:
        rows = Client(ctx.find_root().params.get("socket") or "", ANSWER_S).get(f"/v1/{kind}s")
        return sorted(row[kind] for row in rows[f"{kind}s"] if row[kind].startswith(incomplete))
    except (Unreachable, Failed, ValueError, KeyError, TypeError):
        return []


JOB = click.argument("job", shell_complete=job_names)
NODE = click.argument("node", shell_complete=node_names)


SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_ELASTICCTL_COMPLETE"
"""The variable by which the shell asks elasticctl for completions; click derives it from the program's name."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    In its start-up file: eval "$(elasticctl completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "elasticctl", VARIABLE).source())
