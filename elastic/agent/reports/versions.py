"""The versions that run here, compared with those that the tests are run with."""

from __future__ import annotations

import re

from elastic import __version__

VERSION = __version__

TESTED = {"torch": ((2, 10), (2, 15)), "python": ((3, 11), (3, 13))}
"""Oldest and newest minor version; docs/versions.md has the table. The range of torch is pyproject.toml's."""


def untested(found: dict[str, str]) -> list[str]:
    """A message for each version outside those that the tests are run with."""
    outside = []
    for name, (oldest, newest) in TESTED.items():
        numbers = tuple(map(int, re.findall(r"\d+", found.get(name, ""))[:2]))
        if numbers and not oldest <= numbers <= newest:
            span = " to ".join(".".join(map(str, minor)) for minor in sorted({oldest, newest}))
            outside.append(f"{name} {found[name]} is outside the versions that elasticd is tested with ({span})")
    return outside
