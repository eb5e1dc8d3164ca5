"""Where a job is in its data: the rounds of `job.epochs`, and how the loops under way take their batches.

It belongs to the state and changes with a commit only, so what a step takes stays a function of the step. `train`
begins its loops anew at each entry, in the same order: a loop finds its place here by its number within the round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from elastic.worker.link.misuse import MisuseRuntimeError


class Round(msgspec.Struct, frozen=True):
    """One round of a `job.epochs`."""

    nth: int
    """Number of this `job.epochs` within the round around it."""
    index: int
    """Number of the round; that behind the last one: it is over."""
    begin: int
    """The step with which it begins."""


class LoopPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a loop takes its batches."""

    numbers: dict[str, Any]
    """What the meaning of a position depends on: equal on all ranks, and when the job goes on."""
    nth: int = 0
    """Number of the loop within its round; 0 outside of rounds."""
    begin: int = 0
    """The step from which the loop counts."""
    epoch: int = 0
    since: int = 0
    """The step at which this epoch began, where epochs may differ in length."""
    end: int | None = None
    """The step at which the loop ends; None: when its data does."""
    world: int = 0
    """World size on which the batches depend; 0: on none."""

    def same(self, other: LoopPlan) -> bool:
        return self.nth == other.nth and self.numbers == other.numbers


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """As the state holds it."""

    rounds: tuple[Round, ...] = ()
    loops: tuple[LoopPlan, ...] = ()
    """Those under way at the last commit."""


