"""`make dist`: whoever builds the same files gets the same bytes."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.source import ROOT

if not (ROOT / ".git").exists():
    pytest.skip("not a git checkout", allow_module_level=True)


def copied(to: Path, mtime_s: float) -> Path:
    """What is in the checkout, in another one."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name, follow_symlinks=False)
            os.utime(to / name, (mtime_s, mtime_s), follow_symlinks=False)
    subprocess.run(["git", "init", "-q"], cwd=to, check=True)
    return to


def built(source: Path, umask: int, **env: str) -> dict[str, bytes]:
    argv = [sys.executable, source / ".ci" / "dist.py", source / "dist"]
    subprocess.run(argv, umask=umask, env=os.environ | {"SOURCE_DATE_EPOCH": "1700000000"} | env, check=True)
    return {path.name: path.read_bytes() for path in (source / "dist").iterdir()}


@pytest.mark.long
def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    first = built(copied(tmp_path / "a", 1.6e9), 0o022, TZ="UTC")
    second_source = copied(tmp_path / "other", 1.75e9)
    (second_source / "elasticd.egg-info").mkdir()
    (second_source / "elasticd.egg-info" / "SOURCES.txt").write_text("Makefile\n")
    second = built(second_source, 0o077, TZ="Asia/Tokyo", LC_ALL="C")
    assert sorted(name.rpartition(".")[2] for name in first) == ["gz", "whl"]
    assert [name for name in first | second if first.get(name) != second.get(name)] == []
    (sdist,) = (content for name, content in first.items() if name.endswith(".tar.gz"))
    with tarfile.open(fileobj=io.BytesIO(sdist)) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    made_from = {str(path.relative_to(ROOT)) for path in (ROOT / "elastic" / "etcd" / "proto").glob("*.proto")}
    assert made_from
    assert made_from - inside == set(), "what elastic/etcd/descriptors.py is made from"
