"""For a machine with a GPU where elasticd is not installed: the tests bring what they need, and say what they measured.

Needs torch with CUDA; the rest may be installed or come from .wheels (`wheels.py`). ELASTIC_GPU_SMOKE=1: `smoke.py`.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
for path in (ROOT, ROOT / "tests", pathlib.Path(__file__).parent):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

import smoke  # noqa: E402 - the path is set up above
import wheels  # noqa: E402

wheels.find()
if smoke.ON:
    from support import machine

    machine.REASONS["gpu"] = lambda: ""


def pytest_configure(config: pytest.Config) -> None:
    # What the machine has is another torch: what its import warns of is no failure of a test.
    config.addinivalue_line("filterwarnings", "default:::torch")
    config.addinivalue_line("filterwarnings", "ignore:Failed to initialize NumPy")
    if config.option.markexpr == "gpu":
        config.option.fold_skipped = False  # each that is skipped is told by its name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if smoke.ON else []:
        if item.get_closest_marker("gpu") and any(name in item.name for name in smoke.ABOUT_NOTHING):
            item.add_marker(pytest.mark.skip(reason="says nothing without a GPU"))


@pytest.fixture(scope="session", autouse=True)
def forked_ranks() -> Iterator[None]:
    """In a smoke run ranks are forked: end the process that does it."""
    yield
    if smoke.ON:
        from support import ranks

        ranks._end()


@pytest.fixture(scope="session", autouse=True)
def killed_processes_leave_shared_memory() -> Iterator[None]:
    """CUDA's and NCCL's own, of ranks that a test has killed: taken away, since nobody else would do it."""
    folder = pathlib.Path("/dev/shm")
    before = set(folder.iterdir()) if folder.is_dir() else set()
    yield
    for path in set(folder.iterdir()) - before if folder.is_dir() else ():
        if path.name.startswith(("nccl-", "cuda.shm.")):
            path.unlink(missing_ok=True)


_measured: dict[str, object] = {}


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> dict[str, object]:
    """What goes in here is printed at the end, and written to $ELASTIC_GPU_REPORT as JSON."""
    mine: dict[str, object] = {}
    _measured[request.node.name] = mine
    return mine


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = {name: values for name, values in _measured.items() if values}
    if not found:
        return
    terminalreporter.section("measured")
    for name, values in found.items():
        terminalreporter.write_line(f"{name}: {json.dumps(values)}")
    if path := os.environ.get("ELASTIC_GPU_REPORT"):
        pathlib.Path(path).write_text(json.dumps(found, indent=1))
