"""What the wheel ships is what the folders hold, and imports stay light."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from support.source import FOLDERS, ROOT, modules

import elastic

CONF = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_with_modules_is_a_package() -> None:
    for name, path in modules().items():
        assert (path.parent / "__init__.py").exists(), f"{name}: its folder has no __init__.py"


def test_every_entry_point_is_there() -> None:
    project = CONF["project"]
    for target in (t for group in (project["scripts"], *project["entry-points"].values()) for t in group.values()):
        module, _, function = target.partition(":")
        assert f"def {function}(" in modules()[module].read_text()


def test_the_version_is_written_once() -> None:
    """In elastic/__init__.py, which setuptools and both commands read."""
    written = re.findall(r'^__version__ = "(.+)"$', (ROOT / "elastic" / "__init__.py").read_text(), re.MULTILINE)
    assert written == [elastic.__version__]
    assert CONF["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "elastic.__version__"}
    for name, path in modules().items():
        if name != "elastic":
            assert "__version__ =" not in path.read_text(), name
        asks = 'metadata.version("elasticd")', "version_option(package_name"
        assert not any(ask in path.read_text() for ask in asks), f"{name}: of an installed copy, which may be older"


@pytest.mark.slow
def test_the_wheel_holds_every_module(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS.values():
        shutil.copytree(folder, source / folder.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "systemd", source / "systemd")
    build = "import setuptools.build_meta as b; b.build_wheel('out')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=100)
    (wheel,) = (source / "out").glob("*.whl")
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    want = {
        f"{package}/{path.relative_to(folder)}"
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*")
        if path.suffix in (".py", ".proto") or path.name == "py.typed"
    }
    units = {f"elasticd/unit_files/{path.name}" for path in (ROOT / "systemd").glob("elasticd.*")}
    assert len(units) == 5
    assert inside == want | units


def _loads(*names: str) -> list[str]:
    """Top-level names in sys.modules after importing `names` in a fresh process."""
    code = f"import sys, json, {', '.join(names)}; print(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    loaded: list[str] = json.loads(out.splitlines()[-1])
    return loaded


def test_import_elastic_does_not_import_torch() -> None:
    assert {"torch", "numpy", "grpc"}.isdisjoint(_loads("elastic"))


def test_the_daemon_does_not_import_torch() -> None:
    """Not its start, not its control command, not any module of it."""
    assert {"torch", "numpy"}.isdisjoint(_loads(*(name for name in modules() if name.startswith("elasticd"))))


def test_etcd_does_not_import_torch() -> None:
    names = [name for name in modules() if name == "elastic.etcd" or name.startswith("elastic.etcd.")]
    assert names
    assert {"torch", "numpy"}.isdisjoint(_loads(*names))


def test_the_oldest_versions_are_the_floors_of_pyproject(tmp_path: pathlib.Path) -> None:
    """Each dependency has one, which `make test-oldest` installs; of torch the one that is given."""
    file = tmp_path / "constraints.txt"
    subprocess.run([sys.executable, ROOT / ".ci" / "allowed.py", "oldest", file, "2.11.0"], check=True, timeout=60)
    pinned = dict(line.split("==") for line in file.read_text().splitlines() if "==" in line)
    floors = dict(re.split(">=|==", line.split(",")[0]) for line in CONF["project"]["dependencies"])
    assert pinned.items() >= (floors | {"torch": "2.11.0"}).items()
    assert pinned["cryptography"], "those of extras too"
