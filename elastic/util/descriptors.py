"""Messages with file descriptors over a Unix socket."""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence


def send(channel: socket.socket, raw: bytes, descriptors: Sequence[int] = (), flags: int = 0) -> None:
    """One message. Raises OSError. (`socket.send_fds` ignores its flags.)"""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    channel.sendmsg([raw], rights, flags)
