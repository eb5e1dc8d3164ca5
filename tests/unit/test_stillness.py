"""Why a job makes no step: what is told to other agents, and which rank is named."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

import pytest

from elastic.contract.job.spec import Hang
from elastic.contract.records.reasons import Code, codes, reason
from elastic.contract.records.standings import FIRST_STEP_S, Standing
from elastic.contract.worker.beat import Beat, Doing
from elastic.recovery.hangs.hang_rules import judge
from elastic.recovery.hangs.stillness import StillRank, all_ahead, explain, same, standing, still_s, worth_telling

NODES = {0: "a", 1: "a", 2: "b", 3: "b"}
TICK_S = 0.2
RULES = Hang(floor_s=2.0, ceiling_s=16.0, factor=10.0)


def known(rank: int, doing: str = "exchanging", at: tuple[int, int, int] = (3, 40, 2), **more: bool) -> StillRank:
    waits = more.pop("waits", doing in ("exchanging", "syncing", "finishing"))
    return StillRank(NODES[rank], Standing(rank=rank, position=at, doing=doing, silent_s=5.0, waits=waits, **more), 0.0)


def others(*but: int) -> list[StillRank]:
    return [known(rank) for rank in NODES if rank not in but]


def test_a_job_stands_still_after_ten_step_times() -> None:
    assert still_s(0.5, RULES) == 5.0
    assert still_s(0.01, RULES) == 2.0
    assert still_s(0.0, RULES) == FIRST_STEP_S


def test_the_rank_that_computes_while_the_others_wait_is_named() -> None:
    cause = explain([*others(2), known(2, "computing", (3, 40, 0))], NODES, 3)
    assert (cause.rank, cause.node) == (2, "b")
    assert cause.because == reason(Code.DOES_NOT_WAIT, doing="computing", place="step 41", furthest="step 41")


def test_the_rank_that_waits_a_step_behind_is_named() -> None:
    ahead = [known(rank, at=(3, 41, 2)) for rank in (0, 1, 2)]
    cause = explain([*ahead, known(3)], NODES, 3)
    assert (cause.rank, cause.node) == (3, "b")
    assert cause.because == reason(Code.BEHIND, doing="exchanging", place="step 41", furthest="step 42")


@pytest.mark.parametrize("waits", [False, True])
def test_the_rank_that_is_in_setup_while_the_others_hand_over_is_named(waits: bool) -> None:
    """By itself, or in a collective that it alone calls."""
    there = [known(rank, "syncing", (3, -1, 0)) for rank in (0, 1, 3)]
    cause = explain([*there, known(2, "starting", (3, -1, -1), waits=waits)], NODES, 3)
    assert cause.rank == 2
    facts = {
        "doing": "starting",
        "place": "setup in generation 3",
        "furthest": "the hand-over of state in generation 3",
    }
    assert cause.because == reason(Code.BEHIND if waits else Code.DOES_NOT_WAIT, **facts)


def test_a_rank_that_runs_no_python_or_is_stopped_comes_first() -> None:
    computing = known(0, "computing", (3, 40, 0))
    assert Code.DEAF in codes(explain([computing, *others(0, 3), known(3, deaf=True)], NODES, 3).because)
    stopped = known(1, stopped=True, waits=False)
    assert explain([computing, stopped, *others(0, 1)], NODES, 3).rank == 1


def test_standstill_cause_names_the_rank_whose_train_has_returned() -> None:
    cause = explain([*others(1), known(1, "finishing", (3, 40, 2**31))], NODES, 3)
    assert cause.rank == 1
    assert codes(cause.because) == {Code.HAS_RETURNED}


def test_a_rank_that_still_works_is_named_where_the_others_have_returned() -> None:
    ends = [known(rank, "finishing", (3, 40, 2**31)) for rank in (1, 2, 3)]
    assert explain([known(0, "computing", (3, 40, 0)), *ends], NODES, 3).rank == 0


def test_a_rank_of_which_nothing_is_known_is_named() -> None:
    cause = explain(others(2, 3), NODES, 3)
    assert (cause.rank, cause.node) == (2, "b")
    assert cause.because == reason(Code.UNKNOWN_RANK, reason(Code.AND_OTHERS, count=1))


def test_standstill_cause_ignores_standings_of_an_earlier_standstill() -> None:
    earlier = known(2, "computing", (3, 7, 0), waits=False)
    assert codes(explain([*others(2), earlier], NODES, 3).because) == {Code.UNKNOWN_RANK}
    older = known(2, "computing", (2, 40, 0), waits=False)
    assert codes(explain([*others(2), older], NODES, 3).because) == {Code.UNKNOWN_RANK}


def test_a_declared_span_is_said_to_be_one() -> None:
    cause = explain([*others(0), known(0, "quiet", (3, 40, 0), waits=False, quiet=True)], NODES, 3)
    assert cause.declared
    assert codes(cause.because) == {Code.IN_QUIET}


def test_where_all_wait_for_each_other_no_rank_is_named() -> None:
    cause = explain(others(), NODES, 3)
    assert cause.rank is None
    assert cause.because == reason(Code.ALL_WAIT, count=4, place="step 41")


def test_the_same_is_told_once() -> None:
    said = (known(0).standing, known(1).standing)
    assert worth_telling(said, (), crowd=False) == said
    later = tuple(Standing(rank=s.rank, position=s.position, doing=s.doing, silent_s=9.0, waits=True) for s in said)
    assert worth_telling(later, said, crowd=False) is None
    assert worth_telling((), said, crowd=False) is None
    further = (known(0, at=(3, 41, 2)).standing, said[1])
    assert worth_telling(further, said, crowd=False) == further


def test_standings_of_a_large_job_are_sent_only_if_they_may_be_the_cause() -> None:
    waits, works = known(0).standing, known(1, "computing", waits=False).standing
    assert worth_telling((waits,), (), crowd=True) is None
    assert worth_telling((waits, works), (), crowd=True) == (works,)


# ── histories: ranks that step together, of which some stop ─────────────────────────────────────────────────────


@dataclass
class Rank:
    """One rank of a job that steps by exchanges: what its page says, and what is true of it."""

    index: int
    computes_s: tuple[float, ...]
    """For each step: from the commit before it until its gradients are handed over."""
    stuck: str = ""
    """'', 'computing', 'exchanging' (after its gradients are handed over), 'stopped'"""
    stuck_at: int = 10**9
    step: int = 0
    doing: Doing = Doing.COMPUTING
    exchanges: int = 0
    beat_at_s: float = 0.0
    pulse_s: float = 0.0
    step_s: float = 0.0
    committed_at_s: float = 0.0
    gap_s: float = 0.0
    state: str = "S"
    told: list[tuple[float, Standing]] = field(default_factory=list)

    @property
    def is_stuck(self) -> bool:
        return bool(self.stuck) and self.step >= self.stuck_at

    def beat(self) -> Beat:
        return Beat(
            doing=self.doing, generation=1, step=self.step, beats=0, beat_at_s=self.beat_at_s, loss=math.nan,
            step_s=self.step_s, quiet_until_s=0.0, rank=self.index, committed_in=1 if self.step_s else 0,
            exchanges=self.exchanges, gap_s=self.gap_s, pulse_s=self.pulse_s,
        )  # fmt: skip

    def arrive(self, now_s: float) -> None:
        """Hand over the gradients, once they are computed."""
        self.gap_s = max(self.gap_s, now_s - self.beat_at_s)
        self.doing, self.exchanges, self.beat_at_s = Doing.EXCHANGING, 1, now_s

    def commit(self, now_s: float) -> None:
        self.step += 1
        self.step_s, self.committed_at_s = now_s - self.committed_at_s, now_s
        self.doing, self.exchanges, self.beat_at_s, self.gap_s = Doing.COMPUTING, 0, now_s, 0.0


@dataclass
class History:
    """Ranks of one node each, on one clock. A rank's standing is told to the others `lag_s` after it was seen."""

    ranks: list[Rank]
    lag_s: float
    now_s: float = 0.0
    condemned: dict[int, float] = field(default_factory=dict)
    witnessed_s: float | None = None
    """Since when another rank waits for a stuck one."""

    def run(self, until_s: float, tick_s: float) -> None:
        while self.now_s < until_s and not self.condemned:
            self.now_s += tick_s
            self._train()
            self._watch()

    def _train(self) -> None:
        for rank in self.ranks:
            if not (rank.is_stuck and (rank.stuck != "exchanging" or rank.doing is Doing.EXCHANGING)):
                rank.pulse_s = self.now_s
            if rank.is_stuck and rank.stuck == "stopped":
                rank.state = "T"
            if rank.is_stuck and rank.stuck != "exchanging":
                continue
            takes_s = rank.computes_s[rank.step % len(rank.computes_s)]
            if rank.doing is Doing.COMPUTING and self.now_s - rank.committed_at_s >= takes_s:
                rank.arrive(self.now_s)
        lowest = min(rank.step for rank in self.ranks)
        at = [rank for rank in self.ranks if rank.step == lowest]
        handed_over = [rank.doing is Doing.EXCHANGING or rank.step > lowest for rank in self.ranks]
        if all(handed_over):
            for rank in at:
                if not rank.is_stuck:
                    rank.commit(self.now_s)

    def _watch(self) -> None:
        if all(self.now_s - rank.beat_at_s < RULES.floor_s / 2 for rank in self.ranks):
            return
        for rank in self.ranks:
            said = standing(rank.beat(), rank.state, None, self.now_s)
            if said.silent_s >= RULES.floor_s / 2 and not (rank.told and same(rank.told[-1][1], said)):
                rank.told.append((self.now_s + self.lag_s, said))
        for rank in self.ranks:
            heard = []
            for other in self.ranks:
                arrived = [(when, said) for when, said in other.told if when <= self.now_s]
                if arrived and other is not rank:
                    when, said = arrived[-1]
                    heard.append(StillRank(str(other.index), said, when - said.silent_s))
            waits = [wait for k in heard if (wait := k.wait())]
            sick = judge(rank.beat(), rank.state, waits, RULES, self.now_s)
            if sick and (sick.certain or rank.doing is not Doing.EXCHANGING):
                self.condemned[rank.index] = self.now_s


