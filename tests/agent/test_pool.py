"""The zygote and its workers as processes: forked, told, waited for, ended."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import warm
from support.printed import TRITON, printed
from support.procs import alive
from support.wait import eventually
from support.warm_zygote import adopt_zygotes

from elastic.agent.workers import descendants, zygote
from elastic.agent.workers.descendants import PR_SET_CHILD_SUBREAPER, Descendants, exit_status
from elastic.agent.workers.pool import Exited, Pool, PoolEvent, WorkerMessage
from elastic.agent.workers.worker_error import read_error
from elastic.agent.workers.zygote import ZygoteUnfit
from elastic.contract.records.reasons import Code, reason
from elastic.contract.worker import messages
from elastic.contract.worker.messages import AbortGroup, Forked, ForkRefused, GroupClosed, Preload, ScriptEnded, encode
from elastic.worker.link.session import CHANNEL_ENV


class Bench:
    """A pool and the small loop that it needs."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.selector = selectors.DefaultSelector()
        self.pool = Pool(self.selector, python, Preload(), grace_s=0.5)
        self.seen: list[PoolEvent] = []
        self.pool.start(dict(os.environ), str(folder / "zygote.log"))

    def until(self, check: Callable[[], object], deadline_s: float = 60.0) -> None:
        end_s = time.monotonic() + deadline_s
        while not check():
            assert time.monotonic() < end_s, f"not within {deadline_s:g} s; seen: {self.seen}"
            for key, _ in self.selector.select(0.1):
                self.seen += self.pool.handle(key.data)
            self.seen += self.pool.tick()

    def worker(self, worker_id: int, text: str) -> int:
        """Fork a worker that runs `text`; returns its pid."""
        script = self.folder / f"{worker_id}.py"
        script.write_text(text)
        log = str(self.folder / f"{worker_id}.log")
        self.pool.fork(worker_id, 0, dict(os.environ), [str(script)], str(self.folder), log)
        self.until(lambda: self.pool.processes[worker_id].pid if worker_id in self.pool.processes else True)
        process = self.pool.processes.get(worker_id)
        return process.pid if process else 0

    def exit_of(self, worker_id: int) -> Exited | None:
        return next((h for h in self.seen if isinstance(h, Exited) and h.worker_id == worker_id), None)


@pytest.fixture(autouse=True)
def warm_zygotes(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt_zygotes(monkeypatch)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.pool.close()
    made.selector.close()
    gc.collect()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)  # as the tests' process was before


ASLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def test_how_workers_end(bench: Bench) -> None:
    bench.worker(1, "raise SystemExit(3)\n")
    bench.worker(2, "import os; os.abort()\n")
    bench.worker(3, "print('hello')\n")
    bench.worker(4, ASLEEP)
    bench.until(lambda: "up" in (bench.folder / "4.log").read_text())
    bench.pool.kill(4)
    bench.until(lambda: all(bench.exit_of(worker_id) for worker_id in (1, 2, 3, 4)))
    ends = [bench.exit_of(worker_id) for worker_id in (1, 2, 3, 4)]
    assert [(e.code, e.signal) for e in ends if e] == [(3, None), (None, "SIGABRT"), (0, None), (None, "SIGKILL")]
    assert printed(bench.folder / "3.log") == "hello\n"


DRAWS = """\
import json, random
import numpy, torch
print(json.dumps([torch.rand(1).item(), random.random(), numpy.random.rand()]), flush=True)
"""


def test_workers_that_set_no_seed_draw_different_numbers(bench: Bench) -> None:
    for worker_id in (1, 2):
        bench.worker(worker_id, DRAWS)
    bench.until(lambda: bench.exit_of(1) and bench.exit_of(2))
    first, second = (json.loads((bench.folder / f"{n}.log").read_text()) for n in (1, 2))
    # Seeded by the operating system, as in a new interpreter: ranks that set no seed draw different numbers.
    assert [a != b for a, b in zip(first, second, strict=True)] == [True, True, True]


