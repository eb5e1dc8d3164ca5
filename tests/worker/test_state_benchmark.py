"""benchmarks/state.py, with the smallest state: every part runs to its end and gives the figures that are promised."""

from __future__ import annotations

import json
import pathlib
import runpy
import subprocess
import sys

import pytest
from support.source import ROOT

SCRIPT = ROOT / "benchmarks" / "state.py"
FIGURES = {
    "save": {
        "stall_over_memcpy", "torch_save_over_stall", "dcp_async_over_stall", "durable_over_disk",
        "lost_time_dcp_over_ours", "save_extra_mb",
    },
    "resume": {"resume_over_read", "resume_extra_mb"},
    "broadcast": {
        "broadcast_over_socket", "broadcast_by_socket_over_socket", "object_list_over_broadcast", "broadcast_extra_mb",
    },
    "broadcast-4": {
        "four_ranks_best_of_torch_over_broadcast", "four_ranks_by_socket_best_of_torch_over_broadcast",
        "four_ranks_extra_mb",
    },
}  # fmt: skip


@pytest.mark.long  # some 25 s of a core, most of it for importing torch ten times
@pytest.mark.parametrize("part", FIGURES)
def test_a_part_of_the_state_benchmark_gives_its_figures(part: str, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, str(SCRIPT), "--part", part, "--mb", "8", "--runs", "1", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() == FIGURES[part]
    assert all(isinstance(figure, int | float) for figure in figures.values())
    assert list(tmp_path.iterdir()) == []


def test_every_promised_figure_belongs_to_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = runpy.run_path(str(SCRIPT))
    assert script["PROMISED"].keys() == set().union(*FIGURES.values())
    assert script["PARTS"].keys() == FIGURES.keys()