class DataProgress:
    """One per state. `enter` at each entry of `train`, `committed` at each commit."""

    def __init__(self) -> None:
        self._kept = Kept()
        self._once: tuple[list[object], list[object]] = [], []
        """What can be iterated once, and was begun in the entry before and in this one."""
        self._left_at: int | None = None
        """Where the loop that was left last would have ended; None: not known."""
        self.enter()
        self.due = False

    def enter(self) -> None:
        """`train` is about to be called."""
        self._next: tuple[Round, ...] | None = None
        self._open: dict[object, LoopPlan] = {}
        self._now: tuple[LoopPlan, ...] = ()
        self._begun: list[LoopPlan] = []
        self._finished: list[LoopPlan] = []
        """Of this entry, those that have yielded their last batch."""
        self._allowed = False
        self._siblings = [0]
        """How many `job.epochs` have begun in each round under way, the outermost first."""
        self._loops = 0
        """How many loops have begun in this round."""
        self._cursor = 0
        """The step from which the next loop counts, unless it was under way at the last commit."""
        self._committed = False
        """A step was committed in this entry."""
        self._once = self._once[1], []
        self.due = True
        """No step was committed since this entry, or round, began."""
        self._cut_short = False
        """A loop of this round was left with batches to come, right after a commit."""

    def refuse_again(self, once: object) -> None:
        """`once`, which can be iterated once only, is about to be. Raises MisuseRuntimeError for the second time."""
        if any(once is each for entry in self._once for each in entry):
            raise MisuseRuntimeError(
                f"job.steps: this {type(once).__name__} can be read once only, and was begun before: make it in "
                "train(), as in job.steps(my_batches(), state), where each entry and each epoch has one of its own, or "
                "give an object whose __iter__ begins anew"
            )
        self._once[1].append(once)

    def as_json(self) -> dict[str, Any]:
        """Empty for a job without loops over data."""
        return msgspec.to_builtins(self._kept) if self._kept != Kept() else {}

    def adopt(self, held: Mapping[str, Any]) -> None:
        """The state that comes has this."""
        self._kept = msgspec.convert(held, Kept)

    def committed(self) -> bool:
        """A step has been committed. Returns whether it ends a round: what that changes is set between two loops."""
        ends, self._next = self._next, None
        if ends is not None:
            self._open, self._now = {}, ()  # what a script has left of them is of this round
        if ends is not None or self._now is not self._kept.loops:
            self._kept = Kept(rounds=self._kept.rounds if ends is None else ends, loops=self._now)
        self._committed, self.due = True, ends is not None
        return ends is not None

    # ── rounds ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def in_round(self) -> bool:
        return len(self._siblings) > 1

    @property
    def first_epoch(self) -> int:
        """Number of the first epoch of a loop: that of its round."""
        return self._kept.rounds[len(self._siblings) - 2].index if self.in_round else 0

    def rounds(self, count: int, step: Callable[[], int], commit: Callable[[], None]) -> Iterator[Round]:
        """The rounds of a `job.epochs` from the one under way on. `step` returns the state's; `commit` commits."""
        siblings = self._siblings  # of this entry: a generator may be closed late
        depth = len(siblings) - 1
        nth = siblings[depth]
        siblings[depth] += 1
        outer, here = self._kept.rounds[:depth], self._kept.rounds[depth : depth + 1]
        if here and here[0].nth > nth:
            return  # over: `train` has got to a later one
        if not here or here[0].nth < nth:
            self._kept = Kept(rounds=(*outer, Round(nth, 0, step())), loops=self._kept.loops)
        try:
            while (now := self._kept.rounds[depth]).index < count:
                siblings[depth + 1 :] = [0]
                self._loops, self._cursor = 0, now.begin
                yield now
                self._refuse_cut_short()
                self._next = (*self._kept.rounds[:depth], Round(nth, now.index + 1, step() + 1))
                commit()
        finally:
            del siblings[depth + 1 :]
        self._cursor = self._kept.rounds[depth].begin

    # ── loops ───────────────────────────────────────────────────────────────────────────────────────────────

    def place(self, numbers: Mapping[str, Any]) -> LoopPlan:
        """Where a loop with these numbers counts from: where it did at the last commit, if it was under way then."""
        nth = begin = 0
        if self.in_round:
            nth, begin = self._loops, self._cursor
            self._loops += 1
        fresh = LoopPlan(numbers=dict(numbers), nth=nth, begin=begin, epoch=self.first_epoch, since=begin)
        return next((kept for kept in self._kept.loops if kept.nth == nth and _but_order(kept, numbers)), fresh)

    def begin(self, loop: object, plan: LoopPlan, step: int, *, allow_changed: bool) -> None:
        """`loop` is about to take its first batch. Raises MisuseRuntimeError if it can never take one, or its sampler
        gives another order than before."""
        self._refuse_cut_short()
        self._allowed = self._allowed or allow_changed
        again = any(map(plan.same, self._begun))
        other = (bool(self._begun) and not again) or any(map(plan.same, self._finished))
        over = plan.end is not None and (plan.end < step or (plan.end == step and other))
        if self._committed and not self.in_round and over:
            raise MisuseRuntimeError(
                f"a loop that ends at step {plan.end} begins at step {step}, and takes no batch: outside of job.epochs "
                "the steps and epochs of each loop count from the start of training. Put each of several loops into a "
                "`for epoch in job.epochs(state, …)` of its own, where they count from its beginning"
            )
        for kept in self._kept.loops if not self._allowed else ():
            alike = (kept.nth, kept.epoch, kept.world) == (plan.nth, plan.epoch, plan.world)
            if alike and not again and kept.numbers != plan.numbers and _but_order(kept, plan.numbers):
                raise MisuseRuntimeError(_another_order(kept, plan))
        if not again:
            self._begun.append(plan)
        self.moves(loop, plan)

    def moves(self, loop: object, plan: LoopPlan) -> None:
        """`loop` is in its next epoch."""
        self._open[loop] = plan
        self._now = tuple(self._open.values())

    def ends(self, loop: object, at: int | None) -> None:
        """`loop` is over: all its batches up to step `at` were taken; None: it was left early."""
        if (plan := self._open.pop(loop, None)) is not None:
            self._now, self._left_at = tuple(self._open.values()), plan.end
            if at is not None and not any(map(plan.same, self._finished)):
                self._finished.append(plan)
        if at is not None:
            self._cursor = at

    def left(self, given: int, step: int) -> None:
        """A loop was left at `step`, which gave its last batch at step `given`."""
        self._cut_short |= self.in_round and step > given and (self._left_at is None or step < self._left_at)

    def _refuse_cut_short(self) -> None:
        """Outside of rounds the loop is the last of its training, as `if state.step == 500: break` in one. In a round
        others follow, and a replacement or a survivor that enters here again would take one more of its batches."""
        if self._cut_short:
            raise MisuseRuntimeError(
                "a loop in job.epochs was left by `break` after job.commit(): after a recovery it would go on with its "
                "next batch. Limit it by steps=…, or break at the top of its body, by what the State holds"
            )

    def check(self, step: int) -> str:
        """The first step of this entry is about to be committed, or `train` has returned without one. Raises
        MisuseError if a loop that was under way takes other batches now. Returns what is to be warning."""
        warning = ""
        for kept in self._kept.loops if not self._committed and not self._allowed else ():
            if kept.end is not None and kept.end <= step:
                continue
            if now_same := [plan for plan in self._begun if kept.same(plan)]:
                if kept.world not in (0, now_same[0].world) and kept.numbers.get("length") is None:
                    warning = _in_another_world(kept, now_same[0])
                continue
            now = [plan for plan in self._begun if not any(map(plan.same, self._kept.loops))]
            if not now:
                continue  # left for good, as by an early stop
            if kept.world and any(plan.world not in (0, kept.world) for plan in now):
                warning = _in_another_world(kept, now[-1])
                continue
            raise MisuseRuntimeError(_changed(kept, now, step))
        return warning

    def digest(self) -> int:
        """63 bits, equal on all ranks whose loops take the same batches."""
        return xxhash.xxh3_64_intdigest(self.numbers().encode()) >> 1

    def numbers(self) -> str:
        return json.dumps([plan.numbers for plan in self._open.values()], sort_keys=True)


