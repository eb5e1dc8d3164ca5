"""Reading the workers' logs on this node, from the end and onwards.

A file belongs to one life of one worker: slot<slot>.<agent's incarnation>.<life>.log (a standby's: standby.….log).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"(?:slot(?P<slot>\d+)|standby)\..+\.log")
GAP = b"\n[... the middle of this log is gone: log_limit_mb ...]\n"
CHUNK_BYTES = 256 * 1024
"""Most that is read of one file at once; of its past, when only the last lines are asked for."""


@dataclass(frozen=True, slots=True)
class Line:
    slot: int | None
    """None: written by a standby before it had a slot."""
    source: str
    """The file's name."""
    text: str


class Tail:
    """Lines of all workers of one job on this node, or of one slot."""

    def __init__(self, logs_dir: Path, slot: int | None = None) -> None:
        self._dir = logs_dir
        self._slot = slot
        self._offsets: dict[str, int] = {}
        self._partial: dict[str, bytes] = {}

    def last(self, count: int) -> list[Line]:
        """The last `count` lines written so far, oldest file first; reading goes on from here."""
        lines: list[Line] = []
        for path in self._files():
            size = path.stat().st_size
            start = max(0, size - CHUNK_BYTES)
            self._offsets[path.name] = start
            read = list(self._read(path))
            lines += read[1:] if start else read  # the first one may be cut
        return lines[-count:] if count > 0 else []

    def more(self) -> Iterator[Line]:
        """What was written since."""
        for path in self._files():
            yield from self._read(path)

    def rest(self) -> Iterator[Line]:
        """Last words without an end of line, when nothing more is to come."""
        for name, raw in self._partial.items():
            if raw:
                yield self._line(name, raw)
        self._partial.clear()

    def _files(self) -> list[Path]:
        try:
            found = [p for p in self._dir.iterdir() if (m := NAME.fullmatch(p.name)) and self._wanted(m)]
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda p: (p.stat().st_mtime_ns, p.name))

    def _wanted(self, match: re.Match[str]) -> bool:
        return self._slot is None or match["slot"] == str(self._slot)

    def _read(self, path: Path) -> Iterator[Line]:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._offsets.pop(path.name, None)
            return
        try:
            offset, size = self._offsets.get(path.name, 0), os.fstat(descriptor).st_size
            if offset > size:  # it was cut: begin anew
                offset = 0
            while offset < size:
                chunk, offset = _next(descriptor, offset, size)
                self._offsets[path.name] = offset
                *whole, rest = (self._partial.pop(path.name, b"") + chunk).split(b"\n")
                self._partial[path.name] = rest
                for raw in whole:
                    yield self._line(path.name, raw)
        finally:
            os.close(descriptor)

    @staticmethod
    def _line(name: str, raw: bytes) -> Line:
        match = NAME.fullmatch(name)
        slot = match["slot"] if match else None
        return Line(int(slot) if slot else None, name, raw.decode(errors="replace").rstrip("\r"))


def _next(descriptor: int, offset: int, size: int) -> tuple[bytes, int]:
    """What stands at `offset`, at most CHUNK_BYTES, and where it ends. A hole (the agent frees the middle of a log that
    has grown too large) is passed over in one go, with a line that says so."""
    try:
        begin = os.lseek(descriptor, offset, os.SEEK_DATA)
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return GAP, size  # nothing but hole up to the end
    read = os.pread(descriptor, min(CHUNK_BYTES, end - begin), begin)
    chunk = read.replace(b"\0", b"")  # the rest of the block in which a hole begins
    return (GAP if begin > offset else b"") + chunk, begin + len(read)
