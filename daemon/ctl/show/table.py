"""Tables that fit the terminal: the least important columns are left out before a name is folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from .screen import Console, Part, Text, cells

GAP = 2
"""Cells between two columns."""
BETWEEN: Part = (" " * GAP, "")
NOTHING: Part = ("", "")
FLEX_SHARE = 0.3
"""A column of sentences is folded down to this share of the screen before another column is left out for it."""


class Column(msgspec.Struct, frozen=True):
    title: str
    spare: int = 0
    """Order in which columns are left out for lack of room: the highest first; 0: never."""
    right: bool = False
    flex: bool = False
    """Sentences: folded at words. Other columns stay on one line if possible."""


class Rows:
    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = columns
        self._cells: list[list[Text]] = []
        self._wants: list[list[int]] = []
        """Width of each cell on one line."""

    def add(self, *values: object) -> None:
        """One cell per column. A `Text` keeps its style; nothing is interpreted as markup."""
        assert len(values) == len(self.columns)
        row = [value if isinstance(value, Text) else Text(str(value)) for value in values]
        self._cells.append(row)
        self._wants.append([cell.width for cell in row])

    def left_out(self, width: int) -> set[str]:
        """Titles of the columns that do not fit a screen of `width` cells."""
        kept = self._kept(width, self._natural())
        return {column.title for i, column in enumerate(self.columns) if i not in kept}

    def print(self, out: Console) -> None:
        out.write(self.lines(out.width))

    def lines(self, width: int) -> list[Text]:
        """For a screen of `width` cells: the head, then the rows; a row takes as many lines as its longest cell."""
        natural = self._natural()
        kept = self._kept(width, natural)
        widths = self._widths(kept, width - GAP * (len(kept) - 1), natural)
        head = [Text(column.title, "bold") for column in self.columns]
        found = list(self._folded(head, widths))
        for row, wants in zip(self._cells, self._wants, strict=True):
            if all(wants[i] <= width and row[i].on_one_line for i, width in widths.items()):
                found.append(self._line(row, wants, widths))
            else:
                found += self._folded(row, widths)
        return found

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

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

    def _natural(self) -> list[int]:
        """Width of each column with its longest cell on one line."""
        heads = [cells(column.title) for column in self.columns]
        return [max(1, *column) for column in zip(heads, *self._wants, strict=True)]

    def _kept(self, width: int, natural: Sequence[int]) -> list[int]:
        least = [min(n, int(width * FLEX_SHARE)) if c.flex else n for n, c in zip(natural, self.columns, strict=True)]
        kept = list(range(len(self.columns)))
        while sum(least[i] for i in kept) + GAP * (len(kept) - 1) > width:
            spare = max(kept, key=lambda i: self.columns[i].spare)
            if not self.columns[spare].spare:
                break
            kept.remove(spare)
        return kept

    def _widths(self, kept: Sequence[int], room: int, natural: Sequence[int]) -> dict[int, int]:
        """Flexible columns share the width that the others leave; if even those are too wide, the widest are
        narrowed."""
        widths = {i: natural[i] for i in kept}
        least = int(room * FLEX_SHARE)
        while (over := sum(widths.values()) - room) > 0:
            flexible = [i for i in kept if self.columns[i].flex and widths[i] > least] or kept
            widest = max(flexible, key=lambda i: widths[i])
            if widths[widest] <= 1:
                break
            others = max((widths[i] for i in flexible if i != widest), default=1)
            widths[widest] -= max(1, min(over, widths[widest] - max(others, 1)))
        return widths