def refuse_unlike(numbers: Sequence[str]) -> None:
    """`numbers`: each rank's. Raises MisuseRuntimeError."""
    other = next(rank for rank, each in enumerate(numbers) if each != numbers[0])
    here, there = json.loads(numbers[0]), json.loads(numbers[other])
    pairs = [
        f"{name} = {one.get(name)!r} on rank 0 and {two.get(name)!r} on rank {other}"
        for one, two in zip(here, there, strict=False)
        for name in one | two
        if one.get(name) != two.get(name)
    ]
    raise MisuseRuntimeError(
        f"the ranks' loops take other batches: {'; '.join(pairs) or f'{len(here)} loops and {len(there)}'}. Each rank "
        "must see the same data, in the same order, with the same numbers: read it from one place, or let rank 0 "
        "decide and send it by job.broadcast"
    )


def _but_order(kept: LoopPlan, numbers: Mapping[str, Any]) -> bool:
    names = (kept.numbers.keys() | numbers.keys()) - {"order", "length"}
    return all(kept.numbers.get(name) == numbers.get(name) for name in names)


def _another_order(kept: LoopPlan, now: LoopPlan) -> str:
    if "length" in now.numbers:
        was = f"{now.numbers.get('loader')} has {now.numbers['length']} batches, and had {kept.numbers.get('length')}"
        return (
            f"{was} before the job went on: to train longer, give job.steps more epochs= or steps= and a loader of the "
            "length before, or one without an end (itertools.count()). allow_changed=True goes on with another length"
        )
    what = f"{now.numbers.get('sampler') or now.numbers.get('loader')} gives another order for epoch {now.epoch}"
    return (
        f"{what} than before the job went on: it may depend on set_epoch(epoch), on the random generators of Python, "
        "numpy and torch, which are seeded for it, and on what the State keeps unchanged during an epoch, and on "
        "nothing else"
    )


def _in_another_world(kept: LoopPlan, now: LoopPlan) -> str:
    return (
        f"the loader of job.steps was one of {kept.world} ranks in this epoch, and is one of {now.world}: some samples "
        "of the epoch are taken twice, and others not. job.batches takes each once in any world"
    )


def _changed(kept: LoopPlan, now: Sequence[LoopPlan], step: int) -> str:
    whose, was, now_is = f"job.{kept.numbers.get('loop', 'batches')}", kept.numbers, now[0].numbers
    names = [name for name in was | now_is if was.get(name) != now_is.get(name)]
    differences = ", ".join(f"{name} = {now_is.get(name)!r} rather than {was.get(name)!r}" for name in names)
    return (
        f"{whose} begins with {differences} as in the steps so far: step {step} would be another place "
        "in the data, and samples would be taken twice or never. Use the same again, or begin a new job; between two "
        "rounds of job.epochs data may grow; allow_changed=True goes on at this step all the same"
    )
