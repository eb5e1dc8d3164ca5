"""A type checker in a user's environment, where elasticd is installed, takes its types: by py.typed, and --strict."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from support.source import FOLDERS, ROOT

pytest.importorskip("mypy")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its interpreter: elasticd lies in its packages as a wheel would put it there, with what is installed here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, source in FOLDERS.items():
        (packages / name).symlink_to(source)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "python"


def checked(python: Path, script: Path) -> list[str]:
    argv = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", python, script]
    done = subprocess.run(argv, cwd=script.parent, capture_output=True, text=True, timeout=100, check=False)
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_right_calls_pass_and_wrong_ones_are_refused(environment: Path, tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text((ROOT / "typecheck" / "calls.py").read_text())
    assert checked(environment, script) == ["Success: no issues found in 1 source file"]
