"""TOML and Python have infinity and NaN, records in JSON have neither: no job has one in any of its fields."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from elastic.contract.job.spec import InvalidSpec, JobSpec, parse_job

JOB = {"name": "j", "script": "/t.py"}


def floats(table: type[msgspec.Struct], *path: str) -> Iterator[tuple[str, ...]]:
    for name, kind in typing.get_type_hints(table).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from floats(kind, *path, name)
        elif kind is float:
            yield *path, name


FIELDS = list(floats(JobSpec))


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_no_field_takes_a_number_without_end(path: tuple[str, ...], value: float) -> None:
    raw: Any = value
    for name in reversed(path):
        raw = {name: raw}
    with pytest.raises(InvalidSpec, match=re.escape(f"{'.'.join(path)} = {value}: ")):
        parse_job(JOB | raw)


def test_all_fields_were_found() -> None:
    assert {("stop_grace_s",), ("hang", "ceiling_s"), ("checkpoint", "every_s")} <= set(FIELDS)


def test_the_cure_is_said() -> None:
    with pytest.raises(InvalidSpec, match="a finite number is needed; a very large one does the same"):
        parse_job(JOB | {"hang": {"ceiling_s": math.inf}})
