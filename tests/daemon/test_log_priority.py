"""Lines for systemd's journal carry their priority, so that `journalctl --priority=warning` shows what matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CODE = """
from elasticd.base import log
log = log.start("debug", "n")
log.debug("a"); log.info("b"); log.warning("c"); log.error("d"); log.critical("e")
"""


def logged(journal: bool) -> list[str]:
    read, write = os.pipe()
    found = os.fstat(write)
    stream = f"{found.st_dev}:{found.st_ino}" if journal else "1:1"
    try:
        done = subprocess.run(
            [sys.executable, "-c", CODE], env={**os.environ, "JOURNAL_STREAM": stream}, stderr=write, timeout=30
        )
    finally:
        os.close(write)
    with open(read) as file:
        lines = file.read().splitlines()
    assert done.returncode == 0, lines
    return lines


def test_lines_for_the_journal_carry_their_priority() -> None:
    lines = logged(journal=True)
    assert [line[:3] for line in lines] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    assert [json.loads(line[3:])["event"] for line in lines] == list("abcde")


def test_lines_for_anything_else_are_plain_json() -> None:
    assert [json.loads(line)["event"] for line in logged(journal=False)] == list("abcde")
