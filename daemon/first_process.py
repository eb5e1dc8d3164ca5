"""elasticd as process 1 of a container: it reaps orphaned processes, as an init does."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def become_init() -> None:
    """As process 1, fork: the child returns and is elasticd; the parent passes signals on, reaps orphans, and ends as
    the child does. Any other process returns at once. Call it before there are threads."""
    if os.getpid() != 1 or (child := os.fork()) == 0:
        return

    def pass_on(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # just reaped
            os.kill(child, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
