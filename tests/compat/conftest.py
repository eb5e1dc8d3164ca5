"""Tests of the integrations need the frameworks, which are in an environment of their own: `make test-compat`."""

from __future__ import annotations

import importlib.util
import pathlib

NEEDED = {
    "test_transformers.py": ("transformers",),
    "test_accelerate.py": ("accelerate",),
    "test_lightning.py": ("lightning",),
    "test_streams.py": ("datasets", "webdataset"),
}
"""File -> packages of which one at least is needed. A file that is not named needs none, or its tests say so."""


def _missing(path: pathlib.Path) -> bool:
    needed = NEEDED.get(path.name, ())
    return bool(needed) and not any(importlib.util.find_spec(name) for name in needed)


collect_ignore = [path.name for path in pathlib.Path(__file__).parent.glob("test_*.py") if _missing(path)]
