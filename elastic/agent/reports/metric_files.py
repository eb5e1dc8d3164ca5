"""The values of `job.log` in files: each step once, also where steps were lost and made again.

    <tensorboard>/<job>/metrics.jsonl           one line for each step: step, wall_s, values
    <tensorboard>/<job>/events.out.tfevents.…   the same for TensorBoard, a new file for each generation

The lines are the reference: in each generation the agent of rank 0 reads them, and so knows which steps are there. It
also begins a new file of events: TensorBoard does not come back to one that it has read. Steps that were
committed and lost are cut off, and TensorBoard's file gets the mark that takes them back.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from elastic.contract.worker.messages import LoggedRow

VERSION = "brain.Event:2"
START = 1
"""SessionLog.START: readers drop events of this step and later ones that they have read before."""


def _table() -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        rows.append(byte)
    return tuple(rows)


_CRC = _table()


def masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data))))


def header(wall_s: float) -> bytes:
    """The first record of a file."""
    return record(_event(wall_s, 0, _bytes(3, VERSION.encode())))


def restart(wall_s: float, step: int) -> bytes:
    """What was written of `step` and later ones does not count any more."""
    return record(_event(wall_s, step, _bytes(7, _varint(1 << 3) + _varint(START))))


def scalars(wall_s: float, step: int, values: Mapping[str, float]) -> bytes:
    found = (
        _bytes(1, _bytes(1, name.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", _float32(value)))
        for name, value in values.items()
    )
    return record(_event(wall_s, step, _bytes(5, b"".join(found))))


def _float32(value: float) -> float:
    """As float32; beyond its range infinite."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _event(wall_s: float, step: int, content: bytes) -> bytes:
    return b"".join((_varint(1 << 3 | 1), struct.pack("<d", wall_s), _varint(2 << 3), _varint(step), content))


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


KEPT_ROWS = 2000
"""Rows in memory, for those that are repeated by the next rank 0."""
MOST_WAITING = 100_000
RETRY_S = 5.0
CLOSE_S = 5.0

log = structlog.get_logger()
_ROW = msgspec.json.Decoder(LoggedRow)


class MetricFiles:
    """The files of one job, used by one thread. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: int | None = None
        """Descriptor of metrics.jsonl."""
        self._events: int | None = None
        self._rows: dict[int, LoggedRow] = {}
        """The newest, by step; in the order of steps."""
        self._generation = 0

    @property
    def last(self) -> int:
        """The newest step; -1: none."""
        return next(reversed(self._rows), -1)

    def take(self, generation: int, begun: int, row: LoggedRow, *, repeated: bool) -> None:
        """`row` of a generation that has begun with `begun` steps committed; `repeated`: it may have been given before,
        by another rank."""
        if generation < self._generation:
            return  # a worker of a generation that is over
        if generation > self._generation:
            self.close()  # another agent may have written in between
        self._open()
        if generation > self._generation:
            self._cut(begun + 1)
            self._generation = generation
        known = self._rows.get(row.step)
        if repeated and (known is not None or (len(self._rows) >= KEPT_ROWS and row.step < next(iter(self._rows)))):
            return
        have = known.values if known else {}
        more = {name: value for name, value in row.values.items() if name not in have}
        if not more:
            return
        later = [each for step, each in self._rows.items() if step > row.step]
        if later:
            self._cut(row.step + 1)
        self._append(row, more)
        for each in later:
            self._append(each, each.values)

    def close(self) -> None:
        for descriptor in (self._lines, self._events):
            if descriptor is not None:
                os.close(descriptor)
        self._lines = self._events = None

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> None:
        if self._lines is not None and self._events is not None:
            return
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        lines = os.open(self._folder / "metrics.jsonl", flags, 0o640)
        try:
            self._rows = _read(lines)
            name = f"events.out.tfevents.{_next_stamp(self._folder):010d}.{socket.gethostname()}.{os.getpid()}"
            self._events = os.open(self._folder / name, flags, 0o640)
            _write(self._events, header(time.time()))
        except OSError:
            os.close(lines)
            raise
        self._lines = lines

    def _append(self, row: LoggedRow, values: dict[str, float]) -> None:
        assert self._lines is not None
        assert self._events is not None
        known = self._rows.get(row.step)
        line = msgspec.structs.replace(row, values=values)
        _write(self._lines, msgspec.json.encode(line.as_json()) + b"\n")
        self._rows[row.step] = msgspec.structs.replace(row, values={**(known.values if known else {}), **values})
        while len(self._rows) > KEPT_ROWS:
            del self._rows[next(iter(self._rows))]
        _write(self._events, scalars(row.wall_s, row.step, values))

    def _cut(self, step: int) -> None:
        """Remove `step` and what comes after it."""
        if step > self.last:
            return
        assert self._lines is not None
        assert self._events is not None
        os.ftruncate(self._lines, _offset(self._lines, step))
        self._rows = {s: row for s, row in self._rows.items() if s < step} or _read(self._lines)
        _write(self._events, restart(time.time(), step))


def _next_stamp(folder: Path) -> int:
    """The time in seconds, but above that of every file of events in `folder`: TensorBoard reads them in the order of
    their names, and a mark that takes steps back must come after the file that they are in."""
    stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    return max([int(time.time()), *(1 + int(stamp) for stamp in stamps if stamp.isdecimal() and len(stamp) == 10)])


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read(descriptor: int) -> dict[int, LoggedRow]:
    """The newest rows. What follows the last good line is cut off: its writer was killed. A damaged line between good
    ones stays and is passed over: the rows after it are nowhere else."""
    rows: dict[int, LoggedRow] = {}
    at = end = damaged = 0
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        for line in file:
            at += len(line)
            if (row := _row(line)) is None:
                continue
            damaged, end = damaged + at - end - len(line), at
            known = rows.pop(row.step, None)
            rows[row.step] = msgspec.structs.replace(row, values={**(known.values if known else {}), **row.values})
            if len(rows) > KEPT_ROWS:
                del rows[next(iter(rows))]
    if damaged:
        log.warning("metrics.damaged", nbytes=damaged, next="passed over")
    os.ftruncate(descriptor, end)
    return rows


def _row(line: bytes) -> LoggedRow | None:
    """None: the line is damaged, or not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        return _ROW.decode(line).from_json()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _offset(descriptor: int, step: int) -> int:
    """Where the first line of `step` or of a later one begins."""
    offset = 0
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        for line in file:
            row = _row(line)
            if row is not None and row.step >= step:
                break
            offset += len(line)
    return offset


