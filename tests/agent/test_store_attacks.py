"""Another host that reaches the port of a generation's store, while a real job forms its group and trains."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.agents import Job
from support.wait import eventually
from torch._C._distributed_c10d import TCPStore

from elastic.agent.peers.store import LIMIT_NBYTES
from elastic.contract.records.job_records import GenerationRecord
from elastic.contract.records.reasons import Code, codes
from elastic.contract.timeouts import Timeouts

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

MIB = 2**20


def connected(generation: GenerationRecord) -> TCPStore:
    """The attacker: any client that reaches the port."""
    where = generation.store_host, generation.store_port
    return TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))


def generation(job: Job, number: int) -> GenerationRecord:
    def there() -> GenerationRecord | None:
        found = job.generation()
        return found if found is not None and found.number >= number else None

    found = eventually(there, 20.0, f"generation {number}", every_s=0.005)
    assert found is not None
    return found


def check_it_goes_on(job: Job, pids: set[int]) -> None:
    job.wait_step(job.steps() + 20)
    assert [i.steps_lost for i in job.incidents()] == [0]
    newest = max(line["generation"] for line in job.commits())
    assert pids <= {line["pid"] for line in job.commits() if line["generation"] == newest}, "no process was replaced"


def flood(attacker: TCPStore, pieces: int) -> None:
    for number in range(pieces):
        attacker.set(f"flood{number}", b"x" * MIB)


def told(folder: Path) -> str:
    """All that agents and workers have written into files."""
    return "".join(p.read_text(errors="replace") for p in folder.rglob("*") if p.is_file())


def test_an_address_put_in_place_of_a_ranks_is_refused_and_the_job_goes_on() -> None:
    """A survivor is held back while it should write its own address, and the other one is let through to read it."""
    with Job(nodes="1:1", workers=3, args={"steps": 100_000}, timeouts=Timeouts(abort_s=30.0)) as job:
        job.wait_step(20)
        names = [key for key in connected(generation(job, 1)).list_keys() if key.startswith("g1/")]
        assert len(names) > 3, "addresses of all ranks, and what announces them"
        rows = {row.rank: row.pid for status in job.statuses().values() for row in status.ranks}
        os.kill(rows[1], signal.SIGSTOP)
        try:
            job.kill_rank(2)
            second = generation(job, 2)
            attacker = connected(second)
            for name in names:
                if not name.endswith("/arrived"):
                    attacker.set(name.replace("g1/", "g2/", 1), b"an address of the attacker's")
            refused = eventually(
                lambda: next((c for i in job.all_incidents() for c in i.causes if c.kind == "store"), None), 20.0,
                "the refusal is on record",
            )  # fmt: skip
        finally:
            os.kill(rows[1], signal.SIGCONT)
        assert refused is not None
        assert codes(refused.detail) == {Code.STORE_ALTERED}
        assert generation(job, 3).store_secret != second.store_secret
        eventually(job.incidents, 20.0, "the recovery is over")
        check_it_goes_on(job, {rows[0], rows[1]})
        assert second.store_secret not in told(job.folder), "no log or status shows it"


def test_a_flooded_store_is_closed_and_the_job_goes_on() -> None:
    with Job(nodes="1:1", args={"steps": 100_000}) as job:
        job.wait_step(20)
        first, pids = generation(job, 1), {line["pid"] for line in job.commits()}
        with pytest.raises((dist.DistNetworkError, dist.DistStoreError)):
            flood(connected(first), 8 * LIMIT_NBYTES // MIB)
        second = generation(job, 2)
        assert second.store_port != first.store_port
        (incident,) = eventually(job.incidents, 20.0, "the recovery is over") or [None]
        assert incident is not None
        assert (incident.kind, incident.restored_from) == ("store", "live")
        assert codes(incident.detail) == {Code.STORE_GREW}
        check_it_goes_on(job, pids)
