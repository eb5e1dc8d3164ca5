"""What a field of a job or of the settings takes, in words for its user."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def explained(error: msgspec.ValidationError, table: type[msgspec.Struct], raw: Mapping[str, Any]) -> str:
    """The field, its value in `raw` and what the field takes, from an error of the conversion of `raw` to `table`."""
    what, _, where = str(error).partition(" - at `$.")
    if not where:
        return str(error)
    path = where.rstrip("`").partition("[")[0]
    value: Any = raw
    kind: Any = table
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else value
        kind = typing.get_type_hints(kind, include_extras=True).get(part) if isinstance(kind, type) else None
    return f"{path} = {value!r}: {in_words(kind) or f'{what[0].lower()}{what[1:]}'}"


def in_words(kind: Any) -> str:
    """A type with its limits: "a whole number from 1, or 'auto'"; '' for one that has no words here."""
    kinds = typing.get_args(kind)
    match typing.get_origin(kind):
        case typing.Union | types.UnionType:
            words = [in_words(each) for each in kinds]
            return ", or ".join(words) if all(words) else ""
        case origin if origin is Literal:
            *most, last = map(repr, kinds)
            return f"{', '.join(most)} or {last}" if most else last
        case origin if origin is Annotated:
            limits = next((each for each in kinds[1:] if isinstance(each, msgspec.Meta)), msgspec.Meta())
            return f"{in_words(kinds[0])}{_limits(limits)}" if in_words(kinds[0]) else ""
        case origin if origin is tuple and kinds[0] is str:
            return "a list of texts"
    return _WORDS.get(kind, "") if isinstance(kind, type) else ""


def _limits(meta: msgspec.Meta) -> str:
    limits = [(" from", meta.ge), (" above", meta.gt), (" to", meta.le), (" below", meta.lt)]
    length = f" of {meta.min_length or 0} to {meta.max_length} characters" if meta.max_length is not None else ""
    return length + "".join(f"{word} {limit}" for word, limit in limits if limit is not None)
