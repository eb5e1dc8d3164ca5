"""The tests and the benchmark for GPUs run on a CPU too: what they call is still there. They say nothing of a GPU.

And what `docs/gpu.md` calls a proof is there.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys

import pytest
from support.source import ROOT


def run(*argv: str, timeout_s: float = 110.0) -> str:
    env = {**os.environ, "ELASTIC_GPU_SMOKE": "1"}
    done = subprocess.run(
        [sys.executable, *argv], env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_the_gpu_tests_run() -> None:
    """All but the one whose ranks cannot be forked; those that would be about nothing are skipped by name."""
    out = run("-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-k", "not stopped_rank and not test_agents")
    words = out.splitlines()[-1].split()
    assert words[1].startswith("passed"), out
    assert int(words[0]) >= 15
    skipped = [line for line in out.splitlines() if line.startswith("SKIPPED")]
    assert any("::test_an_illegal_access_sticks_so_the_process_has_to_go" in line for line in skipped)
    assert len(skipped) == int(words[2])


@pytest.mark.slow
@pytest.mark.etcd
@pytest.mark.timeout(300)
@pytest.mark.long
def test_the_gpu_tests_of_agents_run() -> None:
    """On gloo: a worker killed on one of two nodes, and the state compared with an undisturbed job's."""
    out = run("-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_agents.py", "-k", "killed or nccl", timeout_s=280.0)
    assert out.splitlines()[-1].startswith("2 passed"), out


@pytest.mark.slow
@pytest.mark.long
def test_the_benchmark_runs() -> None:
    out = run("benchmarks/nccl.py", "--quick", "--part", "guard", "snapshot", "broadcast")
    found = json.loads(out.splitlines()[-1])
    assert found["hardware"]["card"] == "none, a smoke run"
    assert {"guard_share_of_step", "snapshot_over_copy", "broadcast_over_pinned_copy"} <= found.keys()


def test_what_the_page_calls_a_proof_is_there() -> None:
    """Names of the tests for a GPU, some cut short by '…'; files below tests/; parts of the benchmark."""
    pages = ("gpu.md", "adr/0017-nccl-was-read-before-it-ran.md")
    page = "".join((ROOT / "docs" / name).read_text() for name in pages)
    texts = [path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    there = [node.name for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    named = re.findall(r"`(test_\w+)(…?)`", page)
    assert len(named) > 15
    for name, cut in named:
        assert any(known.startswith(name) if cut else known == name for known in there), name
    files = re.findall(r"`((?:worker|agent|chaos|checkpoint)/test_\w+\.py)`", page)
    assert len(files) > 10
    assert not [path for path in files if not (ROOT / "tests" / path).exists()]
    benchmark = (ROOT / "benchmarks" / "nccl.py").read_text()
    assert not [part for part in re.findall(r"--part (\w+)", page) if f'"{part}": {part}' not in benchmark]