def test_generators_seeded_by_a_preloaded_module_stay_seeded(tmp_path: Path) -> None:
    folder = tmp_path / "preload"
    folder.mkdir()
    (folder / "seeded.py").write_text(
        "import random, numpy, torch\nfor s in random.seed, numpy.random.seed, torch.manual_seed: s(7)\n"
    )
    (folder / "drawn.py").write_text(
        "import random, numpy, torch\nrandom.random(), numpy.random.rand(), torch.rand(9)\n"
    )
    for module, expected in (("seeded", 1), ("drawn", 2)):
        code = (
            f"import os, random, sys, numpy, torch\nsys.path.insert(0, {str(folder)!r})\n"
            f"from elastic.worker.boot import random_state\n"
            f"with random_state.watched(): import {module}\n"
            "for _ in range(2):\n"
            "    if (pid := os.fork()) == 0:\n"
            "        random_state.renew()\n"
            "        print(random.random(), numpy.random.rand(), torch.rand(1).item(), flush=True)\n"
            "        os._exit(0)\n"
            "    os.waitpid(pid, 0)\n"
        )
        found = warm.run(["-c", code])
        said = found.stdout + TRITON.sub("", found.stderr)
        assert len(set(said.split())) == 3 * expected, said


def test_worker_may_be_killed_by_a_signal_without_a_name_in_python(bench: Bench) -> None:
    bench.worker(1, "import os, signal\nos.kill(os.getpid(), signal.SIGRTMIN + 6)\n")
    bench.until(lambda: bench.exit_of(1) is not None)
    end = bench.exit_of(1)
    assert end is not None
    assert (end.code, end.signal, end.cause) == (
        None,
        "SIGRTMIN+6",
        reason(Code.KILLED, signal="SIGRTMIN+6"),
    )


def test_worker_killed_before_fork_exits_without_waiting_for_the_zygote(bench: Bench) -> None:
    bench.pool.fork(1, 0, dict(os.environ), ["x.py"], str(bench.folder), str(bench.folder / "1.log"))
    bench.pool.kill(1, graceful=True)
    (end,) = bench.pool.tick()
    assert isinstance(end, Exited)
    assert end.cause == reason(Code.ENDED_UNSTARTED)
    assert not bench.pool.processes
    assert not any(isinstance(h, messages.ZygoteReady) for h in bench.seen)


