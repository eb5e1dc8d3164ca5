"""An incident compared with what a test did itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from elastic.contract.keys import JobKeys
from elastic.contract.records.decoding import Stored
from elastic.contract.records.incident_account import IncidentAccount, Outcome, weight
from elastic.contract.records.incident_fold import incidents
from elastic.contract.records.job_records import BrokenRecord, IncidentRecord, ProgressRecord, decode
from elastic.testing import Difference, History, Injection
from elastic.testing import incidents as compared

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
    incident: IncidentRecord | Mapping[str, Any], *, back_wall_s: float | None = None, **true: Any
) -> None:
    """Raises AssertionError with what the incident says that is not so; `true`: see `of_incident`; `back_wall_s`: it
    has ended by then."""
    _none(compared.of_incident(incident, **true))
    if back_wall_s is not None:
        late_s = compared.as_told(incident).ended_wall_s - back_wall_s
        assert late_s <= compared.JITTER_S, f"it ended {late_s:.2f} s too late"


def check_injections(
    history: History, incidents: Iterable[Mapping[str, Any]], injections: Iterable[Injection], *, clock: bool = True
) -> None:
    """Raises AssertionError unless there is one incident for each injection, in this order, and each says the truth.
    `clock`: the instants can be compared, since all clocks are right."""
    late, told = [], []
    for incident in incidents:
        (late if incident["kind"] == "late exit" else told).append(incident)
    for incident in late:  # of a process that fails and then takes its time to end, on a busy machine
        had_s = float(incident["detail"].partition("within ")[2].partition(" s")[0])
        could_s = incident["wall_s"] - wall_s(history.commits[0].at_s)
        assert had_s <= could_s, f"the job is {could_s:.1f} s old: {incident['detail']}"
    told.sort(key=lambda i: (i["generation"], i["wall_s"]))
    done = list(injections)
    said = [(i["generation"], i["kind"], i["node"], i["ranks"], i["detail"][:100]) for i in told]
    assert len(told) == len(done), f"{len(told)} incidents, not {len(done)}: {said}; done: {done}"
    for incident, injection in zip(told, done, strict=True):
        _none(compared.of_injection(history, incident, injection, wall_s=wall_s(), clock=clock))


def check_injection(history: History, incident: Mapping[str, Any], injection: Injection) -> None:
    """One incident compared with what the test did, and with what the workers wrote down before and after it."""
    _none(compared.of_injection(history, incident, injection, wall_s=wall_s()))


def _none(found: Iterable[Difference]) -> None:
    differences = [str(each) for each in found]
    assert not differences, "\n".join(differences)


def wall_s(monotonic_s: float = 0.0) -> float:
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
