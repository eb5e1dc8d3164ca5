"""Which process is taken for the holder of a lock: the daemon adopts it, and `elasticd --stop` ends it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.procs import Procs, alive
from support.wait import eventually

from elastic.contract.agent_files import MARK_ENV, AgentStatus, mark
from elastic.contract.records.job_records import ProgressRecord, RankRow
from elasticd.machine.processes import launch, shutdown
from elasticd.main import main

HOLD = """
import fcntl, sys, time
lock = open(sys.argv[1], "r+")
fcntl.flock(lock, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


def held(procs: Procs, lock: Path, written: object) -> subprocess.Popen[bytes]:
    """A process that holds `lock`, in which another number is written: as it stands until the holder has written its
    own, or where that comes from another pid namespace."""
    lock.write_text(str(written))
    holder = procs.popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    return holder


def test_a_number_in_the_file_is_not_believed(tmp_path: Path) -> None:
    with Procs() as procs:
        bystander = procs.popen(["sleep", "60"])
        holder = held(procs, tmp_path / "lock", bystander.pid)
        assert launch.holder(tmp_path / "lock") == holder.pid
        assert shutdown.stop_all(tmp_path) == [f"elasticd (process {holder.pid}, SIGTERM)"]
        assert alive(bystander.pid)
    assert launch.holder(tmp_path / "lock") is None
    assert launch.holder(tmp_path / "absent") is None


def test_digits_that_are_no_number_are_not_believed_either(tmp_path: Path) -> None:
    """A job's user can write them into the lock of the job's agent: the daemon's loop looks at it."""
    with Procs() as procs:
        holder = held(procs, tmp_path / "lock", "²")
        assert launch.holder(tmp_path / "lock") == holder.pid


def test_lock_holder_in_another_pid_namespace_is_reported_and_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "HOLDER_S", 0.0)
    monkeypatch.setattr(launch, "_lockers", lambda inode: [])  # as from another pid namespace
    with Procs() as procs:
        bystander = procs.popen(["sleep", "60"])
        holder = held(procs, tmp_path / "lock", bystander.pid)
        with pytest.raises(launch.HeldElsewhere, match="another container"):
            launch.holder(tmp_path / "lock")
        assert shutdown.NOT in shutdown.stop_all(tmp_path)[0]
        assert main(["--stop", f"--state-dir={tmp_path}"]) == 1
        assert alive(bystander.pid)
        assert alive(holder.pid)


def test_elasticd_stop_ends_leftover_processes_of_a_dead_agent(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "train" / "agent"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    found = folder.stat()
    with Procs() as procs:
        left = procs.popen(["sleep", "60"], env={MARK_ENV: mark(found.st_dev, found.st_ino, str(folder))})
        assert main(["--stop", f"--state-dir={tmp_path}"]) == 0
        eventually(lambda: not alive(left.pid), 5.0)


def test_a_lock_of_our_own_is_ours(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert launch.holder(tmp_path / "lock") == os.getpid()


@pytest.mark.parametrize(
    ("facts", "lost"),
    [
        ({}, True),
        ({"checkpoint_interval": "auto"}, False),
        ({"managed": False}, False),
        ({"world_size": 4}, False),
        ({"step": 0}, False),
    ],
)
def test_elasticd_stop_ends_nothing_where_a_job_would_lose_its_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], facts: dict[str, Any], lost: bool
) -> None:
    folder = tmp_path / "jobs" / "train" / "agent"
    folder.mkdir(parents=True)
    known = ProgressRecord(**{"generation": 1, "world_size": 1, "step": 145, "steps_per_s": 9.0, "loss": None,
                              "wall_s": 0.0, "managed": True} | facts)  # fmt: skip
    row = RankRow(rank=0, node="a", slot=0, pid=1, phase="computing", step=145, incarnation=0)
    status = AgentStatus(pid=1, incarnation="x", job="train", node="a", phase="running", reason="", leader=True,
                         generation=1, etcd_ok=True, written_wall_s=0.0, ranks=(row,), progress=known)  # fmt: skip
    (folder / "status.json").write_bytes(msgspec.json.encode(status))
    with Procs() as procs:
        agent = held(procs, folder / "lock", 1)
        assert main(["--stop", f"--state-dir={tmp_path}"]) == int(lost)
        assert alive(agent.pid) is lost
        if lost:
            said = capfd.readouterr().err
            assert "train is at step 145 and has no folder for checkpoints" in said
            assert "elasticd --stop --discard" in said
            assert main(["--stop", "--discard", f"--state-dir={tmp_path}"]) == 0
            assert not alive(agent.pid)
