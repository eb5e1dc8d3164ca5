"""A job of more nodes than see each other's coming and going: real agents and a real etcd, and no workers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.etcd_server import EtcdServer
from support.source import ROOT

from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys, JobKeys
from elastic.contract.records.generation_delta import GenerationReader
from elastic.contract.records.job_records import SpecRecord, encode
from elastic.etcd.client import Etcd

pytestmark = pytest.mark.etcd
NODES = 76
LEADER_CANDIDATES = 8


@pytest.mark.long
def test_large_job_survives_the_loss_of_all_leader_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from _scale_agents import Fleet

    spec = JobSpec(name="job", script="none.py", nodes=f"1:{NODES}", join_wait_s=90.0)
    keys = ClusterKeys("scale").job("job")
    with EtcdServer() as server:
        etcd = Etcd(server.access, call_s=10.0)
        etcd.put(keys.spec, encode(SpecRecord(spec=spec, submitted_wall_s=0.0, submitted_by="test")))
        fleet = Fleet(server.access, spec, tmp_path, NODES)
        try:
            everyone = set(range(NODES))
            fleet.start(everyone)
            fleet.wait(1, everyone, 100.0)
            threading.Event().wait(8.0)  # they step, so that at their next look around most turn to the head
            there = everyone
            fleet.lose({max(everyone)})
            there = there - {max(everyone)}
            fleet.wait(2, there, 100.0)
            assert fleet.narrow[2] >= len(there) - LEADER_CANDIDATES
            # It has seen no generation before the one that tells its changes, and is one too many to see all members.
            there = there | {NODES}
            fleet.start({NODES})
            fleet.wait(3, there, 50.0)  # without the base it would be some 70 s until it looks at all of the job
            threading.Event().wait(8.0)
            for number, lost in ((4, {min(there)}), (5, set())):
                lost = lost or leading(etcd, keys)
                there = there - lost
                fleet.lose(lost)
                fleet.wait(number, there, 100.0)
        finally:
            fleet.close()
            etcd.close()


def leading(etcd: Etcd, keys: JobKeys) -> set[int]:
    """The leader, and the agents that would follow it."""
    kv, base = etcd.get(keys.generation), etcd.get(keys.base)
    assert kv is not None
    assert base is not None
    places = GenerationReader().read(kv.value, base.value).nodes[:LEADER_CANDIDATES]
    return {int(place.node.removeprefix("n")) for place in places}
