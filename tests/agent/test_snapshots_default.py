"""A job that names no checkpoint: the death of a rank at the worst moment costs the steps since the last snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import IncidentRecord, Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

SCRIPT = Path(__file__).parent.parent / "support" / "train_two_optimizers.py"
STEPS, STEP_MS, STRIKE_AT = 150, 50, 120
"""Six seconds until the strike: by then there was more than the first snapshot."""


def _job(folder: Path, *, nodes: str, more: Sequence[str] = (), **spec: object) -> Job:
    args = [str(folder), str(STEPS), str(STEP_MS), str(STRIKE_AT), *more]
    job = Job(nodes=nodes, workers=1, script=SCRIPT, spec={"args": args, **spec})
    job.record = folder
    return job


def struck(job: Job) -> IncidentRecord:
    """The incident, once the job has come to its end; every step was made, and those made again came to the same."""
    job.wait_phase(Phase.SUCCEEDED)
    sums: dict[int, set[float]] = {}
    for line in job.lines():
        sums.setdefault(line["step"], set()).add(line["sum"])
    assert set(sums) == set(range(1, STEPS + 1))
    again = {line["step"] for line in job.lines() if line["generation"] > 1} & set(range(1, STRIKE_AT + 1))
    incident = eventually(lambda: [i for i in job.incidents() if i.restored_from], 20.0, "the incident")[0]
    assert incident.steps_lost == len(again)
    # None, where the snapshot of this very step was whole by then.
    assert len(again) < STRIKE_AT - 1, "there was more than the first snapshot"
    assert incident.restored_from.startswith(f"snapshot step {STRIKE_AT - len(again)} in")
    if len({line["generation"] for line in job.lines()}) == 2 and not job.spec.nodes.startswith("1:"):
        assert all(len(found) == 1 for found in sums.values()), "the same world: the same bits"
    return incident


def test_rank_killed_between_two_optimizer_steps_of_one_commit_resumes_from_snapshot(tmp_path: Path) -> None:
    with _job(tmp_path, nodes="2:2") as job:
        struck(job)
        shown = job.progress()
        assert shown is not None
        assert shown.snapshot_step
        assert 0 < shown.snapshot_mb < 1, "of a state of some kilobytes"


@pytest.mark.long
def test_each_node_keeps_all_of_it(tmp_path: Path) -> None:
    """A node dies with half of the ranks, and the state of the other half is of no use."""
    with _job(tmp_path, nodes="1:2", more=["node"]) as job:
        struck(job)
