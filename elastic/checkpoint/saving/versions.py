"""Which versions run here: recorded in each checkpoint."""

from __future__ import annotations

import importlib.metadata
import platform


def versions() -> dict[str, str]:
    """Versions of Python, elasticd and torch, without importing torch."""
    installed = {"python": platform.python_version()}
    for name in ("elasticd", "torch"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "unknown"
    return installed
