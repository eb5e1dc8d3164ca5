"""The examples, small: a worker of two is killed in the middle, no step is lost, and the end is the same."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shutil
from typing import Any

import pytest
import torch
from support.examples import check_survives, job_of

from elastic.contract.records.job_records import Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos, pytest.mark.slow, pytest.mark.long]

COMPILES = (pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"), pytest.mark.timeout(300))
COMPILING_S = 200.0
"""Inductor has twenty files of C++ compiled, and torch's headers: 45 s of a core where no run has left them."""
GPT = {"batch": 8, "context": 16, "width": 16, "layers": 1}


@pytest.mark.parametrize(
    ("name", "args", "kills"),
    [
        ("images.py", {"epochs": 2, "images": 200, "batch": 20}, ("evaluate:1:10", "commit:0:14")),
        ("gan.py", {"epochs": 2, "points": 160, "batch": 16, "width": 16}, ("commit:1:21",)),
        ("train_gpt.py", {"steps": 20, "micro-batch": 3, **GPT}, ("commit:1:10",)),
        pytest.param("train_gpt.py", {"steps": 20, "compile": "inductor", **GPT}, ("commit:0:10",), marks=COMPILES),
        ("ddp.py", {}, ("commit:0:100",)),
    ],
)
def test_example_survives_kills(name: str, args: Any, kills: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    deadline_s = COMPILING_S if "compile" in args else 60.0
    check_survives(name, args, tmp_path, *kills, env={"EPOCHS": "1"}, deadline_s=deadline_s)


def test_sharded_example_goes_back_to_a_snapshot_and_ends_the_same(tmp_path: pathlib.Path) -> None:
    """Each rank's own part, compared with the same rank's of an undisturbed run."""
    args = {"epochs": 1, "samples": 2560, "width": 16}
    check_survives("fsdp.py", args, tmp_path, "commit:1:30", alike=False, goes_back=True)


def test_plain_example_goes_on_from_its_own_checkpoint(tmp_path: pathlib.Path) -> None:
    """Epochs have 157 steps: the kill is in the second one, of which rank 0 has made a step too."""
    kills: dict[str, tuple[str, ...]] = {"killed": ("step:1:160",), "whole": ()}
    saved = {}
    with contextlib.ExitStack() as stack:
        both = {
            name: stack.enter_context(job_of("ddp_plain.py", {}, {"EPOCHS": "2"}, tmp_path / name, kill))
            for name, kill in kills.items()
        }
        for name, job in both.items():
            job.wait_phase(Phase.SUCCEEDED)
            assert {path.name for path in (tmp_path / name).glob("step:*")} == set(kills[name])
            assert len(job.incidents()) == len(kills[name])
            said = "".join(path.read_text() for path in sorted(job.folder.glob("n0/logs/*.log")))
            assert re.findall(r"epoch (\d)  loss", said) == ["0", "1"], "no epoch is done again that was saved"
            saved[name] = torch.load(job.folder / "model.pt")
    assert saved["killed"]["epoch"] == saved["whole"]["epoch"] == 2
    torch.testing.assert_close(saved["killed"]["model"], saved["whole"]["model"], rtol=0, atol=0)
