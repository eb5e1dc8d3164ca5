"""A log file that loses lines when its disk is full, and never fails the process that writes to it."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from typing import Any, TextIO

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def open_log(path: str) -> int:
    """A descriptor that appends to the log; to nothing where a full disk has no room for the file. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o640)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        return os.open(os.devnull, flags)


def output_stream(descriptor: int, errors: str = "strict") -> TextIO:
    """An output stream of a process, whose log is `descriptor`. What does not find room is dropped and counted, and the
    number is written once there is room again: a full disk ends no training."""
    raw = _OutputFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), errors=errors, line_buffering=True)


class _OutputFile(io.FileIO):
    _dropped = 0

    def write(self, content: Any, /) -> int:
        given = memoryview(content).nbytes
        try:
            if self._dropped:
                super().write(f"elastic: {self._dropped} bytes of output found no room on the disk\n".encode())
                self._dropped = 0
            return super().write(content) or 0
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._dropped += given
            return given


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
