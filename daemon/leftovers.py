"""Processes left behind by an agent's workers when the agent was killed, found by the mark in their environment.

Workers die with their agent, and a running agent ends their leftovers. Under systemd the agent's control group ends
everything; elsewhere a process in a session of its own outlives them all.
"""

from __future__ import annotations

import os
from pathlib import Path

from elastic.contract.agent_files import MARK_ENV, mark
from elastic.util.processes import kill_if, unlinks_shared_memory


def end(agent_dir: Path) -> list[int]:
    """End everything that was started below the agent of this directory, which must not be running. Returns the process
    ids.

    Never another process: the mark names the directory by device and inode, and it is read again from the very process
    that the signal goes to.
    """
    try:
        wanted = f"{MARK_ENV}={mark_of(agent_dir)}".encode()
    except OSError:
        return []
    return [pid for entry in os.listdir("/proc") if entry.isdigit() and _end(pid := int(entry), wanted)]


def mark_of(agent_dir: Path) -> str:
    """The mark of all that the agent of this directory starts. Raises OSError."""
    found = os.stat(agent_dir)
    return mark(found.st_dev, found.st_ino, os.path.abspath(agent_dir))


def _end(pid: int, wanted: bytes) -> bool:
    # The mark is read again with the process held: its id may have been reused meanwhile.
    # What unlinks the workers' shared memory ends by itself when they have ended.
    ours = pid != os.getpid() and _has(pid, wanted) and not unlinks_shared_memory(pid)
    return ours and kill_if(pid, lambda: _has(pid, wanted))


def _has(pid: int, wanted: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return wanted in file.read().split(b"\0")
    except OSError:  # gone, or another user's
        return False
