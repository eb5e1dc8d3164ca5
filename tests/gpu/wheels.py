"""What the GPU tests need beside torch, for a machine without a network: fetched here, found there.

    python tests/gpu/wheels.py        fills .wheels/cp311 and .wheels/cp312 (make gpu-bundle)

`find()` puts the folder for the running Python behind all that is installed.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[2] / ".wheels"
PYTHONS = ("3.11", "3.12")
PACKAGES = (
    "msgspec", "xxhash", "psutil", "structlog", "nvidia-ml-py",
    "pytest", "pytest-timeout", "iniconfig", "packaging", "pluggy", "pygments",
)  # fmt: skip
PLATFORMS = (*tuple(f"manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 24, 17, 12)), "manylinux2014_x86_64")


def folder(version: str = ".".join(map(str, sys.version_info[:2]))) -> pathlib.Path:
    return FOLDER / f"cp{version.replace('.', '')}"


def find() -> str:
    """The folder, '' where there is none; now also on this process's path."""
    mine = folder()
    if not mine.is_dir():
        return ""
    if str(mine) not in sys.path:
        sys.path.append(str(mine))
    return str(mine)


def fetch() -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    for version in PYTHONS:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--upgrade",
                   "--python-version", version, "--implementation", "cp", *platforms,
                   "--no-compile", "--target", str(folder(version)), *PACKAGES]  # fmt: skip
        subprocess.run(command, check=True)
        print(folder(version))


if __name__ == "__main__":
    fetch()
