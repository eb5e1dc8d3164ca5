"""Bounds of the numbers in records that a job's agents sign. Each user who may submit a job can write such records, and
all daemons compute with them: a record with a number beyond these bounds is malformed; it is reported, not used."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""Within what a float can hold, so that it can be multiplied with one."""
Real = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""A duration or another measure: sums and products of some of them stay finite."""
WallS = Annotated[float, Meta(ge=-62_000_000_000.0, le=253_400_000_000.0)]
"""Seconds since 1970 that can be written as a date, in each time zone: years 5 to 9999."""
