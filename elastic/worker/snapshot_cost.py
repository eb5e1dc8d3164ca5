"""Training time that a snapshot costs, of all ranks the one for which it costs most: the others wait for that rank."""

from __future__ import annotations


class SnapshotCost:
    """One per process. `own_us` is exchanged between the ranks; `group_us` is the largest of all."""

    def __init__(self) -> None:
        self._own_s: float | None = None
        self._copies = 0
        """Number of copies that were measured."""
        self._group_s = 0.0
        """The largest of all ranks as of the last exchange; 0: not known."""

    def enter(self) -> None:
        """A generation begins: its ranks may be others."""
        self._group_s = 0.0

    def add(self, seconds: float) -> None:
        """One more copy was measured. The first one also pays for fresh memory: its cost counts only until there is a
        second."""
        known_s = self._own_s if self._copies > 1 else None
        self._own_s = seconds if known_s is None else 0.7 * known_s + 0.3 * seconds
        self._copies += 1

    @property
    def own_us(self) -> int:
        """This rank's, of copies into already used memory, in microseconds; 0: none was measured."""
        return round(1e6 * self._own_s) if self._own_s is not None and self._copies > 1 else 0

    def exchanged(self, group_us: int) -> None:
        """`group_us`: the largest `own_us` of all ranks."""
        self._group_s = 1e-6 * group_us

    @property
    def copies(self) -> int:
        return self._copies

    @property
    def warm(self) -> bool:
        """Whether `seconds` is of copies into already used memory."""
        return self._copies > 1 or self._group_s > 0

    @property
    def seconds(self) -> float | None:
        """None: none was measured."""
        if self._group_s and self._copies <= 1:
            return self._group_s
        return None if self._own_s is None else max(self._own_s, self._group_s)
