"""The public names for packages that add to elasticd; docs/plugins.md shows how.

A package registers a factory under a name as an entry point, and a setting turns it on by that name:

    elasticd.notices         setting `preemption`     `NoticeFactory`: notices that this machine will be taken away
    elasticd.health_checks   setting `health_checks`  `HealthCheckFactory`: why this node should take no work

All of it runs in the daemon's process and with its rights, each object in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elastic.contract.records.reasons import Text
from elasticd.base.log import Log

__all__ = [
    "HealthCheck", "HealthCheckFactory", "Log", "NodeFacts", "Notice", "NoticeFactory", "NoticeSource", "NoticeUnknown",
    "Text",
]  # fmt: skip


@dataclass(frozen=True)
class Notice:
    """That this machine will be taken away."""

    reason: str
    deadline_s: float
    """Seconds from now until it goes away."""


class NoticeUnknown(Exception):
    """Whether there is a notice cannot be said now."""


class NoticeSource(Protocol):
    def look(self, now_wall_s: float) -> Notice | None:
        """The notice for this machine, as long as there is one; called every 5 s. `now_wall_s`: seconds since the
        epoch. Raises NoticeUnknown."""


NoticeFactory = Callable[[str], NoticeSource]
"""Its argument is the setting `preemption_url`."""


@dataclass(frozen=True)
class NodeFacts:
    """Of the node that a health check looks at."""

    node: str
    address: str
    interface: str
    state_dir: str
    gpus: tuple[int, ...]
    """NVML's indices of those that elasticd uses."""


class HealthCheck(Protocol):
    """A class that is derived from it inherits `every_s` and `leave`."""

    every_s: float = 10.0
    """Seconds between two looks; read anew after each."""
    leave: bool = False
    """Whether the jobs that run here should leave, too, while `look` has something to say."""

    def look(self) -> Text:
        """One line, a str: why this node should take no work. Empty: it may."""


HealthCheckFactory = Callable[[NodeFacts, Log], HealthCheck]
"""`Log` is structlog's: log.warning("nfs.slow", seconds=3)."""
