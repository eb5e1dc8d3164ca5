"""python -m elastic.checkpoint list, verify, export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.ckpt import flip, save, shard_paths

from elastic.checkpoint.__main__ import main
from elastic.checkpoint.format.names import tmp_name


def test_list_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20):
        path = save(str(tmp_path), step)
    (tmp_path / tmp_name(30, 1, "job")).mkdir()
    (tmp_path / "step-5.damaged-shard-hash").mkdir()
    assert main(["list", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row.get("step"), row["state"]) for row in rows] == [
        (20, "good"),
        (10, "good"),
        (None, "being written, or left over"),
        (None, "quarantined"),
    ]
    flip(shard_paths(path)[0], -1)
    assert main(["list", str(tmp_path)]) == 0  # sizes alone do not show it
    assert main(["verify", str(tmp_path)]) == 1
    assert "shard-hash" in capsys.readouterr().out
    assert main(["verify", path]) == 1
    assert main(["verify", str(tmp_path / "step-10")]) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "step-10", "step-20", tmp_name(30, 1, "job"), "step-5.damaged-shard-hash"
    ]  # fmt: skip


def test_nothing_there_is_not_good(tmp_path: Path) -> None:
    assert main(["list", str(tmp_path)]) == 1


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(str(tmp_path), 10)
    assert main(["export", path, str(tmp_path / "out.pt")]) == 0
    assert torch.load(tmp_path / "out.pt", weights_only=True)["step"] == 10
    flip(shard_paths(path)[0], -1)
    assert main(["export", path, str(tmp_path / "out2.pt")]) == 1
    assert "shard-hash" in capsys.readouterr().err


def test_looking_takes_no_torch() -> None:
    code = "import sys, elastic.checkpoint.__main__, elastic.checkpoint.saving.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_folder_with_an_endless_manifest_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(str(tmp_path), 10)
    (tmp_path / "step-99").mkdir()
    with (tmp_path / "step-99" / "manifest.json").open("wb") as file:
        file.truncate(40_000_000_000)
    assert main(["list", str(tmp_path), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [(row.get("step"), row["state"]) for row in rows] == [(10, "good"), (None, "unreadable")]
    assert "40000000000 bytes" in rows[1]["detail"]
