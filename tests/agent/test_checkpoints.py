"""Checkpoints as a job lives with them: on order, full disks, damage, other worlds, remote copies."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.agents import Job
from support.wait import eventually

from elastic.checkpoint.stored import find
from elastic.contract.agent_files import AgentOrders
from elastic.contract.records.job_records import Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]


def steps_saved(folder: Path) -> list[int]:
    return sorted(step for step, _, _ in find.peek(str(folder), "job"))


def test_on_order_then_into_another_world_from_the_remote_copy(tmp_path: Path) -> None:
    """Saved by 2 nodes x 2 workers, copied up; then one node with one worker and an empty disk goes on from there."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    spec = {"checkpoint": {"dir": str(local), "every_s": 3600.0, "remote": f"file://{remote}"}}
    with Job(args={"steps": 60, "step-ms": 25}, spec=spec) as job:
        job.wait_step(10)
        for node in ("n0", "n1"):
            (job.folder / node / "orders.json").write_bytes(msgspec.json.encode(AgentOrders(checkpoint=1)))
        eventually(lambda: steps_saved(local), 20.0, "the checkpoint that was asked for")
        first = steps_saved(local)[0]
        assert 10 <= first < 60
        job.wait_phase(Phase.SUCCEEDED)
        eventually(lambda: 60 in steps_saved(local), 20.0, "the job's last state")
        eventually(lambda: any(remote.glob("step-60.*/manifest.json")), 20.0, "the remote copy")
    elsewhere = {"checkpoint": {**spec["checkpoint"], "dir": str(tmp_path / "empty")}}
    with Job(nodes="1:1", workers=1, args={"steps": 80, "step-ms": 1}, spec=elsewhere) as job:
        job.wait_phase(Phase.SUCCEEDED)
        assert min(line["step"] for line in job.commits()) == 61
        assert job.generation().number > 1, "generations count on from the checkpoint's"


def test_damaged_checkpoint_is_set_aside_and_the_previous_one_is_resumed(tmp_path: Path) -> None:
    spec = {"checkpoint": {"dir": str(tmp_path), "every_steps": 20}}
    with Job(nodes="1:1", args={"steps": 60, "step-ms": 1}, spec=spec) as job:
        job.wait_phase(Phase.SUCCEEDED)
        eventually(lambda: 60 in steps_saved(tmp_path), 20.0)
    shard = next((tmp_path / "step-60").glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-5] ^= 1
    shard.write_bytes(raw)
    with Job(nodes="1:1", args={"steps": 80, "step-ms": 1}, spec=spec) as job:
        job.wait_phase(Phase.SUCCEEDED)
        assert min(line["step"] for line in job.commits()) == 41
        log = (job.folder / "n0" / "agent.log").read_text()
        assert "checkpoint step 40" in log
        assert "quarantined" in log
    assert any("damaged" in path.name for path in tmp_path.iterdir()), "nothing is deleted"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], check=True, timeout=10)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def test_a_full_disk_fails_the_checkpoint_and_not_the_job(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * 500_000)
    spec = {"checkpoint": {"dir": str(small_disk), "every_steps": 20}}
    with Job(nodes="1:1", args={"steps": 3000, "step-ms": 5}, spec=spec) as job:
        eventually(lambda: any(i.kind == "checkpoint" for i in job.incidents()), 30.0, "the failure as an incident")
        incident = next(i for i in job.incidents() if i.kind == "checkpoint")
        assert "No space" in incident.text
        assert incident.steps_lost == 0
        eventually(lambda: (p := job.progress()) and p.checkpoint_error, 10.0, "the failure in status")
        (small_disk / "ballast").unlink()
        eventually(lambda: steps_saved(small_disk), 20.0, "a checkpoint, now that there is room")
        assert job.state().restarts == 0
        assert job.generation().number == 1


def test_a_folder_that_is_not_shared_is_said_at_the_first_save() -> None:
    """Once, by one incident with a count, and nothing piles up on either node."""
    spec = {"checkpoint": {"dir": "/proc/self/cwd/saved", "every_steps": 5}}
    with Job(nodes="2:2", workers=1, args={"steps": 60, "step-ms": 20}, spec=spec, apart=True) as job:
        job.wait_phase(Phase.SUCCEEDED)
        (incident,) = [i for i in job.all_incidents() if i.kind == "checkpoint"]
        assert "checkpoint of step 5 failed: /proc/self/cwd/saved is not one folder on n0 and n1" in incident.text
        assert "checkpoint.shared = false" in incident.text
        assert "in a row" in incident.text
        for node in ("n0", "n1"):
            assert os.listdir(job.folder / node / "saved") == [".elastic-folder"]
