"""An incident compared with what a test did itself."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from elastic.contract.keys import JobKeys
from elastic.contract.records.decoding import Stored
from elastic.contract.records.incident_account import IncidentAccount, Outcome, weight
from elastic.contract.records.incident_fold import incidents
from elastic.contract.records.job_records import BrokenRecord, IncidentRecord, ProgressRecord, decode

from .history import Commit, History

CLOCK_S = 2.0
"""From an act of a test to its notice, on a busy machine; a hang has its own silence besides."""
BUSY_S = 5.0
"""The same, where whole clusters run beside each other."""
JITTER_S = 0.5
AT_ONCE = ("checkpoint", "late exit")
"""Kinds of incidents that are over when they are told: no rank stops stepping."""


def on_record(keys: JobKeys, kvs: Mapping[str, Stored]) -> list[IncidentRecord]:
    """The incidents of a job, from its keys in etcd; those that break no generation last."""
    accounts = sorted((kv.create_revision, key) for key, kv in kvs.items() if keys.is_account(key))
    reports = [decode(BrokenRecord, kv.value) for key, kv in kvs.items() if key.startswith(keys.broken_all)]
    beside = sorted(key for key in kvs if key.startswith(keys.incidents) and not keys.is_account(key))
    stepped_in = decode(ProgressRecord, kvs[keys.progress].value).stepped_in if keys.progress in kvs else 0
    found = incidents([decode(IncidentAccount, kvs[key].value) for _, key in accounts], reports, stepped_in)
    return found + [decode(IncidentRecord, kvs[key].value) for key in beside]


def check_incident(
    incident: IncidentRecord | Mapping[str, Any],
    *,
    kind: str | Collection[str],
    nodes: Collection[str] = (),
    ranks: Collection[int] | None = None,
    redone: int | None = None,
    world_sizes: tuple[int, int] | None = None,
    struck_wall_s: float | None = None,
    back_wall_s: float | None = None,
    noticed_within_s: float = CLOCK_S,
) -> None:
    """Raises AssertionError.

    kind, nodes, ranks: of the first cause, and of all that failed with it; no nodes: any.
    redone: committed steps that were committed again later, by the test's own history.
    struck_wall_s, back_wall_s: when the test struck, and when it saw the job step again: the incident lies in between.
    """
    told: Any = incident if isinstance(incident, IncidentRecord) else msgspec.convert(dict(incident), _Told)
    kinds = (kind,) if isinstance(kind, str) else kind
    assert not told.open, told
    assert told.kind in kinds, f"{told.kind} on {told.node}: {told.detail}, not {kind}; causes: {told.causes}"
    if nodes:
        assert set(told.node.split(", ")) == set(nodes), f"{told.node}, not {sorted(nodes)}; causes: {told.causes}"
    if ranks is not None:
        assert sorted(told.ranks) == sorted(ranks), f"ranks {told.ranks}, not {sorted(ranks)}; causes: {told.causes}"
    if world_sizes is not None:
        said = (told.world_size_before, told.world_size_after)
        assert said == world_sizes, f"of worlds {said} it says, they were {world_sizes}"
    if redone is not None:
        assert told.steps_lost is not None, "it is known how far the job had come"
        assert told.steps_lost <= redone, f"{told.steps_lost} steps lost it says, {redone} were done again"
        most = told.steps_lost_at_most
        assert most is None or redone <= most, f"at most {most} steps lost it says, {redone} were done again"
    assert told.ended_wall_s is not None, "it does not say when it ended"
    if struck_wall_s is not None:
        late_s = told.wall_s - struck_wall_s
        assert -0.1 <= late_s <= noticed_within_s, f"it began {late_s:.2f} s after the strike, it says"
    if back_wall_s is not None:
        assert told.ended_wall_s <= back_wall_s + 0.5, f"it ended {told.ended_wall_s - back_wall_s:.2f} s too late"


class _Told(IncidentRecord, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """As the API gives it, with further fields."""

    job: str = ""


@dataclass(frozen=True)
class Injection:
    """What a test did to a job, and what is to be one incident. Which ranks that were, and on which nodes, how large
    the world was before and after, which steps were done again, and when, is read from the job's recorded history."""

    kind: str | tuple[str, ...]
    """More than one: which of them, the test cannot know."""
    pids: tuple[int, ...] = ()
    """Worker processes that it struck."""
    nodes: tuple[str, ...] = ()
    """Nodes that it struck. Neither these nor `pids`: a planned change, which strikes nothing."""
    struck_s: float | None = None
    """When, on CLOCK_MONOTONIC; None: at an instant that the test does not know."""
    within_s: float = BUSY_S
    """From the strike to its notice, at most."""
    words: tuple[str, ...] = ()
    """Some of the evidence."""
    recovered: bool = True
    """Whether the job has stepped again."""
    waited: bool = False
    """Whether the very generation goes on that stood still."""
    others: tuple[str, ...] = ()
    """Nodes that may be named besides, with what befell them during the recovery."""


def check_injections(
    history: History, incidents: Iterable[Mapping[str, Any]], injections: Iterable[Injection], *, clock: bool = True
) -> None:
    """Raises AssertionError unless there is one incident for each injection, in this order, and each says the truth.
    `clock`: the instants can be compared, since all clocks are right."""
    late, told = [], []
    for incident in sorted(incidents, key=lambda i: (i["generation"], i["wall_s"])):
        (late if incident["kind"] == "late exit" else told).append(incident)
    done = list(injections)
    for incident in late:  # of a process that fails and then takes its time to end, on a busy machine
        had_s = float(incident["detail"].partition("within ")[2].partition(" s")[0])
        could_s = incident["wall_s"] - _wall_s(history.commits[0].at_s)
        assert had_s <= could_s, f"the job is {could_s:.1f} s old: {incident['detail']}"
    said = [(i["generation"], i["kind"], i["node"], i["ranks"], i["detail"][:100]) for i in told]
    assert len(told) == len(done), f"{len(told)} incidents, not {len(done)}: {said}; done: {done}"
    for incident, injection in zip(told, done, strict=True):
        check_injection(history, incident, injection, clock=clock)


