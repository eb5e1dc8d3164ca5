"""What a daemon remembers of etcd across its restarts: the newest stamp of each record (`elastic.etcd.stamps`), and the
questions that it has answered, in `STATE_DIR/stamps.jsonl`.

Each line is an entry as JSON, and the last line of a key counts. Lines are added, and synced to the disk before the
daemon acts on them; a file of more than twice the lines that it needs is replaced. Without the file the daemon takes
each key's first record that it reads for the newest. A file that cannot be written is reported, and the daemon goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from elastic.etcd.stamps import Entry, Stamps
from elastic.util.files import replace_file
from elasticd.base.log import Log

NAME = "stamps.jsonl"
SAVE_S = 60.0
"""What daemons do not act on, as a job's progress, is saved within this time."""
SPARE_LINES = 1000
_LINE = msgspec.json.Decoder(Entry)


class StampFile:
    def __init__(self, state_dir: Path, stamps: Stamps, log: Log) -> None:
        self._path = state_dir / NAME
        self._stamps = stamps
        self._log = log
        self._lines = 0
        self._saved_s = time.monotonic()
        self._failed: dict[str, Entry] = {}
        """Key -> the entry that could not be written."""
        self.error = ""
        """Why the file could not be written."""
        stamps.load(self._read())

    def _read(self) -> Iterator[Entry]:
        try:
            with open(self._path, "rb") as file:
                for line in file:
                    self._lines += 1
                    try:
                        yield _LINE.decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError):  # cut off when the machine lost its power
                        self._log.warning("stamps.line_unreadable", file=str(self._path), line=self._lines)
        except FileNotFoundError:
            self._log.info("stamps.none", file=str(self._path))
        except OSError as error:
            self._log.error("stamps.unreadable", file=str(self._path), why=str(error))

    def save(self, *, all_of_it: bool = False) -> None:
        """Called before the daemon acts on what it has read. `all_of_it`: also what could wait."""
        now_s = time.monotonic()
        if not (all_of_it or self._stamps.urgent or self._failed or now_s >= self._saved_s + SAVE_S):
            return
        self._saved_s = now_s
        entries = self._failed | {entry[0]: entry for entry in self._stamps.entries()}
        try:
            self._add(list(entries.values()))
        except OSError as error:
            self._failed = entries
            if not self.error:
                self._log.error("stamps.not_saved", file=str(self._path), why=str(error))
            self.error = str(error)
        else:
            self._failed, self.error = {}, ""

    def _add(self, entries: list[Entry]) -> None:
        if not entries:
            return
        if self._lines + len(entries) > 2 * len(self._stamps) + SPARE_LINES:
            every = list(self._stamps.all_entries())
            replace_file(self._path, _text(every), synced=True)
            self._lines = len(every)
            return
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab") as file:
            file.write(b"\n" * bool(self._lines) + _text(entries))  # the last line may have been cut off
            file.flush()
            os.fdatasync(file.fileno())
        self._lines += len(entries)


def _text(entries: Iterable[Entry]) -> bytes:
    return b"\n".join(map(msgspec.json.encode, entries))
