"""sd_notify messages to systemd. Without systemd every call does nothing."""

from __future__ import annotations

import os
import socket

STOPPING_S = 1.0
"""How long the last message waits for room in systemd's queue."""


class Notify:
    def __init__(self, path: str, watchdog_usec: str = "") -> None:
        self._path = "\0" + path[1:] if path.startswith("@") else path
        self.watchdog_s = int(watchdog_usec) / 1e6 if watchdog_usec.isdigit() else 0.0
        """Interval within which systemd expects WATCHDOG=1; 0: it does not."""
        self._status = ""
        self._owed: list[str] = []
        """Messages that systemd has to receive and whose sending has failed, the oldest first."""

    @classmethod
    def from_environment(cls) -> Notify:
        """Removes the variables from the environment, so that no child process notifies in our name."""
        path = os.environ.pop("NOTIFY_SOCKET", "")
        pid = os.environ.pop("WATCHDOG_PID", "")
        usec = os.environ.pop("WATCHDOG_USEC", "")
        return cls(path, usec if pid in ("", str(os.getpid())) else "")

    def ready(self) -> None:
        self._owed.append("READY=1")
        self._settle()

    def status(self, text: str) -> None:
        """One line for `systemctl status`; sent only when it changes."""
        if text != self._status:
            self._status = text
            self._owed = [owed for owed in self._owed if not owed.startswith("STATUS=")] + [f"STATUS={text}"]
            self._settle()

    def stopping(self) -> None:
        self._send("STOPPING=1", STOPPING_S)

    def turned(self) -> None:
        """A turn of the loop is done: the only place that sends WATCHDOG=1. Sends again what was not taken before."""
        self._settle()
        if self.watchdog_s:
            self._send("WATCHDOG=1")

    def not_yet(self, extend_s: float) -> None:
        """Still starting, and alive: systemd should wait `extend_s` more."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(extend_s * 1e6)}")

    def _settle(self) -> None:
        while self._owed and self._send(self._owed[0]):
            del self._owed[0]

    def _send(self, text: str, wait_s: float = 0.0) -> bool:
        """Returns False if systemd did not take the message, as it restarts or its queue is full: that must not end the
        daemon."""
        if not self._path:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.settimeout(wait_s)
                channel.sendto(text.encode(), self._path)
        except OSError:
            return False
        return True
