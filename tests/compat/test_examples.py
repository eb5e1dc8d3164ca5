"""The examples that need a framework, small: alone, and with one of two workers killed in the middle."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from support.examples import FOLDER, check_survives

EXAMPLES: list[tuple[str, str, dict[str, Any], str]] = [
    ("hf_trainer.py", "transformers", {"steps": 20, "width": 16}, "commit:1:9"),
    ("hf_accelerate.py", "accelerate", {"epochs": 2, "samples": 320}, "commit:0:7"),
    ("lightning_trainer.py", "lightning", {"epochs": 2, "samples": 320}, "commit:1:7"),
    ("fabric_loop.py", "lightning", {"epochs": 2, "samples": 640}, "commit:0:13"),
    ("streams.py", "datasets", {"steps": 24, "batch": 8, "files": 8, "width": 16}, "commit:1:13"),
]
"""Script, the package that it needs, arguments, the kill (support/struck.py)."""
NAMES = [name for name, *_ in EXAMPLES]


def alone(name: str, args: dict[str, Any], folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    words = [str(word) for key, value in args.items() for word in (f"--{key}", value)]
    return subprocess.run(
        [sys.executable, str(FOLDER / name), *words], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "needs", "args", "kill"), EXAMPLES, ids=NAMES)
def test_example_runs_alone(name: str, needs: str, args: Any, kill: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip(needs)
    done = alone(name, args, tmp_path)
    assert done.returncode == 0, done.stderr
    if name == "hf_trainer.py":
        assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.etcd
@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "needs", "args", "kill"), EXAMPLES, ids=NAMES)
def test_example_survives_a_kill(name: str, needs: str, args: Any, kill: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip(needs)
    # Trainer's own state differs between the ranks, undisturbed as well: each rank is compared with itself.
    check_survives(name, args, tmp_path, kill, deadline_s=150.0, alike=name != "hf_trainer.py")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_missing_datasets_are_named(tmp_path: pathlib.Path) -> None:
    done = alone("streams.py", {}, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "examples/streams.py needs Hugging Face's datasets: pip install datasets torchdata"
    ]
