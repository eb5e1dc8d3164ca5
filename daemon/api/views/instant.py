"""The clocks that the answers need, read at one place."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """Properties that do not change while the daemon runs."""

    cluster: str
    node: str
    version: str
    pid: int
    started_s: float
    endpoints: tuple[str, ...]
    embedded: bool
    metrics: str
    address: str = ""
    interface: str = ""
    address_why: str = ""
    python: str = ""
    """Interpreter for jobs that name none."""
    key_id: str = ""
    """Names the cluster key; empty: records are not signed."""
    plain_text: tuple[str, ...] = ()
    """Endpoints of etcd on other machines that are reached without TLS."""


@dataclass(frozen=True, slots=True)
class Now:
    monotonic_s: float
    wall_s: float


def now() -> Now:
    return Now(time.monotonic(), time.time())
