"""The socket of a daemon without a daemon: the real API on a fake etcd."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import threading
from typing import Any, cast

from support.fake_etcd import FakeClient, FakeServer
from support.snapshots import job, snapshot

from elastic.contract.keys import ClusterKeys
from elastic.etcd.client import Etcd
from elasticd.access.audit import Audit
from elasticd.access.authority import Authority
from elasticd.agents.cleaner import Cleaner
from elasticd.api import server as api
from elasticd.api.actions import Actions
from elasticd.api.doctor import Doctor
from elasticd.api.request import Service
from elasticd.api.views.instant import Identity
from elasticd.base.folders import Folder
from elasticd.base.settings import PerUserSettings, Settings
from elasticd.cluster.published_state import PublishedState
from elasticd.machine.health import Health
from elasticd.node.asks import Asker


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []

    def error(self, event: str, **_: object) -> None:
        self.said.append(event)

    warning = info = error

    def debug(self, event: str, **_: object) -> None:
        pass


class Door:
    """A daemon's socket in this process, with a snapshot with one job and an etcd in memory."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.path, self.log = folder / "s", Heard()
        self.published = published = PublishedState()
        published.publish(snapshot(job()))
        self.etcd = FakeServer()
        self.client = FakeClient(self.etcd)
        etcd, keys, authority = cast(Etcd, self.client), ClusterKeys("main"), Authority(os.geteuid())
        acts = Actions(etcd, keys, published, authority, lambda record: "", PerUserSettings())
        identity = Identity("main", "a", "0.1", 7, 0.0, ("127.0.0.1:1",), False, "")
        logs = lambda name: Folder(folder, (name, "logs"))  # noqa: E731
        log, asker = cast(Any, self.log), Asker(etcd, "main", "a")
        doctor = Doctor(Settings(state_dir=str(folder), address="127.0.0.1"), etcd, asker, False, Health({}, log))
        audit = Audit(etcd, keys, "a", log)
        cleaner = Cleaner(Settings(state_dir=str(folder), node="a"), keys, lambda job: None, lambda: published.now, log)
        self.service = Service(published, acts, identity, logs, dict, log, authority, audit, asker, doctor, cleaner)
        self.server = api.unix_server(str(self.path), "", self.service)
        self._thread = threading.Thread(target=self.server.serve, daemon=True)
        self._thread.start()

    def connect(self) -> socket.socket:
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(10)
        line.connect(str(self.path))
        return line

    def say(self, raw: bytes, end: bool = True) -> tuple[int, dict[str, Any]]:
        """Send it, read all that comes: status and body."""
        with self.connect() as line:
            with contextlib.suppress(BrokenPipeError):
                line.sendall(raw)
            if end:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_WR)
            return answer_on(line)

    def close(self) -> None:
        self.server.listener.shutdown(socket.SHUT_RDWR)
        self.server.listener.close()
        self._thread.join(5)


def answer_on(line: socket.socket) -> tuple[int, dict[str, Any]]:
    answer = b""
    while part := line.recv(65536):
        answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), answer[:200]
    content: dict[str, Any] = json.loads(body) if body and b"chunked" not in head else {}
    return int(head.split()[1]), content
