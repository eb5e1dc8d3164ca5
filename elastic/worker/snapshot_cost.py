"""Training time that a snapshot costs, of all ranks the one for which it costs most: the others wait for that rank."""

from __future__ import annotations

BUFFERS = 2
"""Copies into fresh memory, or into a new layout, before all are like those that follow."""

OUTLIER, LEAST_OUTLIER_S = 3.0, 0.01
"""A copy counts at most as this many times the average, and this much more: a machine that stood still for a minute is
no reason to take snapshots seldom from then on."""


class SnapshotCost:
    """One per process. `own_us` is exchanged between the ranks; what is `exchanged` is the largest of all."""

    def __init__(self) -> None:
        self._own_s: float | None = None
        self._warm = False
        """Whether that is of copies into already used memory."""
        self._cold = BUFFERS
        """Number of copies until all buffers of this generation have been used."""
        self._group_s = 0.0
        """The largest of all ranks as of the last exchange; 0: not known."""
        self.copies = 0
        """Number of copies that were measured."""

    def enter(self) -> None:
        """A generation begins: its ranks may be others, and this rank's part of the state as well."""
        self._group_s = 0.0
        self._cold = BUFFERS

    def add(self, seconds: float) -> None:
        """One more copy was measured. Those into fresh memory count only until there is another."""
        self.copies += 1
        known_s = self._own_s
        if self._cold:
            self._cold -= 1
            if not self._warm:
                self._own_s = seconds if known_s is None else min(known_s, seconds)
        elif known_s is not None and self._warm:
            self._own_s = 0.7 * known_s + 0.3 * min(seconds, OUTLIER * known_s + LEAST_OUTLIER_S)
        else:
            self._own_s = seconds if known_s is None else min(known_s, seconds)
            self._warm = True

    @property
    def own_us(self) -> int:
        """This rank's, of copies into already used memory, in microseconds; 0: none was measured."""
        return round(1e6 * self._own_s) if self._own_s is not None and self._warm else 0

    def exchanged(self, group_us: int) -> None:
        """`group_us`: the largest `own_us` of all ranks."""
        self._group_s = 1e-6 * group_us

    @property
    def warm(self) -> bool:
        """Whether `seconds` is of copies into already used memory."""
        return self._warm or self._group_s > 0

    @property
    def seconds(self) -> float | None:
        """None: none was measured."""
        if self._group_s and not self._warm:
            return self._group_s
        return None if self._own_s is None else max(self._own_s, self._group_s)
