"""The training script in the README is short, and runs as it stands."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
from support import warm

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


@pytest.mark.slow
def test_the_small_gpt_learns_alone() -> None:
    small = ["--steps", "50", "--batch", "8", "--context", "32", "--width", "32", "--layers", "1", "--lr", "1e-2"]
    done = warm.run([str(ROOT / "examples" / "train_gpt.py"), *small])
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)  world 1", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < 3.5  # 5.5 is knowing nothing


def test_the_readme_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"`((?:elastic|daemon|docs|systemd|examples|benchmarks)/[\w./-]*)`", text)
    assert len(named) >= 10
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
