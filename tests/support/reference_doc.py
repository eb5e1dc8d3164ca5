"""The pages of the documentation that are made from the code: every command, every field of a job, every setting.

`PYTHONPATH=tests python -m support.reference_doc` rewrites them.
"""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from support.source import ROOT

from elastic.contract.job import spec
from elasticd.base import settings
from elasticd.ctl import main as ctl

MADE = "<!-- made by tests/support/reference_doc.py -->"
UNBOUNDED = (None, "")
Tables = dict[str, tuple[type[msgspec.Struct], dict[str, str]]]


# ── tables of fields ────────────────────────────────────────────────────────────────────────────────────────


def meanings(owner: type[msgspec.Struct]) -> dict[str, str]:
    """Field → the text below its definition."""
    (made,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(made, ast.ClassDef)
    texts = {}
    for node, after in zip(made.body, made.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
            texts[node.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return texts


def allowed(kind: object) -> str:
    """The values that a field may have, in words."""
    if typing.get_origin(kind) is typing.Annotated:
        plain, *rest = typing.get_args(kind)
        bounds = [f"{sign} {bound:g}" for meta in rest for sign, bound in _bounds(meta)]
        return " ".join([allowed(plain), ", ".join(bounds)]).strip()
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is dict:
        return "a table: name = text"
    if typing.get_origin(kind) is tuple:
        return f"a list of {allowed(parts[0])}s"
    if parts:
        return ", or ".join(allowed(part) for part in parts if part is not type(None))
    return {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}[typing.cast(type, kind)]


def _bounds(meta: msgspec.Meta) -> Iterator[tuple[str, float]]:
    for sign, bound in (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt)):
        if bound is not None:
            yield sign, bound


def default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else None
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value in UNBOUNDED or value == () or value == {}:
        return "required" if field.required else ""
    if isinstance(value, tuple):
        return ", ".join(f"`{each}`" for each in value)
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def table(owner: type[msgspec.Struct], above: str = "") -> Iterator[str]:
    """The rows of its own fields; then each table within it, under its name."""
    hints, texts = typing.get_type_hints(owner, include_extras=True), meanings(owner)
    fields = msgspec.structs.fields(owner)
    inner = [
        field
        for field in fields
        if isinstance(hints[field.name], type) and issubclass(hints[field.name], msgspec.Struct)
    ]
    if above:
        yield f"\n## `[{above}]`\n"
    yield "| field | values | default | meaning |\n|---|---|---|---|"
    for field in fields:
        if field not in inner:
            text = texts.get(field.name, "").replace("|", "\\|")
            yield f"| `{field.name}` | {allowed(hints[field.name])} | {default(field)} | {text} |"
    for field in inner:
        yield from table(hints[field.name], f"{above}.{field.name}".strip("."))


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────


def commands(group: click.Group, above: str) -> Iterator[str]:
    for name in group.list_commands(context := click.Context(group, info_name=above)):
        command = group.get_command(context, name)
        assert command is not None
        if command.hidden:
            continue
        path = f"{above} {name}"
        inner = click.Context(command, info_name=name, parent=context)
        yield f"\n## `{path}`\n"
        yield f"    {path} {' '.join(command.collect_usage_pieces(inner))}\n"
        yield _help(command)
        if rows := list(_options(command, inner)):
            yield "\n| option | |\n|---|---|"
            yield from rows
        if isinstance(command, click.Group):
            yield from commands(command, path)


def _help(command: click.Command) -> str:
    text = inspect.cleandoc(command.help or "")
    return re.sub(r"(?m)^\x08\n((?:.+\n?)+)", lambda block: re.sub(r"(?m)^(?=.)", "    ", block[1]), text)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden and (record := option.get_help_record(context)):
            names, text = record
            yield f"| `{names}` | {' '.join(text.split()).replace('|', chr(92) + '|')} |"


# ── pages ───────────────────────────────────────────────────────────────────────────────────────────────────

CTL = """# elasticctl: every command

Global: `--socket PATH`, before the command or after it, or `$ELASTICCTL_SOCKET` says which daemon to ask. `--json`
prints what [api.md](api.md) describes. What to use when is in [operating.md](operating.md).

| exit code | |
|---|---|
| 0 | ok |
| 1 | refused or failed |
| 2 | wrong usage, or an invalid value |
| 3 | degraded: needs attention |
| 4 | the job has failed |
| 5 | no daemon answers |
| 6 | etcd cannot be reached, and the command needs it |
| 7 | another user's job, or a command for admins |"""
JOB = """# job.toml: every field of a job

`elasticctl submit job.toml`; `elasticctl run` makes the same of its options, and sets any other field by
`--set FIELD=VALUE` (`--set checkpoint.keep=5`). An unknown field or a wrong value is refused by name.
"""
SETTINGS = """# elasticd.toml: every setting

In a file (`/etc/elasticd/elasticd.toml` as a service, else `elasticd --config FILE`), as environment variables
(`ELASTICD_NODE`, `ELASTICD_ETCD_ENDPOINTS`), or for one start by `elasticd --set NAME=VALUE` (`etcd.user=me`). The
last one of these counts. `elasticctl config show` prints what is in force, and where each value comes from.
"""


def pages() -> dict[Path, str]:
    docs = ROOT / "docs"
    return {
        docs / "elasticctl.md": "\n".join([CTL, MADE, *commands(ctl.main, "elasticctl")]) + "\n",
        docs / "job.md": "\n".join([JOB, MADE, "", *table(spec.JobSpec)]) + "\n",
        docs / "settings.md": "\n".join([SETTINGS, MADE, "", *table(settings.Settings)]) + "\n",
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
