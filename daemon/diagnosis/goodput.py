"""The goodput ledger of a job for the API and the screen. Pure.

elasticctl imports this for `text`: the records are imported by `row` only, which runs in the daemon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elasticd.base import answers
from elasticd.base.phrases import age

if TYPE_CHECKING:
    from elastic.contract.records.job_records import ProgressRecord
    from elastic.contract.records.ledger import Ledger
    from elastic.contract.records.rank_records import RanksRecord, RankTimes

STANDSTILL = "standstill"
"""The time since the newest commit of a job that makes no step now, in place of goodput. No bucket of the ledger: if
the step is committed after all, it was stepping."""

UNKNOWN = "not known: a plain script commits no steps"

WORDS = {
    "checkpoint": "checkpoint stall",
    "detect": "detecting failures",
    "abort": "leaving failed groups",
    "form": "forming groups",
    "sync": "sending state",
    "redo": "redoing lost steps",
    "waiting": "waiting for nodes",
    "setup": "set-up",
    "idle": "idle",
    STANDSTILL: "standing still",
}


def row(progress: ProgressRecord | None) -> answers.Goodput | None:
    """None: no agent has kept a ledger yet, or the script is plain: of what it does nothing is known."""
    ledger = progress.ledger if progress else None
    if ledger is None or not ledger.total_ms or tells_nothing(progress):
        return None
    return answers.Goodput(**_parts(ledger, stands_still(progress)), wall_s=ledger.wall_ms / 1000)


def tells_nothing(progress: ProgressRecord | None) -> bool:
    """The script is plain as far as is known: it commits no steps, and whether it trains is not known."""
    return progress is not None and not progress.managed and not progress.step


def stands_still(progress: ProgressRecord | None) -> bool:
    """No step is made, and the script has not declared that (`job.quiet`)."""
    return progress is not None and progress.still is not None and not progress.still.declared


def _parts(ledger: Ledger, still: bool) -> dict[str, Any]:
    """Fields that `answers.Goodput` and `answers.RankTime` have both. `still`: the time since the newest commit is no
    goodput."""
    from elastic.contract.records.ledger import Bucket, shares

    stepped_ms = ledger.ranks_ms.get(Bucket.STEPPING, 0) + (0 if still else ledger.open_ms)
    badput = {name: share for name, share in shares(ledger).items() if name != Bucket.STEPPING}
    return {
        "goodput": stepped_ms / ledger.total_ms,
        "badput": badput | ({STANDSTILL: ledger.open_ms / ledger.total_ms} if still and ledger.open_ms else {}),
        "rank_seconds": {bucket.value: ledger.ranks_ms.get(bucket.value, 0) / 1000 for bucket in Bucket},
        "open_rank_seconds": ledger.open_ms / 1000,
    }


def of_ranks(records: Mapping[str, RanksRecord], *, still: bool) -> dict[tuple[str, int], answers.SlotTime]:
    """(node, slot) -> where its time went, as its own agent has counted it. `still`: the job stands still."""
    rows = [(node, each) for node, record in records.items() for each in record.ranks]
    return {(node, each.slot): answers.SlotTime(**_times(each, still)) for node, each in rows}


def summed(records: Mapping[str, RanksRecord], *, each: bool, still: bool) -> answers.RankTime | None:
    """The accounts of all ranks of all nodes that the job has had, added up: in whole milliseconds, so what the buckets
    sum to is the time of all accounts, exactly. None: there is no account yet. `each`: with a row for each rank.
    `still`: the job stands still."""
    from elastic.contract.records.ledger import Bucket, Ledger

    rows = [(node, times) for node, record in records.items() for times in record.ranks]
    spent_ms = {bucket.value: sum(times.ranks_ms.get(bucket, 0) for _, times in rows) for bucket in Bucket}
    all_ = Ledger(until_ms=0, ranks_ms=spent_ms, open_ms=sum(times.open_ms for _, times in rows))
    if all_.total_ms <= 0:
        return None
    accounts = [
        answers.Account(rank=one.rank, node=node, slot=one.slot, **_times(one, still)) for node, one in rows if each
    ]
    return answers.RankTime(
        **_parts(all_, still),
        ranks=len(rows),
        rank_wall_s=all_.total_ms / 1000,
        wall_s=all_.total_ms / 1000 / len(rows),
        accounts=sorted(accounts, key=lambda row: (row.rank < 0, row.rank, row.node, row.slot)),
    )


def _times(times: RankTimes, still: bool) -> dict[str, Any]:
    """Fields of `answers.SlotTime`."""
    from elastic.contract.records.ledger import Bucket

    total_ms = times.until_ms - times.since_ms
    stepping_ms = times.ranks_ms.get(Bucket.STEPPING, 0) + (0 if still else times.open_ms)
    return {
        "since_wall_s": times.since_ms / 1000,
        "until_wall_s": times.until_ms / 1000,
        "goodput": stepping_ms / total_ms if total_ms > 0 else None,
        "seconds": {bucket.value: times.ranks_ms.get(bucket.value, 0) / 1000 for bucket in Bucket},
        "open_seconds": times.open_ms / 1000,
    }


def text(goodput: answers.Goodput | answers.RankTime | None) -> str:
    """'98.7 % of 2 h; badput: forming groups 0.9 %, checkpoint stall 0.4 %'; the largest first. '' if not known."""
    if goodput is None:
        return ""
    bad = sorted(goodput.badput.items(), key=lambda item: -item[1])
    causes = ", ".join(f"{WORDS.get(name, name)} {percent(share)}" for name, share in bad)
    return f"{percent(goodput.goodput)} of {age(goodput.wall_s, '.1f')}" + (f"; badput: {causes}" if causes else "")


def summed_text(ranks_time: answers.RankTime | None, world_size: int) -> str:
    """'97.1 % of 4 ranks over 2.0 h; badput: …', of what `summed` makes. '' if not known. `world_size`: now."""
    if ranks_time is None:
        return ""
    of, _, causes = text(ranks_time).partition(";")
    share, _, lasted = of.partition(" of ")
    ranks = f"{ranks_time.ranks} rank{'' if ranks_time.ranks == 1 else 's'}"
    if ranks_time.ranks > world_size > 0:
        ranks += ", past ones included,"
    return f"{share} of {ranks} over {lasted}" + (f";{causes}" if causes else "")


def percent(share: float) -> str:
    """'98.7 %'; '< 0.1 %' for what would be shown as nothing, and never '100.0 %' for less than all."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{min(100 * share, 99.9) if share < 1 else 100:.1f} %"
