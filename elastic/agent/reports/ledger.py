"""Keeps the job's goodput ledger on this node. The leader publishes it; the other agents continue the newest one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import msgspec

from elastic.agent.workers import descendants
from elastic.contract.records.ledger import Bucket, Ledger, Seen, advance
from elastic.contract.records.rank_records import RanksRecord
from elastic.contract.worker.beat import Beat
from elastic.recovery.machine.model import Agent
from elastic.recovery.observers.ledger_view import seen

from .rank_ledgers import RankLedgers


class LedgerKeeper:
    """Call `turned` after each turn of the state machine, and `looked` when the beat pages were read."""

    def __init__(self, submitted_wall_s: float, started_wall_s: float, before: RanksRecord | None = None) -> None:
        """`started_wall_s`: when this agent's process began. Time before that which no ledger has was spent waiting.
        `before`: the account of this node's previous agent."""
        self._ahead_s = time.time() - time.monotonic()
        """Time of day less monotonic time, at the start: a clock that is set later changes no second here."""
        self._before: Seen | None = None
        self._started_ms = int(started_wall_s * 1000)
        self._ledger = Ledger(until_ms=int(submitted_wall_s * 1000))
        self._seen: Ledger | None = None
        """The newest that etcd has shown."""
        self._unbooked_s = 0.0
        self.ranks = RankLedgers(self._started_ms, before)
        """Of this node's ranks, each on its own."""

    def turned(self, agent: Agent, now_s: float) -> None:
        after = seen(agent)
        if self._before is None:
            self._before = after
            self._ledger = self._from_start(self._ledger, after)
        self._follow(agent, after)
        stall_ms, now_ms = int(self._unbooked_s * 1000), int((now_s + self._ahead_s) * 1000)
        self._unbooked_s -= stall_ms / 1000
        self._ledger = advance(self._ledger, self._before, after, now_ms, stall_ms)
        self.ranks.turned(agent, now_ms)
        self._before = after

    def looked(self, beats: Mapping[int, Beat]) -> None:
        """`beats`: worker id -> what its page shows. Adds the mean of the time for which they stood still for a
        snapshot."""
        stalls = self.ranks.looked(beats)
        self._unbooked_s += sum(stalls.values()) / len(stalls) if stalls else 0.0

    def published(self, agent: Agent) -> Ledger:
        self._ledger = msgspec.structs.replace(self._ledger, by=agent.policy.incarnation)
        return self._ledger

    def _from_start(self, ledger: Ledger, now: Seen) -> Ledger:
        waits = Seen(Bucket.WAITING, now.ranks)
        return advance(ledger, waits, waits, self._started_ms)

    def _follow(self, agent: Agent, now: Seen) -> None:
        """Continue what another agent has published: it leads, or has led until now."""
        progress = agent.etcd.view.progress
        theirs = progress.ledger if progress is not None else None
        if theirs is None or theirs == self._seen:
            return
        self._seen = theirs
        if theirs.by != agent.policy.incarnation:
            self._ledger = self._from_start(theirs, now) if theirs.until_ms < self._started_ms else theirs
            if self._before is not None:  # it has those steps already: they are not made again
                known = max(self._before.step, min(theirs.step, now.step))
                self._before = msgspec.structs.replace(self._before, step=known)


def began_wall_s() -> float:
    """Time of day at which this process began, to a hundredth of a second."""
    ticks = descendants.started(os.getpid())
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - max(0.0, age_s)
