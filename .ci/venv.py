"""Fills the virtual environment that runs this: torch in its CPU build, elasticd, and what its tests need.

Shows each step with its time, and nothing else unless it fails. Arguments: the constraints file; what of
elasticd, if not all extras.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from pathlib import Path

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
"""On x86-64, PyPI has torch with CUDA alone: 5 GB in place of 1."""
EXTRAS = ".[embedded,remote,data,test,lint]"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(argv: tuple[str, ...]) -> str:
    done = subprocess.run([*PIP, *argv], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"\n{done.stdout}{done.stderr}\nfailed: pip {' '.join(argv)}")
    return done.stdout


def has_cuda(torch: str) -> bool:
    """Whether this machine's package indexes have this torch with CUDA alone."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return False
    report = run(("install", "-q", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", torch))
    return "+cpu" not in json.loads(report)["install"][0]["metadata"]["version"]


def main(constraints: str, wanted: str = EXTRAS) -> None:
    torch = next(line for line in Path(constraints).read_text().splitlines() if line.startswith("torch=="))
    index = ("--extra-index-url", CPU_BUILDS) if has_cuda(torch) else ()
    step(1, f"{torch}, the CPU build (some 200 MB)", torch, *index)
    step(2, "elasticd, an etcd for one machine, what the tests need", "-c", constraints, "--use-pep517", "-e", wanted)


def step(number: int, what: str, *wanted: str) -> None:
    began_s = time.monotonic()
    print(f"set-up {number} of 2: {what} …", end="", flush=True)
    run(("install", "-q", *wanted))
    print(f" {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
