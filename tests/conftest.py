"""What holds for every test: skips say why, a crash shows its stacks, and nothing is left behind."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator, Iterator

import psutil
import pytest
from support import etcd_server, machine, procs, scratch, warm

RUN = "ELASTIC_TEST_RUN"
LONG_END = 0.7
"""Of the tests of a process: beyond this part of them none is begun that takes long."""


def pytest_configure() -> None:
    # pytest enables faulthandler for itself; this is for the processes that tests start.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # Else every process that tests start compiles our modules again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    warm.remember_environment()
    if importlib.util.find_spec("hypothesis"):  # a machine with GPUs may have pytest alone
        from hypothesis import HealthCheck, settings

        # A property is not a matter of time: an example may take long on a busy machine.
        settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected lives as long as the run: looking through it for garbage would cost seconds in each process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("chaos") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))  # starts real jobs, on machines that may be busy
    if processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        items[:] = long_before_the_end(items, processes)


def long_before_the_end(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Each process gets its share of the list as it stands: the same number of long tests in each, among the others,
    and none at the end, where the other processes would wait for it. Tests of a module stay together."""
    long, short = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (long if any(map(item.get_closest_marker, ("chaos", "slow", "systemd"))) else short).append(item)
    ordered = list[pytest.Item]()
    for process in range(processes):
        places = list[tuple[float, list[pytest.Item]]]()
        for found, end in ((long, LONG_END), (short, 1.0)):
            share = found[len(found) * process // processes : len(found) * (process + 1) // processes]
            for _, module in itertools.groupby(enumerate(share), lambda numbered: numbered[1].path):
                numbers, together = zip(*module, strict=True)
                places.append((end * numbers[0] / len(share), list(together)))
        places.sort(key=lambda place: place[0])
        ordered += [item for _, together in places for item in together]
    return ordered


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, why_not in machine.REASONS.items():
        if item.get_closest_marker(marker) and (reason := why_not()):
            pytest.skip(reason)


def _shared_memory() -> set[str]:
    # multiprocessing's semaphores are taken away by its own resource tracker, which outlives us by a moment.
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def _held() -> str:
    """All that living processes have mapped or open, as one text to look names up in."""
    text = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text.append((entry / "maps").read_text(errors="replace"))
                text += [os.readlink(fd) for fd in (entry / "fd").iterdir()]
            except OSError:  # gone meanwhile
                continue
    return "\n".join(text)


def _namespaces() -> set[str]:
    """Named network namespaces, our bridges and links, our cgroups."""
    found = {f"namespace {p.name}" for p in pathlib.Path("/run/netns").glob("elt*")}
    found |= {f"folder {p}" for p in pathlib.Path("/run").glob("elt*")}
    found |= {f"link {p.name}" for p in pathlib.Path("/sys/class/net").glob("elt*")}
    if root := machine.cgroup2():
        found |= {f"cgroup {p}" for p in root.glob("elt*")}
    return {name for name in found if f"elt{os.getpid()}" in name}


def _processes(run: str) -> list[int]:
    """What the tests started: by its environment, wherever it hangs in the tree, or as a child forked from here."""
    children = {child.pid for child in psutil.Process().children(recursive=True) if procs.alive(child.pid)}
    # multiprocessing's tracker belongs to this process and ends with it
    return [pid for pid in children | set(procs.tagged(run, RUN)) if "resource_tracker" not in procs.describe([pid])]


def _another_run(run: str) -> bool:
    """Whether other tests run on this machine: theirs cannot be told from ours in /dev/shm."""
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes()
            except OSError:  # gone meanwhile
                continue
            if b"support/reaper.py" in argv and run.encode() not in argv:
                return True
    return False


def _of_a_dead_loader(name: str) -> bool:
    """torch ends a DataLoader's processes while their queues send: between a file's making and its unlinking, too. Of
    one that is gone nobody can use the file; it is removed here."""
    if (made := re.match(r"torch_(\d+)_", name)) and not procs.alive(int(made[1])):
        pathlib.Path("/dev/shm", name).unlink(missing_ok=True)
        return True
    return False


def _left_behind(run: str, shm_before: set[str]) -> str:
    """What this run of the tests has left, in words; '' when nothing."""
    left = []
    if pids := _processes(run):
        left.append(f"processes:\n{procs.describe(pids)}")
    names = _shared_memory() - shm_before
    if names and not _another_run(run):
        held = _held()  # and a demo or a benchmark may be at work: what is in use is not left behind
        names = {name for name in names if not _of_a_dead_loader(name)}
        if orphans := sorted(name for name in names if name not in held and not scratch.of_another(name)):
            left.append(f"in /dev/shm: {', '.join(orphans)}")
    if names := _namespaces():
        left.append(", ".join(sorted(names)))
    return "\n".join(left)


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that are killed leave temporary files behind: those of all that the tests start lie in one folder."""
    tmp_path_factory.getbasetemp()  # not in it
    with tempfile.TemporaryDirectory(prefix="elt-tmp-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o1777)
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = folder
        yield
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(temporary_files: None) -> Iterator[None]:
    """Fail the run when processes, shared memory, namespaces or cgroups of its tests outlive it."""
    run = uuid.uuid4().hex
    scratch.remove_orphans()
    reaper = subprocess.Popen(  # for the case that we are killed
        [sys.executable, pathlib.Path(__file__).parent / "support" / "reaper.py", run, str(os.getpid())],
        stdin=subprocess.PIPE, text=True, process_group=0,  # in our session: a pool under test ends orphans in others
    )  # fmt: skip
    os.environ[RUN] = run  # inherited by all that tests start
    before = _shared_memory()
    yield
    warm.end()
    etcd_server.end_shared(os.getpid())
    reaper.communicate("bye\n", timeout=60)
    end_s = time.monotonic() + 3.0  # what is being ended right now may take a moment
    while (left := _left_behind(run, before)) and time.monotonic() < end_s:
        time.sleep(0.1)
    procs.end_all(_processes(run))
    scratch.remove_semaphores()
    assert not left, f"left behind by the tests:\n{left}"
