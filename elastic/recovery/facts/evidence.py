"""Which of several reports of one failure names the first cause. Pure.

A dead worker is detected by its own agent, and by every other rank as a failed collective. The reports race; whichever
arrives first, the death is the cause and the failed collective its consequence.
"""

from __future__ import annotations

from elastic.contract.records.incident_account import kind_of, spread, weight
from elastic.contract.records.job_records import BrokenRecord, Loss
from elastic.contract.structs import replace

KEPT_LOSSES = 64
"""How many further failures of one generation are listed."""

BAD_NUMBERS = frozenset({"bad loss", "drift"})
"""Kinds of failures in which the ranks work and their numbers do not."""


def bad_numbers(record: BrokenRecord, node: str = "") -> BrokenRecord | Loss | None:
    """The first report of bad numbers in `record`, if any: of `node`, or of any node."""
    ends: tuple[BrokenRecord | Loss, ...] = (record, *record.also)
    return next((end for end in ends if end.kind in BAD_NUMBERS and node in ("", end.node)), None)


def merged(first: BrokenRecord, more: BrokenRecord) -> BrokenRecord:
    """`first` with what another report `more` of the same generation adds. Idempotent."""
    heavier = _weight(more) > _weight(first) or spread(more, first)
    primary, other = (more, first) if heavier else (first, more)
    also = list(first.also)
    if heavier:
        also = [loss for loss in also if not _covers(more, loss)]
    for loss in (_loss(other), *more.also):
        if _adds(primary, also, loss):
            also.append(loss)
    return replace(
        primary,
        also=tuple(also[:KEPT_LOSSES]),
        rollback=first.rollback or more.rollback,
        stacks=primary.stacks or other.stacks,
    )


def _weight(record: BrokenRecord) -> tuple[int, int]:
    """A rank that found no state ranks below every cause, and above a failed collective, which is less specific."""
    return weight(kind_of(record)), weight(record.kind)


def _adds(primary: BrokenRecord, also: list[Loss], loss: Loss) -> bool:
    """Whether `loss` names slots not known to be lost or, if it is a cause, ranks not known to have failed."""
    losses: list[BrokenRecord | Loss] = [primary, *also]
    slots = {slot for k in losses if k.node == loss.node for slot in k.slots}
    ranks = {rank for k in losses for rank in k.ranks}
    return not set(loss.slots) <= slots or (weight(loss.kind) == 2 and not set(loss.ranks) <= ranks)


def _covers(more: BrokenRecord, loss: Loss) -> bool:
    """Whether `more` names all that `loss` does. A rank with bad numbers has lost no slot."""
    named = set(loss.slots) <= set(more.slots) if loss.slots else set(loss.ranks) <= set(more.ranks)
    return loss.node == more.node and named


def _loss(record: BrokenRecord) -> Loss:
    return Loss(
        node=record.node,
        kind=kind_of(record),
        detail=record.detail,
        slots=record.slots,
        ranks=record.ranks,
        step=record.step,
        step_in=record.step_in,
    )
