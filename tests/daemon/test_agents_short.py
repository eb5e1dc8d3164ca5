"""Which ends of an agent are failures, and whose: a machine that is short of something is no fault of the job's."""

from __future__ import annotations

import errno
import os
import pathlib
import threading
import time

import msgspec
import pytest
import structlog
from support.wait import eventually

from elastic.contract.agent_files import AgentConfig, AgentStatus, EtcdAccess
from elastic.contract.timeouts import Timeouts
from elasticd.agents import agents as agents_module
from elasticd.agents.agents import SHORT_OF_S, Agents, Gone, Running
from elasticd.base.errors import CannotStart
from elasticd.base.threads import Threads
from elasticd.cluster.reconcile import FAILED_STARTS
from elasticd.machine.processes.launch import ServiceProcess, Started


class Refuses:
    """A launcher that cannot."""

    def __init__(self, code: int) -> None:
        self._code = code

    def start(self, service: ServiceProcess) -> Started:
        raise CannotStart(f"{service.argv[0]}: {os.strerror(self._code)}") from OSError(
            self._code, os.strerror(self._code)
        )


def config(folder: pathlib.Path) -> AgentConfig:
    return AgentConfig(
        cluster="c", node="n", job="j", address="127.0.0.1", slots=1, etcd=EtcdAccess(endpoints=("127.0.0.1:1",)),
        timeouts=Timeouts(), agent_dir=str(folder / "jobs" / "j" / "agent"), logs_dir=str(folder / "logs"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "blamed"), [(errno.EMFILE, False), (errno.ENOSPC, False), (errno.EAGAIN, False), (errno.ENOENT, True)]
)
def test_node_is_excluded_only_for_start_failures_the_job_can_influence(
    tmp_path: pathlib.Path, code: int, blamed: bool
) -> None:
    log = structlog.get_logger()
    agents = Agents(tmp_path, Refuses(code), Threads(log), lambda gone: None, log)
    for _ in range(8):
        agents.start(config(tmp_path), "")
    trouble = agents.trouble["j"]
    assert (trouble.failures >= FAILED_STARTS) == blamed
    assert os.strerror(code) in trouble.why
    assert (trouble.pause_s > SHORT_OF_S) == blamed


def test_a_shortage_that_lasts_excludes_the_node(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full state folder, say: the job goes on with other nodes."""
    monkeypatch.setattr(agents_module, "SHORT_FOR_S", 0.0)
    log = structlog.get_logger()
    agents = Agents(tmp_path, Refuses(errno.ENOSPC), Threads(log), lambda gone: None, log)
    for _ in range(FAILED_STARTS):
        agents.start(config(tmp_path), "")
    assert agents.trouble["j"].failures >= FAILED_STARTS
    assert agents.trouble["j"].short


PID = 4_000_000


def ended(tmp_path: pathlib.Path, code: int | None, wrote: int | None, pid: int = PID) -> Agents:
    """An agent that was adopted, or is a unit of its own, has ended: the kernel tells the daemon `code`, and its last
    status has `wrote`."""
    log = structlog.get_logger()
    agents = Agents(tmp_path, Refuses(0), Threads(log), lambda gone: None, log)
    folder = agents.dir("j")
    folder.mkdir(parents=True)
    status = AgentStatus(
        pid=pid, incarnation="i", job="j", node="n", phase="finishing", reason="", leader=False, generation=1,
        etcd_ok=True, written_wall_s=0.0, exit_code=wrote,
    )  # fmt: skip
    (folder / "status.json").write_bytes(msgspec.json.encode(status))
    agents.running["j"] = Running(config(tmp_path), PID, time.monotonic(), status=status)
    agents.gone(Gone("j", PID, code))
    return agents


def test_an_agent_that_leaves_is_no_failure_where_its_exit_code_is_not_known(tmp_path: pathlib.Path) -> None:
    left = ended(tmp_path, None, 0)
    assert left.trouble["j"].why == ""
    assert left.why_none(["j"]) == {}


@pytest.mark.parametrize(
    ("code", "wrote", "pid", "why"),
    [
        (None, None, PID, "the agent ended"),  # killed
        (None, 3, PID, "the agent ended with exit code 3"),
        (None, 0, PID - 1, "the agent ended"),  # the status of another one
        (None, 10**400, PID, "the agent ended"),  # the job's user may write anything
        (-9, 0, PID, "the agent was killed by SIGKILL"),  # the kernel knows better
    ],
)
def test_any_other_end_is_a_failure(
    tmp_path: pathlib.Path, code: int | None, wrote: int | None, pid: int, why: str
) -> None:
    assert ended(tmp_path, code, wrote, pid).trouble["j"].why == why


def test_a_failure_is_told_only_while_the_job_has_a_place_here(tmp_path: pathlib.Path) -> None:
    agents = ended(tmp_path, -9, None)
    assert agents.why_none({"j": 1}) == {"j": "the agent was killed by SIGKILL"}
    assert agents.why_none({"other": 1}) == {}


def test_an_agent_that_no_thread_waits_for_is_waited_for_later(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a limit of threads: it ended the daemon."""
    log, ended, start = structlog.get_logger(), [], threading.Thread.start
    agents = Agents(tmp_path, Refuses(0), Threads(log), ended.append, log)
    agents.running["j"] = Running(config(tmp_path), PID, time.monotonic())

    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    agents._watch("j", PID, None)  # a pid that no process has
    agents.refresh()
    assert ended == []
    monkeypatch.setattr(threading.Thread, "start", start)
    agents.refresh()
    eventually(lambda: ended, 5.0)
    assert ended == [Gone("j", PID, None)]
