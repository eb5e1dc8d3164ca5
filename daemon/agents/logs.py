"""Reading the workers' logs on this node: the last lines, then new ones.

A file belongs to one worker id: slot<slot>.<agent's incarnation>.<worker id>.<submission>.log (a standby's:
standby.….log). An agent of an earlier version leaves the submission out.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from elastic.util.files import closed_after
from elasticd.base.folders import Folder, open_file, regular_files

NAME = re.compile(r"(?:slot(?P<slot>[0-9]+)|standby)\..+\.log", re.DOTALL)
OF = re.compile(r".+\.[0-9]{4,}\.(?P<submission>[^.]{1,8})\.log", re.DOTALL)
GAP = b"\n[... the middle of this log is gone: log_limit_mb ...]\n"
CHUNK_BYTES = 256 * 1024
"""Maximum bytes read from one file at once."""
FAR_BYTES = 64 * 1024
"""The same for a reader on another node: short lines take several times their length there."""
PAST_BYTES = 16 * 1024 * 1024
"""Maximum bytes read backwards, from all files together, to find the last lines."""
LINE_BYTES = 1024 * 1024
"""A longer line is passed on in pieces: a worker that never ends its line must not exhaust the daemon's memory."""


@dataclass(frozen=True, slots=True)
class Line:
    slot: int | None
    """None: written by a standby before it had a slot."""
    source: str
    """The file's name."""
    text: str


class Tail:
    """Lines of all workers of one job on this node, or of one slot."""

    def __init__(
        self,
        folder: Folder,
        slot: int | None = None,
        *,
        previous: bool = False,
        since_wall_s: float = 0.0,
        owner: int | None = None,
        submission: str = "",
    ) -> None:
        """`previous`: only the workers before the present ones. `since_wall_s`: only workers that have written since;
        lines carry no time of their own. `owner`: user id of the only user whose folder is read, as another user's job
        may have taken the name since the reader was checked; None: anyone's. `submission`: of the only job whose
        workers are read; empty: also of earlier ones of the name."""
        self._folder = folder
        self._owner = owner
        self._slot = slot
        self._previous = previous
        self._submission = submission[:8]
        self._since_ns = int(since_wall_s * 1e9)
        self._offsets: dict[str, int] = {}
        self._partial: dict[str, bytes] = {}
        self.cut = False
        """Whether `last` returned fewer lines than requested because it had read PAST_BYTES."""

    def last(self, count: int) -> list[Line]:
        """The last `count` lines written so far, oldest file first; reading goes on from here."""
        lines: list[Line] = []
        budget = PAST_BYTES
        for name, descriptor in self._opened(newest_first=True):
            size = self._offsets[name] = os.fstat(descriptor).st_size
            past = _Past(descriptor, size, budget)
            *complete, self._partial[name] = past.lines(count - len(lines))
            budget -= past.read
            self.cut = self.cut or (past.cut and len(lines) + len(complete) < count)
            lines = [self._line(name, raw) for raw in complete] + lines
        return lines

    @property
    def offsets(self) -> dict[str, int]:
        """File -> offset after its last whole line that was read, for `more_from`."""
        return {name: offset - len(self._partial.get(name, b"")) for name, offset in self._offsets.items()}

    def more_from(self, offsets: Mapping[str, int]) -> list[Line]:
        """Lines written since an earlier reader's `offsets`, of up to FAR_BYTES of each file."""
        self._offsets = dict(offsets)
        return list(self.more(FAR_BYTES))

    def more(self, most: int = 0) -> Iterator[Line]:
        """Lines written since the last read, of up to `most` bytes of each file; 0: all of them."""
        for name, descriptor in self._opened():
            yield from self._read(name, descriptor, most)

    def rest(self) -> Iterator[Line]:
        """Last lines without a newline, when nothing more will be written."""
        for name, raw in self._partial.items():
            if raw:
                yield self._line(name, raw)
        self._partial.clear()

    def _opened(self, newest_first: bool = False) -> Iterator[tuple[str, int]]:
        """Name and descriptor of each matching log, by modification time."""
        try:
            with self._folder.opened() as folder:
                if self._owner not in (None, os.fstat(folder).st_uid):
                    return
                files = [(at, name) for at, name in regular_files(folder) if self._wanted(name)]
                files = previous(files) if self._previous else files
                for at, name in sorted(files, reverse=newest_first):
                    if at < self._since_ns:
                        continue
                    try:
                        descriptor = open_file(folder, name)
                    except (FileNotFoundError, PermissionError):  # removed or replaced since it was listed
                        self._offsets.pop(name, None)
                        continue
                    with closed_after(descriptor):
                        yield name, descriptor
        except (FileNotFoundError, NotADirectoryError):
            return  # nothing written yet; or the directory was replaced by a link

    def _wanted(self, name: str) -> bool:
        match = NAME.fullmatch(name)
        of = OF.fullmatch(name) if self._submission else None
        if of is not None and of["submission"] != self._submission:
            return False
        return match is not None and (self._slot is None or match["slot"] == str(self._slot))

    def _read(self, name: str, descriptor: int, most: int = 0) -> Iterator[Line]:
        """`most`: bytes to read at most; 0: all there are."""
        offset, size = self._offsets.get(name, 0), os.fstat(descriptor).st_size
        if offset > size:  # truncated: start over
            offset = 0
        whole_file, any_line = not most, False
        while offset < size and (whole_file or most > 0):
            chunk, offset = _next(descriptor, offset, size, CHUNK_BYTES if whole_file else min(most, CHUNK_BYTES))
            most -= len(chunk)
            self._offsets[name] = offset
            *complete, rest = (self._partial.pop(name, b"") + chunk).split(b"\n")
            if len(rest) > LINE_BYTES:
                complete, rest = [*complete, rest], b""
            self._partial[name] = rest
            any_line = any_line or bool(complete)
            for raw in complete:
                yield self._line(name, raw)
        if offset < size and not any_line:  # a progress bar never ends its line; the next reader would be stuck here
            yield self._line(name, self._partial.pop(name, b""))

    @staticmethod
    def _line(name: str, raw: bytes) -> Line:
        match = NAME.fullmatch(name)
        slot = match["slot"] if match else None
        return Line(int(slot) if slot else None, name, raw.decode(errors="replace").rstrip("\r"))


