"""Messages to systemd that its socket does not take at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.base.sd_notify import Notify


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.setblocking(False)
        yield channel


def heard(systemd: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(systemd.recv(4096).decode())
        except BlockingIOError:
            return found


def fill(notify: Notify) -> None:
    """A process 1 that is busy: its queue takes no more."""
    for _ in range(2000):
        notify.not_yet(30.0)


def test_ready_and_the_newest_status_are_sent_again_until_they_have_arrived(systemd: socket.socket) -> None:
    notify = Notify(systemd.getsockname())
    fill(notify)
    notify.ready()
    notify.status("0 agents here")
    notify.status("1 agent here")
    assert set(heard(systemd)) == {"EXTEND_TIMEOUT_USEC=30000000"}
    notify.turned()
    assert heard(systemd) == ["READY=1", "STATUS=1 agent here"]
    notify.turned()
    assert heard(systemd) == []


def test_a_life_sign_that_was_not_taken_is_not_made_up_for(systemd: socket.socket) -> None:
    """Each says that the loop turns at that moment."""
    notify = Notify(systemd.getsockname(), "900000")
    fill(notify)
    notify.turned()
    heard(systemd)
    notify.turned()
    assert heard(systemd) == ["WATCHDOG=1"]


def test_the_socket_of_a_systemd_that_restarts_is_tried_again(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    notify = Notify(path)
    notify.ready()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(path)
        channel.setblocking(False)
        notify.turned()
        assert heard(channel) == ["READY=1"]
