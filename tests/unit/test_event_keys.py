"""Keys of events sort by time, whatever node writes them."""

from __future__ import annotations

import math

from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import decode, encode
from elastic.contract.records.node_records import EventRecord


def test_keys_of_events_sort_by_time() -> None:
    keys = ClusterKeys("lab")
    times = [9.0, 10.0, 999.999, 1000.0, 1_790_000_000.5]
    made = [keys.event(at, node, "a1") for at, node in zip(times, ("z", "y", "x", "b", "a"), strict=True)]
    assert made == sorted(made)
    assert all(key.startswith(keys.events) for key in made)


def test_event_of_elasticd_itself_names_no_user() -> None:
    event = EventRecord(when_wall_s=1.5, kind="node.gone", node="n1", text="lease expired")
    read = decode(EventRecord, encode(event))
    assert read == event
    assert (read.user, read.uid, read.pid) == ("", None, None)


def test_a_time_that_is_no_date_has_a_key_all_the_same() -> None:
    """The daemons' loops make these keys of times that a job's records name."""
    keys = ClusterKeys("lab")
    made = [keys.event(at, "a", "x") for at in (-1.0, 1000.0, 1e306, math.inf)]
    assert made == sorted(made)
    assert made[0] == keys.event(0.0, "a", "x")
    assert keys.event(math.nan, "a", "x") == made[0]
