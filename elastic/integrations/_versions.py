"""Whether a framework is installed in a version that an integration was tested with."""

from __future__ import annotations

import importlib.metadata
import re


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (5, 23, 0) for "5.23.0.dev0"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def complaint(package: str, found: str | None, lowest: str, below: str) -> str:
    """Why `found` cannot be used; '' if it can. None: not installed."""
    wanted = f"{package}>={lowest},<{below}"
    fix = f"pip install 'elasticd[{package}]'"
    if found is None:
        return f"elastic.integrations.{package} needs {wanted}, which is not installed: {fix}"
    if not numbers(lowest) <= numbers(found) < numbers(below):
        return f"elastic.integrations.{package} needs {wanted}, and {found} is installed: {fix}"
    return ""


def require(package: str, lowest: str, below: str) -> None:
    """Raises ImportError, with the fix, unless `package` is installed in a version from `lowest` to below `below`."""
    try:
        found: str | None = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = None
    if why := complaint(package, found, lowest, below):
        raise ImportError(why)