def check_injection(history: History, incident: Mapping[str, Any], injection: Injection, *, clock: bool = True) -> None:
    """One incident compared with what the test did, and with what the workers wrote down before and after it."""
    number = int(incident["generation"])
    before = max((g for g in history.generations() if g < number + injection.waited), default=0)
    failed, again = history.of(before), history.of(number)
    if injection.waited:
        began_s = incident["wall_s"] - _wall_s(0.0)
        failed, again = [c for c in failed if c.at_s < began_s], [c for c in again if c.at_s > began_s]
    assert bool(again) == injection.recovered, f"steps in generation {number}: {len(again)}, it says: {incident}"
    struck = [c for c in failed if c.node in injection.nodes or int(c.process.rpartition(".")[2]) in injection.pids]
    check_incident(
        incident, kind=injection.kind, nodes=sorted({c.node for c in struck} | set(injection.nodes)),
        ranks=sorted({c.rank for c in struck}) if failed else None,
        redone=_redone(history, before, number) if failed and again and not injection.waited else None,
        world_sizes=(
            failed[0].world_size if failed else incident["world_size_before"],
            again[0].world_size if again else 0,
        ),
        struck_wall_s=_wall_s(injection.struck_s) if clock and injection.struck_s is not None else None,
        noticed_within_s=injection.within_s,
    )  # fmt: skip
    for words in injection.words:
        assert words in incident["detail"], f"{words!r} is not the evidence: {incident['detail']}"
    named = {c["node"] for c in incident["causes"] if weight(c["kind"]) > weight("drain")}
    assert named <= {c.node for c in struck} | {*injection.nodes, *injection.others}, (
        f"nothing befell {named}: {incident}"
    )
    lasted_s = incident["ended_wall_s"] - incident["wall_s"]
    marks = incident["timeline_s"].values()
    assert all(-0.001 <= at_s <= lasted_s + 0.1 for at_s in marks), f"it lasted {lasted_s} s: {incident['timeline_s']}"
    if failed and again:
        _check_recovery(failed, again, incident, clock)


def _check_recovery(failed: list[Commit], again: list[Commit], incident: Mapping[str, Any], clock: bool) -> None:
    top = max((c.step + 1 for c in failed), default=0)
    if incident["steps_lost"] is not None and incident["steps_lost"] == incident["steps_lost_at_most"]:
        assert incident["step"] == top, f"step {top} was the newest, not {incident['step']}"
    survived = {c.process for c in failed} & {c.process for c in again}
    live = incident["restored_from"] == "live"
    assert survived or not live, f"no rank that stepped before stepped again: {incident['restored_from']}"
    if not clock:
        return
    first_s: dict[int, float] = {}
    for commit in again:
        first_s.setdefault(commit.rank, commit.at_s)
    ended_s = incident["ended_wall_s"] - _wall_s(0.0)
    began_s = incident["wall_s"] - _wall_s(0.0)
    # What a rank has committed is written down by the rank a moment before or after its agent has heard of it.
    assert min(first_s.values()) - JITTER_S <= ended_s <= max(first_s.values()) + BUSY_S, (
        f"it stepped again at {sorted(first_s.values())}, not at {ended_s}"
    )
    if incident["kind"] == "planned":
        assert max(c.at_s for c in failed) - JITTER_S <= began_s <= min(first_s.values()) + JITTER_S, (
            f"it stood from {max(c.at_s for c in failed)} to {min(first_s.values())}, not from {began_s}"
        )


def _redone(history: History, before: int, number: int) -> int:
    """Steps that were committed up to generation `before` and that generation `number` has done again."""
    top = max((c.step + 1 for c in history.commits if c.generation <= before), default=0)
    return max(0, top - min(c.step for c in history.of(number)))


def _wall_s(monotonic_s: float) -> float:
    return time.time() - time.monotonic() + monotonic_s


def check_written(writes: Iterable[tuple[str, Mapping[str, Any] | None]], *, clock: bool = True) -> None:
    """Of all writes of a job, in their order: an account that tells the end is not written again, the beginning of an
    incident stays, and what is over stays so, but for causes that are reported later. `clock`: all clocks are right."""
    accounts: dict[str, IncidentAccount] = {}
    reports: dict[str, BrokenRecord] = {}
    last: dict[str, IncidentRecord] = {}
    for key, record in writes:
        if record is None:
            accounts.pop(key, None), reports.pop(key, None)
        elif key.startswith("broken/"):
            reports[key] = msgspec.convert(record, BrokenRecord)
        elif key.startswith("incidents/") and ".by." in key:
            account = msgspec.convert(record, IncidentAccount)
            before = accounts.get(key, account)
            assert before.outcome is Outcome.OPEN or before == account, f"{key} was over: {before} → {account}"
            accounts[key] = account
        for incident in incidents(list(accounts.values()), reports.values()):
            known = last.get(incident.id, incident)
            assert known.open or not incident.open, f"it was over: {known} → {incident}"
            gone = [c for c in known.causes if c not in incident.causes and weight(c.kind) > 0]
            assert known.open or not gone, f"it has lost {gone}"
            moved_s = abs(incident.wall_s - known.wall_s)
            stays = moved_s < 0.1 or incident.kind == "planned" or not clock
            assert stays, f"{incident.id} began {moved_s} s earlier or later"
            last[incident.id] = incident
