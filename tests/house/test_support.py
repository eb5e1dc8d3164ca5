"""The helpers of the tests are tested too: a wait that never fails, or a clean-up that misses, hides everything."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
from support import scratch
from support.procs import Procs, alive, end_all, tagged
from support.wait import eventually, holds, stretched


def test_eventually_returns_the_awaited_value() -> None:
    answers = iter([None, [], "here"])
    assert eventually(lambda: next(answers), 5.0) == "here"


def test_eventually_raises_with_the_last_value() -> None:
    with pytest.raises(AssertionError, match=r"not within 0.05 s: the moon; seen last: 0"):
        eventually(lambda: 0, 0.05, "the moon")


def test_eventually_takes_an_assertion_for_not_yet() -> None:
    seen: list[int] = []

    def check() -> int:
        seen.append(1)
        assert len(seen) >= 3
        return len(seen)

    assert eventually(check, 5.0) == 3


def test_eventually_lets_other_errors_through() -> None:
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 / 0, 5.0)


def test_deadlines_are_as_many_times_as_long_as_processes_share_a_core() -> None:
    cores = os.cpu_count() or 1
    assert stretched(5.0, load=0.5 * cores) == 5.0
    assert stretched(5.0, load=4.0 * cores) == 20.0
    assert stretched(20.0, load=4.0 * cores) == 60.0, "pytest's limit for a test comes soon after"
    assert stretched(90.0, load=4.0 * cores) == 90.0


def test_holds_raises_if_the_condition_fails() -> None:
    answers = iter([True, True, False])
    with pytest.raises(AssertionError, match="did not hold"):
        holds(lambda: next(answers), 5.0)


def test_processes_end_with_the_block_even_detached_ones() -> None:
    detach = (
        "import subprocess, sys;"
        "p = subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL);"
        "print(p.pid, flush=True)"
    )
    with Procs() as procs:
        parent = procs.popen([sys.executable, "-c", detach], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        detached = int(parent.stdout.readline())
        assert parent.wait(10) == 0
        assert alive(detached)
        assert detached in procs.pids()
    assert not alive(detached)
    assert tagged(procs.tag) == []


def test_processes_end_when_the_block_raises() -> None:
    pids: list[int] = []

    def fails() -> None:
        with Procs() as procs:
            pids.append(procs.popen(["sleep", "60"]).pid)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not alive(pids[0])


def test_a_stopped_process_is_ended_too() -> None:
    with Procs() as procs:
        process = procs.popen(["sleep", "60"])
        process.send_signal(19)
        eventually(lambda: os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG), 5.0)
        end_all([process.pid])
        assert process.wait(5) == -9


def test_folders_of_a_run_that_was_killed_are_removed_and_those_of_a_living_one_stay() -> None:
    make = "import sys; from support import scratch; print(scratch.folder('gone'), flush=True); sys.stdin.read()"
    mine = pathlib.Path(scratch.folder("mine"))
    try:
        with Procs() as procs:
            env = {"PYTHONPATH": os.pathsep.join(sys.path)}
            other = procs.popen([sys.executable, "-c", make], env=env, stdin=-1, stdout=-1, text=True)
            assert other.stdout is not None
            theirs = pathlib.Path(other.stdout.readline().strip())
            (theirs / "data").mkdir()
            assert str(theirs) not in scratch.remove_orphans()
            assert (scratch.of_another(theirs.name), scratch.of_another(mine.name)) == (True, False)
            other.send_signal(signal.SIGKILL)
            other.wait(10)
            assert theirs.is_dir()
            assert str(theirs) in scratch.remove_orphans()
        assert not theirs.exists()
        assert mine.is_dir()
    finally:
        shutil.rmtree(mine)


def test_semaphores_of_processes_that_were_killed_are_removed_and_no_others() -> None:
    make = (
        "import multiprocessing, sys\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "sys.stdin.read()"
    )
    with Procs() as procs:
        both, paths = [], []
        for _ in range(2):
            both.append(procs.popen([sys.executable, "-c", make], stdin=-1, stdout=-1, text=True))
            paths.append(pathlib.Path("/dev/shm/sem." + both[-1].stdout.readline().strip().removeprefix("/")))
        assert [path.exists() for path in paths] == [True, True]
        os.killpg(both[0].pid, signal.SIGKILL)  # with its tracker, which would remove it
        both[0].wait(10)
        gone = str(paths[0])
        eventually(lambda: gone in scratch.remove_semaphores() or not paths[0].exists(), 5.0, "it is removed")
        assert [path.exists() for path in paths] == [False, True]
