"""`elasticctl fault` and the request behind it: what is struck, and what is refused by name."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import psutil
import pytest
from support import snapshots
from support.door import Door
from support.wait import eventually

from elastic import testing
from elastic.contract.agent_files import AgentStatus
from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import JobState, Phase, SpecRecord, decode
from elastic.contract.records.node_records import EventRecord
from elasticd.api.routes import fault_routes
from elasticd.cluster.published_state import LocalAgent
from elasticd.ctl import main as ctl

Worker = subprocess.Popen[bytes]


def agent(pid: int) -> LocalAgent:
    """This process, whose file says that `pid` is its worker."""
    status = {
        "pid": 1, "incarnation": "i", "job": "train", "node": "a", "phase": "running", "reason": "", "leader": False,
        "generation": 2, "etcd_ok": True, "written_wall_s": 9.0, "ranks": [snapshots.row(0, "a", 0, pid=pid)],
    }  # fmt: skip
    return LocalAgent("train", os.getpid(), 2, msgspec.convert(status, AgentStatus, from_attributes=True), None)


def show(door: Door, pid: int, **facts: object) -> None:
    job = snapshots.job(**facts)
    door.published.publish(replace(snapshots.snapshot(job), agents={"train": agent(pid)}))


@pytest.fixture
def worker() -> Iterator[Worker]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


@pytest.fixture
def door(tmp_path: pathlib.Path, worker: Worker) -> Iterator[Door]:
    made = Door(tmp_path)
    object.__setattr__(made.service, "allow_faults", True)
    show(made, worker.pid)
    yield made
    made.close()


def ctl_fault(door: Door, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        ctl.main(["--socket", str(door.path), "fault", "train", *words])
    said = capsys.readouterr()
    return int(str(ended.value.code)), said.out + said.err


def events(door: Door) -> list[EventRecord]:
    return [
        decode(EventRecord, kv.value) for key, kv in list(door.etcd.kvs.items()) if ClusterKeys("main").events in key
    ]


def test_a_kill_is_sent_to_the_worker_and_written_down_with_who_asked(
    door: Door, worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = ctl_fault(door, capsys, "kill", "--rank", "0", "--json")
    answer = json.loads(said)
    del answer["schema"]
    assert code == 0
    assert answer == {
        "job": "train", "do": "kill", "rank": 0, "node": "a", "pid": worker.pid, "signal": "SIGKILL", "for_s": None,
        "ended": None,
    }  # fmt: skip
    assert worker.wait(10) == -signal.SIGKILL
    event = eventually(lambda: next(iter(events(door)), None), 5.0, "written after the answer")
    assert (event.kind, event.job, event.uid) == ("job.fault_requested", "train", os.geteuid())
    assert event.text == "do = 'kill', rank = 0 (on a)"
    assert "fault.strikes" in door.log.said


def test_a_stop_ends_after_its_time(door: Door, worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    began_s = time.monotonic()
    code, said = ctl_fault(door, capsys, "stop", "--rank", "0", "--for", "0.3")
    assert time.monotonic() - began_s >= 0.3
    assert code == 0
    assert f"SIGSTOP sent to rank 0 of train (process {worker.pid} on a); it goes on after 0.3 s" in said
    running = lambda: psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED  # noqa: E731
    assert eventually(running, 5.0, "it goes on")
    assert ctl_fault(door, capsys, "stop", "--rank", "0")[0] == 0
    assert eventually(lambda: not running(), 5.0, "it stands, for good")


WRONG = {
    "a rank of another node": (["kill", "--rank", "2"], "rank 2 runs on node 'b', and a node strikes its own"),
    "a rank that is not": (["kill", "--rank", "3"], "no worker of rank 3: it has ranks 0 to 2"),
    "a rank that starts": (["kill", "--rank", "1"], "no worker of rank 1: its worker is being started"),
    "no plan": (["hang", "--rank", "0"], "job 'train' has no plan of faults"),
    "no plan for a place": (["kill", "--rank", "0", "--place", "data"], "not kill with place: submit it with preload"),
    "too long": (["stop", "--rank", "0", "--for", "1h"], "for_s = 3600: at most 60 s"),
    "an option of another": (["kill", "--rank", "0", "--for", "2"], "kill takes no --for: it takes --place"),
    "a wrong place": (["kill", "--rank", "0", "--place", "middle"], "Kill.place = 'middle': one of data, forward"),
    "a function is missing": (["call", "--rank", "0"], "call needs --function"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_by_name(
    door: Door, worker: Worker, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    words, why = WRONG[case]
    code, said = ctl_fault(door, capsys, *words)
    assert code in (1, 2)
    assert why in said
    assert worker.poll() is None


def test_no_node_is_struck_that_does_not_allow_it_and_no_job_that_is_over(
    door: Door, worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    show(door, worker.pid, state=JobState(phase=Phase.SUCCEEDED))
    assert "job 'train' does not run: it is succeeded" in ctl_fault(door, capsys, "kill", "--rank", "0")[1]
    show(door, worker.pid)
    object.__setattr__(door.service, "allow_faults", False)
    code, said = ctl_fault(door, capsys, "kill", "--rank", "0")
    assert code == 1
    assert "node 'a' takes no faults: set allow_faults = true" in said
    assert worker.poll() is None


def test_a_process_that_the_agents_file_names_and_that_is_not_its_child_is_left_alone(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job's user may write that file: it could name any process of that user, or of root."""
    with subprocess.Popen([sys.executable, "-c", GRANDCHILD], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        stranger = int(parent.stdout.readline())
        for pid in (stranger, os.getpid(), 1):
            show(door, pid)
            assert f"process {pid} is no worker of this job" in ctl_fault(door, capsys, "kill", "--rank", "0")[1]
        assert psutil.pid_exists(stranger)
        os.kill(stranger, signal.SIGKILL)


GRANDCHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
child.wait()
"""


def planned(folder: pathlib.Path, **facts: Any) -> SpecRecord:
    env = {"ELASTIC_TESTING": "plan.json"}
    spec = JobSpec(name="train", script="/t.py", workdir=str(folder), env=env, preload=(fault_routes.PRELOAD,))
    return SpecRecord(spec=spec, submitted_wall_s=900.0, submitted_by="ada", **{"uid": os.geteuid(), **facts})


def test_a_job_with_a_plan_gets_any_fault_added_to_it(
    door: Door, worker: Worker, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"faults": [{"do": "kill", "rank": 1, "step": 3}]}')
    show(door, worker.pid, spec=planned(tmp_path), progress=snapshots.progress(managed=True))
    code, said = ctl_fault(door, capsys, "hang", "--rank", "0", "--place", "backward", "--for", "90")
    assert (code, f"hang of rank 0 of train at step 102, in its backward: added to {plan}" in said) == (0, True), said
    assert ctl_fault(door, capsys, "fail", "--rank", "0", "--step", "50", "--error", "ValueError")[0] == 0
    added = (
        testing.Kill(rank=1, step=3), testing.Hang(rank=0, step=102, place="backward", for_s=90.0),
        testing.Fail(rank=0, step=50, error="ValueError"),
    )  # fmt: skip
    assert testing.Plan.read(plan).faults == added
    assert json.loads(plan.read_text())["record"] == ""  # it stays beside the plan, on each node
    for words, why in (
        (["--step", "40"], "step 40 has passed: job 'train' is at 40"),
        (["--step", "50", "--error", "ValueError"], "has it already"),
    ):
        code, said = ctl_fault(door, capsys, "fail", "--rank", "0", *words)
        assert (code, why in said) == (1, True), said
    plan.write_text("{}}")
    assert "plan.json: " in ctl_fault(door, capsys, "kill", "--rank", "0")[1]
    assert plan.read_text() == "{}}"
    assert worker.poll() is None


def test_root_writes_no_file_where_a_user_says(
    door: Door, worker: Worker, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "plan.json").write_text("{}")
    show(door, worker.pid, spec=planned(tmp_path, uid=12345, user="ada"))
    code, said = ctl_fault(door, capsys, "kill", "--rank", "0")
    assert code == 7
    assert "is a file of ada, who alone adds to it" in said
    assert (tmp_path / "plan.json").read_text() == "{}"
