"""The newest sample of the gradients of each rank here, in a file that this node's daemon reads."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from elastic.contract.agent_files import GRADIENTS_BYTES, GradientSamples, RankSample
from elastic.contract.records.rank_records import Sample
from elastic.contract.worker import messages
from elastic.contract.worker.messages import GradientRow

from .status import write_for_daemon

NAMED = 4
"""Parameters without a gradient in the record in etcd; all are in the file."""


MOST_ROWS = 12_000
"""Of all ranks of this node; of more parameters their layers are given."""


class GradientFile:
    """`take` the parts of samples, and `write` once one is complete."""

    def __init__(self, folder: Path, node: str, submitted_wall_s: float) -> None:
        self._path = folder / "gradients.json"
        self._node, self._submitted_wall_s = node, submitted_wall_s
        self._parts: dict[int, list[messages.GradientSample]] = {}
        self._ranks: dict[int, RankSample] = {}
        self.samples: dict[int, Sample] = {}
        """In short, by slot."""

    def take(self, slot: int, message: messages.GradientSample) -> RankSample | None:
        """The sample, once all of its parts are there."""
        parts = [part for part in self._parts.pop(slot, []) if (part.step, part.parts) == (message.step, message.parts)]
        parts.append(message)
        if len(parts) < message.parts:
            self._parts[slot] = parts
            return None
        rows = tuple(row for part in sorted(parts, key=lambda part: part.part) for row in part.rows)
        sample = RankSample(
            rank=message.rank, node=self._node, slot=slot, generation=message.generation, step=message.step,
            wall_s=time.time(), gradients=message.gradients, weights=message.weights, rows=rows,
        )  # fmt: skip
        self._ranks = {s: each for s, each in self._ranks.items() if each.generation == message.generation}
        self._ranks[slot] = sample
        self.samples[slot] = in_short(sample)
        return sample

    def write(self) -> None:
        ranks, most = tuple(self._ranks.values()), MOST_ROWS // max(1, len(self._ranks))
        while True:
            rows = (msgspec.structs.replace(rank, rows=collapsed(rank.rows, most)) for rank in ranks)
            content = GradientSamples(submitted_wall_s=self._submitted_wall_s, ranks=tuple(rows))
            if len(raw := msgspec.json.encode(content)) <= GRADIENTS_BYTES or not most:
                break
            most //= 2
        write_for_daemon(self._path, raw)


def in_short(sample: RankSample) -> Sample:
    without = [row.name for row in sample.rows if row.trained and not (row.own or row.mean or row.bad)]
    bad = next((row.name for row in sample.rows if row.bad), "")
    return Sample(
        step=sample.step, gradients=sample.gradients, weights=sample.weights, without=tuple(without[:NAMED]), bad=bad
    )


def by_layer(rows: tuple[GradientRow, ...]) -> dict[str, tuple[float | None, float | None, float]]:
    """Layer -> norms of its own and of its mean gradient (None: it has none), and of its weights."""
    return {
        layer: (
            _norm(row.own for row in parts),
            _norm(row.mean for row in parts),
            _norm(row.weight for row in parts) or 0,
        )
        for layer, parts in _layers(rows).items()
    }


def collapsed(rows: tuple[GradientRow, ...], most: int) -> tuple[GradientRow, ...]:
    """At most `most` rows are left as they are; of more, the parameters of a layer become one row. Should they still be
    too many, the first of them stay."""
    if len(rows) <= most:
        return rows
    return tuple(
        GradientRow(
            f"{layer}.*", _norm(row.own for row in parts), _norm(row.mean for row in parts),
            _norm(row.weight for row in parts), any(row.trained for row in parts), any(row.bad for row in parts),
        )
        for layer, parts in itertools.islice(_layers(rows).items(), most)
    )  # fmt: skip


def _layers(rows: tuple[GradientRow, ...]) -> dict[str, list[GradientRow]]:
    layers: dict[str, list[GradientRow]] = {}
    for row in rows:
        layers.setdefault(row.name.rpartition(".")[0] or row.name, []).append(row)
    return layers


def _norm(parts: Iterable[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return math.hypot(*known) if known else None