def drawn(seed: int) -> History:
    """Two to four ranks whose steps differ by a factor of ten, of which one (or none) stops computing, stops being
    scheduled, or runs no Python any more once its gradients are handed over."""
    random = Random(seed)
    ranks = [
        Rank(i, tuple(random.uniform(0.1, 1.0) for _ in range(random.randint(1, 4))))
        for i in range(random.randint(2, 4))
    ]
    culprit = random.choice(ranks)
    culprit.stuck = random.choice(["", "computing", "exchanging", "stopped"])
    culprit.stuck_at = random.randint(0, 4)
    return History(ranks, lag_s=random.uniform(0.0, 0.5))


@pytest.mark.parametrize("block", range(8))
def test_the_stuck_rank_is_found_within_the_limits_and_no_other(block: int) -> None:
    for seed in range(block * 200, block * 200 + 200):
        history = drawn(seed)
        history.run(40.0, TICK_S)
        culprit = next((rank for rank in history.ranks if rank.stuck), None)
        if culprit is None:
            assert not history.condemned, f"seed {seed}"
            continue
        assert list(history.condemned) == [culprit.index], f"seed {seed}"
        longest_s = max(max(rank.computes_s) for rank in history.ranks) + 2 * TICK_S
        settled = culprit.stuck_at > 0 or culprit.stuck == "stopped"
        patience_s = max(2.0, 10 * longest_s) if settled else RULES.ceiling_s
        # The others come to wait for it a step later at most, and are told of after half the floor.
        limit_s = 2 * longest_s + patience_s + history.lag_s + RULES.floor_s
        assert history.now_s - culprit.beat_at_s <= limit_s, f"seed {seed}"


def test_all_ahead_needs_every_other_rank() -> None:
    heard = [known(rank, at=(3, 41, 2)) for rank in (0, 1, 2)]
    assert all_ahead((3, 40, 2), heard, 4)
    assert not all_ahead((3, 40, 2), heard[:2], 4)


def test_a_rank_that_has_returned_from_train_proves_nothing_about_the_step() -> None:
    """Else the others, which wait in that step's exchange, would be called hung for it."""
    early = [known(1, "finishing", (3, 40, 2**31))]
    assert not all_ahead((3, 40, 2), early, 2)
    assert all_ahead((3, 39, 2), early, 2)
