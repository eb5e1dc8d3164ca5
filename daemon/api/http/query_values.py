"""Values in a request's query, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from elasticd.base.errors import Refused

COUNT = re.compile("[0-9]{1,9}")


def seconds(query: Mapping[str, str], name: str) -> float:
    """Seconds; 0 if not given. Raises Refused (400)."""
    try:
        value = float(query.get(name, 0.0))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise Refused(400, f"{name} = {query[name]!r}: seconds, from 0")
    return value


def count(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not COUNT.fullmatch(text):
        raise Refused(400, f"{name} = {text!r}: a whole number from 0 to 999999999")
    return int(text)


def flag(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "0") in ("1", "true", "")
