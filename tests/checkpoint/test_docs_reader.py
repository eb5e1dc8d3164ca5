"""The ten lines in docs/checkpoints.md read a checkpoint, without elastic."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.ckpt import flip, save, shard_paths, state_at

DOCS = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BLOCK_ELASTIC = "import sys; sys.modules['elastic'] = None\n"


def the_ten_lines() -> str:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "safetensors.torch" in block]
    return str(code)


def run(path: str) -> subprocess.CompletedProcess[str]:
    code = BLOCK_ELASTIC + the_ten_lines()
    return subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60, check=False)


def test_documented_checkpoint_reader_is_at_most_ten_lines() -> None:
    assert len([line for line in the_ten_lines().splitlines() if line.strip()]) <= 10


@pytest.mark.slow
def test_documented_checkpoint_reader_reads_all_tensors_and_detects_damage(tmp_path: Path) -> None:
    path = save(str(tmp_path), 10, shards=3)
    good = run(path)
    assert good.returncode == 0, good.stderr
    assert ast.literal_eval(good.stdout) == sorted(state_at(10))
    flip(shard_paths(path)[0], -1)
    assert "AssertionError" in run(path).stderr
