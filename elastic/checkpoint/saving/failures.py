"""Checkpoints that have failed, one after the other."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic.contract.records.reasons import Text

ESCALATE_AFTER = 3
"""From this many in a row they are reported as errors."""


@dataclass(slots=True)
class FailuresInRow:
    """Replaced by a new one after a success."""

    error: Text | None = None
    """The latest failure."""
    count: int = 0
    last: tuple[int, int] | None = None
    """(generation, step) of the last one: its shard and its commit may both report the failure."""
    began: tuple[int, float] = (0, 0.0)
    """Step and time of day of the first one of the present kind: all of a kind are one incident."""
    _kind: str = ""

    def add(self, error: Text, generation: int = 0, step: int = 0, wall_s: float = 0.0) -> bool:
        """Returns False if this one is counted already. Generation 0 or less: no particular checkpoint."""
        if generation > 0 and self.last == (generation, step):
            return False
        self.error, self.count, self.last = error, self.count + 1, (generation, step)
        if (kind := re.sub(r"[0-9]+", "", str(error))) != self._kind:
            self._kind, self.began = kind, (step, wall_s)
        return True

    @property
    def escalate(self) -> bool:
        return self.count >= ESCALATE_AFTER
