"""The zygote and its workers as processes: forked, told, waited for, ended."""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.procs import alive

from elastic.agent.pool import PR_SET_CHILD_SUBREAPER, Exited, Happening, Pool, ZygoteUp


class Bench:
    """A pool and the small loop that it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.selector = selectors.DefaultSelector()
        self.pool = Pool(self.selector, sys.executable, (), grace_s=0.5)
        self.seen: list[Happening] = []
        self.pool.start(dict(os.environ), str(folder / "zygote.log"))

    def until(self, check: Callable[[], object], deadline_s: float = 60.0) -> None:
        end_s = time.monotonic() + deadline_s
        while not check():
            assert time.monotonic() < end_s, f"not within {deadline_s:g} s; seen: {self.seen}"
            for key, _ in self.selector.select(0.1):
                self.seen += self.pool.handle(key.data)
            self.pool.tick()

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
    zygote = bench.pool._zygote
    assert zygote is not None
    zygote.kill()
    bench.until(lambda: sum(isinstance(h, ZygoteUp) for h in bench.seen) == 2)
    assert alive(first)
    second = bench.worker(2, ASLEEP)
    assert alive(first)
    assert alive(second)
    bench.pool.kill(1)
    bench.until(lambda: bench.exit_of(1))
