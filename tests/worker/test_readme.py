"""The training script in the README is short, and runs as it stands."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_the_readmes_script_runs(tmp_path: pathlib.Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in script.splitlines() if line.strip()]) <= 25
    told = script.replace("elastic.run(setup, train)", "print('steps:', elastic.run(setup, train).step)")
    (tmp_path / "train.py").write_text(told)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "steps: 471\n"
    assert done.stderr == ""
