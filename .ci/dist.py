"""Builds the source distribution, and from it the wheel: the same files give the same bytes, with one setuptools.

Their times are that of the last commit, or SOURCE_DATE_EPOCH. Arguments: the folder to write to, which is replaced.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def git(*argv: str) -> str:
    return subprocess.run(["git", *argv], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(out: str) -> None:
    epoch_s = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct").strip()
    os.umask(0o022)  # the wheel has the permissions of the files that it is made from
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "source", Path(folder) / "built"
        copy(source)
        sdist = Path(out).resolve() / build("sdist", source, built, epoch_s)
        sdist.parent.mkdir(parents=True)
        rewrite(built / sdist.name, sdist, int(epoch_s))
        with tarfile.open(sdist) as packed:
            packed.extractall(folder, filter="tar")
        build("wheel", Path(folder) / sdist.name.removesuffix(".tar.gz"), sdist.parent, epoch_s)


def copy(to: Path) -> None:
    """What git tracks or would, without traces of earlier builds."""
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if name and (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name, follow_symlinks=False)


def build(what: str, source: Path, out: Path, epoch_s: str) -> str:
    """Returns the name of the file made. Exits with setuptools' output if it fails."""
    code = f"import setuptools.build_meta as b, sys; print(b.build_{what}(sys.argv[1]))"
    argv = [sys.executable, "-W", "ignore", "-c", code, str(out)]
    env = os.environ | {"SOURCE_DATE_EPOCH": epoch_s}
    done = subprocess.run(argv, cwd=source, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")
    return done.stdout.splitlines()[-1]


def rewrite(sdist: Path, to: Path, epoch_s: int) -> None:
    """Its files sorted by name, with one time, owner and mode: setuptools takes those of the build machine."""
    with (
        tarfile.open(sdist) as old,
        gzip.GzipFile(to, "wb", mtime=epoch_s) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.pax_headers, member.mtime = {}, epoch_s
            member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, old.extractfile(member) if member.isreg() else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
