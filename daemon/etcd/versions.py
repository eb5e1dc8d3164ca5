"""What is known of etcd's versions: their faults that touch elasticd, and the first version without them. Pure.

Source: etcd's own changelogs (CHANGELOG-3.4 to 3.7, https://github.com/etcd-io/etcd/tree/main/CHANGELOG) and security
advisories, as of November 2026.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

Version = tuple[int, int, int]
FIRST: Version = (3, 4, 0)
"""The first that elasticd can use."""


class VersionSupport(enum.Enum):
    SOUND = "sound"
    FLAWED = "flawed"  # known faults that lose no data
    UNSOUND = "unsound"  # may lose or corrupt data
    UNKNOWN = "unknown"  # too old to be supported, or not a version


class Fault(NamedTuple):
    name: str
    """of the advisory; empty: it has none"""
    what: str
    fixed: tuple[Version, ...]
    """the first version of each minor release without it, ascending; a lower minor release keeps it"""
    since: Version = FIRST
    loses: bool = False
    """data"""
    single: bool = False
    """only an etcd of a single member has it"""

    def fix(self, version: Version) -> Version | None:
        """The first version from this one on that has the fault no more; None: this one has not got it."""
        after = next((fixed for fixed in self.fixed if fixed[:2] >= version[:2]), None)
        return after if after is not None and self.since <= version < after else None


FAULTS = (
    Fault("", "it can lose data when it is killed under load", ((3, 5, 3),), since=(3, 5, 0), loses=True),
    Fault("", "a single member can lose confirmed writes in a crash", ((3, 4, 21), (3, 5, 5)), loses=True, single=True),
    Fault("", "a watch can miss events after a compaction", ((3, 4, 31), (3, 5, 13))),
    Fault("CVE-2026-33413", "calls that administer it skip its access control", ((3, 4, 42), (3, 5, 28), (3, 6, 9))),
    Fault("CVE-2026-33343", "nested transactions skip its access control", ((3, 4, 42), (3, 5, 28), (3, 6, 9))),
    Fault("CVE-2026-44283", "puts in transactions read past its access control", ((3, 4, 44), (3, 5, 30), (3, 6, 11))),
    Fault("GHSA-xg4h-6gfc-h4m8", "watches read past its access control", ((3, 5, 33), (3, 6, 14), (3, 7, 1))),
)


class Judgement(NamedTuple):
    support: VersionSupport
    text: str
    take: str = ""
    """The first version without any of it; empty: nothing is known to be wrong."""

    def __str__(self) -> str:
        return f"{self.text}: take {self.take} or newer" if self.take else self.text


def judge(text: str, members: int = 1) -> Judgement:
    """Judge what `etcd --version` or a member's status says. `members`: of the cluster."""
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        return Judgement(VersionSupport.UNKNOWN, f"{text.strip()[:60]!r} is not a version of etcd")
    version = (int(match[1]), int(match[2]), int(match[3]))
    if version < FIRST:
        return Judgement(VersionSupport.UNKNOWN, f"etcd {match[0]} is too old: 3.4 or newer is needed")
    fixes = {fault: fix for fault in FAULTS if not (fault.single and members > 1) and (fix := fault.fix(version))}
    if not fixes:
        return Judgement(VersionSupport.SOUND, f"etcd {match[0]}")
    support = VersionSupport.UNSOUND if any(fault.loses for fault in fixes) else VersionSupport.FLAWED
    faults = "; ".join(f"{fault.what} ({fault.name})" if fault.name else fault.what for fault in fixes)
    return Judgement(support, f"etcd {match[0]}: {faults}", ".".join(map(str, max(fixes.values()))))