def previous(found: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Of (time, file name): for each slot the file before its newest, of the worker that was replaced."""
    by_slot: dict[str, list[tuple[int, str]]] = {}
    for at, name in sorted(found):
        match = NAME.fullmatch(name)
        if match and match["slot"]:
            by_slot.setdefault(match["slot"], []).append((at, name))
    return sorted(files[-2] for files in by_slot.values() if len(files) > 1)


class _Past:
    """The end of one file, read backwards in chunks until enough of it is known."""

    def __init__(self, descriptor: int, size: int, budget: int) -> None:
        self._descriptor = descriptor
        self._segments = list(_segments(descriptor, size))
        self._budget = budget
        self.read = 0
        """Bytes read so far."""
        self.cut = False
        """Whether the budget ended before the file did."""

    def lines(self, count: int) -> list[bytes]:
        """The last `count` whole lines, followed by the text after the last newline."""
        chunks, ends = [], 0
        for chunk in self._backwards():
            chunks.append(chunk)
            ends += chunk.count(b"\n")
            if ends > count:
                break
        *complete, rest = b"".join(reversed(chunks)).split(b"\n")
        if self.cut:
            complete = complete[1:]  # a piece of a line
        return [*(complete[-count:] if count > 0 else []), rest[-LINE_BYTES:]]

    def _backwards(self) -> Iterator[bytes]:
        for begin, end in reversed(self._segments):
            while end > begin:
                if self.read >= self._budget:
                    self.cut = True
                    return
                start = max(begin, end - CHUNK_BYTES)
                raw = os.pread(self._descriptor, end - start, start)
                self.read += end - start
                yield raw.replace(b"\0", b"")  # zeros: the rest of the block in which a hole begins
                end = start
            if begin > 0:
                yield GAP


def _segments(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the parts of a file that are not holes."""
    offset = 0
    while offset < size and (part := _data(descriptor, offset)):
        begin, offset = part
        yield begin, min(offset, size)


def _data(descriptor: int, offset: int) -> tuple[int, int] | None:
    """(begin, end) of the next part that is no hole; None: there is nothing but hole up to the end."""
    try:
        begin = os.lseek(descriptor, offset, os.SEEK_DATA)
        return begin, os.lseek(descriptor, begin, os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def _next(descriptor: int, offset: int, size: int, most: int) -> tuple[bytes, int]:
    """The data at `offset`, at most `most` bytes, and its end. A hole (the agent frees the middle of a log that has
    grown too large) is skipped at once, with a line that says so."""
    if (part := _data(descriptor, offset)) is None:
        return GAP, size
    begin, end = part
    read = os.pread(descriptor, min(most, end - begin), begin)
    chunk = read.replace(b"\0", b"")  # the rest of the block in which a hole begins
    return (GAP if begin > offset else b"") + chunk, begin + len(read)
