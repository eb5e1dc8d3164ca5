"""Most tests fork their agents from a process that has imported torch (support/forge.py): a fork is as a new process
is. Agents that are really started behave the same: see test_first_zygote.py."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess

import pytest
from support import warm
from support.forge import LATE
from support.printed import TRITON
from support.procs import Procs, describe
from support.wait import eventually

pytestmark = pytest.mark.chaos


def test_fork_has_its_arguments_environment_folder_streams_and_exit_code(tmp_path: pathlib.Path) -> None:
    say = "import os, sys; print(sys.argv, os.environ['MINE'], os.getcwd()); print('bad', file=sys.stderr); sys.exit(3)"
    done = warm.run(["-c", say, "x"], env={**os.environ, "MINE": "yes"}, cwd=tmp_path)
    said = TRITON.sub("", done.stderr)
    assert (done.returncode, done.stdout, said) == (3, f"['-c', 'x'] yes {tmp_path}\n", "bad\n")


def test_fork_is_found_by_its_tag_and_dies_by_a_signal(tmp_path: pathlib.Path) -> None:
    with Procs() as procs, (tmp_path / "out").open("ab") as output:
        forked = procs.python(["-c", "import time; time.sleep(60)"], output=output)
        assert isinstance(forked, warm.Process)
        eventually(lambda: procs.pids() == [forked.pid], 10.0, "its tag is in /proc")
        forked.terminate()
        assert forked.wait(60) == -signal.SIGTERM
        assert procs.pids() == [], describe(procs.pids())


def test_fork_is_refused_where_the_interpreter_would_start_differently(tmp_path: pathlib.Path) -> None:
    with Procs() as procs, (tmp_path / "out").open("ab") as output:
        argv = ["-c", "import sys; sys.exit(sys.path.count('/nowhere'))"]
        started = procs.python(argv, output=output, env={"PYTHONPATH": "/nowhere"})
        assert isinstance(started, subprocess.Popen)
        assert started.wait(20) == 1


def test_fork_runs_a_sitecustomize_that_may_come_late(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.late = 7\n")
    path = {"PYTHONPATH": str(tmp_path), LATE: str(tmp_path)}
    with Procs() as procs, (tmp_path / "out").open("ab") as output:
        argv = ["-c", f"import sys; sys.exit(sys.late * sys.path.count({str(tmp_path)!r}))"]
        forked = procs.python(argv, output=output, env=path)
        assert isinstance(forked, warm.Process)
        assert forked.wait(60) == 7
