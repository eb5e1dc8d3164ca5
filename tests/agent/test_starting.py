"""An agent that finds etcd slow or away tries for minutes, says so, and is not counted as one that cannot start."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from elastic.agent import node as starting
from elastic.contract.agent_files import AgentConfig, AgentStatus, EtcdAccess
from elastic.contract.keys import ClusterKeys
from elastic.etcd.client import KV, Etcd, EtcdUnavailable

KEYS = ClusterKeys("c").job("j")
SPEC = KV(KEYS.spec, b"{}", 1, 1, 0)


class Slow:
    """Answers at the n-th call."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def get(self, key: str) -> KV:
        assert key == KEYS.spec
        self.calls -= 1
        if self.calls > 0:
            raise EtcdUnavailable("10.0.0.1:2379: still logging in", maybe_done=False)
        return SPEC


@pytest.fixture(autouse=True)
def hup(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(starting, "AGAIN_S", 0.0)
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def config(folder: Path) -> AgentConfig:
    return AgentConfig(
        cluster="c", node="n", job="j", address="a", slots=1, etcd=EtcdAccess(endpoints=("10.0.0.1:2379",)),
        agent_dir=str(folder), logs_dir=str(folder),
    )  # fmt: skip


def test_agent_start_retries_slow_etcd_and_reports_the_reason(tmp_path: Path) -> None:
    assert starting.read_spec(cast(Etcd, Slow(30)), KEYS, config(tmp_path)) == SPEC
    status = msgspec.json.decode((tmp_path / "status.json").read_bytes(), type=AgentStatus)
    assert status.reason == "etcd does not answer: 10.0.0.1:2379: still logging in"
    assert not status.etcd_ok
    signal.raise_signal(signal.SIGHUP)  # a daemon that reads the status sends it with new orders


def test_an_etcd_that_answers_at_once_leaves_no_trace(tmp_path: Path) -> None:
    assert starting.read_spec(cast(Etcd, Slow(1)), KEYS, config(tmp_path)) == SPEC
    assert not (tmp_path / "status.json").exists()


def test_agent_start_gives_up_on_etcd_after_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert starting.ETCD_S >= 120
    ticks = iter(range(0, 10**6, 50))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    slow = Slow(10**6)
    with pytest.raises(EtcdUnavailable):
        starting.read_spec(cast(Etcd, slow), KEYS, config(tmp_path))
    assert 10**6 - slow.calls == starting.ETCD_S // 50
