"""Untrusted text made safe for a terminal: from users, workers and other programs. Pure.

None of it is interpreted as markup, and no control character in it reaches a terminal: an escape sequence is shown as
text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LINE_CHARS = 2_000
"""A one-line text is cut beyond this; --json has all of it."""
BLOCK_CHARS = 50_000
"""A traceback or stack is cut beyond this, in its middle."""
BLOCKS = frozenset({"traceback", "message", "stacks", "stack", "doc"})
"""Fields whose text has several lines."""

_COLOUR = re.compile(r"(\x1b\[[0-9;:]{0,64}m)")
_RESET = "\x1b[0m"


def line(text: object, most: int = LINE_CHARS) -> str:
    """`text` as one line: unprintable characters (line breaks, escape sequences, direction marks) are escaped."""
    plain = str(text)
    if len(plain) > most:
        plain = f"{plain[:most]}… ({len(plain) - most} more characters)"
    return plain if plain.isprintable() else "".join(map(_visible, plain))


def block(text: object, most: int = BLOCK_CHARS) -> str:
    """`text` with its line breaks; tabs become spaces, other unprintable characters are escaped."""
    plain = str(text)
    if len(plain) > most:
        half = most // 2
        plain = f"{plain[:half]}\n… ({len(plain) - 2 * half} characters left out)\n{plain[-half:]}"
    lines = plain.replace("\r\n", "\n").expandtabs().split("\n")
    return "\n".join(part if part.isprintable() else "".join(map(_visible, part)) for part in lines)


def output(text: str) -> str:
    """A worker's output line: its colours and tabs stay. Of a progress bar that returns to the beginning of the line
    with each update, the last state stays, as on a terminal."""
    last = text.rstrip("\r").rpartition("\r")[2]
    if last.isprintable():
        return last
    parts = _COLOUR.split(last)
    shown = "".join(
        part if i % 2 else "".join(c if c == "\t" else _visible(c) for c in part) for i, part in enumerate(parts)
    )
    return shown + _RESET if len(parts) > 1 else shown


def shown(data: Any, field: str = "") -> Any:
    """An answer of the daemon with every text in it, including field names, made safe for a terminal."""
    if isinstance(data, str):
        if len(data) <= LINE_CHARS and data.isprintable():
            return data  # nearly always, and there may be many thousands
        return block(data) if field in BLOCKS else line(data)
    if data is None or isinstance(data, int | float):
        return data
    if isinstance(data, Mapping):
        return {
            key if _plain(key) else line(key): shown(value, field if field in BLOCKS else key)
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [shown(value, field) for value in data]
    return data


def _plain(key: Any) -> bool:
    """Whether it is a field's name as ours are."""
    return isinstance(key, str) and len(key) < 64 and key.isascii() and key.isidentifier()


def _visible(char: str) -> str:
    if char.isprintable():
        return char
    return _SHORT.get(char) or char.encode("unicode_escape", "surrogatepass").decode()


_SHORT = {"\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u3000": " "}
"""Spaces of other widths: not printable to Python, harmless to a terminal."""
