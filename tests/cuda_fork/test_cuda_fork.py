"""A CUDA build of torch, on a machine that seems to have a GPU: every forked worker must be able to train.

`make test-cuda-fork` makes the environment with the CUDA build (several GB) and sets $ELASTIC_CUDA_PYTHON. The GPU is
a preloaded library that answers the runtime's device count; what only a driver can do fails.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pathlib
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from support.agents import Job
from support.scripts import EPOCH

from elastic.agent.workers import worker_env
from elastic.agent.workers.descendants import PR_SET_CHILD_SUBREAPER
from elastic.agent.workers.pool import Exited, Pool, PoolEvent
from elastic.agent.workers.zygote import ZygoteUnfit
from elastic.contract.agent_files import AgentConfig, EtcdAccess
from elastic.contract.job.spec import JobSpec
from elastic.contract.records.job_records import Phase
from elastic.contract.worker import messages
from elastic.contract.worker.messages import Preload

PYTHON = os.environ.get("ELASTIC_CUDA_PYTHON", "")
ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="needs a CUDA build of torch: make test-cuda-fork"),
    pytest.mark.timeout(300),
]

TRAINS = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("trained", flush=True)
"""

BACKWARD = "import torch\ntorch.ones(1, requires_grad=True).sum().backward()\n"

ONLY_ZYGOTE = f"""
import sys
if "elastic.worker.boot.zygote" in " ".join(sys.orig_argv):
    {BACKWARD.replace(chr(10), "; ").rstrip("; ")}
"""

