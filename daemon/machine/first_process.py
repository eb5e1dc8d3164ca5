"""elasticd as process 1 of a container: it reaps orphaned processes, as an init does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from types import FrameType

ARENAS = 2
"""Of malloc, in place of eight for each core: every arena keeps what the threads in it have freed."""
MAPPED_BYTES = 64 << 10
"""Larger pieces, such as answers, go back to the system when they are freed. Set, it stays: else malloc raises it to
the size of the largest piece that was freed."""
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""For mallopt(3)."""


def start() -> None:
    """Call it before the first thread starts and before structlog is imported: that imports rich and pygments where
    they are installed, some 10 MB, for a format that is not used here."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # documented: `import rich` then raises ImportError
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


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
