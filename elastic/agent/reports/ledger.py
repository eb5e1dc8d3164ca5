"""Keeps the job's goodput ledger on this node. The leader publishes it; the other agents continue the newest one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from elastic.agent.workers import descendants
from elastic.contract.records.job_records import RankRow
from elastic.contract.records.ledger import Bucket, Ledger, Seen, advance
from elastic.contract.records.rank_records import RanksRecord, RankTimes, Sample, every_s
from elastic.contract.worker.beat import Beat, Doing
from elastic.recovery.machine.model import Agent
from elastic.recovery.observers.ledger_view import seen, seen_slot

from .status import of_predecessors

TURNS = 32
"""Turns that are kept at most until they are booked: each holds a view of the job."""


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
        self._ranks = RankLedgers(self._started_ms, before)
        """Of this node's ranks, each on its own."""
        self._turns: list[tuple[Agent, float]] = []

    @property
    def ranks(self) -> RankLedgers:
        self._book()
        return self._ranks

    def turned(self, agent: Agent, now_s: float) -> None:
        """The turn is booked when the ledger is read next: until then it must not delay a recovery."""
        self._turns.append((agent, now_s))
        if len(self._turns) > TURNS:
            self._book()

    def _book(self) -> None:
        turns, self._turns = self._turns, []
        for agent, now_s in turns:
            self._turned(agent, now_s)

    def _turned(self, agent: Agent, now_s: float) -> None:
        after = seen(agent)
        if self._before is None:
            self._before = after
            self._ledger = self._from_start(self._ledger, after)
        self._follow(agent, after)
        stall_ms, now_ms = int(self._unbooked_s * 1000), int((now_s + self._ahead_s) * 1000)
        self._unbooked_s -= stall_ms / 1000
        self._ledger = advance(self._ledger, self._before, after, now_ms, stall_ms)
        self._ranks.turned(agent, after, now_ms)
        self._before = after

    def looked(self, beats: Mapping[int, Beat]) -> None:
        """`beats`: worker id -> what its page shows. Adds the mean of the time for which they stood still for a
        snapshot."""
        stalls = self.ranks.looked(beats)
        self._unbooked_s += sum(stalls.values()) / len(stalls) if stalls else 0.0

    def published(self, agent: Agent) -> Ledger:
        self._book()
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


NEWS = 0.8
"""The part of the time between two writes that is left out for news."""


class RankLedgers:
    """Where the time of each rank of this node went, slot by slot: what this agent saw itself, and no estimate. It
    continues the account of its predecessor on the node, which is in the node's status file; the time between the two
    was spent waiting for an agent. See `LedgerKeeper` for when to call `turned` and `looked`."""

    def __init__(self, started_ms: int, before: RanksRecord | None = None) -> None:
        """`started_ms`: time of day at which this agent's process began; `before`: the account of its predecessor."""
        self._started_ms = started_ms
        self._before = {each.slot: each for each in before.ranks} if before else {}
        self._since_ms: dict[int, int] = {}
        self._ledgers: dict[int, Ledger] = {}
        self._seen: dict[int, Seen] = {}
        self._stall_s: dict[int, float] = {}
        self._unbooked_s: dict[int, float] = {}
        """By worker id."""
        self._due_s = 0.0

    def turned(self, agent: Agent, job: Seen, now_ms: int) -> None:
        """`job`: what is seen of all ranks."""
        for slot in range(agent.policy.slots):
            after = seen_slot(agent, job, slot)
            before = self._seen.get(slot)
            if before is None:
                before = after
                self._ledgers[slot] = self._begin(slot, after)
            worker = agent.local.workers.get(slot)
            stall_s = self._unbooked_s.pop(worker.worker_id, 0.0) if worker else 0.0
            self._ledgers[slot] = advance(self._ledgers[slot], before, after, now_ms, int(stall_s * 1000))
            self._seen[slot] = after

    def looked(self, beats: Mapping[int, Beat]) -> dict[int, float]:
        """`beats`: worker id -> what its page shows. Returns for how many seconds each has stood still for a snapshot
        since the last look."""
        now = {worker_id: beat.stall_s + beat.spent_s[Doing.SAVING] for worker_id, beat in beats.items()}
        stalls = {w: max(0.0, stall_s - self._stall_s.get(w, 0.0)) for w, stall_s in now.items()}
        self._unbooked_s = {w: self._unbooked_s.get(w, 0.0) + more_s for w, more_s in stalls.items()}
        self._stall_s = now
        return stalls

    def record(
        self,
        agent: Agent,
        own_s: Callable[[int], tuple[float, ...]],
        samples: Mapping[int, Sample],
        rows: Sequence[RankRow] = (),
    ) -> RanksRecord:
        """`own_s`: rank -> its own times of a step; `samples`: by slot."""
        generation, node = agent.formed.generation, agent.policy.node
        ranks = generation.ranks(node) if generation else {}
        now = {row.slot: msgspec.structs.replace(row, parts=None) for row in rows}
        times = [
            RankTimes(
                slot=slot,
                rank=ranks.get(slot, -1),
                since_ms=self._since_ms[slot],
                until_ms=ledger.until_ms,
                ranks_ms=ledger.ranks_ms,
                open_ms=ledger.open_ms,
                own_s=own_s(ranks[slot]) if slot in ranks else (),
                sample=samples.get(slot),
                row=now.get(slot),
            )
            for slot, ledger in sorted(self._ledgers.items())
        ]
        number = generation.number if generation else 0
        return RanksRecord(node=node, generation=number, wall_s=time.time(), ranks=tuple(times))

    def due(self, agent: Agent, now_s: float, *, last: bool, news: bool) -> bool:
        """Whether the record is to be written to etcd now; then it is due again after `every_s`, or with `news` after a
        fifth of that."""
        if agent.formed.generation is None or not agent.etcd.connected:
            return False
        every = every_s(len(agent.formed.generation.nodes))
        if now_s < self._due_s - (NEWS * every if news else 0.0) and not last:
            return False
        self._due_s = now_s + every
        return True

    def _begin(self, slot: int, now: Seen) -> Ledger:
        old = self._before.get(slot)
        if old is None:
            self._since_ms[slot] = self._started_ms
            return Ledger(until_ms=self._started_ms, step=now.step)
        self._since_ms[slot] = old.since_ms
        ledger = Ledger(until_ms=old.until_ms, ranks_ms=old.ranks_ms, open_ms=old.open_ms, step=now.step)
        # What was open is lost with the agent's memory of it: it ended with the agent.
        ended = advance(
            ledger, Seen(Bucket.STEPPING, 1), Seen(Bucket.DETECT, 1, broken=True), old.until_ms
        )  # fmt: skip
        waits = Seen(Bucket.WAITING, 1)
        return advance(ended, waits, waits, self._started_ms)


def left_behind(folder: Path, submitted_wall_s: float) -> RanksRecord | None:
    """The account of this node's previous agent of the job; None: there was none, or of an earlier job of the name."""
    found = (status.rank_times for status in of_predecessors(folder, submitted_wall_s))
    return next((times for times in found if times is not None), None)
