"""Styled text and tables, on a terminal or in a pipe. Without a library: `elasticctl status` must not wait for imports.

Nothing is interpreted as markup. Texts come from `safe_text` and hold no control character but line breaks.
"""

from __future__ import annotations

import io
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from elasticd.api.views.columns import Column

PIPED_CELLS = 200
"""Width if the output is not a terminal and no width is set."""
HOME_AND_CLEAR = "\x1b[H\x1b[2J"

_SGR = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_WORD = re.compile(r"\s*\S+\s*|\s+")
_WIDE = ((0x2630, 0x2637), (0x268A, 0x268F), (0x4DC0, 0x4DFF), (0x1D300, 0x1D376), (0x1F1E6, 0x1F1FF))
"""First and last characters of ranges that take two cells, which unicodedata does not know yet or sees in pairs."""
_EMOJI_FORM = "\ufe0f"
"""Makes the character before it two cells wide on terminals that know it."""

Part = tuple[str, str]
"""Text and its style: words of `_SGR` with spaces between them; '': plain."""


class Text:
    """Parts of text, each with a style."""

    __slots__ = ("parts",)

    def __init__(self, text: str = "", style: str = "") -> None:
        self.parts: list[Part] = [(text, style)]

    @classmethod
    def assemble(cls, *parts: str | Part | Text) -> Text:
        return cls.of(
            piece
            for part in parts
            for piece in (part.parts if isinstance(part, Text) else [part if isinstance(part, tuple) else (part, "")])
        )

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Text:
        made = cls()
        made.parts = list(parts)
        return made

    @property
    def plain(self) -> str:
        return self.parts[0][0] if len(self.parts) == 1 else "".join(text for text, _ in self.parts)

    @property
    def width(self) -> int:
        """Cells of its longest line."""
        plain = self.plain
        return cells(plain) if "\n" not in plain else max(map(cells, plain.split("\n")))

    def slice(self, begin: int, end: int) -> Text:
        """Characters `begin` to `end`, with their styles."""
        parts, at = list[Part](), 0
        for text, style in self.parts:
            if piece := text[max(0, begin - at) : max(0, end - at)]:
                parts.append((piece, style))
            at += len(text)
        return Text.of(parts)

    def folded(self, width: int) -> list[Text]:
        """Lines of at most `width` cells, broken at words; within a word only if it is longer than a line."""
        if width < 2 and not self.plain.isascii():  # a character of two cells fits no such line
            return Text.of(("".join(c if _cells(c) < 2 else "?" for c in t), s) for t, s in self.parts)._folded(1)
        return self._folded(width)

    def _folded(self, width: int) -> list[Text]:
        plain = self.plain
        if "\n" not in plain and cells(plain) <= width:
            return [self]
        return [self.slice(begin, end) for begin, end in _lines(plain, max(1, width))]

    def styled(self, colours: bool) -> str:
        if not colours:
            return self.plain
        return "".join(
            f"\x1b[{';'.join(_SGR[word] for word in style.split())}m{text}\x1b[0m" if style and text else text
            for text, style in self.parts
        )


COLOURS = {
    **dict.fromkeys(("running", "succeeded", "ready", "healthy", "computing"), "green"),
    **dict.fromkeys(("pending", "stopping", "cordoned", "draining", "degraded", "starting"), "yellow"),
    **dict.fromkeys(("waiting", "no daemon"), "bold yellow"),
    **dict.fromkeys(("failed", "unhealthy", "lost"), "bold red"),
    **dict.fromkeys(("stopped", "off"), "dim"),
}


def coloured(word: str, text: str = "") -> Text:
    """`text`, else the word, in the colour of the word."""
    return Text(text or word, COLOURS.get(word, ""))


class Console:
    """Where text is printed."""

    def __init__(self, out: TextIO | None = None, width: int | None = None, terminal: bool | None = None) -> None:
        """`width`, `terminal`: in place of what is found out."""
        self.out = out or sys.stdout
        env = os.environ
        forced = env.get("FORCE_COLOR", "") not in ("", "0")
        self.is_terminal = (self.out.isatty() or forced) if terminal is None else terminal
        self._colours = self.is_terminal and not env.get("NO_COLOR") and env.get("TERM") not in ("dumb", "unknown")
        columns, self.height = size()
        self.width = width or (columns if self.is_terminal or env.get("COLUMNS") else PIPED_CELLS)

    def print(self, *texts: Text) -> None:
        """Each on a line of its own, folded to the width; without any: an empty line."""
        lines = [line for text in texts for line in text.folded(self.width)]
        self.write(lines or [Text()])

    def say(self, text: Text | str, style: str = "") -> None:
        """On a terminal folded at words; in a pipe one line as it is, for grep."""
        text = Text(text, style) if isinstance(text, str) else text
        self.print(text) if self.is_terminal else self.write([text])

    def write(self, lines: Iterable[Text]) -> None:
        """Lines as they are, however long."""
        self.out.write("".join(f"{line.styled(self._colours)}\n" for line in lines))


def size() -> tuple[int, int]:
    """Columns and lines as `shutil.get_terminal_size` finds them, without its imports."""
    given = [int(text) if text.isdigit() else 0 for text in map(os.environ.get, ("COLUMNS", "LINES"), ("", ""))]
    try:
        size = os.get_terminal_size(sys.__stdout__.fileno())  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):
        size = os.terminal_size((0, 0))
    return given[0] or size.columns or 80, given[1] or size.lines or 24


