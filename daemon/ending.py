"""`elasticd --stop`: end all that belongs to one state directory. The daemon alone leaves agents and etcd running."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from . import launch

GRACE_S = 15.0
"""From SIGTERM until SIGKILL."""


def stop_all(state_dir: Path) -> list[str]:
    """End the daemon, then its agents (their workers end with them), then the embedded etcd. Returns what was ended."""
    ended = _end("elasticd", launch.holder(state_dir / "lock"))
    agents = {f.parent.parent.name: launch.holder(f) for f in sorted(state_dir.glob("jobs/*/agent/lock"))}
    for job, pid in agents.items():
        ended += _end(f"agent of {job}", pid)
    return ended + _end("etcd", launch.holder(state_dir / "etcd" / "lock"))


def _end(what: str, pid: int | None) -> list[str]:
    if pid is None:
        return []
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return []
    try:
        for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            signal.pidfd_send_signal(descriptor, number)
            if _gone(descriptor, wait_s):
                return [f"{what} (process {pid}, {number.name})"]
    except ProcessLookupError:
        return [f"{what} (process {pid})"]
    finally:
        os.close(descriptor)
    return [f"{what} (process {pid}) does not end"]


def _gone(descriptor: int, wait_s: float) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(wait_s * 1000))
