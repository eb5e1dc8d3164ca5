"""A file of environment variables: NAME=VALUE lines, as `docker run --env-file` and systemd's EnvironmentFile take
them. Pure."""

from __future__ import annotations

from .spec_values import environment_complaint


def parse(text: str) -> dict[str, str]:
    """Blank lines and lines that begin with '#' are skipped, an `export ` before a name is dropped, and one pair of
    quotes around a whole value. Nothing is expanded. Raises ValueError, which names the line and never its value: it
    may be a secret."""
    variables: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name or not name.isidentifier():
            raise ValueError(f"line {number}: write NAME=VALUE")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        if environment_complaint({name: value}):
            raise ValueError(f"line {number}: the value of {name} holds a NUL, or is too long")
        variables[name] = value
    return variables
