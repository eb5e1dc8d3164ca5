"""A log file that costs lines when its disk is full, and never the process that writes to it."""

from __future__ import annotations

from collections.abc import Callable


class LogFile:
    """What a logger needs of a file. Each `write` is one whole line.

    A line that cannot be written (full disk, quota, reader of the pipe gone) is dropped and counted; the next one that
    can be is preceded by a line that says how many are missing. `put` writes bytes without a buffer and returns how
    many it took, or raises OSError.
    """

    def __init__(self, put: Callable[[bytes], int]) -> None:
        self._put = put
        self._torn = False
        self.dropped = 0

    def write(self, line: str) -> int:
        """Returns the characters of `line`, written or not: a logger has no use for an error."""
        note = f'{{"event": "log.lines_dropped", "count": {self.dropped}}}\n' if self.dropped else ""
        raw = ("\n" * self._torn + note + line).encode(errors="replace")
        try:
            wrote = self._put(raw)
        except OSError:
            self.dropped += 1
            return len(line)
        self._torn = wrote < len(raw)
        self.dropped = int(self._torn)
        return len(line)

    def flush(self) -> None:
        """Nothing is kept back."""
