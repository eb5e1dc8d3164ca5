"""The machine shuts down or reboots: this node is drained first, so that its jobs leave at a step boundary.

systemd stops this service before the jobs' units, which have `Before=elasticd.service`. A node that would leave a job
below its minimum has it save a checkpoint before that.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from elastic.contract.records.reasons import Code, Text, reason
from elasticd.base.errors import Refused
from elasticd.base.log import Log
from elasticd.cluster.published_state import Snapshot

REASON = reason(Code.SHUTS_DOWN)
"""Of the drain, which the daemon removes when it starts again."""
ASK_S = 5.0
MARGIN_S = 15.0
"""Beyond the drain's own time, for what follows it."""


def is_stopping() -> bool:
    """Whether systemd is about to stop the whole machine."""
    try:
        done = subprocess.run(
            ["systemctl", "is-system-running"], capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "stopping"


def leave(
    node: str,
    within_s: float,
    drain: Callable[[str, Text, float], None],
    wait: Callable[[Callable[[Snapshot], object], float], Snapshot],
    extend: Callable[[float], None],
    log: Log,
) -> None:
    """Drain `node` and wait until no agent runs on it, at most `within_s`. `drain`: see `Actions.drain`. `extend`: asks
    systemd for as many seconds more. Without etcd nothing can be drained: the agents then end by SIGTERM."""
    began_s = time.monotonic()
    if not wait(lambda s: True, 0.0).agents:
        return
    extend(within_s + MARGIN_S)
    try:
        drain(node, REASON, within_s)
    except Refused as refused:
        log.warning("shutdown.not_drained", why=str(refused))
        return
    left = sorted(wait(lambda s: not s.agents, within_s).agents)
    log.info("shutdown.drained", left=left, took_s=round(time.monotonic() - began_s, 2))


def ours(snapshot: Snapshot, node: str) -> bool:
    """Whether the node is drained because of an earlier shutdown."""
    drain = snapshot.cluster.drains.get(node)
    return drain is not None and drain.reason == REASON
