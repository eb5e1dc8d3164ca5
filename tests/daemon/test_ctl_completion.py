"""Completion of words in a shell: the scripts, and the names of jobs and nodes."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from elasticd.ctl import main as ctl
from elasticd.ctl.client import Client, Unreachable
from elasticd.ctl.completion import SHELLS, VARIABLE


def complete(words: str) -> list[str]:
    done = CliRunner().invoke(
        ctl.main, [], prog_name="elasticctl",
        env={VARIABLE: "bash_complete", "COMP_WORDS": f"elasticctl {words}", "COMP_CWORD": str(words.count(" ") + 1)},
    )  # fmt: skip
    return [line.partition(",")[2] for line in done.output.splitlines() if line]


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(self: Client, path: str, *_: object, **__: object) -> dict[str, Any]:
        return {"jobs": [{"job": "train"}, {"job": "tune"}, {"job": "eval"}], "nodes": [{"node": "n1"}]}

    monkeypatch.setattr(Client, "get", get)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("stop t", ["train", "tune"]),
        ("forget train t", ["train", "tune"]),
        ("status ", ["eval", "train", "tune"]),
        ("drain ", ["n1"]),
        ("resta", ["restart"]),
        ("completion f", ["fish"]),
    ],
)
def test_completion(words: str, found: list[str], daemon: None) -> None:
    assert complete(words) == found


def test_completion_is_silent_without_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(self: Client, *_: object, **__: object) -> dict[str, Any]:
        raise Unreachable("no")

    monkeypatch.setattr(Client, "get", get)
    assert complete("stop t") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_that_the_shell_reads(shell: str) -> None:
    done = CliRunner().invoke(ctl.main, ["completion", shell])
    assert done.exit_code == 0
    assert VARIABLE in done.output
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"no {shell} here")
    assert subprocess.run([program, "-n"], input=done.output, text=True, timeout=60, check=False).returncode == 0


def test_bash_completes_by_the_script(tmp_path: pathlib.Path) -> None:
    """bash itself, with an elasticctl in its PATH: the script, click and our names work together."""
    program = tmp_path / "elasticctl"
    program.write_text(f"#!{sys.executable}\nfrom elasticd.ctl.main import main\nmain()\n")
    program.chmod(0o755)
    script = CliRunner().invoke(ctl.main, ["completion", "bash"]).output
    types = "COMP_WORDS=(elasticctl unco) COMP_CWORD=1; _elasticctl_completion elasticctl; echo ${COMPREPLY[@]}"
    env = dict(os.environ, ELASTICCTL_SOCKET="/nowhere", PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{types}"], env=env, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "uncordon", done.stderr
