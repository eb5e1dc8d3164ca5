"""Which versions of etcd are supported. Pure."""

from __future__ import annotations

import enum
import re


class VersionSupport(enum.Enum):
    SOUND = "sound"
    OLD = "old"  # known faults that do not lose data
    UNSOUND = "unsound"  # may lose or corrupt data
    UNKNOWN = "unknown"  # too old to be supported, or not a version


def version(text: str) -> tuple[int, int, int] | None:
    """'etcd Version: 3.5.1' or '3.5.1' -> (3, 5, 1)."""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def judge(text: str) -> tuple[VersionSupport, str]:
    """Support of this version, and the reason as text."""
    number = version(text)
    if number is None:
        return VersionSupport.UNKNOWN, f"{text.strip()[:60]!r} is not a version of etcd"
    name = ".".join(map(str, number))
    if number < (3, 4, 0):
        return VersionSupport.UNKNOWN, f"etcd {name} is too old: 3.4 or newer is needed"
    if (3, 5, 0) <= number <= (3, 5, 2):
        return VersionSupport.UNSOUND, f"etcd {name} can lose data when it is killed under load (fixed in 3.5.3)"
    if (3, 5, 3) <= number < (3, 5, 13):
        return VersionSupport.OLD, f"etcd {name} has known faults: take 3.5.13 or newer"
    return VersionSupport.SOUND, f"etcd {name}"
