"""CUDA does not survive a fork: the real zygote is watched for starting it, with a stand-in for the driver alone."""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.printed import printed

from elastic.agent.workers import worker_env
from elastic.agent.workers.descendants import PR_SET_CHILD_SUBREAPER
from elastic.agent.workers.pool import Exited, Pool, PoolEvent
from elastic.agent.workers.zygote import ZygoteUnfit
from elastic.contract.agent_files import AgentConfig, EtcdAccess
from elastic.contract.job.spec import JobSpec
from elastic.contract.worker import messages
from elastic.contract.worker.messages import Preload

pytestmark = pytest.mark.slow

SITE = """
import ctypes, os
if log := os.environ.get("CUDA_LOG"):
    import torch

    started = []

    def say(what):
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {what}\\n")

    def lazy_init():  # what every use of CUDA begins with, in Python and in C++
        if started and started[0] != os.getpid():
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        if not started:
            started.append(os.getpid())
            say("starts CUDA")

    class Cdll(ctypes.CDLL):
        def __init__(self, name, *args, **kwargs):
            if name == "libcuda.so.1":
                say("loads the driver")
                name = None
            super().__init__(name, *args, **kwargs)

    ctypes.CDLL = Cdll
    torch.cuda._lazy_init = lazy_init
    torch.cuda.is_initialized = lambda: started[:1] == [os.getpid()]
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
"""
"""As sitecustomize it runs before the zygote's first import. torch.cuda says that there is a GPU: code that uses one
if there were one uses it here."""


CONFIG = AgentConfig(
    cluster="c", node="n", job="j", address="127.0.0.1", slots=1, gpus=(0,), etcd=EtcdAccess(endpoints=()),
    agent_dir="/a", logs_dir="/l",
)  # fmt: skip


class Bench:
    """A zygote of a job on GPU 0."""

    def __init__(self, folder: Path, preload: tuple[str, ...] = ()) -> None:
        self.folder = folder
        (folder / "sitecustomize.py").write_text(SITE)
        (folder / "starts_cuda.py").write_text("import torch\ntorch.cuda.init()\n")
        self.selector = selectors.DefaultSelector()
        self.pool = Pool(self.selector, sys.executable, Preload(modules=preload), grace_s=0.5)
        self.seen: list[PoolEvent] = []
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        inherited = {**os.environ, "PYTHONPATH": path, "CUDA_LOG": str(folder / "cuda")}
        config = msgspec.structs.replace(CONFIG, agent_dir=str(folder))
        self.env = worker_env.base(config, JobSpec(name="j", script="x.py"), inherited)
        self.pool.start(self.env, str(folder / "zygote.log"))
        self.zygote = self.pool._zygote.pid

    def until(self, check: Callable[[], object], deadline_s: float = 60.0) -> None:
        end_s = time.monotonic() + deadline_s
        while not check():
            assert time.monotonic() < end_s, f"not within {deadline_s:g} s; seen: {self.seen}"
            for key, _ in self.selector.select(0.1):
                self.seen += self.pool.handle(key.data)
            self.seen += self.pool.tick()

    def problems(self) -> tuple[str, ...]:
        self.until(lambda: any(isinstance(h, messages.ZygoteReady) for h in self.seen))
        return next(h.problems for h in self.seen if isinstance(h, messages.ZygoteReady))

    def worker(self, text: str) -> tuple[int, int | None, str]:
        """(process, exit code, what it printed) of a worker that runs `text`."""
        script, log = self.folder / "worker.py", self.folder / "worker.log"
        script.write_text(text)
        self.pool.fork(1, 0, self.env, [str(script)], str(self.folder), str(log))
        self.until(lambda: self.pool.processes[1].pid)
        pid = self.pool.processes[1].pid
        self.until(lambda: any(isinstance(h, Exited) for h in self.seen))
        return pid, next(h.code for h in self.seen if isinstance(h, Exited)), printed(log)

    def said(self) -> list[tuple[int, str]]:
        lines = (self.folder / "cuda").read_text().splitlines()
        return [(int(pid), what) for pid, _, what in (line.partition(" ") for line in lines)]

    def close(self) -> None:
        self.pool.close()
        self.selector.close()
        gc.collect()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)  # as the tests' process was before


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tmp_path, getattr(request, "param", ()))
    yield made
    made.close()


USES_CUDA = "import torch\ntorch.cuda.init()\nprint('on the card')\n"


def test_the_zygote_loads_the_driver_and_starts_nothing(bench: Bench) -> None:
    assert bench.problems() == ()
    assert bench.said() == [(bench.zygote, "loads the driver")]
    pid, code, printed = bench.worker(USES_CUDA)
    assert (code, printed) == (0, "on the card\n")
    assert bench.said()[1:] == [(pid, "starts CUDA")]


@pytest.mark.parametrize("bench", [("starts_cuda",)], indirect=True)
def test_no_worker_is_forked_where_a_preloaded_module_has_started_it(bench: Bench) -> None:
    assert bench.problems() == ()
    (unfit,) = [h for h in bench.seen if isinstance(h, ZygoteUnfit)]
    assert "CUDA was started in it" in unfit.why
    assert "the import of starts_cuda started CUDA" in unfit.why
    assert unfit.preload.modules == ("starts_cuda",)
    assert (bench.zygote, "starts CUDA") in bench.said()
    pid, code, printed = bench.worker(USES_CUDA)
    assert (code, printed) == (0, "on the card\n")
    assert (pid, "starts CUDA") in bench.said()
    assert not bench.pool.why_fresh
