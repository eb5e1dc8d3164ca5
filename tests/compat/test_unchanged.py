"""Scripts that know nothing of elastic: a killed worker is replaced, they resume by their own means, and end as under
stock torchrun. How long it takes is for `benchmarks/unchanged.py` to say."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest
from support.source import ROOT

pytestmark = [pytest.mark.etcd, pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(600)]

FOLDER = pathlib.Path(__file__).parent / "scripts" / "unchanged"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*_*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_unchanged_script_survives_a_killed_worker_as_under_torchrun(script: str, tmp_path: pathlib.Path) -> None:
    text = (FOLDER / f"{script}.py").read_text()
    for name in re.findall(r"^(?:from|import) (transformers|accelerate|lightning)\b", text, re.MULTILINE):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: make test-compat")
    found = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "unchanged.py"), "--only", script, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, stock = json.loads(found.read_text())
    assert (ours["launcher"], stock["launcher"]) == ("elasticd", "torchrun")
    assert ours["seconds"] is not None, done.stdout
    assert 0 < ours["again"] <= 20, "back to the script's own last checkpoint"
    if stock["seconds"] is not None:  # torchrun does not always recover
        assert ours["final"] == stock["final"]
        assert ours["again"] == stock["again"]
