"""An embedded etcd that ends while the daemon looks at it is started anew."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from elasticd.base.errors import CannotStart
from elasticd.base.settings import EtcdSettings, Settings
from elasticd.etcd import embedded as embedded_etcd
from elasticd.etcd.embedded import EmbeddedEtcd
from elasticd.machine.processes import launch


class Quiet:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Starts:
    switches_user = False

    def start(self, service: launch.ServiceProcess) -> launch.Started:
        return launch.Started(7, None)


def test_embedded_etcd_that_exits_during_adoption_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "holder", lambda lock: 2**22 + 1)  # no process has this number
    settings = Settings(state_dir=str(tmp_path), etcd=EtcdSettings(embedded_binary="/bin/true"))
    log: Any = Quiet()
    etcd = EmbeddedEtcd(settings, Starts(), log)
    etcd.start()
    assert etcd._pid == 7
    assert embedded_etcd._listens(2**22 + 1) == ""


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(lock: Path) -> int | None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(lock))

    monkeypatch.setattr(launch, "holder", no_descriptors)
    log: Any = Quiet()
    etcd = EmbeddedEtcd(
        Settings(state_dir=str(tmp_path), etcd=EtcdSettings(embedded_binary="/bin/true")), Starts(), log
    )
    with pytest.raises(CannotStart, match=f"^{tmp_path}/etcd/lock: Too many open files$"):
        etcd.start()
