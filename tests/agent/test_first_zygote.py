"""Agent and zygote share one import of torch where they can, and the job runs as with two."""

from __future__ import annotations

import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agents import Job
from support.procs import alive
from support.wait import eventually

from elastic.agent.workers import first_zygote, worker_env
from elastic.agent.workers.first_zygote import FirstZygote
from elastic.agent.workers.zygote import Zygote
from elastic.contract.agent_files import MARK_ENV
from elastic.contract.records.job_records import Phase
from elastic.contract.worker.messages import Preload

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

SCRIPT = """
import os, sys, torch
import elastic.worker.boot.zygote
print("told", os.environ["TOLD"], "grpc" in sys.modules, "structlog" in sys.modules, os.environ.get("GRPC_VERBOSITY"))
open("go").read()  # a pipe: until the test opens it
"""


class Marked(Job):
    """As by a daemon: agents that are programs of their own, each with its mark in its environment."""

    def start_agent(self, node: str) -> None:
        (self.folder / node).mkdir()
        env = {MARK_ENV: worker_env._mark(str(self.folder / node))}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._procs, "python", functools.partial(self._procs.python, env=env))
            super().start_agent(node)


class Started(Marked):
    """One agent, with one worker that runs SCRIPT."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        script = folder / "plain.py"
        script.write_text(SCRIPT)
        super().__init__(nodes="1:1", workers=1, script=script, spec={"env": {"TOLD": "yes"}, **spec}, warm=False)
        os.mkfifo(self.folder / "go")

    def go(self) -> None:
        """Let the script end."""
        with (self.folder / "go").open("w"):
            pass

    @property
    def agent(self) -> int:
        return self.agents["n0"].pid

    def zygote(self) -> int:
        """The child of the agent that is no worker, once it has forked one."""
        worker = self.worker()
        found = Path(f"/proc/{self.agent}/task/{self.agent}/children").read_text().split()
        (pid,) = [int(pid) for pid in found if int(pid) != worker]
        return pid

    def worker(self) -> int:
        return (
            eventually(
                lambda: next((r.pid for s in self.statuses().values() for r in s.ranks if r.pid), None),
                60.0,
                "a worker",
            )
            or 0
        )

    def printed(self) -> list[str]:
        return [
            line for log in (self.folder / "n0" / "logs").glob("slot*.log") for line in log.read_text().splitlines()
        ]


def titles(*pids: int) -> list[str]:
    """The first words of what ps shows of them."""
    found = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in pids]
    return [" ".join(text.split()[:4]).rstrip(",") for text in found]


def torch_at(pid: int) -> str:
    """Where a process has torch's library: the kernel chooses another place for each program."""
    return next(line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "libtorch_cpu" in line)


def test_zygote_is_a_fork_of_its_agent_and_its_successor_a_program(tmp_path: Path) -> None:
    with Started(tmp_path) as job:
        first, worker = job.zygote(), job.worker()
        eventually(job.printed, 20.0, "the script runs")
        assert torch_at(first) == torch_at(job.agent), "one import"
        assert titles(first, worker) == ["elastic zygote of job", "elastic worker of job"]
        os.kill(first, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: job.worker() != worker and len(job.printed()) == 2, 60.0, "a worker of the next zygote")
        assert torch_at(job.zygote()) != torch_at(job.agent)
        job.go()
        job.wait_phase(Phase.SUCCEEDED)
        # The environment is the job's, and a worker has no module that the agent alone needs.
        assert job.printed() == ["told yes False False None"] * 2


@pytest.mark.long
@pytest.mark.parametrize("started", [Job, Marked])
def test_no_step_is_lost_with_agents_that_are_really_started(started: type[Job]) -> None:
    """With a zygote that is a program of its own, and with one that is a fork of its agent."""
    with started(nodes="2:2", workers=1, args={"steps": 400, "step-ms": 3}, warm=False) as job:
        job.wait_step(20)
        job.kill_rank(1)
        job.wait_phase(Phase.SUCCEEDED)
        assert [(i.kind, i.steps_lost) for i in job.incidents()] == [("exit", 0)]


@pytest.mark.long
def test_a_variable_for_the_start_of_python_takes_a_zygote_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "extra").mkdir()
    with Started(tmp_path, env={"TOLD": "yes", "PYTHONPATH": str(tmp_path / "extra")}) as job:
        eventually(job.printed, 60.0, "the script runs")
        assert torch_at(job.zygote()) != torch_at(job.agent)
        job.go()
        job.wait_phase(Phase.SUCCEEDED)


@pytest.fixture
def first(tmp_path: Path) -> Iterator[FirstZygote]:
    """A child in the place of the zygote."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with ours, theirs, child:
        yield FirstZygote(
            pid=child.pid, agent_pid=os.getpid(), control=ours, incarnation="1", python=sys.executable,
            env={"A": "1"}, preload=Preload(argv=("x.py",)), log_file=str(tmp_path / "log"),
        )  # fmt: skip
        child.kill()


def test_a_first_zygote_for_another_job_record_is_ended_and_not_used(
    first: FirstZygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = selectors.DefaultSelector()
    monkeypatch.setattr(Zygote, "_popen", lambda self: (_ for _ in ()).throw(OSError("another was asked for")))
    for env, preload in (({"A": "2"}, first.preload), (first.env, Preload(argv=("y.py",)))):
        assert not first.fits(sys.executable, env, preload)
    zygote = Zygote(selector, sys.executable, first.preload)
    died = zygote.start({"A": "2"}, first.log_file, first)
    assert died is not None
    assert died.how == "another was asked for"
    assert not alive(first.pid)
    assert first.control.fileno() == -1


def test_a_first_zygote_for_this_job_is_used(first: FirstZygote) -> None:
    with selectors.DefaultSelector() as selector:
        zygote = Zygote(selector, sys.executable, first.preload)
        assert zygote.start(first.env, first.log_file, first) is None
        assert zygote.pid == first.pid
        assert selector.get_key(first.control).data == ("zygote", 0)
        zygote.close()
        assert not alive(first.pid)


def test_no_first_zygote_without_the_mark(tmp_path: Path) -> None:
    assert MARK_ENV not in os.environ
    assert first_zygote.fork(str(tmp_path)) is None
