"""Orders of this node's daemon to the agent, through a file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import structlog

from elastic.contract.agent_files import AgentOrders

log = structlog.get_logger()

_ORDERS = msgspec.json.Decoder(AgentOrders)


class OrdersFile:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "orders.json"
        self._version = (0, 0, 0)
        self._orders = AgentOrders()

    def news(self) -> tuple[AgentOrders, AgentOrders] | None:
        """The previous and the current orders, if the file has changed since the last call. A file that cannot be read
        is logged, and read again the next time."""
        try:
            written = os.stat(self._path)
            version = (written.st_ino, written.st_mtime_ns, written.st_size)
            if version == self._version:
                return None
            orders = _ORDERS.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
            log.warning("orders.unreadable", error=str(error))
            return None
        before, self._orders, self._version = self._orders, orders, version
        return before, orders
