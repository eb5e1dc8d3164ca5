"""sd_notify messages to systemd. Without systemd every call does nothing."""

from __future__ import annotations

import os
import socket


class Notify:
    def __init__(self, path: str, watchdog_usec: str = "") -> None:
        self._path = "\0" + path[1:] if path.startswith("@") else path
        self.watchdog_s = int(watchdog_usec) / 1e6 if watchdog_usec.isdigit() else 0.0
        """Interval within which systemd expects WATCHDOG=1; 0: it does not."""
        self._status = ""

    @classmethod
    def from_environment(cls) -> Notify:
        """Removes the variables from the environment, so that no child process notifies in our name."""
        path = os.environ.pop("NOTIFY_SOCKET", "")
        pid = os.environ.pop("WATCHDOG_PID", "")
        usec = os.environ.pop("WATCHDOG_USEC", "")
        return cls(path, usec if pid in ("", str(os.getpid())) else "")

    def ready(self) -> None:
        self._send("READY=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`; sent only when it changes."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def turned(self) -> None:
        """A turn of the loop is done: the only place that sends WATCHDOG=1."""
        if self.watchdog_s:
            self._send("WATCHDOG=1")

    def not_yet(self, extend_s: float) -> None:
        """Still starting, and alive: systemd should wait `extend_s` more."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(extend_s * 1e6)}")

    def _send(self, text: str) -> None:
        if not self._path:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.sendto(text.encode(), self._path)
        except OSError:
            # systemd restarts, or its buffer is full: the next turn repeats the message, and a failed one must not end
            # the daemon.
            pass
