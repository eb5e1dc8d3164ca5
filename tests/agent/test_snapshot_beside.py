"""Snapshots so large that a thread copies them beside the steps, with real agents and a worker that is killed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.agents import Job
from support.wait import eventually

from elastic.checkpoint.memory.memcpy import WORTH_A_THREAD_BYTES
from elastic.checkpoint.stored import find
from elastic.contract.records.job_records import Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]


def weights_in(folder: Path) -> str:
    """As the training script hashes them."""
    held: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        assert shard.stat().st_size > WORTH_A_THREAD_BYTES
        held |= safetensors.torch.load_file(shard)
    # load_state_dict's order is that of parameters()
    names = [f"model.{layer}.{kind}" for layer in (0, 3) for kind in ("weight", "bias")]
    return hashlib.sha256(b"".join(held[name].numpy().tobytes() for name in names)).hexdigest()[:12]


def test_each_checkpoint_is_bit_identical_to_one_committed_step(tmp_path: Path) -> None:
    spec = {"checkpoint": {"dir": str(tmp_path), "every_steps": 3, "keep": 20}}
    args = {"steps": 24, "step-ms": 0, "width": 100_000, "batch": 4, "samples": 16, "hashes": 1}
    with Job(nodes="1:1", args=args, spec=spec) as job:
        job.wait_step(14)
        job.kill_rank(1)
        job.wait_phase(Phase.SUCCEEDED)
        eventually(lambda: 24 in [step for step, _, _ in find.peek(str(tmp_path), "job")], 30.0, "the last checkpoint")
        committed = {(line["step"], line["hash"]) for line in job.commits()}
    folders = [path for path in tmp_path.glob("step-*") if (path / "manifest.json").exists()]
    assert len(folders) >= 3
    for folder in folders:
        step = json.loads((folder / "manifest.json").read_text())["body"]["step"]
        assert (step, weights_in(folder)) in committed, folder.name
