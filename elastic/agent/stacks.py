"""What can be seen of a worker from outside: the state of its process, and its stack."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ..core.collective_frames import is_blocked_in_collective

QUICK_S, NATIVE_S = 1.0, 2.0
"""Longest look at one worker: at its Python frames from outside (0.1 s), and below them (0.5 s, more under load)."""
STACK_CHARS = 6000


def stack(pid: int, native: bool) -> str:
    """The stack of a process that may not move: Python's, and with `native` what lies below unless that takes too
    long, or shows it waiting for others. Ends within QUICK_S, with `native` NATIVE_S more."""
    tool = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if tool is None:
        return "py-spy is not installed"
    quick = _dump(tool, "--nonblocking", pid, QUICK_S)
    if native and not is_blocked_in_collective(quick):
        quick = _dump(tool, "--native", pid, NATIVE_S) or quick
    return quick or "no stack could be read"


def _dump(tool: str, option: str, pid: int, limit_s: float) -> str:
    argv = [tool, "dump", option, "--pid", str(pid)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False)
    except (subprocess.TimeoutExpired, OSError):  # no process or descriptor to be had: who hangs is still called hung
        return ""
    return done.stdout[:STACK_CHARS] if done.returncode == 0 else ""


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat; X when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]
