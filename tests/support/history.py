"""What a run of `train_chaos.py` wrote down, and what must be true of it, whatever failed meanwhile."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Sequence
from typing import Self

from elastic import testing
from elastic.testing import Commit
from elastic.worker.data.sharding import BatchPlan, SampleOrder, rank_range

SAMPLES = 1000


class History(testing.History):
    """That of a run of `train_chaos.py`."""

    def read(self) -> Self:
        super().read()
        return self

    def gaps_s(self) -> list[float]:
        """Time between consecutive steps, each at its first commit anywhere."""
        first: dict[int, float] = {}
        for commit in self.commits:
            first.setdefault(commit.step, commit.at_s)
        instants = sorted(first.values())
        return [b - a for a, b in itertools.pairwise(instants)]

    def back_s(self, struck_s: float, after_generation: int) -> float:
        """From the strike until every rank of a newer generation has committed a step."""
        newer = [c for c in self.commits if c.generation > after_generation]
        assert newer, f"no step was committed after generation {after_generation}"
        generation = min(c.generation for c in newer)
        firsts: dict[int, float] = {}
        for commit in self.of(generation):
            firsts.setdefault(commit.rank, commit.at_s)
        world_size = self.of(generation)[0].world_size
        assert len(firsts) == world_size, f"generation {generation}: {sorted(firsts)} of {world_size} ranks stepped"
        return max(firsts.values()) - struck_s

    def finals(self) -> dict[int, dict[str, object]]:
        """rank -> {"step", "world", "sha256"}, of those ranks that got to the end."""
        return {int(path.name.split(".")[1]): json.loads(path.read_text()) for path in self.folder.glob("final.*.json")}


def check(
    history: History, *, steps: int, batch: int, lost: int = 0, frozen: Collection[str] = (), whole: bool = True
) -> None:
    """All that holds for a complete run, or with `whole=False` for the `steps` that one has done until it was stopped.
    `lost`: steps that may have been done again (0 while anybody survived);
    `frozen`: nodes that were stopped or cut off, whose last words may come late. Raises AssertionError."""
    commits = history.commits
    assert {c.step for c in commits} == set(range(steps)), f"steps missing: {_missing(commits, steps)}"
    _one_plan_per_generation(commits)
    _right_samples(commits, batch)
    _each_sample_once(commits, steps, batch)
    _order_within_processes(commits)
    _one_live_world(commits, frozen)
    _ranks_kept(commits)
    redone = _done_again(commits)
    assert redone <= lost, f"{redone} committed steps were lost and done again, allowed: {lost}"
    if not whole:
        return
    finals = history.finals()
    last = history.of(history.generations()[-1])
    world_size = last[-1].world_size
    assert set(finals) >= set(range(world_size)), f"only ranks {sorted(finals)} of {world_size} got to the end"
    prints = {str(finals[rank]["sha256"]) for rank in range(world_size)}
    assert len(prints) == 1, f"the replicas differ: {finals}"
    assert all(finals[rank]["step"] == steps for rank in range(world_size))


def final_sha256(history: History) -> str:
    return str(history.finals()[0]["sha256"])


def _missing(commits: Sequence[Commit], steps: int) -> list[int]:
    return sorted(set(range(steps)) - {c.step for c in commits})[:10]


def _right_samples(commits: Sequence[Commit], batch: int) -> None:
    """Each rank's samples are what the step, the rank and the world say, and nothing else."""
    plan = BatchPlan(SAMPLES, batch)
    orders: dict[int, SampleOrder] = {}
    for commit in commits:
        whole = plan.at(commit.step)
        order = orders.setdefault(whole.epoch, SampleOrder(SAMPLES, 0, whole.epoch))
        want = order.take(*rank_range(whole.start, whole.stop, commit.rank, commit.world_size))
        assert commit.ids == tuple(want), f"wrong samples: {commit}"


def _each_sample_once(commits: Sequence[Commit], steps: int, batch: int) -> None:
    """Over the steps of one epoch no sample comes twice. One world's parts make a step: the last that did it."""
    plan = BatchPlan(SAMPLES, batch)
    last = {c.step: c.generation for c in sorted(commits, key=lambda c: c.generation)}
    parts: dict[int, dict[int, tuple[int, ...]]] = {}
    for commit in commits:
        if commit.generation == last[commit.step]:
            parts.setdefault(commit.step, {})[commit.rank] = commit.ids
    seen: dict[int, set[int]] = {}
    for step in range(steps):
        whole = plan.at(step)
        taken = [sample for part in parts[step].values() for sample in part]
        epoch = seen.setdefault(whole.epoch, set())
        assert len(set(taken)) == len(taken), f"step {step}: samples twice within the step"
        assert not epoch & set(taken), f"step {step}: samples that were taken before"
        epoch |= set(taken)


def _one_plan_per_generation(commits: Sequence[Commit]) -> None:
    for generation in {c.generation for c in commits}:
        mine = [c for c in commits if c.generation == generation]
        assert len({c.world_size for c in mine}) == 1, f"generation {generation} has two sizes"
        holders = {(c.rank, c.process) for c in mine}
        assert len(holders) == len({rank for rank, _ in holders}), f"generation {generation}: a rank twice: {holders}"


def _order_within_processes(commits: Sequence[Commit]) -> None:
    """No process goes back: neither in generations nor in steps."""
    for process in {c.process for c in commits}:
        mine = [c for c in commits if c.process == process]
        for before, after in itertools.pairwise(mine):
            assert after.generation >= before.generation, f"{process}: generation went back: {before} {after}"
            assert after.step > before.step, f"{process}: step went back: {before} {after}"
            if after.generation == before.generation:
                assert after.step == before.step + 1, f"{process}: a step left out: {before} {after}"


def _one_live_world(commits: Sequence[Commit], frozen: Collection[str]) -> None:
    """No generation commits after a newer one has."""
    newest = 0
    for commit in commits:
        if commit.node not in frozen:
            assert commit.generation >= newest, f"generation {newest} was at work already: {commit}"
            newest = max(newest, commit.generation)


def _ranks_kept(commits: Sequence[Commit]) -> None:
    """In an unchanged world no process gets another rank."""
    ranks = {(c.generation, c.process): c.rank for c in commits}
    worlds = {c.generation: c.world_size for c in commits}
    for (generation, process), rank in ranks.items():
        after = ranks.get((generation + 1, process), rank)
        same = worlds[generation] == worlds.get(generation + 1)
        assert after == rank or not same, f"{process}: rank {rank}, then {after}, after generation {generation}"


def _done_again(commits: Sequence[Commit]) -> int:
    """Steps that had been committed somewhere and were committed again in a later generation."""
    generations: dict[int, set[int]] = {}
    for commit in commits:
        generations.setdefault(commit.step, set()).add(commit.generation)
    return sum(len(of_step) > 1 for of_step in generations.values())
