"""What samples of gradients and weights of one step say: layers, and what is wrong with them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from elastic.contract.records.rank_records import RanksRecord, Sample
from elasticd.base import phrases
from elasticd.base.answers import Json

NAMED = 4


def layers(samples: Sequence[Json]) -> list[Json]:
    """A row for each layer, in the model's order: norms by rank of its gradients and weights. `samples`: of one step,
    with their rows."""
    rows: dict[str, Json] = {}
    for sample in samples:
        rank = str(sample["rank"])
        squares: dict[str, dict[str, float]] = {}
        for name, own, mean, weight, *_ in sample["rows"]:
            layer = name.rpartition(".")[0] or name
            sums = squares.setdefault(layer, {})
            for what, value in (("own", own), ("mean", mean), ("weight", weight)):
                if value is not None:
                    sums[what] = sums.get(what, 0.0) + value * value
        for layer, sums in squares.items():
            row = rows.setdefault(layer, {"layer": layer, "own": {}, "mean": {}, "weight": {}})
            for what, square in sums.items():
                row[what][rank] = square**0.5
    return list(rows.values())


def in_short(samples: Iterable[Json]) -> dict[int, Sample]:
    """By rank."""
    short = {}
    for each in samples:
        without = [name for name, own, mean, _, trained, bad in each["rows"] if trained and not (own or mean or bad)]
        bad = next((row[0] for row in each["rows"] if row[5]), "")
        short[int(each["rank"])] = Sample(
            step=each["step"], gradients=each["gradients"], weights=each["weights"], without=tuple(without), bad=bad
        )
    return short


def newest(records: Mapping[str, RanksRecord], generation: int, world_size: int) -> tuple[int, dict[int, Sample]]:
    """(step, rank -> sample) of the newest step that all ranks have sampled; (0, {}): there is none."""
    short = {
        each.rank: each.sample
        for record in records.values()
        if record.generation == generation
        for each in record.ranks
        if each.rank >= 0 and each.sample is not None
    }
    steps = {sample.step for sample in short.values()}
    if len(short) < world_size or len(steps) != 1:
        return 0, {}
    return steps.pop(), short


def findings(samples: Mapping[int, Sample]) -> Iterator[str]:
    """What is wrong, one sentence each. `samples`: by rank, of one step."""
    for rank, sample in sorted(samples.items()):
        if sample.bad:
            yield f"the gradient of {sample.bad} is not finite on rank {rank}"
    for names, ranks in _groups({rank: sample.without for rank, sample in samples.items() if sample.without}).items():
        where = "all ranks" if len(ranks) == len(samples) else phrases.ranks(ranks)
        unused = "unused in the loss, or frozen without requires_grad = False"
        yield f"no gradient reaches {phrases.some(names, NAMED)} on {where}: {unused}"
    for ranks in _groups({rank: sample.gradients for rank, sample in samples.items() if sample.gradients}).values():
        if len(ranks) > 1:
            why = "they train on the same samples, or on none"
            yield f"{phrases.ranks(ranks)} have the same gradients before they are averaged: {why}"
    replicas = _groups({rank: sample.weights for rank, sample in samples.items()})
    if len(replicas) > 1:
        most = max(replicas.values(), key=len)
        if 2 * len(most) > len(samples):
            yield f"the weights of {phrases.ranks(samples.keys() - most)} differ from those of the other replicas"
        else:
            yield f"the replicas' weights differ, and no majority is equal: {phrases.ranks(samples)}"


K = TypeVar("K")


def _groups(values: Mapping[int, K]) -> dict[K, list[int]]:
    """Value -> the ranks that have it."""
    groups: dict[K, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    return groups
