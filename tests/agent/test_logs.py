"""A log that grows too large loses its middle, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from elastic.agent.reports.logs import Trimmer
from elastic.util.log_trim import trim

LIMIT = 1 << 20


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 1000)
    assert trim(str(path), LIMIT) == 0
    assert path.read_bytes() == b"x" * 1000


def test_the_middle_goes_while_the_writer_writes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [b"line %08d\n" % i for i in range(300_000)]
    with open(path, "ab", buffering=0) as writer:
        writer.write(b"".join(lines))
        assert trim(str(path), LIMIT) > 1_500_000
        writer.write(b"the end\n")
        trim(str(path), LIMIT)
        assert os.stat(path).st_blocks * 512 <= LIMIT
    kept = path.read_bytes().replace(b"\0", b"").splitlines()
    assert kept[0] == b"line 00000000"
    assert kept[-2:] == [b"line 00299999", b"the end"]
    assert len(kept) > 20_000


def test_no_file_is_no_error(tmp_path: Path) -> None:
    assert trim(str(tmp_path / "none"), LIMIT) == 0


def test_the_agents_own_log_is_trimmed_with_those_of_its_workers(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("agent.log", "slot0.log")]
    for path in paths:
        path.write_bytes(b"a line of a log\n" * 300_000)
    Trimmer(1.0, str(paths[0])).trim_all([str(paths[1])])
    assert all(os.stat(path).st_blocks * 512 <= 1_000_000 for path in paths)
