"""A worker as seen from outside: the state of its process, and its stack."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

from elastic.recovery.hangs.collective_frames import is_blocked_in_collective
from elastic.util.processes import is_shortage

QUICK_S, NATIVE_S = 1.0, 2.0
"""Time limits of a dump: Python frames without pausing (takes 0.1 s), native frames too (0.5 s, more under load)."""
STACK_CHARS = 6000
UNREAD = "no stack could be read"
NO_NATIVE = "(no native frames could be read)"
UNSEEN = f"{UNREAD}, as this node lacks what py-spy needs: "
"""Begins the stack of a process that could not be looked at; the error follows."""


def stack(pid: int, native: bool) -> str:
    """The stack of a process that may be stuck: Python frames, and with `native` native ones too, unless they take too
    long, or the Python frames show it waiting in a collective. Ends within QUICK_S, with `native` NATIVE_S more."""
    tool = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if tool is None:
        return "py-spy is not installed"
    try:
        quick = _dump(tool, "--nonblocking", pid, QUICK_S)
    except OSError as error:
        return f"{UNSEEN}{error.strerror}"
    if native and not is_blocked_in_collective(quick):
        native_frames = ""
        with contextlib.suppress(OSError):
            native_frames = _dump(tool, "--native", pid, NATIVE_S)
        quick = native_frames or (quick and f"{quick}\n{NO_NATIVE}")
    return quick or UNREAD


def is_in_part(dump: str) -> bool:
    """Whether it leaves open if the process is in a collective: the wait for gradients shows in native frames only."""
    return dump.startswith(UNREAD) or dump.endswith(NO_NATIVE)


def _dump(tool: str, option: str, pid: int, limit_s: float) -> str:
    """Raises OSError if the node lacks processes, descriptors or memory for it."""
    argv = [tool, "dump", option, "--pid", str(pid)]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=limit_s, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:  # no dump: the worker is reported as hung without one
        if is_shortage(error):
            raise
        return ""
    # Always UTF-8, whatever this process's locale is.
    return done.stdout.decode(errors="replace")[:STACK_CHARS] if done.returncode == 0 else ""
