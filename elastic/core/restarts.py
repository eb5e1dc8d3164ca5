"""How often a job may fail, and when it is the job's own fault. Pure.

Wall time is compared only within the window of a budget, where the few seconds by which two hosts' clocks differ
do not matter; nothing else is decided by it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec

from .records import BrokenRecord, Failure, JobState, Phase
from .spec import Restarts

BAD_NODE_FAILURES = 3
"""A node with this many failures in the window, and more than all other nodes together, is set aside."""


KEPT_FAILURES = 200
"""So many are kept for people to see, or as many as the budget needs."""


COMM = "comm"
"""Kind of a generation in which a collective failed for a reason that nobody knew."""

NO_STATE = "NoStateError"
"""Begins the fingerprint of who found nothing to go on from. What is missing may come: a file system that is mounted
late, a store that fails for a moment, the node that has the checkpoint. So this alone is never a crash loop."""


NUMBERS_LEFT_OUT = 2
"""Generations that follow each other have numbers so far apart at most: one is left out after etcd lost its data."""


@dataclass(frozen=True, slots=True)
class Verdict:
    state: JobState
    stopped: str = ""
    """Why the job is stopped; empty: it goes on."""


def charge(state: JobState, broken: BrokenRecord, rules: Restarts, wall_s: float, other_nodes: int) -> Verdict:
    """Book one failure. `other_nodes`: how many living nodes the job could go on with besides the failing one,
    beyond its minimum (0: the node cannot be spared and is not set aside)."""
    if not broken.charged:
        return Verdict(state)
    failure = Failure(
        wall_s=wall_s,
        generation=broken.generation,
        node="" if broken.kind == COMM else broken.node,  # who says it need not be who caused it
        fingerprint=broken.fingerprint or broken.kind,
        step=broken.step,
    )
    recent = (*(f for f in state.failures if abs(wall_s - f.wall_s) < rules.window_s), failure)
    charged = msgspec.structs.replace(
        state,
        restarts=state.restarts + 1,
        failures=recent[-max(KEPT_FAILURES, rules.budget) :],
        error=broken.error or state.error,
        avoid=_avoid(recent) if other_nodes > 0 else (),
    )
    alike = sum(1 for f in recent if (f.fingerprint, f.step) == (failure.fingerprint, failure.step))
    if broken.error is not None and alike >= rules.same_failure and not failure.fingerprint.startswith(NO_STATE):
        where = f"at step {failure.step}" if failure.step else "before the first step"
        return _stop(charged, wall_s, f"crash loop: the same failure {where}, {alike} times: {broken.detail}")
    # A network that fails a job which has stepped before is not the job's fault: it waits, and tries again.
    counted = sum(1 for f in recent if f.fingerprint != COMM or not f.step)
    if counted > rules.budget:
        return _stop(
            charged,
            wall_s,
            f"{counted} failures within {rules.window_s:g} s, {rules.budget} are allowed (restarts.budget); "
            f"the last: {broken.detail}",
        )
    return Verdict(charged)


def summary(message: str) -> str:
    """The line of an exception's message that names it: the first that says anything."""
    return next((line.strip() for line in message.splitlines() if line.strip()), message)


def _stop(state: JobState, wall_s: float, reason: str) -> Verdict:
    return Verdict(msgspec.structs.replace(state, phase=Phase.FAILED, reason=reason, since_wall_s=wall_s), reason)


def _avoid(failures: tuple[Failure, ...]) -> tuple[str, ...]:
    counts = Counter(f.node for f in failures if f.node)
    return tuple(sorted(n for n, c in counts.items() if c >= BAD_NODE_FAILURES and c > sum(counts.values()) - c))


def in_vain(state: JobState, broken: BrokenRecord | None) -> int:
    """How many generations in a row, `broken` the newest, ended before their first step by a failed collective."""
    if broken is None or broken.kind != COMM or not broken.charged:
        return 0
    count, number = 1, broken.generation
    for failure in reversed(state.failures):
        if failure.generation >= number:
            continue  # `broken` itself, charged already
        if failure.fingerprint != COMM or failure.generation < number - NUMBERS_LEFT_OUT:
            break
        count, number = count + 1, failure.generation
    return count


def backoff_s(failures_without_progress: int, rules: Restarts, jitter: float) -> float:
    """Pause before a slot is tried again. None after the first failure; then doubling. `jitter` in [0, 1]."""
    if failures_without_progress <= 1:
        return 0.0
    doublings = min(failures_without_progress - 2, 64)  # a standby may fail for days: no power of two holds that
    pause = min(rules.backoff_max_s, rules.backoff_s * 2.0**doublings)
    return pause * (0.5 + jitter / 2)
