"""Whether this worker got a SIGTERM: a script that handles it may end with any exit code, which does not show that."""

from __future__ import annotations

import contextlib
import os
import signal

_PIPE_BYTES = 65536
_ends: tuple[int, int] | None = None
"""Of the pipe: read, write."""


def watch() -> None:
    """Have Python write the number of each signal that the script handles to a pipe. A script that sets another wakeup
    descriptor, as asyncio's signal handlers do, is not watched from then on."""
    global _ends
    _ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(_ends[1], warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_unwatch)


def _unwatch() -> None:
    """In a process that the script forks, a pool's for example: what that gets is not for this worker."""
    if (before := signal.set_wakeup_fd(-1)) >= 0 and _ends is not None and before != _ends[1]:
        signal.set_wakeup_fd(before)  # the script's own


def terminated() -> bool:
    """Whether a SIGTERM has been handled since `watch`, as far as that can be known."""
    with contextlib.suppress(OSError):  # nothing to read, or closed by the script
        return _ends is not None and signal.SIGTERM in os.read(_ends[0], _PIPE_BYTES)
    return False
