"""Starts workers as new processes, where no zygote can be forked from. Slower by the import of torch only."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Sequence

from elastic.contract.worker import messages
from elastic.contract.worker.messages import Fork


def start_fresh(python: str, order: Fork, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the worker that `order` describes; `descriptors` as for the zygote. Raises OSError."""
    with contextlib.ExitStack() as files:
        told = files.enter_context(tempfile.TemporaryFile())  # the order may exceed the capacity of a pipe
        told.write(messages.encode(order))
        told.seek(0)
        channel, page, log = descriptors
        passed = [told.fileno(), channel, page, log]
        return subprocess.Popen(
            [python, "-m", "elastic.worker.boot.fresh", str(os.getpid()), *map(str, passed)],
            env=order.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=passed,
        )