class WatchScreen(io.StringIO):
    """Takes what is written in place of `out`, which is a terminal or not."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._is_terminal = out.isatty()

    def isatty(self) -> bool:
        return self._is_terminal

    def cut(self, height: int) -> str:
        """What was written; on a terminal of `height` lines no more than it shows, with a note on what is left out."""
        lines = self.getvalue().splitlines()
        if not self._is_terminal or len(lines) < height:  # the cursor takes a line
            return self.getvalue()
        kept = lines[: max(0, height - 2)]
        return "\n".join(
            [*kept, f"… and {len(lines) - len(kept)} more lines: without --watch, or on a higher screen\n"]
        )


def cells(text: str) -> int:
    """How many cells of a terminal `text` takes; rather too many than too few."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(char: str) -> int:
    if char.isascii() or char == _EMOJI_FORM:
        return 1
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    wide = unicodedata.east_asian_width(char) in "WF" or any(first <= ord(char) <= last for first, last in _WIDE)
    return 2 if wide else 1


def _lines(plain: str, width: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each line, without the spaces at its end."""
    begin = 0
    for part in plain.split("\n"):
        for first, last in _folds(part, width):
            yield begin + first, begin + last
        begin += len(part) + 1


def _folds(line: str, width: int) -> Iterator[tuple[int, int]]:
    first, used = 0, 0
    for match in _WORD.finditer(line):
        word, at = match[0], match.start()
        if used and used + cells(word.rstrip()) > width:
            yield first, first + len(line[first:at].rstrip())
            first, used = at, 0
        for char in word if used + cells(word) > width else "":
            if used + _cells(char) > width and not char.isspace():
                yield first, first + len(line[first:at].rstrip())
                first, used = at, 0
            used += _cells(char)
            at += 1
        used += 0 if at > match.start() else cells(word)
    yield first, first + len(line[first:].rstrip())


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────


GAP = 2
"""Cells between two columns."""
BETWEEN: Part = (" " * GAP, "")
NOTHING: Part = ("", "")
FLEX_SHARE = 0.3
"""A column of sentences is folded down to this share of the screen before another column is left out for it."""


def _cell(column: Column, row: object) -> Text:
    """A `Text` keeps its style; nothing is interpreted as markup."""
    value = column.cell(row)
    return value if isinstance(value, Text) else coloured(str(value)) if column.state else Text(str(value))


class Rows:
    """A table that fits the terminal: the least important columns are left out before a name is folded."""

    def __init__(self, columns: Sequence[Column], rows: Iterable[object]) -> None:
        self.columns = columns
        self._cells = [[_cell(column, row) for column in columns] for row in rows]
        self._wants = [[cell.width for cell in row] for row in self._cells]
        """Width of each cell on one line."""
        heads = [cells(column.title) for column in columns]
        self._natural = [max(1, *column) for column in zip(heads, *self._wants, strict=True)]
        """Width of each column with its longest cell on one line."""

    def left_out(self, width: int) -> set[str]:
        """Titles of the columns that do not fit a screen of `width` cells."""
        kept = self._kept(width)
        return {column.title for i, column in enumerate(self.columns) if i not in kept}

    def print(self, out: Console) -> None:
        out.write(self.lines(out.width))

    def lines(self, width: int) -> list[Text]:
        """For a screen of `width` cells: the head, then the rows; a row takes as many lines as its longest cell."""
        kept = self._kept(width)
        widths = self._widths(kept, width - GAP * (len(kept) - 1))
        head = [Text(column.title, "bold") for column in self.columns]
        shown = list(self._folded(head, widths))
        for row, wants in zip(self._cells, self._wants, strict=True):
            if all(wants[i] <= width and "\n" not in row[i].plain for i, width in widths.items()):
                shown.append(self._line(row, wants, widths))
            else:
                shown += self._folded(row, widths)
        return shown

    def _folded(self, row: Sequence[Text], widths: dict[int, int]) -> Iterator[Text]:
        folded = {i: row[i].folded(width) for i, width in widths.items()}
        for number in range(max(map(len, folded.values()))):
            line = {i: cell[number] if number < len(cell) else Text() for i, cell in folded.items()}
            yield self._line(line, {i: cell.width for i, cell in line.items()}, widths)

    def _line(
        self, row: Sequence[Text] | dict[int, Text], wants: Sequence[int] | dict[int, int], widths: dict[int, int]
    ) -> Text:
        """Cells that fit, side by side."""
        parts: list[Part] = []
        for i, width in widths.items():
            space = (" " * (width - wants[i]), "") if wants[i] < width else NOTHING
            parts += [space, *row[i].parts, BETWEEN] if self.columns[i].right else [*row[i].parts, space, BETWEEN]
        while parts and not parts[-1][0].strip():
            parts.pop()
        return Text.of(parts)

    def _kept(self, width: int) -> list[int]:
        most = int(width * FLEX_SHARE)
        least = [min(n, most) if c.flex else n for n, c in zip(self._natural, self.columns, strict=True)]
        kept = list(range(len(self.columns)))
        while sum(least[i] for i in kept) + GAP * (len(kept) - 1) > width:
            spare = max(kept, key=lambda i: self.columns[i].spare)
            if not self.columns[spare].spare:
                break
            kept.remove(spare)
        return kept

    def _widths(self, kept: Sequence[int], room: int) -> dict[int, int]:
        """Flexible columns share the width that the others leave; if even those are too wide, the widest are
        narrowed."""
        widths = {i: self._natural[i] for i in kept}
        least = int(room * FLEX_SHARE)
        while (over := sum(widths.values()) - room) > 0:
            flexible = [i for i in kept if self.columns[i].flex and widths[i] > least] or kept
            widest = max(flexible, key=lambda i: widths[i])
            if widths[widest] <= 1:
                break
            others = max((widths[i] for i in flexible if i != widest), default=1)
            widths[widest] -= max(1, min(over, widths[widest] - max(others, 1)))
        return widths
