"""A log file that loses lines when its disk is full, and never fails the process that writes to it."""

from __future__ import annotations

from collections.abc import Callable


class LogFile:
    """The parts of a file that a logger uses. Each `write` is one complete line.

    A line that cannot be written (full disk, quota, broken pipe) is dropped and counted; the next line that is written
    is preceded by one that gives the number of dropped lines. `put` writes bytes unbuffered and returns how many it
    wrote, or raises OSError.
    """

    def __init__(self, put: Callable[[bytes], int]) -> None:
        self._put = put
        self._torn = False
        self.dropped = 0

    def write(self, line: str) -> int:
        """Return the number of characters in `line`, written or not: a logger cannot handle an error."""
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
        """Nothing is buffered."""
