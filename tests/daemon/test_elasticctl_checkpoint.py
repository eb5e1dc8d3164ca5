"""elasticctl checkpoint list, verify, export, on a folder with checkpoints: no daemon is needed for that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from support.ckpt import flip, save, shard_paths, state_at

from elasticd.ctl.main import main


def ctl(*args: str) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *args])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (10, 20):
        save(str(tmp_path / "checkpoints"), step)
    return tmp_path / "checkpoints"


def test_list_and_verify(folder: Path) -> None:
    rows = json.loads(ctl("list", str(folder), "--json").output)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(20, "good"), (10, "good")]
    assert ctl("verify", str(folder)).exit_code == 0
    flip(shard_paths(str(folder / "step-20"))[1], -1)
    done = ctl("verify", str(folder))
    assert done.exit_code == 1
    assert "step-20: DAMAGED (shard-hash)" in done.output
    assert "step-10: good" in done.output


@pytest.mark.long
def test_export(folder: Path, tmp_path: Path) -> None:
    assert ctl("export", str(folder / "step-20"), str(tmp_path / "out.pt")).exit_code == 0
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(found["state"]["weight"], state_at(20)["weight"])
    assert ctl("export", str(folder / "step-20"), str(tmp_path / "dcp"), "--format", "dcp").exit_code == 0
    assert (tmp_path / "dcp" / ".metadata").exists()
    flip(shard_paths(str(folder / "step-20"))[0], -1)
    done = ctl("export", str(folder / "step-20"), str(tmp_path / "bad.pt"))
    assert done.exit_code == 1
    assert "shard-hash" in done.output
    assert not (tmp_path / "bad.pt").exists()
