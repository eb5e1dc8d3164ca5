"""Streams of webdataset and of datasets, and a StatefulDataLoader per rank, under real agents: each sample once."""

from __future__ import annotations

import io
import json
import pathlib
import tarfile
from typing import Any

import pytest
from support.agents import Job

from elastic.contract.records.job_records import Phase

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "streams.py"
FILES, EACH = 8, 16
"""Files, samples of a file."""

pytestmark = [pytest.mark.etcd, pytest.mark.chaos, pytest.mark.timeout(300)]


def make_files(folder: pathlib.Path, kind: str) -> None:
    """Tar files for webdataset, else lines of JSON; the samples are the numbers from 0."""
    for number in range(FILES):
        samples = [json.dumps({"n": number * EACH + i}).encode() for i in range(EACH)]
        if kind != "webdataset":
            (folder / f"{number}.jsonl").write_bytes(b"\n".join(samples) + b"\n")
            continue
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for i, sample in enumerate(samples):
                info = tarfile.TarInfo(f"{number:03}{i:03}.json")
                info.size = len(sample)
                tar.addfile(info, io.BytesIO(sample))


def job_of(kind: str, folder: pathlib.Path, *, kill: str = "", **options: Any) -> Job:
    if kind != "loader":
        pytest.importorskip(kind)
    data = folder / "data"
    data.mkdir()
    make_files(data, kind)
    return Job(script=SCRIPT, args={"record": "record", "kind": kind, "kill": kill, "data": data}, **options)


def check_each_sample_once(job: Job) -> None:
    """Of all committed steps; a step that was done again counts as it was at last."""
    job.wait_phase(Phase.SUCCEEDED, 150.0)
    steps = job.samples()
    assert sorted(steps) == list(range(1, 17))
    assert sorted(sample for samples in steps.values() for sample in samples) == list(range(FILES * EACH))


@pytest.mark.parametrize("kind", ["webdataset", "datasets", "loader"])
def test_each_sample_of_a_stream_is_taken_once_when_workers_die(kind: str, tmp_path: pathlib.Path) -> None:
    with job_of(kind, tmp_path, kill="1:4,0:11", nodes="1", workers=2) as job:
        check_each_sample_once(job)
        assert len(list(job.record.glob("killed-*"))) == 2
        assert [i.steps_lost for i in job.incidents() if i.kind != "late exit"] == [0, 0]


@pytest.mark.parametrize("kind", ["webdataset", "datasets"])
def test_each_sample_of_a_stream_is_taken_once_when_the_world_shrinks(kind: str, tmp_path: pathlib.Path) -> None:
    with job_of(kind, tmp_path, nodes="1:2", workers=1) as job:
        job.wait_step(6, 90.0)
        job.kill_node("n1")
        check_each_sample_once(job)
        assert {line["world_size"] for line in job.commits()} == {1, 2}
