"""AGENTS.md: each field that it reads is one of an answer of the API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from support.source import ROOT

from elasticd.base import answers, command_answers


def fields() -> Iterator[str]:
    for module in (answers, command_answers):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct):
                yield from (field.encode_name for field in msgspec.structs.fields(value))


def test_every_field_in_the_page_for_whoever_is_on_call_exists() -> None:
    known: set[Any] = set(fields())
    look = (ROOT / "AGENTS.md").read_text().partition("## Look")[2].partition("## Act")[0]
    rows = [row.split(" | ") for row in look.splitlines() if re.match(r"\| \d", row)]
    assert len(rows) >= 6
    named = {word for row in rows for span in re.findall(r"`([a-z_.]+)`", row[2]) for word in span.split(".")}
    assert len(named) > 20
    assert named - known <= {"events", "healthy", "ready"}, "a list that the route makes, and two values"
