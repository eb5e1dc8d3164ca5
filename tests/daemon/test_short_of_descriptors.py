"""What elasticd says of itself and does where the machine gives it no more descriptors or threads. In one process."""

from __future__ import annotations

import errno
import os
import pathlib
import threading

import pytest

from elasticd import api, host


def refusing(code: int) -> object:
    def open_(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return open_


def test_no_descriptors_make_a_node_unwell(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LEAST_FREE_MB", 0.0)
    assert host.sickness(str(tmp_path)) == ""
    assert "No such file" in host.sickness(str(tmp_path / "nowhere"))
    for code, whose in ((errno.EMFILE, "elasticd"), (errno.ENFILE, "this machine")):
        monkeypatch.setattr(os, "open", refusing(code))
        assert host.sickness(str(tmp_path)).startswith(f"{whose} has no file descriptors left")


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []

    def error(self, event: str, **_: object) -> None:
        self.said.append(event)

    warning = debug = error


@pytest.fixture
def server(tmp_path: pathlib.Path) -> object:
    service = type("Service", (), {"log": Heard()})()
    handler = type("Handler", (api.Handler,), {"service": service})
    made = api.UnixServer(str(tmp_path / "s"), handler)
    yield made
    made.server_close()


def test_a_request_that_cannot_be_taken_is_said_once_and_not_tried_without_pause(
    server: api.UnixServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept() -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    pauses: list[float | None] = []
    monkeypatch.setattr(
        server, "socket", type("Socket", (), {"accept": staticmethod(accept), "close": lambda _: None})()
    )
    monkeypatch.setattr(server._pause, "wait", pauses.append)
    for _ in range(3):
        with pytest.raises(OSError, match="Too many open files"):
            server.get_request()
    assert server._log.said == ["api.cannot_accept"]  # type: ignore[attr-defined]
    assert pauses == [api.RETRY_S] * 3


def test_a_request_without_a_thread_gives_its_place_back(
    server: api.UnixServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2 * api.MAX_REQUESTS):  # else the last ones would find no room, and wait for it
        with pytest.raises(RuntimeError):
            server.process_request(None, None)
