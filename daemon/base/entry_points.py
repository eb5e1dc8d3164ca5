"""What packages add to elasticd by entry points: found by name, loaded once a setting names it, called with care."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PluginFailed

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint  # whose import takes milliseconds, and few daemons have plug-ins

    from .log import Log

GROUPS = {"preemption": "elasticd.notices", "health_checks": "elasticd.health_checks"}
"""Setting -> group."""
SOURCE = Path(__file__).parents[2] / "pyproject.toml"
"""There if elasticd runs from its source: what is installed of it may be of an earlier state."""
INSTALL = "those of elasticd itself are missing: install it anew (pip install .)"


def find(setting: str, name: str) -> EntryPoint:
    """Raises ValueError for a name that no package provides, or more than one."""
    from importlib.metadata import EntryPoint, entry_points

    group, own = GROUPS[setting], dict[str, str]()
    if SOURCE.exists():
        project = tomllib.loads(SOURCE.read_text())["project"]
        own = project["entry-points"].get(group, {}) if project["name"] == "elasticd" else {}
    there: set[EntryPoint] = {
        *entry_points(group=group),
        *(EntryPoint(key, value, group) for key, value in own.items()),
    }
    found = [point for point in there if point.name == name]
    if len(found) == 1:
        return found[0]
    named = f"{setting} = {name!r}"
    if found:
        raise ValueError(f"{named}: more than one package provides it: {', '.join(sorted(p.value for p in found))}")
    known = f"there are: {', '.join(sorted({point.name for point in there}))}" if there else "there is none"
    stale = setting == "preemption" and not any(point.value.startswith("elasticd.") for point in there)
    raise ValueError(f"{named}: no package provides it; {known}{f'; {INSTALL}' if stale else ''}")


def made(setting: str, name: str, log: Log, *given: object) -> Any:
    """What the factory of that name makes of `given`. Raises PluginFailed."""
    with Guard(f"{setting} = {name!r}", log).call():
        return find(setting, name).load()(*given)


class Guard:
    """Calls into a plug-in."""

    def __init__(self, name: str, log: Log, expected: type[Exception] = PluginFailed) -> None:
        self._name, self._log, self._expected = name, log, expected
        self._logged: set[type[BaseException]] = set()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Raises PluginFailed in place of all but `expected`; of each kind the first is logged with its traceback."""
        try:
            yield
        except self._expected:
            raise
        except (Exception, SystemExit) as error:
            kind = type(error)
            if kind not in self._logged:
                self._logged.add(kind)
                self._log.error("plugin.failed", plugin=self._name, exc_info=True)
            raise PluginFailed(f"{self._name}: {kind.__name__}, with its traceback in the log of elasticd") from error
