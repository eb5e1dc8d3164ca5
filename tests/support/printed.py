"""What a worker has printed."""

from __future__ import annotations

import re
from pathlib import Path

TRITON = re.compile(r"^nanobind: leaked .*?refleaks\.html$\n?", re.MULTILINE | re.DOTALL)
"""Printed at the end of a forked process by the triton of torch 2.15's CUDA builds: see docs/versions.md."""


def printed(log: Path) -> str:
    """The worker's own output in `log`."""
    return TRITON.sub("", log.read_text())
