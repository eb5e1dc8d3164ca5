"""Values by dotted names, as 'timeouts.beat_s', in tables as TOML has them, and from the text of an option."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

Raw = dict[str, Any]


def leaves(raw: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all that is no table."""
    for name, value in raw.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def put(raw: Raw, name: str, value: Any) -> None:
    """Raises ValueError, with the table's name, for a part of the name that is no table."""
    *tables, last = name.split(".")
    for table in tables:
        raw = raw.setdefault(table, {})
        if not isinstance(raw, dict):
            raise ValueError(f"{table!r} is not a table")
    raw[last] = value


def value_of(text: str) -> Any:
    """As TOML reads it; else the text."""
    try:
        raw = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return raw["value"] if list(raw) == ["value"] else text
