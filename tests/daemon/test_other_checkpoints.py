"""What `elasticctl run` says of a folder in which another job has its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elasticd.ctl.jobs.job_file import other_job


def checkpoint(folder: Path, name: str, job: str, step: int) -> None:
    (folder / name).mkdir()
    (folder / name / "manifest.json").write_text(json.dumps({"format": 1, "body": {"job": job, "step": step}}))


def test_the_job_of_the_newest_checkpoint_is_named_where_none_is_of_this_job(tmp_path: Path) -> None:
    assert other_job(tmp_path / "absent", "train-2") == ""
    assert other_job(tmp_path, "train-2") == ""
    checkpoint(tmp_path, "step-9", "first", 9)
    checkpoint(tmp_path, "step-10", "train", 10)
    assert other_job(tmp_path, "train-2") == "train"
    checkpoint(tmp_path, "step-3", "train-2", 3)
    assert other_job(tmp_path, "train-2") == ""


@pytest.mark.parametrize("raw", ["", "[]", "{", '{"body": 3}', '{"body": {"step": "x", "job": "a"}}', "\udcff"])
def test_what_is_no_checkpoint_of_ours_is_passed_over(tmp_path: Path, raw: str) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").write_bytes(raw.encode(errors="surrogateescape"))
    assert other_job(tmp_path, "train") == ""
