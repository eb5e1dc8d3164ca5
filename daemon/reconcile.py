"""The daemon's smaller decisions. Pure."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable

import msgspec

from elastic.core.records import JobState, Phase

from . import host
from .cluster import Cluster, Job
from .settings import Settings

FAILED_STARTS = 3
"""This many agents in a row that end before they report anything: the node is set aside for the job."""
END_AFTER_S = 10.0
"""Beyond the job's own stop grace: how long an agent may outlive its job before it is told to end by signal, and
again until it is killed."""


def pick_gpus(gpus: tuple[int, ...], slots: int, taken: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """A device for each slot: the least used first. Empty without GPUs."""
    if not gpus:
        return ()
    used = Counter(gpu for agent in taken for gpu in agent)
    picked = []
    for _ in range(slots):
        best = min(gpus, key=lambda gpu: (used[gpu], gpu))
        used[best] += 1
        picked.append(best)
    return tuple(picked)


def refuses_unsound(settings: Settings) -> bool:
    """An etcd that loses data is refused, except our own and where all of the cluster is this one machine."""
    etcd = settings.etcd
    return bool(etcd.endpoints) and not etcd.allow_unsound_version and not host.only_loopback(settings)


def job_state(job: Job, cluster: Cluster, me: str, here: bool, failed: str, wall_s: float) -> JobState | None:
    """The state that this daemon should write for a job, or None: none. `failed`: why no agent comes up here."""
    state = job.state
    if job.over:
        return None
    if state.phase is Phase.STOPPING and not job.members and not here:
        return msgspec.structs.replace(state, phase=Phase.STOPPED, since_wall_s=wall_s)
    if failed and not here and me not in state.avoid and state.phase is not Phase.STOPPING:
        avoid = tuple(sorted({*state.avoid, me}))
        reason = f"no agent comes up on {me}: {failed}"
        hopeless = state.phase is Phase.PENDING and not job.members and set(cluster.nodes) <= set(avoid)
        phase = Phase.FAILED if hopeless else state.phase
        since_s = wall_s if hopeless else state.since_wall_s
        return msgspec.structs.replace(state, phase=phase, reason=reason, avoid=avoid, since_wall_s=since_s)
    return None


def signal_for(job: Job, overdue_s: float, told: bool) -> signal.Signals | None:
    """How to end an agent that outlives its job, if it is time to."""
    grace_s = (job.spec.spec.stop_grace_s if job.spec else 0.0) + END_AFTER_S
    if overdue_s > 2 * grace_s:
        return signal.SIGKILL
    return signal.SIGTERM if overdue_s > grace_s and not told else None
