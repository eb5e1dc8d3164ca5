"""Long texts of other programs, cut so that what tells most stays. Pure."""

from __future__ import annotations

ONE_LINE_CHARS = 300
"""An exception's message as the reason of a failure, in one line."""


def cut_middle(text: str, most: int, mark: str = "…") -> str:
    """At most `most` characters of `text`: its beginning and its end, with `mark` between them."""
    if len(text) <= most:
        return text
    head = (most - len(mark)) // 2
    return f"{text[:head]}{mark}{text[len(text) - (most - len(mark) - head) :]}"


def one_line(message: str) -> str:
    """An exception's message as one line: its lines joined by spaces. Where that is too long its beginning, which has
    the exception's type, and its end stay: an error of a compiler, a validator or a data loader's process names the
    culprit in its last lines."""
    return cut_middle(" ".join(message.split()), ONE_LINE_CHARS, " … ")
