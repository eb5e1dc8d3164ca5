"""Newer etcd members (3.5.30) tell their status to etcd's root only; one that serves is not taken for a failed one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic.contract.agent_files import EtcdAccess
from elastic.etcd import wire
from elastic.etcd.client import Etcd, EtcdDenied, EtcdError, EtcdUnavailable
from elasticd.node.writer import ClusterWriter


def members(monkeypatch: pytest.MonkeyPatch, status: EtcdError, read: EtcdError | None) -> Any:
    class Connection:
        silent = False

        def __init__(self, *_: object) -> None: ...

        def call(self, name: str, *_: object, **__: object) -> None:
            if error := status if name == "Maintenance.Status" else read:
                raise error

        def close(self) -> None: ...

    monkeypatch.setattr(wire, "Connection", Connection)
    (found,) = Etcd(EtcdAccess(endpoints=("e:1",))).members(1.0)
    return found.ok, found.error, found.version


DENIED = EtcdDenied("e:1: etcdserver: permission denied")
NAMELESS = EtcdError("e:1: etcdserver: user name is empty")
AWAY = EtcdUnavailable("e:1: no leader")


@pytest.mark.parametrize("status", [DENIED, NAMELESS])
def test_a_member_whose_status_is_denied_works_if_it_reaches_the_quorum(
    monkeypatch: pytest.MonkeyPatch, status: EtcdError
) -> None:
    for read in (None, DENIED, NAMELESS):
        assert members(monkeypatch, status, read) == (True, "", "")
    assert members(monkeypatch, status, AWAY) == (False, "e:1: no leader", "")
    assert members(monkeypatch, AWAY, None) == (False, "e:1: no leader", "")


def test_alarms_that_are_denied_are_no_fault() -> None:
    def alarms() -> tuple[str, ...]:
        raise DENIED

    heard: list[object] = []
    writer = ClusterWriter(
        cast(Any, SimpleNamespace(alarms=alarms)), cast(Any, None), cast(Any, SimpleNamespace(post=heard.append)),
        cast(Any, None),
    )  # fmt: skip
    writer.check_alarms()
    writer.run_one()
    assert [event.error for event in cast(Any, heard)] == [""]
