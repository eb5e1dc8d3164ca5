"""The examples in docs/frameworks.md are complete, and run as they stand."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "frameworks.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=["transformers", "accelerate", "lightning", "fabric"])
def test_examples_of_the_docs_run(text: str, tmp_path: pathlib.Path) -> None:
    used = re.findall(r"integrations\.(\w+)", text)
    if missing := [name for name in used if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)}: not installed")
    (tmp_path / "train.py").write_text(text)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    if "integrations.transformers" in text:
        assert (tmp_path / "out" / "model.safetensors").exists()
