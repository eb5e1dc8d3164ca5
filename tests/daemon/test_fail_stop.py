"""A daemon that has lost a limb ends at once, so that the service manager starts another: seen by its exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest
import structlog

from elasticd.base.threads import EXIT_CODE, Threads

HEAD = """
import threading
from elasticd.base import log as logs
from elasticd.base.threads import Threads, fail_stop_whatever_fails
log = logs.start("info", "n")
fail_stop_whatever_fails(log)

def work():
    raise LookupError("a limb")

"""


@pytest.mark.parametrize(
    "thread",
    ['Threads(log).start("limb", work)', 'threading.Thread(target=work, name="limb", daemon=True).start()'],
    ids=["one of ours", "any other"],
)
def test_a_thread_that_fails_ends_the_process(thread: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{HEAD}{thread}\nthreading.Event().wait(20)"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_CODE
    assert '"event": "daemon.failed"' in done.stderr
    assert '"where": "limb"' in done.stderr
    assert "LookupError: a limb" in done.stderr


def test_work_is_repeated_until_the_daemon_ends() -> None:
    threads, turns = Threads(structlog.get_logger()), list[int]()

    def turn() -> float:
        turns.append(len(turns))
        if len(turns) == 3:
            threads.closed.set()
        return 0.0

    limb = threads.repeat("limb", turn)
    limb.join(10.0)
    assert not limb.is_alive()
    assert turns == [0, 1, 2]
