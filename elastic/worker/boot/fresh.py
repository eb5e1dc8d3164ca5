"""A worker started as a new process, for the case that the zygote is unfit to fork.

    python -m elastic.worker.boot.fresh AGENT_PID ORDER_FD CHANNEL_FD PAGE_FD LOG_FD

The order is a file with the message that a zygote would receive.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elastic.contract.worker import messages

from . import bootstrap


def main(argv: Sequence[str]) -> int:
    agent_pid, order_fd, *descriptors = map(int, argv)
    with open(order_fd, "rb") as file:
        order = messages.to_zygote(file.read())
    return bootstrap.become(order, descriptors, agent_pid)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
