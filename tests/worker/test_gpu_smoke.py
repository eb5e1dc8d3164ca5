"""The tests and the benchmark for GPUs run on a CPU too: what they call is still there. They say nothing of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.source import ROOT

pytestmark = pytest.mark.slow


def run(*argv: str) -> str:
    env = {**os.environ, "ELASTIC_GPU_SMOKE": "1"}
    done = subprocess.run(
        [sys.executable, *argv], env=env, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_gpu_tests_run() -> None:
    """All but the one whose ranks cannot be forked; those that would be about nothing are skipped by name."""
    out = run("-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-k", "not stopped_rank")
    words = out.splitlines()[-1].split()
    assert words[1].startswith("passed"), out
    assert int(words[0]) >= 15
    skipped = [line for line in out.splitlines() if line.startswith("SKIPPED")]
    assert any("::test_an_illegal_access_sticks_so_the_process_has_to_go" in line for line in skipped)
    assert len(skipped) == int(words[2])


def test_the_benchmark_runs() -> None:
    out = run("benchmarks/nccl.py", "--quick", "--part", "guard", "snapshot", "broadcast")
    found = json.loads(out.splitlines()[-1])
    assert found["hardware"]["card"] == "none, a smoke run"
    assert {"guard_share_of_step", "snapshot_over_copy", "broadcast_over_pinned_copy"} <= found.keys()
