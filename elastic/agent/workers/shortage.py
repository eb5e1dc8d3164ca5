"""Whether an error says that the node lacks something: descriptors, processes, memory or disk space."""

from __future__ import annotations

import errno

_OF_THE_NODE = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT}
)


def is_shortage(error: BaseException) -> bool:
    """Where a worker cannot be started for it, another node may be able to, and this one later: the job's script is not
    at fault."""
    return isinstance(error, OSError) and error.errno in _OF_THE_NODE
