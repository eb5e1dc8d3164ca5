"""A full disk costs log lines, and the gap is told."""

from __future__ import annotations

import json

from elastic.util.capped_log import LogFile


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
