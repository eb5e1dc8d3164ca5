"""Nothing that is read of a checkpoint is unpickled, so nothing in it can run code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.ckpt import flip, save, shard_paths

READ = """
import io, pickle, sys
seen = []
sys.addaudithook(lambda event, args: seen.append(args) if event == "pickle.find_class" else None)
import torch
from elastic.checkpoint.__main__ import main
from elastic.checkpoint.stored.read import load_newest

here, there, elsewhere = sys.argv[1:]
seen.clear()
for directory, remote in ((here, ""), (elsewhere, f"file://{there}")):
    back = {}
    def into(info):
        return back.setdefault(info.name, torch.empty(info.shape, dtype=getattr(torch, DTYPES[info.dtype])))
    DTYPES = {"F32": "float32", "BF16": "bfloat16", "I64": "int64"}
    assert load_newest(directory, "job", lambda found: into, remote=remote).step == 10
    assert main(["verify", directory]) == 0
assert not seen, f"unpickled: {seen}"
pickle.loads(pickle.dumps(io.BytesIO))
assert seen, "the hook does not see what it is there for"
"""


@pytest.mark.slow
def test_local_damaged_and_remote_ones(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        save(str(folder), 10)
    flip(shard_paths(save(str(here), 20))[0], -1)
    argv = [sys.executable, "-c", READ, str(here), str(there), str(tmp_path / "elsewhere")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
