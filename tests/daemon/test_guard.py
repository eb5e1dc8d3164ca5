"""What an agent leaves is ended by its parent, in whatever session and environment, without a daemon."""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import pytest
from support.procs import alive
from support.wait import eventually

from elastic.contract.agent_files import MARK_ENV
from elasticd.base.errors import CannotStart
from elasticd.machine.processes.launch import Detached, GuardedChild, ServiceProcess

AGENT = """
import os, subprocess, sys, time
assert os.getsid(0) == os.getpid()
left = [
    subprocess.Popen(["sleep", "600"], start_new_session=True, env={}).pid,
    subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600"], env={}, start_new_session=True).pid,
]
if os.fork() == 0:
    os.setsid()
    left.append(os.getpid())
    open("left.new", "w").write(" ".join(map(str, left)))
    os.rename("left.new", "left")
    time.sleep(600)
while sys.argv[1] == "wait" or not os.path.exists("left"):
    time.sleep(0.01)
os._exit(int(sys.argv[1]))
"""


def started(folder: pathlib.Path, how: str) -> GuardedChild:
    argv = [sys.executable, "-c", AGENT, how]
    service = ServiceProcess("agent", argv, {**os.environ, MARK_ENV: "0:0:/x"}, folder, folder / "out")
    agent = Detached().start(service)
    assert isinstance(agent.child, GuardedChild)
    assert agent.pid == agent.child.pid
    return agent.child


def left(folder: pathlib.Path) -> list[int]:
    eventually((folder / "left").exists, 10.0, "what it leaves")
    return [int(pid) for pid in (folder / "left").read_text().split()]


@pytest.mark.parametrize(("how", "code"), [("wait", -signal.SIGKILL), ("7", 7)])
def test_all_that_an_agent_leaves_ends_with_it(tmp_path: pathlib.Path, how: str, code: int) -> None:
    agent = started(tmp_path, how)
    pids = left(tmp_path)
    if how == "wait":
        assert (
            pathlib.Path(f"/proc/{agent.pid}/environ").read_bytes().split(b"\0").count(f"{MARK_ENV}=0:0:/x".encode())
            == 1
        )
        assert all(alive(pid) for pid in pids)
        os.kill(agent.pid, signal.SIGKILL)
    assert agent.wait() == code
    agent.reap()
    assert not any(alive(pid) for pid in pids)


def test_a_command_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    service = ServiceProcess("agent", ["/no/python"], {MARK_ENV: "x"}, tmp_path, tmp_path / "out")
    with pytest.raises(CannotStart, match="/no/python: No such file or directory"):
        Detached().start(service)
