"""The zygote and its workers as processes: forked, told, waited for, ended."""

from __future__ import annotations

import ctypes
import gc
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
from support.procs import alive
from support.wait import eventually

from elastic.agent import zygote
from elastic.agent.errors import read_error
from elastic.agent.pool import PR_SET_CHILD_SUBREAPER, Exited, Happening, Pool, ZygoteUp
from elastic.core.messages import Forked, SaveSoon


class Bench:
    """A pool and the small loop that it needs."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.selector = selectors.DefaultSelector()
        self.pool = Pool(self.selector, python, (), grace_s=0.5)
        self.seen: list[Happening] = []
        self.pool.start(dict(os.environ), str(folder / "zygote.log"))

    def until(self, check: Callable[[], object], deadline_s: float = 60.0) -> None:
        end_s = time.monotonic() + deadline_s
        while not check():
            assert time.monotonic() < end_s, f"not within {deadline_s:g} s; seen: {self.seen}"
            for key, _ in self.selector.select(0.1):
                self.seen += self.pool.handle(key.data)
            self.seen += self.pool.tick()

    def worker(self, life: int, text: str) -> int:
        """Fork a worker that runs `text`; returns its pid."""
        script = self.folder / f"{life}.py"
        script.write_text(text)
        log = str(self.folder / f"{life}.log")
        self.pool.fork(life, 0, dict(os.environ), [str(script)], str(self.folder), log)
        self.until(lambda: self.pool.processes[life].pid if life in self.pool.processes else True)
        process = self.pool.processes.get(life)
        return process.pid if process else 0

    def exit_of(self, life: int) -> Exited | None:
        return next((h for h in self.seen if isinstance(h, Exited) and h.life == life), None)


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
    bench.until(lambda: all(bench.exit_of(life) for life in (1, 2, 3, 4)))
    ends = [bench.exit_of(life) for life in (1, 2, 3, 4)]
    assert [(e.code, e.signal) for e in ends if e] == [(3, None), (None, "SIGABRT"), (0, None), (None, "SIGKILL")]
    assert (bench.folder / "3.log").read_text() == "hello\n"


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(bench: Bench) -> None:
    bench.worker(1, "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ASLEEP)
    bench.until(lambda: "up" in (bench.folder / "1.log").read_text())
    bench.pool.kill(1, gently=True)
    bench.until(lambda: bench.exit_of(1))
    end = bench.exit_of(1)
    assert end is not None
    assert end.signal == "SIGKILL"


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
    bench.until(lambda: sum(isinstance(h, ZygoteUp) for h in bench.seen) == 2)
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
    def test_whoever_waits_is_told_why(self, bench: Bench, said: str) -> None:
        bench.pool.fork(1, 0, dict(os.environ), ["x.py"], str(bench.folder), str(bench.folder / "1.log"))
        bench.until(lambda: bench.exit_of(1), 10.0)
        end = bench.exit_of(1)
        assert end is not None
        assert said in end.cause
        error, fingerprint = read_error(end, node="n", slot=0, rank=-1, step=None)
        assert error is not None
        assert "dies before it has forked one" in error.message
        assert fingerprint == "the process that forks workers (zygote) dies before it has forked one"
        if said == "exit code 7":
            assert error.traceback.count("no torch here") == 3
        assert not bench.pool.processes


def test_where_no_worker_can_be_made_one_has_exited(bench: Bench) -> None:
    for life, log_file in ((1, bench.folder / "absent" / "1.log"), (2, bench.folder)):
        bench.pool.fork(life, 0, dict(os.environ), ["x.py"], str(bench.folder), str(log_file))
    bench.until(lambda: bench.exit_of(1) and bench.exit_of(2), 5.0)
    end = bench.exit_of(1)
    assert end is not None
    assert end.code == 1
    assert "cannot be started" in end.cause
    assert not bench.pool.processes


@pytest.mark.parametrize("pid", [0, 2**22 + 1])
def test_a_fork_that_failed_is_an_exit(bench: Bench, pid: int) -> None:
    bench.pool.fork(1, 0, dict(os.environ), ["x.py"], str(bench.folder), str(bench.folder / "1.log"))
    end = next(iter(bench.pool._forked(Forked(ticket=1, pid=pid))))
    assert isinstance(end, Exited)
    assert end.code == 1
    assert not bench.pool.processes


def test_reaping_takes_orphans_only(bench: Bench) -> None:
    """Not what somebody of ours waits for: its exit status would be lost."""
    ours = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"])
    eventually(lambda: state(ours.pid) == "Z", 10.0)
    text = "import subprocess\nprint(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
    bench.worker(1, text)
    bench.until(lambda: bench.exit_of(1))
    orphan = int((bench.folder / "1.log").read_text())
    os.kill(orphan, signal.SIGKILL)
    eventually(lambda: state(orphan) == "Z", 5.0)
    bench.pool._zygote._ordered[9] = time.monotonic()
    bench.pool.reap()
    assert state(orphan) == "Z", "one whose number is still to come may be among them"
    bench.pool._zygote.forget(9)
    bench.pool.reap()
    assert not alive(orphan)
    assert ours.wait() == 5


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_a_worker_that_reads_nothing_stops_nobody(bench: Bench) -> None:
    bench.worker(1, ASLEEP)
    channel = bench.pool.processes[1].channel
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    os.kill(bench.pool.processes[1].pid, signal.SIGSTOP)
    for _ in range(1000):
        bench.pool.tell(1, SaveSoon(reason="x" * 100))
    bench.pool.kill(1)
    bench.until(lambda: bench.exit_of(1))
