"""Whether a framework is installed in a version that an integration was tested with."""

from __future__ import annotations

import importlib.metadata
import re


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (5, 23, 0) for "5.23.0.dev0"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def complaint(package: str, version: str | None, lowest: str, below: str) -> str:
    """Why `version` cannot be used; '' if it can. None: not installed."""
    wanted = f"{package}>={lowest},<{below}"
    fix = f"pip install 'elasticd[{package}]'"
    if version is None:
        return f"elastic.integrations.{package} needs {wanted}, which is not installed: {fix}"
    if not numbers(lowest) <= numbers(version) < numbers(below):
        return f"elastic.integrations.{package} needs {wanted}, and {version} is installed: {fix}"
    return ""


def require(package: str, lowest: str, below: str) -> None:
    """Raises ImportError, with the fix, unless `package` is installed in a version from `lowest` to below `below`."""
    try:
        version: str | None = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if why := complaint(package, version, lowest, below):
        raise ImportError(why)
