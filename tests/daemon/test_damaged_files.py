"""Files between a daemon and its agents that are damaged, down to a single byte of a text, are as if they were not."""

from __future__ import annotations

import fcntl
import os
import pathlib

import msgspec
import pytest
import structlog

from elastic.contract.agent_files import AgentConfig, AgentOrders, AgentStatus, EtcdAccess
from elasticd.agents.agents import Agents, _read, write
from elasticd.base.threads import Threads
from elasticd.machine.processes.launch import Detached

CONFIG = AgentConfig(
    cluster="c", node="n", job="j", address="127.0.0.1", slots=1, etcd=EtcdAccess(endpoints=("127.0.0.1:1",)),
    agent_dir="/x", logs_dir="/x",
)  # fmt: skip
STATUS = AgentStatus(
    pid=1, incarnation="i", job="j", node="n", phase="running", reason="", leader=True, generation=1, etcd_ok=True,
    written_wall_s=0.0,
)  # fmt: skip
FILES = {"config.json": CONFIG, "status.json": STATUS, "orders.json": AgentOrders(draining="a new disk")}


@pytest.mark.parametrize("name", FILES)
def test_any_byte_may_be_any_other(tmp_path: pathlib.Path, name: str) -> None:
    raw = msgspec.json.encode(FILES[name])
    file = tmp_path / name
    read = 0
    for place in range(len(raw)):
        for byte in (0x00, 0x22, 0x7B, 0xFF, raw[place] ^ 0x80):
            file.write_bytes(raw[:place] + bytes([byte]) + raw[place + 1 :])
            read += _read(file, type(FILES[name])) is not None  # type: ignore[type-var]
    assert read < len(raw) * 5


@pytest.mark.parametrize("name", FILES)
def test_a_file_may_be_nested_without_end(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"x":' + b"[" * 100_000)
    assert _read(tmp_path / name, type(FILES[name])) is None  # type: ignore[type-var]


@pytest.mark.parametrize("changed", [{"slots": 0}, {"slots": -8}, {"slots": 10**9}, {"job": "another"}])
def test_a_config_that_its_user_has_changed_is_replaced(tmp_path: pathlib.Path, changed: dict[str, object]) -> None:
    log = structlog.get_logger()
    agents = Agents(tmp_path, Detached(), Threads(log), lambda gone: None, log)
    folder = agents.dir("j")
    folder.mkdir(parents=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getpid()))
        lock.flush()
        write(folder / "config.json", msgspec.structs.replace(CONFIG, **changed))  # type: ignore[arg-type]
        assert not agents.adopt("j")
        assert agents.adopt("j", CONFIG)
    assert agents.running["j"].config == CONFIG
    assert _read(folder / "config.json", AgentConfig) == CONFIG


def test_a_daemon_starts_all_the_same(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "jobs" / "j" / "agent"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(msgspec.json.encode(content).replace(b'"', b'"\xff'))
    log = structlog.get_logger()
    agents = Agents(tmp_path, Detached(), Threads(log), lambda gone: None, log)
    agents.find()
    assert not agents.running
