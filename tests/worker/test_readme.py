"""What README and the first page show is short, and is what the files hold."""

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
def test_the_first_pages_script_runs(tmp_path: pathlib.Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
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


def code(line: str) -> str:
    """Without the comment that the README adds."""
    return line.split("  # ")[0].rstrip()


def without_blanks(lines: list[str]) -> list[str]:
    return [line.rstrip() for line in lines if line.strip()]


def test_the_readme_shows_what_changes_from_one_example_to_the_other() -> None:
    """All that goes is all of `main` in `ddp_plain.py`, all that comes is `setup` and `train` in `ddp.py`."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for sign, name, first in (("-", "ddp_plain.py", "def main():"), ("+", "ddp.py", "def setup(job):")):
        shown = without_blanks([code(line[1:]) for line in diff.splitlines() if line.startswith(sign)])
        lines = (ROOT / "examples" / name).read_text().splitlines()
        begin, end = lines.index(first), lines.index('if __name__ == "__main__":')
        assert shown == without_blanks(lines[begin:end])
