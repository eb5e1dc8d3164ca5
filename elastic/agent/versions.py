"""Which versions wrote a checkpoint."""

from __future__ import annotations

import importlib.metadata
import platform


def versions() -> dict[str, str]:
    """Of Python, torch and elasticd, without importing torch."""
    found = {"python": platform.python_version()}
    for name in ("torch", "elasticd"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
