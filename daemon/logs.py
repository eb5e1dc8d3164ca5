"""Reading the workers' logs on this node, from the end and onwards.

A file belongs to one life of one worker: slot<slot>.<agent's incarnation>.<life>.log (a standby's: standby.….log).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"(?:slot(?P<slot>\d+)|standby)\..+\.log")
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
        offset = self._offsets.get(path.name, 0)
        try:
            with path.open("rb") as file:
                if offset > file.seek(0, 2):  # it was cut: begin anew
                    offset = 0
                file.seek(offset)
                while chunk := file.read(CHUNK_BYTES):
                    offset += len(chunk)
                    text = chunk.replace(b"\0", b"")  # where the agent has freed the middle of a large log
                    *whole, rest = (self._partial.pop(path.name, b"") + text).split(b"\n")
                    self._partial[path.name] = rest
                    self._offsets[path.name] = offset
                    for raw in whole:
                        yield self._line(path.name, raw)
        except FileNotFoundError:
            self._offsets.pop(path.name, None)

    @staticmethod
    def _line(name: str, raw: bytes) -> Line:
        match = NAME.fullmatch(name)
        slot = match["slot"] if match else None
        return Line(int(slot) if slot else None, name, raw.decode(errors="replace").rstrip("\r"))
