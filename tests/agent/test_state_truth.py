"""However a loop changes the state: after a kill the final state is that of an undisturbed run, or the incident says
how many steps were lost."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

LOOPS = Path(__file__).parents[1] / "support" / "train_loops.py"
STEPS = 30


def job_of(loop: str, folder: Path, **env: object) -> Job:
    told = {"LOOP": loop, "RECORD_DIR": str(folder), "STEPS": str(STEPS), **{k: str(v) for k, v in env.items()}}
    return Job(nodes="2:2", workers=1, script=LOOPS, spec={"env": told, "restarts": {"backoff_s": 0.1}})


def finals(folder: Path) -> set[str]:
    found = [json.loads(path.read_text()) for path in folder.glob("final.*.json")]
    assert [final["step"] for final in found] == [STEPS] * 2
    return {final["sha256"] for final in found}


@functools.cache
def undisturbed(loop: str, folder: Path) -> set[str]:
    (folder / "undisturbed").mkdir()
    with job_of(loop, folder / "undisturbed") as job:
        job.wait_phase(Phase.SUCCEEDED)
    return finals(folder / "undisturbed")


@pytest.mark.parametrize("loop", ["closure", "skips", pytest.param("restored", marks=pytest.mark.long)])
def test_a_kill_in_the_middle_of_a_step_changes_no_bit(loop: str, tmp_path: Path) -> None:
    """Rank 0 dies, whose buffers are those that all ranks have, while the other waits in the backward."""
    with job_of(loop, tmp_path, KILL_STEP=12, KILL_RANK=0) as job:
        job.wait_phase(Phase.SUCCEEDED)
        (incident,) = job.incidents()
        assert (incident.steps_lost, incident.restored_from) == (0, "live")
    assert len(finals(tmp_path)) == 1, "the replicas are alike"
    assert finals(tmp_path) == undisturbed(loop, tmp_path)


@pytest.mark.parametrize(
    ("loop", "env"),
    [
        ("calls", {"KILL_IN": "evaluate"}),
        ("epochs", {"KILL_IN": "end", "KILL_STEP": "19"}),
        pytest.param("epochs", {"KILL_IN": "backward"}, marks=pytest.mark.long),
        pytest.param("calls", {"KILL_IN": "broadcast"}, marks=pytest.mark.long),
        pytest.param("calls", {"KILL_IN": "backward"}, marks=pytest.mark.long),
    ],
)
def test_a_kill_in_a_call_of_the_job_changes_no_bit(loop: str, env: dict[str, str], tmp_path: Path) -> None:
    """Evaluation, broadcast, the end of an epoch, and gradients that are compressed."""
    with job_of(loop, tmp_path, **{"KILL_STEP": "12"} | env) as job:
        job.wait_phase(Phase.SUCCEEDED)
        (incident,) = job.incidents()
        assert (incident.steps_lost, incident.restored_from) == (0, "live")
    assert len(finals(tmp_path)) == 1, "the replicas are alike"
    assert finals(tmp_path) == undisturbed(loop, tmp_path)


@pytest.mark.parametrize("loop", ["adversarial", pytest.param("manual", marks=pytest.mark.long)])
def test_a_survivor_in_the_middle_of_a_change_is_no_source(loop: str, tmp_path: Path) -> None:
    """Its parameters are those of no step. At the first step nothing is saved yet either: all begin again, and the
    script is not to blame."""
    with job_of(loop, tmp_path, KILL_STEP=0) as job:
        assert job.wait_phase(Phase.SUCCEEDED).restarts == 1, "the kill, and nothing else"
        logs = "".join(path.read_text() for path in job.folder.glob("n*/logs/*.log"))
        assert "Traceback" not in logs
        assert "training begins again from setup()" in logs
        (incident,) = job.incidents()
        assert incident.restored_from == "setup"
    assert finals(tmp_path) == undisturbed(loop, tmp_path)


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        ("stranger", "SGD steps state.model.0.weight and is not part of the state"),
        pytest.param("zero", "ZeroRedundancyOptimizer keeps a part of its state on each rank", marks=pytest.mark.long),
        pytest.param("sharded", "is sharded (DTensor)", marks=pytest.mark.long),
        ("late", "was changed between job.commit() and the next batch"),
    ],
)
def test_training_loop_that_cannot_be_kept_exact_ends_the_job_at_the_first_refusal(
    loop: str, said: str, tmp_path: Path
) -> None:
    with job_of(loop, tmp_path) as job:
        state = eventually(lambda: (s := job.state()).phase.over and s, 60.0, "the end")
        assert state.phase is Phase.FAILED
        assert state.error is not None
        assert said in state.error.message
        assert state.error.misuse
        assert said in str(state.reason)
        assert state.restarts == 1, "it is not tried again: the second try would begin behind the change it lost"
        assert (generation := job.generation()) is not None
        assert generation.number == 1
        assert job.progress() is None or job.progress().step <= 10  # type: ignore[union-attr]
