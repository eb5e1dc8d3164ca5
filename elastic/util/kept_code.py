"""The source files that a job began with, kept in one file of the agent's folder.

A worker that is started later runs the same code as the survivors, whatever has happened to the files meanwhile. The
first process of the job on this node that reads a file keeps it; every later one gets the kept bytes. One JSON line per
file, below a first line that names the submission: a later submission begins anew.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from .files import locked_within

ENV = "ELASTIC_KEPT_CODE"
"""Environment variable: the submission and the path of the file, separated by a colon."""
MOST_BYTES = 64_000_000
"""Of the file: a script may write modules under new names at each start, and import them."""
LOCK_S = 5.0
"""Other processes hold the lock for the length of one read or write."""


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """Absolute."""
    mtime_ns: int
    source: bytes

    def changed(self) -> bool:
        """Whether the file at `path` is another one by now, or gone."""
        try:
            now = os.stat(self.path)
        except OSError:
            return True
        return (now.st_mtime_ns, now.st_size) != (self.mtime_ns, len(self.source))


class KeptCode:
    """`store`: path of the file; empty: nothing is kept."""

    def __init__(self, store: str, submission: str) -> None:
        self._store, self._header = store, msgspec.json.encode(submission) + b"\n"
        self._files: dict[str, KeptFile] = {}
        self._read_to = 0
        self.problem = ""
        """Why files could not be kept, as on a full disk; read and emptied by the user."""

    @staticmethod
    def named_by(environment: Mapping[str, str]) -> KeptCode:
        submission, _, store = environment.get(ENV, "").partition(":")
        return KeptCode(store, submission)

    def load(self) -> None:
        """Read what is kept, so that `find` has it."""
        if self._store:
            try:
                with self._locked():
                    pass
            except (OSError, msgspec.MsgspecError) as error:
                self.problem = f"{self._store} cannot be read: {error}"

    def find(self, path: str) -> KeptFile | None:
        return self._files.get(path)

    def keep(self, path: str) -> KeptFile:
        """The file as the job began with it; it is kept now if it was not. Raises OSError as `open` does. If it cannot
        be kept, as on a full disk, it is returned as it is now, and `problem` says why."""
        if (found := self._files.get(path)) is not None:
            return found
        now = _read(path)
        try:
            if self._store:
                self._add(now)
        except (OSError, msgspec.MsgspecError) as error:
            self.problem = f"{path} cannot be kept in {self._store}, so a later worker may run another: {error}"
        return self._files.setdefault(path, now)

    def _add(self, new: KeptFile) -> None:
        with self._locked() as file:
            if new.path in self._files:
                return
            line = msgspec.json.encode(new) + b"\n"
            if self._read_to + len(line) > MOST_BYTES:
                raise OSError(f"it would have more than {MOST_BYTES / 1e6:.0f} MB")
            try:
                written = file.write(line)
                if written != len(line):
                    raise OSError(f"{written} of {len(line)} bytes were written")
            except OSError:
                file.truncate(self._read_to)
                raise
            self._read_to += len(line)

    @contextmanager
    def _locked(self) -> Iterator[io.FileIO]:
        """The file, at its end and locked, with all its lines read."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with io.FileIO(os.open(self._store, flags, 0o640), "r+") as file:
            if not locked_within(file, LOCK_S):
                raise OSError(f"locked for {LOCK_S:g} s")
            if not self._read_to:
                if file.readline() != self._header:
                    file.truncate(0)
                    os.pwrite(file.fileno(), self._header, 0)
                self._read_to = len(self._header)
            file.seek(self._read_to)
            for line in file.readall().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    kept = msgspec.json.decode(line, type=KeptFile)
                    self._files.setdefault(kept.path, kept)
                    self._read_to += len(line)
            file.truncate(self._read_to)  # a line that its writer did not finish
            file.seek(self._read_to)
            yield file


def _read(path: str) -> KeptFile:
    with io.open_code(path) as file:
        mtime_ns = os.fstat(file.fileno()).st_mtime_ns
        return KeptFile(path=path, mtime_ns=mtime_ns, source=file.read())
