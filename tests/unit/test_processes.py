"""What is read of other processes in /proc."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from elastic.util import processes


def test_the_memory_of_a_process_is_what_its_owner_sees_too() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=-1)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        known = psutil.Process(child.pid).memory_info()
        assert processes.memory_nbytes(child.pid) == (known.rss, known.shared)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.memory_nbytes(child.pid) == (0, 0), "a zombie"
    with pytest.raises(OSError, match=str(child.pid)):
        processes.memory_nbytes(child.pid)


def test_a_file_that_takes_several_reads_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_READ_BYTES", 7)
    assert len(processes.stat_fields(os.getpid())) == 50