def test_ps_tells_worker_and_zygote_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"TORCHELASTIC_RUN_ID": "train", "LOCAL_RANK": "3", "SPT_NOENV": "1", "ELT_MARK": "here"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    bench = Bench(tmp_path)
    try:
        pid = bench.worker(1, ASLEEP)
        bench.until(lambda: "up" in (tmp_path / "1.log").read_text())
        shown = [Path(f"/proc/{p}/cmdline").read_bytes() for p in (bench.pool._zygote.pid, pid)]
        assert shown[0].startswith(b"elastic zygote of train\0")
        assert shown[1].startswith(b"elastic worker of train, slot 3: ")
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"ELT_MARK=here" in environ, "whose process it is can still be read"
    finally:
        bench.pool.close()
        bench.selector.close()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(bench: Bench) -> None:
    bench.worker(1, "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ASLEEP)
    bench.until(lambda: "up" in (bench.folder / "1.log").read_text())
    bench.pool.kill(1, graceful=True)
    bench.until(lambda: bench.exit_of(1))
    end = bench.exit_of(1)
    assert end is not None
    assert end.signal == "SIGKILL"


def test_a_process_that_a_signal_had_stopped_when_it_was_killed_is_told_apart(bench: Bench) -> None:
    for worker_id in (1, 2):
        bench.worker(worker_id, ASLEEP)
        bench.until(lambda i=worker_id: "up" in (bench.folder / f"{i}.log").read_text())
    os.kill(bench.pool.processes[2].pid, signal.SIGSTOP)
    bench.until(lambda: state(bench.pool.processes[2].pid) == "T")
    for worker_id in (1, 2):
        bench.pool.kill(worker_id)
    bench.until(lambda: bench.exit_of(1) and bench.exit_of(2))
    assert [end.stopped for i in (1, 2) if (end := bench.exit_of(i)) is not None] == [False, True]


def test_a_workers_children_go_with_it(bench: Bench) -> None:
    text = "import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\n" + ASLEEP
    pid = bench.worker(1, text)
    bench.until(lambda: "up" in (bench.folder / "1.log").read_text())
    child = int((bench.folder / "1.log").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)  # itself alone
    bench.until(lambda: bench.exit_of(1))
    bench.until(lambda: not alive(child), 5.0)


def test_the_zygote_dies_and_the_workers_do_not(bench: Bench) -> None:
    first = bench.worker(1, ASLEEP)
    os.kill(bench.pool._zygote.pid, signal.SIGKILL)
    bench.until(lambda: sum(isinstance(h, messages.ZygoteReady) for h in bench.seen) == 2)
    assert alive(first)
    second = bench.worker(2, ASLEEP)
    assert alive(first)
    assert alive(second)
    bench.pool.kill(1)
    bench.until(lambda: bench.exit_of(1))


def test_a_stuck_zygote_is_replaced_and_its_orders_are_given_to_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies with orders unread: that resets the connection."""
    bench.until(lambda: bench.seen)
    stuck = bench.pool._zygote.pid
    os.kill(stuck, signal.SIGSTOP)
    script = bench.folder / "1.py"
    script.write_text("raise SystemExit(3)\n")
    bench.pool.fork(1, 0, dict(os.environ), [str(script)], str(bench.folder), str(bench.folder / "1.log"))
    bench.pool.fork(2, 0, dict(os.environ), [str(script)], str(bench.folder), str(bench.folder / "2.log"))
    with monkeypatch.context() as patch:
        patch.setattr(zygote, "ANSWER_S", 0.2)
        bench.until(lambda: bench.pool._zygote.pid != stuck, 10.0)
    bench.until(lambda: bench.exit_of(1) and bench.exit_of(2))
    ends = [bench.exit_of(1), bench.exit_of(2)]
    assert [end.code for end in ends if end] == [3, 3]


class TestBroken:
    """A zygote that cannot start."""

    @pytest.fixture
    def bench(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
        false = tmp_path / "python"
        false.write_text("#!/bin/sh\necho no torch here >&2\nexit 7\n")
        false.chmod(0o755)
        made = Bench(tmp_path, str(false if request.param == "dies" else tmp_path / "absent"))
        yield made
        made.pool.close()
        made.selector.close()
        gc.collect()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    @pytest.mark.parametrize(
        ("bench", "said"), [("dies", "exit code 7"), ("absent", "No such file")], indirect=["bench"]
    )
    def test_worker_waiting_for_a_broken_zygote_exits_with_the_cause(self, bench: Bench, said: str) -> None:
        bench.pool.fork(1, 0, dict(os.environ), ["x.py"], str(bench.folder), str(bench.folder / "1.log"))
        bench.until(lambda: bench.exit_of(1), 10.0)
        end = bench.exit_of(1)
        assert end is not None
        assert end.cause.code is Code.ZYGOTE_DIES
        assert said in str(end.cause)
        _, error, fingerprint = read_error(end, node="n", slot=0, rank=-1, step=None)
        assert error is not None
        assert fingerprint == str(reason(Code.ZYGOTE_DIES))
        if said == "exit code 7":
            assert error.traceback.count("no torch here") == 3
        assert not bench.pool.processes


class TestUnfit:
    """A zygote that must not be forked from: a thread of its own would be missing in every worker."""

    SITE = """
import sys, threading
if "elastic.worker.boot.zygote" in " ".join(sys.orig_argv):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""

    @pytest.fixture
    def bench(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
        (tmp_path / "sitecustomize.py").write_text(self.SITE)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        made = Bench(tmp_path)
        yield made
        made.pool.close()
        made.selector.close()
        gc.collect()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    @pytest.mark.long
    def test_workers_are_new_processes(self, bench: Bench) -> None:
        bench.worker(1, "import threading\nprint('threads', threading.active_count())\nraise SystemExit(3)\n")
        bench.worker(2, "import os; os.abort()\n")
        bench.worker(3, ASLEEP)
        bench.until(lambda: "up" in (bench.folder / "3.log").read_text())
        bench.pool.kill(3)
        bench.until(lambda: all(bench.exit_of(worker_id) for worker_id in (1, 2, 3)))
        ends = [bench.exit_of(worker_id) for worker_id in (1, 2, 3)]
        assert [(e.code, e.signal) for e in ends if e] == [(3, None), (None, "SIGABRT"), (None, "SIGKILL")]
        assert (bench.folder / "1.log").read_text() == "threads 1\n"
        assert not any(isinstance(h, messages.ZygoteReady) for h in bench.seen)
        (unfit,) = [h for h in bench.seen if isinstance(h, ZygoteUnfit)]
        assert "2 threads run in it" in unfit.why
        assert bench.pool.why_fresh == unfit.why
        assert bench.pool._zygote.pid == 0


def test_zygote_that_became_unfit_is_not_forked_from(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.until(lambda: bench.seen)
    first = bench.pool._zygote.pid
    control = bench.pool._zygote._control
    assert control is not None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, monkeypatch.context() as patch:
        patch.setattr(bench.pool._zygote, "order", lambda order, descriptors: True)
        bench.pool.fork(1, 0, dict(os.environ), ["absent.py"], str(bench.folder), str(bench.folder / "1.log"))
        theirs.send(encode(ForkRefused(ticket=1, why="a thread runs in it")))
        patch.setattr(bench.pool._zygote, "_control", ours)
        bench.selector.unregister(control)
        bench.selector.register(ours, selectors.EVENT_READ, ("zygote", 0))
        bench.until(lambda: bench.exit_of(1))
        control.close()
    assert bench.pool.why_fresh == "a thread runs in it"
    assert not alive(first)
    assert "absent.py" in (bench.folder / "1.log").read_text()


def test_worker_that_cannot_be_forked_is_reported_as_exited(bench: Bench) -> None:
    for worker_id, log_file in ((1, bench.folder / "absent" / "1.log"), (2, bench.folder)):
        bench.pool.fork(worker_id, 0, dict(os.environ), ["x.py"], str(bench.folder), str(log_file))
    bench.until(lambda: bench.exit_of(1) and bench.exit_of(2), 5.0)
    end = bench.exit_of(1)
    assert end is not None
    assert end.code == 1
    assert end.cause.code is Code.NOT_STARTED
    assert not end.shortage, "a folder that is not there is nothing that the node lacks"
    assert not bench.pool.processes


@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open"])
def test_worker_that_the_node_has_no_descriptors_for_is_reported_as_that(
    bench: Bench, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, lacking)
        bench.pool.fork(1, 0, dict(os.environ), ["x.py"], str(bench.folder), str(bench.folder / "1.log"))
        bench.until(lambda: bench.exit_of(1), 5.0)
    end = bench.exit_of(1)
    assert end is not None
    assert end.shortage
    assert end.cause == reason(Code.NOT_STARTED, "[Errno 24] Too many open files")
    assert not bench.pool.processes


def test_a_worker_whose_environment_no_message_can_hold_is_reported_as_exited(bench: Bench) -> None:
    """Its job may take 512 KiB as a record: that must not end the agent, again and again."""
    env = dict(os.environ) | {f"TABLE_{i}": "x" * 99_000 for i in range(3)}
    log_file = bench.folder / "1.log"
    bench.pool.fork(1, 0, env, ["x.py"], str(bench.folder), str(log_file))
    bench.until(lambda: bench.exit_of(1))
    end = bench.exit_of(1)
    assert end is not None
    assert end.cause.code is Code.NOT_STARTED
    assert not bench.pool.processes


@pytest.mark.parametrize("pid", [0, 2**22 + 1])
def test_a_fork_that_failed_is_an_exit(bench: Bench, pid: int) -> None:
    bench.pool.fork(1, 0, dict(os.environ), ["x.py"], str(bench.folder), str(bench.folder / "1.log"))
    end = next(iter(bench.pool._forked(Forked(ticket=1, pid=pid))))
    assert isinstance(end, Exited)
    assert end.code == 1
    assert not bench.pool.processes


LEAVES = """
import os, subprocess, time
def detached(**more):
    argv = ["sh", "-c", "echo $$; exec sleep 600"]
    made = subprocess.Popen(argv, start_new_session=True, stdout=-1, text=True, **more)
    return int(made.stdout.readline())
pids = [detached(), detached(env={})]
if (middle := os.fork()) == 0:  # a service that leaves its parent
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(600)
os.waitpid(middle, 0)
print(*pids, flush=True)
time.sleep(600)
"""


def test_a_child_from_before_the_pool_is_left_alone(tmp_path: Path) -> None:
    """A test session's own, say, or those of a program that runs an agent inside itself."""
    before = [subprocess.Popen(argv, start_new_session=True) for argv in (["sleep", "600"], ["sh", "-c", "exit 5"])]
    os.waitid(os.P_PID, before[1].pid, os.WEXITED | os.WNOWAIT)
    made = Bench(tmp_path)
    try:
        made.pool.reap()
        made.pool.close()
        assert alive(before[0].pid)
        assert before[1].wait() == 5, "its exit status is still there"
    finally:
        made.pool.close()
        made.selector.close()
        before[0].kill()
        before[0].wait()


def test_worker_exit_kills_its_detached_children_and_none_of_living_workers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(descendants.children(os.getpid()))  # of the test session: its guard, say
    ours = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"])
    service = subprocess.Popen(["sleep", "600"])
    pids = {worker_id: bench.worker(worker_id, LEAVES) for worker_id in (1, 2)}
    left = {}
    for worker_id in pids:
        log = bench.folder / f"{worker_id}.log"
        bench.until(lambda log=log: log.read_text().count("\n"))  # type: ignore[misc]
        left[worker_id] = [int(pid) for pid in log.read_text().split()]
    monkeypatch.setattr(bench.pool, "_look_due_s", 0.0)
    bench.pool.reap()
    os.kill(pids[1], signal.SIGKILL)
    bench.until(lambda: bench.exit_of(1))
    bench.until(lambda: not any(alive(pid) for pid in left[1]), 5.0)
    bench.pool.reap()
    assert all(alive(pid) for pid in left[2])
    bench.pool.close()
    assert not any(alive(pid) for pid in left[2])
    kept = set(descendants.children(os.getpid())) - others
    served = alive(service.pid)
    service.kill()
    service.wait()
    assert kept <= {ours.pid, service.pid}
    assert served, "that is ours"
    assert ours.wait() == 5, "and so was this one: its exit status is still there"


EMERGENCY = """
import multiprocessing, os, signal, sys, time
def load():
    print("loads", flush=True)
    time.sleep(600)
loader = multiprocessing.get_context("fork").Process(target=load, daemon=True)
loader.start()
def save(*_):
    time.sleep(0.1)
    print("loader lives:", loader.is_alive(), "saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True:
    time.sleep(0.01)
"""


def test_a_stop_leaves_loader_processes_to_their_script_until_it_has_saved(bench: Bench) -> None:
    """They are not told to end: a script that finds its loader dead raises before its emergency checkpoint."""
    bench.worker(1, EMERGENCY)
    log = bench.folder / "1.log"
    bench.until(lambda: "up" in log.read_text() and "loads" in log.read_text())
    bench.pool.kill(1, graceful=True)
    bench.until(lambda: bench.exit_of(1))
    assert "loader lives: True saved" in log.read_text()


HANDLES = """
import asyncio, multiprocessing, os, signal, sys, threading, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
{more}
print("up", flush=True)
while True:
    time.sleep(0.01)
"""
OF_A_CHILD = """
def forked():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    time.sleep(0.1)
    child.terminate()
    child.join()
thread = threading.Thread(target=forked)
thread.start()
thread.join()
sys.exit(3)
"""
OF_ASYNCIO = """
async def served():
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    print("up", flush=True)
    await end.wait()
asyncio.run(served())
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("more", "sent", "expected"),
    [
        ("", "from outside", (3, Code.AFTER_SIGTERM)),
        ("", "by the agent", (3, Code.EXITED)),
        (OF_A_CHILD, "to a child", (3, Code.EXITED)),
        (OF_ASYNCIO, "from outside", (3, Code.EXITED)),  # it has Python write elsewhere: nothing can be said
    ],
    ids=["outside", "agent", "child", "asyncio"],
)
def test_sigterm_that_the_script_handles_is_told_with_its_exit(
    bench: Bench, more: str, sent: str, expected: tuple[int, Code]
) -> None:
    bench.pool._grace_s = 60.0
    pid = bench.worker(1, HANDLES.format(more=more))
    log = bench.folder / "1.log"
    bench.until(lambda: "up" in log.read_text() or bench.exit_of(1))
    if sent == "from outside":
        os.kill(pid, signal.SIGTERM)
    elif sent == "by the agent":
        bench.pool.kill(1, graceful=True)
    bench.until(lambda: bench.exit_of(1))
    end = bench.exit_of(1)
    assert end is not None
    assert (end.code, end.cause.code) == expected, log.read_text()


SHARES = """
import glob, multiprocessing.shared_memory, time
import torch.multiprocessing, torch.utils.data
torch.multiprocessing.set_sharing_strategy("file_system")
shared = torch.ones(1 << 18).share_memory_()
name = shared.untyped_storage()._share_filename_cpu_()[1].decode()
block = multiprocessing.shared_memory.SharedMemory(create=True, size=1 << 20)
loader = iter(torch.utils.data.DataLoader(torch.ones(9000, 4), num_workers=2))
batch = next(loader)
loaded = [path[9:] for w in loader._workers for path in glob.glob(f"/dev/shm/torch_{w.pid}_*")]
assert loaded
print(name.lstrip("/"), block.name, *loaded, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_what_a_worker_has_in_shared_memory_is_unlinked_when_it_is_killed(bench: Bench, how: str) -> None:
    """By torch's managers, its own and its loader processes', and by Python's resource tracker."""
    bench.worker(1, SHARES)
    log = bench.folder / "1.log"
    bench.until(lambda: "\n" in log.read_text())
    files = [Path("/dev/shm", name) for name in log.read_text().split()]
    assert all(file.exists() for file in files)
    try:
        if how == "killed":
            os.kill(bench.pool.processes[1].pid, signal.SIGKILL)
            bench.until(lambda: bench.exit_of(1))
            bench.until(lambda: not any(file.exists() for file in files), 10.0)
        else:
            bench.pool.close()
            assert not [file.name for file in files if file.exists()]
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def test_a_service_in_a_session_with_the_number_of_a_dead_worker_is_that_of_the_living_one() -> None:
    living = subprocess.Popen(["sleep", "600"])
    service = subprocess.Popen(
        ["sleep", "600"], start_new_session=True, env={**os.environ, "ELASTIC_WORKER_PID": str(living.pid)}
    )
    try:
        made = Descendants()
        made.look([service.pid])  # a worker had that number once
        made.look([])
        made._of.clear()
        # For a moment after the exec that Popen waits for, the kernel shows no environment yet.
        eventually(lambda: Path(f"/proc/{service.pid}/environ").read_bytes(), 5.0)
        assert made.orphans([service.pid], [living.pid]) == []
        assert [orphan.pid for orphan in made.orphans([service.pid], [])] == [service.pid]
    finally:
        for process in (living, service):
            process.kill()
            process.wait()


def test_pool_does_not_take_a_worker_that_died_at_fork_for_an_orphan(bench: Bench) -> None:
    text = "import subprocess\nprint(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
    bench.pool._zygote._ordered[9] = time.monotonic()
    bench.worker(1, text)
    bench.until(lambda: bench.exit_of(1))
    orphan = int(printed(bench.folder / "1.log"))
    assert alive(orphan), "one whose number is still to come may be among them"
    bench.pool._zygote.forget(9)

    def ended() -> bool:
        bench.pool.reap()  # as often as the agent does: /proc may not name a child that has just become ours
        return not alive(orphan)

    eventually(ended, 5.0)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


@pytest.mark.long
def test_a_worker_that_reads_nothing_stops_nobody(bench: Bench) -> None:
    bench.worker(1, ASLEEP)
    channel = bench.pool.processes[1].channel
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    os.kill(bench.pool.processes[1].pid, signal.SIGSTOP)
    for _ in range(1000):
        bench.pool.tell(1, AbortGroup(generation=1, why="x" * 100))
    bench.pool.kill(1)
    bench.until(lambda: bench.exit_of(1))


def test_the_end_of_its_channel_reports_a_death_before_the_kernel_has_told_it(bench: Bench) -> None:
    """The kernel may take a while to tear a process down; what is left of it is waited for all the same."""
    pid = bench.worker(1, "import os; os._exit(3)\n")
    eventually(lambda: exit_status(pid) is not None, 20.0, "it ends")
    # Its memory is given back before its files are closed.
    happened = eventually(lambda: bench.pool.handle(("worker", 1)), 20.0, "the end of its channel")
    assert [(h.code, h.signal) for h in happened if isinstance(h, Exited)] == [(3, None)]
    assert os.path.exists(f"/proc/{pid}"), "it has been waited for already"
    bench.until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert bench.exit_of(1) is None, "its exit is told twice"


FAILS_AT_ONCE = """
import os, socket, time
while not os.path.exists("go"):
    time.sleep(0.01)
channel = socket.socket(fileno=int(os.environ["ELASTIC_CHANNEL_FD"]))
for raw in (%r, %r):
    channel.send(bytes.fromhex(raw))
os._exit(3)
"""


def test_an_end_seen_with_the_last_messages_tells_the_failure_once(bench: Bench) -> None:
    """Where the agent was held up for a moment, the process has ended before its messages are read. A failure told of a
    process that the pool does not know any more would end the agent with a KeyError."""
    said = [encode(GroupClosed(generation=1, step=0, clean=False)), encode(ScriptEnded(code=3))]
    pid = bench.worker(1, FAILS_AT_ONCE % tuple(raw.hex() for raw in said))
    (bench.folder / "go").touch()
    eventually(lambda: state(pid) == "Z", 20.0, "it ends")
    happened = bench.pool.handle(("exit", 1))
    assert [h.message for h in happened if isinstance(h, WorkerMessage)] == [
        GroupClosed(generation=1, step=0, clean=False)
    ]
    assert [h.code for h in happened if isinstance(h, Exited)] == [3]


def test_exit_status_is_readable_before_the_process_is_reaped() -> None:
    for argv, expected in (("exit 7", (7, 0)), ("kill -KILL $$", (0, signal.SIGKILL))):
        process = subprocess.Popen(["sh", "-c", argv])
        status = eventually(lambda process=process: exit_status(process.pid), 10.0)  # type: ignore[misc]
        assert (os.WEXITSTATUS(status), os.WTERMSIG(status)) == expected
        process.wait()
        assert exit_status(process.pid) is None
    assert exit_status(os.getpid()) is None


CLOSES = """
import os, socket, sys, time
channel = socket.socket(fileno=int(os.environ["ELASTIC_CHANNEL_FD"]))
if SPEAKS:
    channel.send(bytes.fromhex(%r))
channel.close()
print("closed", flush=True)
time.sleep(600)
"""


def test_a_worker_that_closes_its_channel_and_lives_on_is_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain script that never spoke may close what it does not know."""
    monkeypatch.setattr("elastic.agent.workers.pool.CLOSED_S", 0.3)
    body = CLOSES % encode(GroupClosed(generation=1, step=0, clean=True)).hex()
    silent = bench.worker(2, f"SPEAKS = False\n{body}")
    bench.until(lambda: "closed" in (bench.folder / "2.log").read_text())
    speaker = bench.worker(1, f"SPEAKS = True\n{body}")
    bench.until(lambda: bench.exit_of(1))
    ended = bench.exit_of(1)
    assert ended is not None
    assert ended.signal == "SIGKILL"
    bench.until(lambda: not alive(speaker))
    assert alive(silent), "it has closed its channel earlier"


@pytest.mark.parametrize(
    "raw", [b"{not json", b"\xff\xfe", b"[" * 30_000, b"{}"], ids=["text", "bytes", "deep", "empty"]
)
def test_a_worker_whose_message_cannot_be_read_is_ended_and_its_agent_is_not(bench: Bench, raw: bytes) -> None:
    bench.worker(1, f"import os, time\nos.write(int(os.environ[{CHANNEL_ENV!r}]), {raw!r})\ntime.sleep(600)\n")
    bench.until(lambda: bench.exit_of(1))
    ended = bench.exit_of(1)
    assert ended is not None
    assert (ended.code, ended.signal) == (None, None)
    assert ended.cause.code is Code.UNREADABLE
