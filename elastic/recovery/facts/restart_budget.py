"""The restart budget: how often a job may fail, and when the job itself is at fault. Pure.

Wall time is compared only within the window of a budget, where a clock difference of a few seconds between two hosts
does not matter; nothing else is decided by it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import msgspec

from elastic.contract.job.spec import Restarts
from elastic.contract.records.incident_account import COMM
from elastic.contract.records.job_records import BrokenRecord, Failure, JobState, MemberRecord
from elastic.contract.records.phases import PhaseTrigger, after, allows
from elastic.contract.records.reasons import Code, Reason, Text, reason
from elastic.contract.structs import replace

BAD_NODE_FAILURES = 3
"""A node with this many failures in the window, and more than all other nodes together, is excluded."""


KEPT_FAILURES = 200
"""How many failures are kept, for users to see; more if the budget is larger."""


STORE = "store"
"""Failure kind: the generation's store held a value that none of its ranks wrote, or was closed for its size."""

SHORTAGE = "shortage"
"""Failure kind: a process could not be started, for lack of something on its node."""

OF_THE_NETWORK = frozenset({COMM, STORE})
"""Kinds that no node is charged with, and not the job either once it has stepped."""

NUMBERS_LEFT_OUT = 2
"""The numbers of consecutive generations differ by at most this, and a row of failures is seen as one: one number is
skipped after etcd has lost its data. Where more are, above those of the checkpoints, a row begins anew."""


OF_THE_TEXT = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "NameError"}
)
"""Exceptions that the text of a program, or what is installed, causes: the next try raises them again."""

OF_THE_TYPES = frozenset({"AttributeError", "TypeError", "ValueError", "KeyError", "IndexError", "AssertionError"})
"""Exceptions that mostly are of that kind, too: before the first step of a job they are taken for it."""


FATAL = "Fatal Python error: "
"""Begins what faulthandler writes about a signal."""

