"""How a worker's process ends: with its script's own exit code, and with its error told, whatever takes its output."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

PROCESS = """
import os, sys
from elastic.core import messages
from elastic.worker.bootstrap import become

log, workdir, agent_pid = sys.argv[1:]
order = messages.Fork(ticket=1, argv=("script.py",), env=dict(os.environ), workdir=workdir)
ends = os.pipe()
become(order, [*ends, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)], int(agent_pid))
"""


def exit_code(folder: pathlib.Path, script: str, log: pathlib.Path) -> int:
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-c", PROCESS, str(log), str(folder), str(os.getpid())],
        env=os.environ | {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json")},
        timeout=60,
        check=False,
    ).returncode


def error(folder: pathlib.Path) -> str:
    return str(json.loads((folder / "error.json").read_text())["message"]["message"])


def test_an_error_that_is_no_text_is_told(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    assert exit_code(tmp_path, 'raise FileNotFoundError("caf\\udce9.png")\n', log) == 1
    assert log.read_text().splitlines()[-1] == "FileNotFoundError: caf\\udce9.png"
    assert "FileNotFoundError" in error(tmp_path)


@pytest.mark.parametrize("code", [0, 7])
def test_a_full_disk_does_not_change_the_exit_code(tmp_path: pathlib.Path, code: int) -> None:
    script = f'import sys\nprint("half a line", end="")\nsys.exit({code})\n'
    assert exit_code(tmp_path, script, pathlib.Path("/dev/full")) == code


def test_on_a_full_disk_an_error_is_still_written_down_for_the_agent(tmp_path: pathlib.Path) -> None:
    assert exit_code(tmp_path, 'raise KeyError("mine")\n', pathlib.Path("/dev/full")) == 1
    assert "KeyError" in error(tmp_path)
