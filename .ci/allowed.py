"""The two ends of what pyproject.toml allows, for `make test-oldest` and `make test-newest`.

`oldest FILE [TORCH]`, `newest FILE [TORCH]`: writes pip's constraints for that end. Oldest: the floors as they stand in
pyproject.toml, and wheels alone, so that a floor that cannot be installed fails. Newest: torch alone, since of all else
pip takes the newest by itself. TORCH: this version of it; else the outermost one that has a CPU build here.
`installed`: prints what this environment has of all that is allowed.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from venv import CPU_BUILDS  # .ci/venv.py, beside this file

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("embedded", "remote", "data")
"""Optional dependencies that the tests of both ends use."""
SOURCE_ONLY = "etcd3"
"""Has no wheel, and is pure Python."""


def allowed() -> list[Requirement]:
    project = tomllib.loads(PROJECT.read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def floor(requirement: Requirement) -> str:
    floors = [one.version for one in requirement.specifier if one.operator in (">=", "==", "~=")]
    if len(floors) != 1:
        sys.exit(
            f"pyproject.toml: {requirement} has {len(floors)} floors: give it one, with which make test-oldest passes"
        )
    return floors[0]


def torch_of(end: str, torch: Requirement) -> str:
    """The oldest or newest torch that is allowed and has a CPU build here, since one with CUDA takes 5 GB. Says so if
    it is not the outermost of all."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "0")
    argv = (*pip, "index", "versions", "torch", "--extra-index-url", CPU_BUILDS)
    told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    listed = told.partition("Available versions: ")[2].partition("\n")[0].split(", ")
    found = [one for one in map(Version, listed) if one in torch.specifier]
    builds = [one for one in found if one.local == "cpu"]
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        builds = found  # PyPI's own have no CUDA
    outermost = min if end == "oldest" else max
    wanted, taken = outermost(found).public, outermost(builds or found).public
    if taken != wanted:
        print(f"{end}: no CPU build of torch {wanted} in the package indexes of this machine: {taken} in its place")
    return taken


def constraints(end: str, torch: str) -> list[str]:
    requirements = allowed()
    first = next(one for one in requirements if one.name == "torch")
    lines = [f"torch=={torch or torch_of(end, first)}"]
    if end == "oldest":
        lines += ["--only-binary=:all:", f"--no-binary={SOURCE_ONLY}"]
        lines += [f"{one.name}=={floor(one)}" for one in requirements if one is not first]
    return lines


def main(do: str, file: str = "", torch: str = "") -> None:
    if do == "installed":
        print(", ".join(f"{one.name} {version(one.name)}" for one in allowed()))
    else:
        Path(file).write_text("\n".join(constraints(do, torch)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
