"""How often a job may fail, and when it is the job's own fault. Pure.

Wall time is compared only within the window of a budget, where the few seconds by which two hosts' clocks differ
do not matter; nothing else is decided by it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec

from .phases import PhaseTrigger, after, allows
from .records import BrokenRecord, Failure, JobState
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


def charge(state: JobState, broken: BrokenRecord, rules: Restarts, wall_s: float, other_nodes: int | None) -> Verdict:
    """Book one failure. `other_nodes`: how many living nodes the job could go on with besides the failing one,
    beyond its minimum (0: the node cannot be spared and is not set aside; None: not known, and none more is)."""
    if not broken.charged:
        return Verdict(state)
    error = broken.error or state.error
    if _follows_from_another(state, broken):
        return Verdict(msgspec.structs.replace(state, error=error))
    failure = Failure(
        wall_s=wall_s,
        generation=broken.generation,
        node="" if broken.kind == COMM else broken.node,  # who says it need not be who caused it
        fingerprint=broken.fingerprint or broken.kind,
        step=broken.step,
        slots=broken.slots,
    )
    if broken.error and state.failures and (last := _with_neighbour(state.failures[-1], failure)) is not None:
        return Verdict(msgspec.structs.replace(state, error=error, failures=(*state.failures[:-1], last)))
    recent = (*(f for f in state.failures if abs(wall_s - f.wall_s) < rules.window_s), failure)
    kept = recent[-max(KEPT_FAILURES, rules.budget) :]
    charged = msgspec.structs.replace(
        state,
        restarts=state.restarts + 1,
        failures=kept,
        error=error,
        excluded_nodes=_set_aside(state, kept, other_nodes),
    )
    alike = sum(1 for f in recent if (f.fingerprint, f.step) == (failure.fingerprint, failure.step))
    crawling = _after_each_step(recent)
    loop = max(alike, crawling) >= rules.same_failure and not failure.fingerprint.startswith(NO_STATE)
    if broken.error is not None and loop:
        where = f"at step {failure.step}" if failure.step else "before the first step"
        if crawling > alike:
            where, alike = "after each step", crawling
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
    if not allows(state.phase, PhaseTrigger.FAILED):
        return Verdict(state)  # it was told to stop meanwhile, or has ended: that stands
    return Verdict(after(state, PhaseTrigger.FAILED, reason, wall_s), reason)


def _follows_from_another(state: JobState, broken: BrokenRecord) -> bool:
    """Whether no state was found because of the failure of the generation before, which is booked. When none is found
    in the next generation either, that is a failure of its own."""
    return broken.fingerprint.startswith(NO_STATE) and any(
        f.generation == broken.generation - 1 and not f.fingerprint.startswith(NO_STATE) for f in state.failures
    )


def _after_each_step(failures: tuple[Failure, ...]) -> int:
    """How often the last failure came in generations that follow each other and made no more than one step each."""
    times = 1
    for older, newer in zip(failures[-2::-1], failures[:0:-1], strict=True):
        follows = 1 <= newer.generation - older.generation <= NUMBERS_LEFT_OUT
        crawls = 0 <= (newer.step or 0) - (older.step or 0) <= 1
        if not (follows and crawls and newer.fingerprint == older.fingerprint):
            break
        times += 1
    return times


def _with_neighbour(last: Failure, new: Failure) -> Failure | None:
    """`last` with the slots of `new`, if that is the same failure of other workers of the node; None: it is not.

    A setup that fails fails in each worker of a node. They do so one after the other, each in a generation of its own.
    """
    alike = (last.node, last.fingerprint) == (new.node, new.fingerprint) and not last.step and not new.step
    if not alike or not new.slots or not last.slots or set(new.slots) & set(last.slots):
        return None
    return msgspec.structs.replace(last, slots=(*last.slots, *new.slots))


def _set_aside(state: JobState, failures: tuple[Failure, ...], other_nodes: int | None) -> tuple[str, ...]:
    """Nodes that fail more than others, where one can be spared, and those that a node's daemon has set aside because
    no agent starts there: these are the ones that the failures booked so far do not explain. The daemon ends either
    exclusion after a while."""
    by_daemon = set(state.excluded_nodes) - set(_avoid(state.failures))
    by_failures = set(_avoid(failures) if other_nodes != 0 else ())
    if other_nodes is None:
        by_failures &= set(state.excluded_nodes)
    return tuple(sorted(by_daemon | by_failures))


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
