"""The end of a worker's process: all that Python does at its end, within the job's time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.agents import Job
from support.printed import printed
from support.scripts import EPOCH

from elastic.contract.records.job_records import Phase
from elasticd.diagnosis.verdict import judge

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

TRAIN = (
    "import atexit, os, threading, time\n"
    + EPOCH
    + """
        {fault}
    print("trained", state.step, flush=True)

if __name__ == "__main__":
    elastic.run(setup, train)

def late():
    time.sleep(1.0)
    print("from a thread", flush=True)

atexit.register(print, "from atexit", flush=True)
threading.Thread(target=late).start()
{last}
"""
)
HANGS = "threading.Thread(target=time.sleep, args=(600,)).start()"


def job(folder: Path, fault: str = "pass", last: str = "", **spec: Any) -> Job:
    script = folder / "train.py"
    script.write_text(TRAIN.format(fault=fault, last=last))
    return Job(nodes="1:1", workers=2, agents=1, script=script, spec=spec)


def logs(job: Job) -> list[str]:
    return [printed(path) for path in sorted((job.folder / "n0" / "logs").glob("slot*.log"))]


def test_threads_and_handlers_run_to_their_end(tmp_path: Path) -> None:
    with job(tmp_path) as made:
        made.wait_phase(Phase.SUCCEEDED)
        made.agents["n0"].wait(timeout=30)
        assert logs(made) == ["trained 30\nfrom a thread\nfrom atexit\n"] * 2
        assert made.incidents() == []


def test_worker_process_exceeding_exit_timeout_is_killed_and_recorded(tmp_path: Path) -> None:
    with job(tmp_path, last=HANGS, exit_timeout_s=3.0) as made:
        made.wait_phase(Phase.SUCCEEDED)
        assert made.agents["n0"].wait(timeout=30) == 0
        found = made.incidents()
        assert sorted((i.kind, i.ranks, i.steps_lost) for i in found) == [
            ("late exit", (0,), 0),
            ("late exit", (1,), 0),
        ]
        assert "had not ended within 3 s" in found[0].text
        assert all("in _shutdown" in text for text in logs(made)), "the stacks are in the log"
        assert made.state().phase is Phase.SUCCEEDED


def test_a_script_that_takes_too_long_after_training_has_failed(tmp_path: Path) -> None:
    with job(tmp_path, last="time.sleep(600 * int(os.environ['RANK']))", exit_timeout_s=2.0) as made:
        assert made.agents["n0"].wait(timeout=60) == 0
        assert made.state().phase is Phase.FAILED
        assert "the rest of its script had not ended within exit_timeout_s = 2 s" in str(made.state().reason)
        assert (1,) in [incident.ranks for incident in made.incidents()]


def test_failed_worker_that_hangs_at_exit_delays_recovery_at_most_the_grace_time(tmp_path: Path) -> None:
    fault = f"if job.rank == 1 and state.step == 10 and job.generation == 1: {HANGS}; raise KeyError('mine')"
    with job(tmp_path, fault=fault, stop_grace_s=2.0) as made:
        made.wait_phase(Phase.SUCCEEDED)
        incident = next(i for i in made.incidents() if i.kind == "exit")
        assert "KeyError" in incident.text
        assert (incident.ranks, incident.steps_lost, incident.restored_from) == ((1,), 0, "live")
        assert incident.timeline_s["aborted"] < 1.0, "the others hear of it at once"
        assert incident.timeline_s["stepping"] > 1.5, "the process had its grace"
        assert {i.kind for i in made.incidents()} == {"exit"}, "its end belongs to the failure"


def test_a_script_that_ends_too_early_with_code_0_has_failed_before_its_process_ends(tmp_path: Path) -> None:
    """The others wait for it meanwhile: it is not called hung, and its process gets what a failed script's does."""
    fault = f"if job.rank == 1 and state.step == 10 and job.generation == 1: {HANGS}; raise SystemExit(0)"
    with job(tmp_path, fault=fault, stop_grace_s=4.0, hang={"floor_s": 1.0, "ceiling_s": 10.0}) as made:
        made.wait_phase(Phase.SUCCEEDED)
        first, second = sorted(made.incidents(), key=lambda i: i.kind)
        assert (first.kind, first.ranks, first.steps_lost, first.restored_from) == ("exit", (1,), 0, "live")
        assert first.text == "exited with code 0 before the job was done"
        assert (second.kind, second.ranks) == ("late exit", (1,))
        assert "had not ended within 4 s" in second.text


@pytest.mark.parametrize("ends", ["sys.exit(3)", "sys.exit(0)"])
def test_sigterm_that_the_script_turns_into_an_exit_code_is_in_the_incident_and_the_verdict(
    tmp_path: Path, ends: str
) -> None:
    handles = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: {ends})"
    strikes = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)"
    fault = f"if job.rank == 1 and state.step == 10 and job.generation == 1: {handles}; {strikes}"
    with job(tmp_path, fault=fault) as made:
        made.wait_phase(Phase.SUCCEEDED)
        (incident,) = made.incidents()
        assert (incident.kind, incident.ranks, incident.steps_lost) == ("exit", (1,), 0)
        assert incident.text.startswith(f"exit code {ends[-2]} after SIGTERM")
        found = judge(incident)
        assert (found.rule, str(found.cls)) == ("sigterm", "node")
        assert any("after SIGTERM" in evidence.line for evidence in found.evidence)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("raise OSError('no space for the final model')", "OSError: no space for the final model"),
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    ],
)
def test_failure_after_training_fails_the_job_and_lets_the_other_ranks_end(
    tmp_path: Path, last: str, said: str
) -> None:
    """The state is complete on all ranks; what the script was to do with it, such as an export, is not."""
    other = f"time.sleep(2); open('{tmp_path}/exported', 'w')"
    with job(tmp_path, last=f"if os.environ['RANK'] == '1': {last}\nelse: {other}") as made:
        assert made.agents["n0"].wait(timeout=60) == 0
        assert made.state().phase is Phase.FAILED
        (incident,) = made.incidents()
        assert (incident.kind, incident.ranks, incident.steps_lost) == ("late exit", (1,), 0)
        assert incident.text == f"the process of slot 1 failed after training: {said}"
        assert str(made.state().reason) == incident.text
        assert (tmp_path / "exported").exists()


def test_a_crash_of_a_process_whose_script_has_ended_is_no_failure_of_the_job(tmp_path: Path) -> None:
    with job(tmp_path, last="import atexit; atexit.register(lambda: os.kill(os.getpid(), 9))") as made:
        made.wait_phase(Phase.SUCCEEDED)
        assert made.agents["n0"].wait(timeout=30) == 0
        assert made.state().phase is Phase.SUCCEEDED
        assert {incident.kind for incident in made.incidents()} == {"late exit"}


def test_a_second_run_is_refused_and_the_job_has_not_succeeded(tmp_path: Path) -> None:
    """Its first was complete: without that the job would have succeeded, and its workers wait for a group for ever."""
    with job(tmp_path, last="elastic.run(setup, train)") as made:
        assert made.agents["n0"].wait(timeout=60) == 0
        assert made.state().phase is Phase.FAILED
        assert "elastic.run is called a second time in this program" in made.state().reason
