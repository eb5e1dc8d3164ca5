"""What one user may put into etcd: the size of a description, jobs and bytes in all, and in an hour."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.contract.job.spec import JobSpec, parse_job
from elastic.contract.records.job_records import SpecRecord
from elasticd.access.authority import Account
from elasticd.base.errors import Refused
from elasticd.base.settings import PerUserSettings
from elasticd.cluster.cluster import Job
from elasticd.cluster.quotas import HOUR_S, SPEC_BYTES, Quotas, check_spec

ADA, BOB = Account(1000, 1000, "ada"), Account(1001, 1001, "bob")


def spec(**facts: Any) -> JobSpec:
    return parse_job({"name": "j", "script": "/t.py"} | facts)


def large(nbytes: int) -> JobSpec:
    return spec(args=["x" * nbytes])


def jobs(owner: Account, count: int, described: JobSpec | None = None) -> dict[str, Job]:
    record = SpecRecord(spec=described or spec(), submitted_wall_s=1.0, submitted_by=owner.user, uid=owner.uid)
    return {f"{owner.user}{i}": Job(f"{owner.user}{i}", spec=record) for i in range(count)}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def quotas(clock: Clock | None = None, **limits: Any) -> Quotas:
    return Quotas(PerUserSettings(**limits), clock or Clock())


def refusal_of(take: Any) -> str:
    with pytest.raises(Refused) as refused:
        take()
    assert refused.value.status in (400, 429)
    return str(refused.value)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"args": ["x" * SPEC_BYTES]}, ("args has 65540 bytes", "65536 is the most", "a file that the script reads")),
        ({"env": {f"V{i}": "x" * 1000 for i in range(70)}}, ("env has", "a file that env_file names")),
    ],
)
def test_a_description_that_is_too_large_is_refused_by_its_largest_field(
    facts: dict[str, Any], words: tuple[str, ...]
) -> None:
    message = refusal_of(lambda: check_spec(spec(**facts)))
    assert all(word in message for word in words), message
    check_spec(large(SPEC_BYTES - 2000))


def test_a_user_has_so_many_jobs_at_most() -> None:
    limited = quotas(jobs=3)
    limited.take(ADA, spec(), jobs(ADA, 2) | jobs(BOB, 9))
    message = refusal_of(lambda: limited.take(ADA, spec(), jobs(ADA, 3)))
    assert "ada has in etcd 3 jobs, and per_user.jobs = 3 is the most" in message
    assert "elasticctl forget --over" in message
    quotas(jobs=0).take(ADA, spec(), jobs(ADA, 9999))


def test_a_user_has_so_many_bytes_at_most() -> None:
    limited = quotas(specs_mb=0.2)
    limited.take(ADA, large(60_000), jobs(ADA, 2, large(60_000)))
    assert "per_user.specs_mb = 0.2" in refusal_of(
        lambda: limited.take(ADA, large(60_000), jobs(ADA, 3, large(60_000)))
    )
    limited.take(BOB, large(60_000), jobs(ADA, 3, large(60_000)))


def test_what_was_forgotten_counts_for_an_hour() -> None:
    clock = Clock()
    limited = quotas(clock, jobs=2)
    for _ in range(2):
        limited.take(ADA, spec(), {})
    assert "submitted in the last hour 2 jobs" in refusal_of(lambda: limited.take(ADA, spec(), {}))
    limited.take(BOB, spec(), {})
    clock.now_s += HOUR_S
    limited.take(ADA, spec(), {})
