"""Tables that fit the terminal: the least important columns are left out before a name is folded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2
"""Cells between two columns."""
FLEX_SHARE = 0.3
"""A column of sentences is folded down to this share of the screen before another column is left out for it."""


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    spare: int = 0
    """Order in which columns are left out for lack of room: the highest first; 0: never."""
    right: bool = False
    flex: bool = False
    """Sentences: folded at words. Other columns stay on one line if possible."""


@dataclass(slots=True)
class Rows:
    columns: Sequence[Column]
    cells: list[list[Text]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """One cell per column. A `Text` keeps its style; nothing is interpreted as markup."""
        assert len(cells) == len(self.columns)
        self.cells.append([cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells])

    def left_out(self, width: int) -> set[str]:
        """Titles of the columns that do not fit a screen of `width` cells."""
        return {column.title for i, column in enumerate(self.columns) if i not in self._kept(width)}

    def print(self, out: Console) -> None:
        out.print(self.table(out.width))

    def table(self, width: int) -> Table:
        """For a screen of `width` cells."""
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        kept = self._kept(width)
        room = width - GAP * (len(kept) - 1)
        widths = self._widths(kept, room)
        for i in kept:
            column = self.columns[i]
            table.add_column(
                Text(column.title), justify="right" if column.right else "left", overflow="fold", width=widths[i]
            )
        for row in self.cells:
            table.add_row(*(row[i] for i in kept))
        return table

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _natural(self, i: int) -> int:
        cells = (max((cell_len(part) for part in row[i].plain.split("\n")), default=0) for row in self.cells)
        return max(cell_len(self.columns[i].title), *cells, 1)

    def _least(self, i: int, width: int) -> int:
        return min(self._natural(i), int(width * FLEX_SHARE)) if self.columns[i].flex else self._natural(i)

    def _kept(self, width: int) -> list[int]:
        kept = list(range(len(self.columns)))
        least = {i: self._least(i, width) for i in kept}
        while sum(least[i] for i in kept) + GAP * (len(kept) - 1) > width:
            spare = max(kept, key=lambda i: self.columns[i].spare)
            if not self.columns[spare].spare:
                break
            kept.remove(spare)
        return kept

    def _widths(self, kept: Sequence[int], room: int) -> dict[int, int]:
        """Flexible columns share the width that the others leave; if even those are too wide, the widest are
        narrowed."""
        widths = {i: self._natural(i) for i in kept}
        least = int(room * FLEX_SHARE)
        while (over := sum(widths.values()) - room) > 0:
            flexible = [i for i in kept if self.columns[i].flex and widths[i] > least] or kept
            widest = max(flexible, key=lambda i: widths[i])
            if widths[widest] <= 1:
                break
            others = max((widths[i] for i in flexible if i != widest), default=1)
            widths[widest] -= max(1, min(over, widths[widest] - max(others, 1)))
        return widths