ELASTIC = f"""
import time
{EPOCH}
        time.sleep(0.05)
    print("final", state.step, flush=True)

elastic.run(setup, train)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("cuda") / "runtime.so"
    source = pathlib.Path(__file__).with_name("runtime.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True, timeout=60)
    return path


def feigned(folder: pathlib.Path, library: pathlib.Path) -> dict[str, str]:
    return {
        "LD_PRELOAD": str(library), "CUDA_CALLS": str(folder / "calls"), "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
    }  # fmt: skip


class Bench:
    """A pool whose zygote has the CUDA build."""

    def __init__(self, folder: pathlib.Path, library: pathlib.Path, preload: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.selector = selectors.DefaultSelector()
        self.pool = Pool(self.selector, PYTHON, Preload(modules=preload), grace_s=0.5)
        self.seen: list[PoolEvent] = []
        config = AgentConfig(
            cluster="c", node="n", job="j", address="127.0.0.1", slots=1, etcd=EtcdAccess(endpoints=()),
            agent_dir="/a", logs_dir="/l",
        )  # fmt: skip
        spec = JobSpec(name="j", script="x.py", env=feigned(folder, library))
        self.env = worker_env.base(config, spec, os.environ)
        self.pool.start(self.env, str(folder / "zygote.log"))
        self.zygote = self.pool._zygote.pid

    def until(self, check: Callable[[], object], deadline_s: float = 120.0) -> None:
        end_s = time.monotonic() + deadline_s
        while not check():
            assert time.monotonic() < end_s, f"not within {deadline_s:g} s; seen: {self.seen}"
            for key, _ in self.selector.select(0.1):
                self.seen += self.pool.handle(key.data)
            self.seen += self.pool.tick()

    def worker(self) -> tuple[Exited, str]:
        """How a worker ended that ran TRAINS, and what it printed."""
        script, log = self.folder / "worker.py", self.folder / "worker.log"
        script.write_text(TRAINS)
        self.pool.fork(1, 0, self.env, [str(script)], str(self.folder), str(log))
        self.until(lambda: any(isinstance(h, Exited) for h in self.seen))
        return next(h for h in self.seen if isinstance(h, Exited)), log.read_text()

    def all(self, kind: type) -> list[PoolEvent]:
        return [h for h in self.seen if isinstance(h, kind)]

    def calls(self) -> set[int]:
        """Processes that asked the runtime for anything."""
        path = self.folder / "calls"
        return {int(line.split()[0]) for line in path.read_text().splitlines()} if path.exists() else set()

    def close(self) -> None:
        self.pool.close()
        self.selector.close()
        gc.collect()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)  # as the tests' process was before


@pytest.fixture
def bench(tmp_path: pathlib.Path, library: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    preload, site = getattr(request, "param", ((), ""))
    (tmp_path / "backward.py").write_text(BACKWARD)
    (tmp_path / "sitecustomize.py").write_text(site)
    made = Bench(tmp_path, library, preload)
    yield made
    made.close()


def test_the_gpu_is_seen(tmp_path: pathlib.Path, library: pathlib.Path) -> None:
    """Else none of the other tests means anything."""
    text = "import torch; print(torch.version.cuda is not None, torch.cuda.device_count())"
    env = {**os.environ, **feigned(tmp_path, library)}
    said = subprocess.run([PYTHON, "-c", text], env=env, capture_output=True, text=True, timeout=120, check=True).stdout
    assert said.split() == ["True", "1"]


def test_a_forked_worker_trains_and_the_zygote_asks_for_no_gpu(bench: Bench) -> None:
    end, printed = bench.worker()
    assert (end.code, printed) == (0, "trained\n")
    (up,) = bench.all(messages.ZygoteReady)
    assert isinstance(up, messages.ZygoteReady)
    assert up.problems == ()
    assert not bench.all(ZygoteUnfit)
    assert bench.zygote not in bench.calls()
    assert bench.calls(), "the worker's backward did not ask: the library is not in force"


@pytest.mark.parametrize("bench", [(("backward",), "")], indirect=True)
def test_a_preloaded_module_that_spoils_the_zygote_is_left_out(bench: Bench) -> None:
    end, printed = bench.worker()
    assert (end.code, printed) == (0, "trained\n")
    (unfit,) = bench.all(ZygoteUnfit)
    assert isinstance(unfit, ZygoteUnfit)
    assert "the import of backward started" in unfit.why
    assert unfit.preload.modules == ("backward",)
    assert bench.all(messages.ZygoteReady), "the next zygote is forked from"
    assert not bench.pool.why_fresh


@pytest.mark.parametrize("bench", [((), ONLY_ZYGOTE)], indirect=True)
def test_where_no_zygote_is_fit_workers_are_new_processes(bench: Bench) -> None:
    end, printed = bench.worker()
    assert (end.code, printed) == (0, "trained\n")
    assert bench.zygote in bench.calls(), "the zygote was not spoilt"
    assert not bench.all(messages.ZygoteReady)
    assert bench.pool.why_fresh
    assert bench.pool._zygote.pid == 0, "the unfit one is not kept"


@pytest.mark.etcd
@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "new processes"])
def test_a_gloo_job_trains_and_takes_a_killed_worker_back(
    fresh: bool, tmp_path: pathlib.Path, library: pathlib.Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONLY_ZYGOTE if fresh else "")
    (tmp_path / "train.py").write_text(ELASTIC)
    spec = {"python": PYTHON, "env": feigned(tmp_path, library), "hang": {"floor_s": 10.0}}
    with Job(nodes="1:1", workers=2, agents=1, script=tmp_path / "train.py", spec=spec, warm=False) as job:

        def step() -> int:
            return max((row.step for s in job.statuses().values() for row in s.ranks), default=0)

        end_s = time.monotonic() + 120.0
        while step() < 10:
            assert time.monotonic() < end_s, job.story()
            time.sleep(0.05)
        (status,) = job.statuses().values()
        assert bool(status.why_fresh) == fresh
        job.kill_rank(1)
        job.wait_phase(Phase.SUCCEEDED, 120.0)
        finals = [p for p in (job.folder / "n0" / "logs").glob("slot*.log") if "final 30" in p.read_text()]
        assert len(finals) == 2, job.story()
        assert [i.steps_lost for i in job.incidents()] == [0]
        said = [json.loads(line) for line in (job.folder / "n0" / "agent.log").read_text().splitlines()]
        assert any(line["event"] == "zygote.unfit" for line in said) == fresh


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
