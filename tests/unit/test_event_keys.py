"""Keys of events sort by time, whatever node writes them."""

from __future__ import annotations

from elastic.contract.keys import ClusterKeys
from elastic.contract.node_records import EventRecord
from elastic.contract.records import decode, encode


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
