"""A full disk costs log lines, and the gap is told."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import resource

import pytest

from elastic.util.capped_log import LogFile, open_log, output_stream


class Disk:
    def __init__(self) -> None:
        self.content, self.room = b"", 1000

    def put(self, raw: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = raw[: self.room]
        self.content += taken
        self.room -= len(taken)
        return len(taken)


def test_lines_that_find_no_room_are_dropped_and_counted() -> None:
    disk = Disk()
    log = LogFile(disk.put)
    assert log.write('{"event": "a"}\n') == 15
    disk.room = 0
    for _ in range(3):
        log.write('{"event": "lost"}\n')
    assert log.dropped == 3
    disk.room = 1000
    log.write('{"event": "b"}\n')
    assert [json.loads(line) for line in disk.content.decode().splitlines()] == [
        {"event": "a"}, {"event": "log.lines_dropped", "count": 3}, {"event": "b"}
    ]  # fmt: skip
    assert log.dropped == 0


def test_a_line_cut_off_in_its_middle_does_not_spoil_the_next() -> None:
    disk = Disk()
    disk.room = 9
    log = LogFile(disk.put)
    log.write('{"event": "torn"}\n')
    disk.room = 1000
    log.write('{"event": "b"}\n')
    lines = disk.content.decode().splitlines()
    assert lines[0] == '{"event":'
    assert [json.loads(line) for line in lines[1:]] == [{"event": "log.lines_dropped", "count": 1}, {"event": "b"}]


def test_output_that_finds_no_room_is_dropped_and_the_number_of_bytes_is_told(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log"
    stream = output_stream(descriptor := open_log(str(path)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    print("first", file=stream)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, limits[1]))  # fails as a full disk does: Python ignores the signal
    try:
        print("lost", file=stream)
        print("lost too", file=stream)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print("last", file=stream)
    stream.close()
    os.close(descriptor)
    assert path.read_text() == "first\nelastic: 14 bytes of output found no room on the disk\nlast\n"


def test_a_log_without_room_for_its_file_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def full(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", full)
    descriptor = open_log("/any/log")
    assert os.readlink(f"/proc/self/fd/{descriptor}") == os.devnull
    os.close(descriptor)
