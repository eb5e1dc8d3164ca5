"""What a child process of a worker does first: arrange to die with the worker, and drop the sockets it inherited.

A forked child holds the worker's sockets. If the worker dies, its peers see no end of stream until the last holder is
gone; and torch's own loader processes notice their parent's death only after seconds.
"""

from __future__ import annotations

import functools
import os
import socket
import stat
from collections.abc import Callable

from elastic.util.processes import die_with


def process_init() -> Callable[[int], None]:
    """`worker_init_fn` of a DataLoader whose processes are children of this one."""
    return functools.partial(leave_parents_sockets, parent=os.getpid())


def leave_parents_sockets(_loader: int = 0, *, parent: int) -> None:
    """Replaces each inherited internet socket by /dev/null.

    Replaced, not closed: C++ objects copied by the fork still hold the descriptors and must not hit another file.
    """
    if not die_with(parent):
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if _is_internet_socket(fd):
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _is_internet_socket(fd: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        twin = socket.socket(fileno=os.dup(fd))
    except OSError:  # closed meanwhile: the descriptor of the listing itself
        return False
    with twin:
        return twin.family in (socket.AF_INET, socket.AF_INET6)
