"""`elasticd --stop`: end everything that belongs to one state directory. The end of the daemon alone leaves agents and
etcd running."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from elastic.contract.agent_files import MARK_ENV, AgentStatus, mark
from elastic.util.files import read_file
from elastic.util.processes import has_ended, kill_if, unlinks_shared_memory
from elasticd.machine import host

from . import launch


def end_leftovers(agent_dir: Path) -> list[int]:
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
    entry = os.stat(agent_dir)
    return mark(entry.st_dev, entry.st_ino, os.path.abspath(agent_dir))


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


NOT = "could not be ended"
GRACE_S = 15.0
"""Time from SIGTERM to SIGKILL."""


def stop_all(state_dir: Path) -> list[str]:
    """End the daemon, then its agents (their workers end with them) and the workers' leftover processes, then the
    embedded etcd. Returns a report; a line with NOT in it names a process that is still alive."""
    report = _end_holder("elasticd", state_dir / "lock")
    for lock in sorted(state_dir.glob("jobs/*/agent/lock")):
        what = f"agent of {lock.parent.parent.name}"
        ended = _end_holder(what, lock)
        report += ended
        if not any(NOT in line for line in ended) and (pids := end_leftovers(lock.parent)):
            report.append(f"what the {what} has left ({', '.join(map(str, pids))})")
    return report + _end_holder("etcd", state_dir / "etcd" / "lock")


def unsaved(state_dir: Path) -> list[str]:
    """Jobs whose steps are lost if the agents of this state directory end: no checkpoint is written, and all of their
    ranks are here. A plain script keeps its state itself."""
    lost = []
    for lock in sorted(state_dir.glob("jobs/*/agent/lock")):
        try:
            status = msgspec.json.decode(read_file(lock.parent / "status.json"), type=AgentStatus)
            alive = launch.holder(lock) is not None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # it has not begun, or another user wrote to it
        seen = status.progress
        if not alive or seen is None or status.phase == "finishing":
            continue
        here = len(status.ranks) >= seen.world_size
        if here and seen.managed and seen.step and not seen.checkpoint_interval:
            lost.append(f"{lock.parent.parent.name} is at step {seen.step} and has no folder for checkpoints")
    return lost


def _end_holder(what: str, lock: Path) -> list[str]:
    try:
        pid = launch.holder(lock)
        if pid is None:  # and perhaps no such folder: without an embedded etcd
            return []
        owner = os.stat(lock.parent).st_uid
        if owner != os.geteuid() and host.uid_of(pid) != owner:  # see agents.Agents.adopt
            return [f"{what} {NOT}: its lock is held by process {pid}, which is not uid {owner}'s"]
        return end(what, pid)
    except OSError as error:
        return [f"{what} {NOT}: {error}"]


def end(what: str, pid: int | None) -> list[str]:
    """End one process, by SIGTERM, then SIGKILL. Returns a report; empty without a process."""
    if pid is None:
        return []
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return []
    try:
        for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            signal.pidfd_send_signal(descriptor, number)
            if has_ended(descriptor, wait_s):
                return [f"{what} (process {pid}, {number.name})"]
    except ProcessLookupError:
        return [f"{what} (process {pid})"]
    finally:
        os.close(descriptor)
    return [f"{what} {NOT} (process {pid}, SIGKILL)"]