OWN_ENDS = frozenset({str(Code.EXITED), "SIGABRT", "SIGSEGV", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP"})
"""Fingerprints of ends without an exception that a process brings about by itself. What kills from outside, an operator
or the kernel for lack of memory, sends other signals; and SIGBUS is mostly a full /dev/shm of that node."""


class Charge(msgspec.Struct, frozen=True):
    state: JobState
    stopped: Text = ""
    """Why the job is stopped; empty: it goes on."""


def charge(
    state: JobState,
    broken: BrokenRecord,
    rules: Restarts,
    wall_s: float,
    other_nodes: int | None,
    *,
    before: int | None = None,
    stepped: bool | None = None,
    survives: bool = False,
) -> Charge:
    """Count one failure against the budget. `other_nodes`: how many living nodes the job could go on with besides the
    failing one, beyond its minimum (0: no node can be spared, none is excluded; None: unknown, no further one is).
    `before`: number of the generation before the one that failed; None: one less. `stepped`: whether the job has made a
    step; None: it is a plain one, of which that is not known. `survives`: whether a worker holds the state of a
    job that has: then replacements that do not come as far as a step never end the job. It waits with its state, and
    tries again, until a person has looked."""
    if not broken.charged:
        return Charge(state)
    error = broken.error or state.error
    if _follows_from_another(state, broken, before):
        return Charge(replace(state, error=error))
    failure = Failure(
        wall_s=wall_s,
        generation=broken.generation,
        node="" if broken.kind in OF_THE_NETWORK else broken.node,  # the node that reports it need not have caused it
        fingerprint=broken.fingerprint or broken.kind,
        step=broken.step,
        slots=_alike(broken),
        no_state=broken.no_state,
    )
    failures = state.failures
    if broken.error:
        failures, further = _in_earlier_tries(failures, failure)
        if further is None:
            return Charge(replace(state, error=error, failures=failures))
        failure = further
    recent = (*(f for f in failures if abs(wall_s - f.wall_s) < rules.window_s), failure)
    kept = recent[-max(KEPT_FAILURES, rules.budget) :]
    charged = replace(
        state,
        restarts=state.restarts + 1,
        failures=kept,
        error=error,
        excluded_nodes=_set_aside(state, kept, other_nodes),
    )
    # Where no rank of the generation found a state, those that live hold none.
    waits = survives and bool(stepped) and not broken.no_state
    fault = _at_fault(recent, broken, rules, stepped=stepped, first=not state.restarts, waits=waits)
    if fault := fault or _ends_alike(recent, broken, rules, spared=bool(other_nodes), waits=waits):
        return _stop(charged, wall_s, reason(fault.code, broken.detail, _said(broken), **fault.values))
    # A failed collective of a job that has stepped before is not the job's fault but the network's: the job retries.
    counted = sum(1 for f in recent if (f.fingerprint not in OF_THE_NETWORK if f.step else not waits))
    if counted > rules.budget:
        limits = {"count": counted, "window_s": rules.window_s, "budget": rules.budget}
        return _stop(charged, wall_s, reason(Code.OVER_BUDGET, broken.detail, **limits))
    return Charge(charged)


def _at_fault(
    recent: tuple[Failure, ...],
    broken: BrokenRecord,
    rules: Restarts,
    *,
    stepped: bool | None,
    first: bool,
    waits: bool,
) -> Reason | None:
    """Why the next try would fail as well; None: it need not. What elastic refuses, a mistake in the program that shows
    before the first step, and the same failure again and again. `first`: nothing has failed before."""
    failure = recent[-1]
    if broken.error is None or failure.no_state:
        return None
    if broken.error.misuse:
        return reason(Code.MISUSE)
    sure = OF_THE_TEXT if stepped is None else OF_THE_TEXT | OF_THE_TYPES
    if waits and not failure.step:
        return None
    if first and not stepped and not failure.step and broken.error.exception in sure:
        return reason(Code.FAILS_AT_ONCE)
    alike = sum(1 for f in recent if (f.fingerprint, f.step) == (failure.fingerprint, failure.step))
    crawling = _after_each_step(recent)
    if max(alike, crawling) < rules.same_failure:
        return None
    where = f"at step {failure.step}" if failure.step else "before the first step"
    if crawling > alike:
        where, alike = "after each step", crawling
    return reason(Code.CRASH_LOOP, where=where, count=alike)


def _ends_alike(
    recent: tuple[Failure, ...], broken: BrokenRecord, rules: Restarts, *, spared: bool, waits: bool
) -> Reason | None:
    """Why the next try would end as well; None: it need not. The same end without an exception at the same step,
    several times in a row. If all were on one node, that is excluded first where it can be spared: its memory may be
    bad."""
    last = recent[-1]
    if broken.error is not None or last.fingerprint not in OWN_ENDS or (waits and not last.step):
        return None
    same = (last.fingerprint, last.step)
    row = list(itertools.takewhile(lambda f: (f.fingerprint, f.step) == same, reversed(recent)))
    if len(row) < rules.same_failure or (spared and len({f.node for f in row}) == 1):
        return None
    where = f"at step {last.step}" if last.step else "before the first step"
    return reason(Code.ENDS_ALIKE, where=where, count=len(row))


def _said(broken: BrokenRecord) -> str:
    """What a library has said before it aborted the process."""
    lines = list(itertools.takewhile(lambda line: not line.startswith(FATAL), broken.last_lines))
    return lines[-1].strip() if lines and len(lines) < len(broken.last_lines) else ""


def _stop(state: JobState, wall_s: float, why: Reason) -> Charge:
    if not allows(state.phase, PhaseTrigger.FAILED):
        return Charge(state)  # it was told to stop meanwhile, or has ended: that is not overridden
    return Charge(after(state, PhaseTrigger.FAILED, why, wall_s), why)


def _follows_from_another(state: JobState, broken: BrokenRecord, before: int | None) -> bool:
    """Whether no state was found because of the failure of the previous generation, which is counted already. If none
    is found in the next generation either, that is a failure of its own."""
    before = broken.generation - 1 if before is None else before
    return broken.no_state and any(f.generation == before and not f.no_state for f in state.failures)


def _after_each_step(failures: tuple[Failure, ...]) -> int:
    """How many times in a row the last failure occurred, in consecutive generations of at most one step each."""
    times = 1
    for older, newer in zip(failures[-2::-1], failures[:0:-1], strict=True):
        follows = 1 <= newer.generation - older.generation <= NUMBERS_LEFT_OUT
        crawls = 0 <= (newer.step or 0) - (older.step or 0) <= 1
        if not (follows and crawls and newer.fingerprint == older.fingerprint):
            break
        times += 1
    return times


def _alike(broken: BrokenRecord) -> tuple[int, ...]:
    """The slots of the failing node in which the same has happened in this generation."""
    same = (
        loss for loss in broken.also if (loss.node, loss.kind, loss.detail) == (broken.node, broken.kind, broken.detail)
    )
    return tuple(dict.fromkeys([*broken.slots, *(slot for loss in same for slot in loss.slots)]))


def _in_earlier_tries(failures: tuple[Failure, ...], new: Failure) -> tuple[tuple[Failure, ...], Failure | None]:
    """A failing setup fails in each worker of a node: together, or in one after the other, each in a generation of its
    own, and a quick worker may have failed again before a slow one has failed once. So a try is one failure, with the
    slots that have failed in it.

    Returns `failures` with the slots of `new` added to the tries that lack them, and `new` with those that have failed
    once more than in all of these; None: there is none.
    """
    tries, left = list(failures), new.slots
    if new.step or not left:
        return failures, new
    first = len(tries)
    while first and (tries[first - 1].node, tries[first - 1].fingerprint) == (new.node, new.fingerprint):
        if tries[first - 1].step or not tries[first - 1].slots:
            break
        first -= 1
    for at in range(first, len(tries)):
        there = tries[at].slots
        tries[at] = replace(tries[at], slots=(*there, *(slot for slot in left if slot not in there)))
        left = tuple(slot for slot in left if slot in there)
    return tuple(tries), replace(new, slots=left) if left else None


def _set_aside(state: JobState, failures: tuple[Failure, ...], other_nodes: int | None) -> tuple[str, ...]:
    """Excluded nodes: those that fail more than others, where one can be spared, and those that a node's daemon has
    excluded because no agent starts there. The daemon ends either exclusion after a while."""
    by_failures = set(_avoid(failures) if other_nodes != 0 else ())
    if other_nodes is None:
        by_failures &= set(state.excluded_nodes)
    return tuple(sorted({*state.no_agent, *by_failures}))


def lacking(state: JobState, members: Iterable[MemberRecord], *, managed: bool) -> JobState:
    """`state` with the nodes excluded on which workers cannot be started for lack of something: another node is taken
    where there is one. Where there is none they stay, and are taken back once all their workers are ready; not in a
    plain job, in which that shows only when all its workers are started anew."""
    records = list(members)
    new = {m.node: m.lacks for m in records if m.lacks and m.node not in state.excluded_nodes}
    back = {m.node for m in records if managed and m.node in state.no_agent and len(m.ready) == m.slots}
    if not (new or back):
        return state
    return replace(
        state,
        excluded_nodes=tuple(sorted({*state.excluded_nodes, *new} - back)),
        no_agent={node: why for node, why in {**state.no_agent, **new}.items() if node not in back},
    )


def _avoid(failures: tuple[Failure, ...]) -> tuple[str, ...]:
    counts = Counter(f.node for f in failures if f.node)
    return tuple(sorted(n for n, c in counts.items() if c >= BAD_NODE_FAILURES and c > sum(counts.values()) - c))


def failed_formations_in_a_row(state: JobState, broken: BrokenRecord | None) -> int:
    """How many generations in a row, up to `broken`, ended before their first step with a failed collective."""
    if broken is None or broken.kind not in OF_THE_NETWORK or not broken.charged:
        return 0
    count, number = 1, broken.generation
    for failure in reversed(state.failures):
        if failure.generation >= number:
            continue  # `broken` itself, counted already
        if failure.fingerprint not in OF_THE_NETWORK or failure.generation < number - NUMBERS_LEFT_OUT:
            break
        count, number = count + 1, failure.generation
    return count


def backoff_s(failures_without_progress: int, rules: Restarts, jitter: float) -> float:
    """Seconds before a slot is tried again: 0 after the first failure, then doubling. `jitter` in [0, 1]."""
    if failures_without_progress <= 1:
        return 0.0
    doublings = min(failures_without_progress - 2, 64)  # a standby may fail for days: 2.0**n overflows
    pause = min(rules.backoff_max_s, rules.backoff_s * 2.0**doublings)
    return pause * (0.5 + jitter / 2)
