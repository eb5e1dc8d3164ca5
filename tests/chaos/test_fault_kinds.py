"""Each kind of fault ten times: real processes that really fail or hang, read as an agent reads them, and judged.

Without a cluster, so that many fit into seconds; `chaos.fault_kinds` injects the same ones into real jobs.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch.distributed.elastic.multiprocessing.errors  # noqa: F401 - each child would import it
from chaos.fault_kinds import KINDS, SCRIPT, Result, table
from support.wait import eventually

import elastic  # noqa: F401 - likewise
from elastic.agent.workers import descendants, stacks
from elastic.agent.workers.process import Exited
from elastic.agent.workers.worker_error import last_lines, read_error
from elastic.contract.records.job_records import IncidentRecord
from elastic.contract.records.reasons import Code, reason
from elastic.worker.boot import bootstrap
from elasticd.base.answers import Verdict
from elasticd.diagnosis.verdict import VerdictContext
from elasticd.diagnosis.verdict import judge as verdict_of

TIMES = 10
"""Of each kind."""
WITH_OTHERS = {"nan", "drift", "outlives", "collective", "no_batch"}
"""They need other ranks: injected by `chaos.fault_kinds` only."""
SCRIPTED = [name for name, kind in KINDS.items() if kind.do is None and name not in WITH_OTHERS]
HANGS = [name for name in SCRIPTED if KINDS[name].cls == "hang"]
DEATHS = [name for name in SCRIPTED if name not in HANGS]


def begun(folder: Path, name: str) -> int:
    """Process id of a child that runs a script with this fault, as a worker would."""
    script = folder / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\nimport train_faulty\n"
        f"open('begun', 'x').close()\ntrain_faulty.{name}()\n"
    )
    if pid := os.fork():
        return pid
    code = 99
    gc.freeze()  # what other tests have left is of threads that this process does not have: collecting it is a SIGSEGV
    try:
        os.setsid()
        os.chdir(folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        os.environ.update(RECORD_DIR=str(folder), FAULT=name, TORCHELASTIC_ERROR_FILE=str(folder / "error.json"))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        code = bootstrap._run((str(script),))
        bootstrap._flush()
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)


def death(folder: Path, name: str) -> Verdict:
    """The verdict on a process that died of this fault."""
    _, status = os.waitpid(begun(folder, name), 0)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    ended = Exited(
        1, None if number else os.WEXITSTATUS(status), signal.Signals(number).name if number else None, 12,
        str(folder / "error.json"), str(folder / "log"),
    )  # fmt: skip
    detail, error, _ = read_error(ended, node="node1", slot=0, rank=1, step=12)
    if ended.code == 0:
        detail = reason(Code.ENDED_EARLY)
    lines = last_lines(ended.log_file) if ended.signal else ()
    record = IncidentRecord(
        generation=2, kind="exit", node="node1", ranks=(1,), detail=detail, wall_s=9.0, step=12, error=error,
        last_lines=lines,
    )  # fmt: skip
    return verdict_of(record, VerdictContext(one_host=True))


def hang(folder: Path, name: str) -> Verdict:
    """The verdict on a process that hangs of it, from its state and its real stack."""
    pid = begun(folder, name)
    try:
        eventually(lambda: (folder / "begun").exists(), 30.0, f"{name} begins")
        time.sleep(0.3)
        state = descendants.state(pid)
        detail = reason(Code.STOPPED) if state == "T" else reason(Code.NO_PROGRESS)
        stack = "" if state == "T" else stacks.stack(pid, native=True)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    record = IncidentRecord(
        generation=2, kind="hang", node="node1", ranks=(1,), detail=detail, wall_s=9.0, step=12,
        stacks={"slot 0 (hung)": stack},
    )  # fmt: skip
    return verdict_of(record, VerdictContext(one_host=True))


def right(name: str, found: Verdict) -> None:
    kind = KINDS[name]
    assert str(found.cls) == kind.cls, found
    assert found.rule in kind.rules, found
    assert found.fix
    assert not found.person


def ten(folder: Path, name: str) -> list[Path]:
    folders = [folder / f"{name}-{number}" for number in range(TIMES)]
    for each in folders:
        each.mkdir()
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("name", DEATHS)
def test_a_death_gets_its_class_and_cure_ten_times(name: str, tmp_path: Path) -> None:
    for folder in ten(tmp_path, name):
        right(name, death(folder, name))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", HANGS)
def test_a_hang_gets_its_class_and_cure_ten_times(name: str, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("py-spy may not read other processes")
    for folder in ten(tmp_path, name):
        right(name, hang(folder, name))


@pytest.mark.chaos
@pytest.mark.etcd
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_kind_is_injected_into_a_real_job_and_gets_its_class_and_cure(capsys: pytest.CaptureFixture[str]) -> None:
    from chaos.fault_kinds import run_all

    results = run_all(list(KINDS), 1, print)
    with capsys.disabled():
        print(table(results))
    assert not [result for result in results if result.trouble or not result.struck]


def test_there_are_kinds_enough_and_each_is_a_function_of_the_script_or_of_the_harness() -> None:
    source = SCRIPT.read_text()
    assert len(KINDS) >= 25
    for name, kind in KINDS.items():
        assert kind.do or f"def {name}(" in source or name in WITH_OTHERS, name
    assert len({kind.cls for kind in KINDS.values()}) >= 11


def test_table_of_kinds_counts_injections_and_right_verdicts() -> None:
    results = [Result("spin", True, "hang/hang"), Result("spin", True, "node/sigkill", "class node, not hang")]
    told = table([*results, Result("lock", False, "", "the fault did not strike")])
    assert "spin                            2      1     0.0  hang/hang, node/sigkill" in told
    assert "kinds 2, injected 2, right verdicts 1" in told
    json.dumps(told)
