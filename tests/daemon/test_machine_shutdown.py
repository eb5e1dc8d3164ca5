"""The drain of a node whose machine shuts down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import structlog
from support.snapshots import job, snapshot

from elastic.contract.records.node_records import DrainRecord
from elastic.contract.records.reasons import Text
from elasticd.base.errors import Refused
from elasticd.cluster.published_state import LocalAgent, Snapshot
from elasticd.node import machine_shutdown
from elasticd.node.machine_shutdown import REASON, leave, ours

LOG = structlog.get_logger()
BUSY = replace(snapshot(job()), agents={"train": LocalAgent("train", 3, 2, None, None)})
EMPTY = replace(BUSY, agents={})


class Drains:
    def __init__(self, refuses: bool = False) -> None:
        self.asked: list[tuple[str, str, float]] = []
        self._refuses = refuses

    def drain(self, node: str, reason: str, deadline_s: float) -> None:
        if self._refuses:
            raise Refused(503, "etcd cannot be reached")
        self.asked.append((node, reason, deadline_s))


def waits(*found: Snapshot) -> Callable[[Callable[[Snapshot], object], float], Snapshot]:
    """A published that shows one snapshot after the other."""
    left = list(found)
    return lambda until, timeout_s: left.pop(0)


def test_a_node_with_agents_is_drained_and_systemd_asked_for_the_time() -> None:
    drains, extended = Drains(), []
    leave("a", 30.0, drains.drain, waits(BUSY, EMPTY), extended.append, LOG)
    assert drains.asked == [("a", REASON, 30.0)]
    assert extended
    assert extended[0] > 30.0


def test_an_empty_node_is_not_drained() -> None:
    drains = Drains()
    leave("a", 30.0, drains.drain, waits(EMPTY), lambda s: None, LOG)
    assert not drains.asked


def test_without_etcd_the_shutdown_goes_on() -> None:
    leave("a", 30.0, Drains(refuses=True).drain, waits(BUSY), lambda s: None, LOG)


@pytest.mark.parametrize(("reason", "removed"), [(REASON, True), ("a new disk", False)])
def test_only_its_own_drain_is_removed_at_the_next_start(reason: Text, removed: bool) -> None:
    record = DrainRecord(reason=reason, deadline_s=0.0, since_wall_s=0.0)
    seen = replace(BUSY, cluster=replace(BUSY.cluster, drains={"a": record}))
    assert ours(seen, "a") == removed
    assert not ours(seen, "b")


def test_a_running_machine_is_not_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert not machine_shutdown.is_stopping()
