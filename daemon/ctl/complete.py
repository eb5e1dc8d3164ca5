"""Names of jobs and nodes for the shell's completion, asked of the daemon while the user types."""

from __future__ import annotations

import click

from .client import Client, Failed, Unreachable

ANSWER_S = 1.0
"""Longest wait for the daemon: a key press must not hang."""


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return _names(ctx, "job", incomplete)


def nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return _names(ctx, "node", incomplete)


def _names(ctx: click.Context, kind: str, incomplete: str) -> list[str]:
    """Names that begin with `incomplete`; none if no daemon answers."""
    try:
        rows = Client(ctx.find_root().params.get("socket") or "", ANSWER_S).get(f"/v1/{kind}s")
        return sorted(row[kind] for row in rows[f"{kind}s"] if row[kind].startswith(incomplete))
    except (Unreachable, Failed, ValueError, KeyError, TypeError):
        return []


JOB = click.argument("job", shell_complete=jobs)
NODE = click.argument("node", shell_complete=nodes)
