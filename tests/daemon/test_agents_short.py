"""An agent that cannot be started because the machine is short of something is no fault of the job's."""

from __future__ import annotations

import errno
import os
import pathlib

import pytest
import structlog

from elastic.contract.agent_files import AgentConfig, EtcdAccess
from elastic.contract.timeouts import Timeouts
from elasticd.agents import SHORT_OF_S, Agents
from elasticd.errors import CannotStart
from elasticd.launch import ServiceProcess, Started
from elasticd.reconcile import FAILED_STARTS
from elasticd.threads import Threads


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
