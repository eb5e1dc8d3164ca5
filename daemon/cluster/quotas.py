"""What one user may put into etcd by submitting jobs: every daemon reads all of it, and it must not end them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from elastic.contract.job.spec import JobSpec
from elastic.contract.records.job_records import encode
from elasticd.access.authority import Account
from elasticd.base.errors import Refused
from elasticd.base.settings import PerUserSettings

from .cluster import Job

SPEC_BYTES = 64 * 1024
"""Of a job's description."""
HOUR_S = 3600.0
"""etcd keeps what was deleted for about as long."""


def check_spec(spec: JobSpec) -> None:
    """Raise Refused (400) for a description that is too large."""
    fields = {name: len(msgspec.json.encode(value)) for name, value in msgspec.structs.asdict(spec).items()}
    nbytes = len(msgspec.json.encode(spec))
    if nbytes > SPEC_BYTES:
        field = max(fields, key=lambda name: fields[name])
        fix = "a file that env_file names" if field == "env" else "a file that the script reads"
        raise Refused(
            400, f"{field} has {fields[field]} bytes of the description's {nbytes}, and {SPEC_BYTES} is the most: put "
            f"it into {fix}"
        )  # fmt: skip


class Quotas:
    """Thread-safe."""

    def __init__(self, settings: PerUserSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._lately: deque[tuple[float, int, int]] = deque()
        """(instant, uid, bytes) of each submission here in the last hour."""

    def take(self, owner: Account, spec: JobSpec, jobs: Mapping[str, Job]) -> None:
        """Count a description that is written for `owner`. Raises Refused (429) where that user has, or has submitted
        here in the last hour, as much as a user may. `jobs`: all; none, if the job is there already."""
        in_etcd = [len(encode(job.spec)) for job in jobs.values() if job.spec and job.spec.uid == owner.uid]
        nbytes, now_s, limits = len(msgspec.json.encode(spec)), self._clock(), self._settings
        with self._lock:
            while self._lately and self._lately[0][0] <= now_s - HOUR_S:
                self._lately.popleft()
            lately = [size for _, uid, size in self._lately if uid == owner.uid]
            for sizes, where, fix in (
                (in_etcd, "has in etcd", "remove finished ones (elasticctl forget --over)"),
                (lately, "has submitted in the last hour", "wait"),
            ):
                total = sum(sizes) + nbytes
                if limits.jobs and len(sizes) >= limits.jobs:
                    has, most = f"{where} {len(sizes)} jobs", f"per_user.jobs = {limits.jobs}"
                elif limits.specs_mb and total > limits.specs_mb * 1e6:
                    has = f"{where} {total / 1e6:.1f} MB of descriptions with this one"
                    most = f"per_user.specs_mb = {limits.specs_mb:g}"
                else:
                    continue
                why = f"{owner.user} {has}, and {most} is the most: {fix}, or have an admin raise it"
                raise Refused(429, why)
            self._lately.append((now_s, owner.uid, nbytes))
