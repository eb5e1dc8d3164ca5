"""An incident compared with what a test did itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from elastic.core.records import IncidentRecord

CLOCK_S = 2.0
"""From an act of a test to its notice, on a busy machine; a hang has its own silence besides."""


def check_incident(
    incident: IncidentRecord | Mapping[str, Any],
    *,
    kind: str | Collection[str],
    nodes: Collection[str] = (),
    ranks: Collection[int] | None = None,
    redone: int | None = None,
    worlds: tuple[int, int] | None = None,
    struck_wall_s: float | None = None,
    back_wall_s: float | None = None,
    noticed_within_s: float = CLOCK_S,
) -> None:
    """Raises AssertionError.

    kind, nodes, ranks: of the first cause, and of all that failed with it; no nodes: any.
    redone: committed steps that were committed again later, by the test's own history.
    struck_wall_s, back_wall_s: when the test struck, and when it saw the job step again: the incident lies in between.
    """
    told: Any = incident if isinstance(incident, IncidentRecord) else msgspec.convert(dict(incident), _Told)
    kinds = (kind,) if isinstance(kind, str) else kind
    assert not told.open, told
    assert told.kind in kinds, f"{told.kind} on {told.node}: {told.detail}, not {kind}; causes: {told.causes}"
    if nodes:
        assert set(told.node.split(", ")) == set(nodes), f"{told.node}, not {sorted(nodes)}; causes: {told.causes}"
    if ranks is not None:
        assert sorted(told.ranks) == sorted(ranks), f"ranks {told.ranks}, not {sorted(ranks)}; causes: {told.causes}"
    if worlds is not None:
        assert (told.world_before, told.world_after) == worlds
    if redone is not None:
        assert told.steps_lost is not None, "it is known how far the job had come"
        assert told.steps_lost <= redone, f"{told.steps_lost} steps lost it says, {redone} were done again"
        most = told.steps_lost_at_most
        assert most is None or redone <= most, f"at most {most} steps lost it says, {redone} were done again"
    assert told.ended_wall_s is not None
    if struck_wall_s is not None:
        late_s = told.wall_s - struck_wall_s
        assert -0.1 <= late_s <= noticed_within_s, f"it began {late_s:.2f} s after the strike, it says"
    if back_wall_s is not None:
        assert told.ended_wall_s <= back_wall_s + 0.5, f"it ended {told.ended_wall_s - back_wall_s:.2f} s too late"


class _Told(IncidentRecord, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """As the API gives it, with further fields."""

    job: str = ""
