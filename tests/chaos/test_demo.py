"""What a newcomer runs first."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

DEMO = pathlib.Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.mark.chaos
@pytest.mark.etcd
@pytest.mark.timeout(300)
@pytest.mark.long
def test_demo_runs_and_prints_each_recovery() -> None:
    done = subprocess.run([sys.executable, DEMO], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("killed by SIGKILL", "node b is gone", "b joins", "400 steps done"):
        assert what in done.stdout, done.stdout
    # A node that is lost whole may have committed one step more than the survivors know of.
    assert re.search(r", 0( to 1)? steps lost$", done.stdout, re.MULTILINE), done.stdout