def published(newest: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """`newest` as fields of a ProgressRecord: JSON has no number for some values."""
    odd = {name: str(float(value)) for name, value in newest.items() if not math.isfinite(value)}
    return {"logged": {name: v for name, v in newest.items() if name not in odd}, "logged_not_finite": odd}


class MetricWriter:
    """Writes in a thread of its own: a file system that hangs must not hold up the agent."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: of the job; None: nothing is written."""
        self._folder = folder
        self.newest: dict[str, float] = {}
        """The newest value of each name, in the order of their first appearance."""
        self._queue: queue.Queue[tuple[int, int, LoggedRow, bool] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    def take(self, generation: int, begun: int, rows: Sequence[LoggedRow], *, repeated: bool) -> None:
        """From the loop's thread; returns at once."""
        for row in rows if not repeated else ():
            self.newest.update(row.values)
        if self._folder is None:
            return
        if self._thread is None:
            self._begin(self._folder)
        for row in rows:
            try:
                self._queue.put_nowait((generation, begun, row, repeated))
            except queue.Full:
                log.error("metrics.dropped", step=row.step, why=f"{MOST_WAITING} rows wait to be written")

    def _begin(self, folder: Path) -> None:
        thread = threading.Thread(target=self._run, args=[folder], name="metrics", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # at a limit of threads: the rows wait, and the next ones try again
            log.warning("metrics.not_written", folder=str(folder), error=str(error), next="trying again")
        else:
            self._thread = thread

    def close(self) -> None:
        """Write what waits, for CLOSE_S seconds at most."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(CLOSE_S)
            self._ending.set()

    def _run(self, folder: Path) -> None:
        files, reported = MetricFiles(folder), ""
        while (order := self._queue.get()) is not None:
            generation, begun, row, repeated = order
            while True:
                try:
                    files.take(generation, begun, row, repeated=repeated)
                    break
                except OSError as error:
                    if str(error) != reported:
                        reported = str(error)
                        log.warning("metrics.not_written", folder=str(folder), error=reported, next="trying again")
                    files.close()
                    if self._ending.wait(RETRY_S):
                        return
        files.close()
