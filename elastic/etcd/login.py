"""The login of an etcd on a Unix socket, in a file beside the socket: who may read it may use it, as the socket itself.

<folder>/client:0    the socket
<folder>/login       user:password, for all that is no administration
"""

from __future__ import annotations

import os

import msgspec

from elastic.contract.agent_files import EtcdAccess

NAME = "login"
NOT_ENABLED = "authentication is not enabled"
_MOST_BYTES = 1000


def with_login(endpoint: str, access: EtcdAccess) -> EtcdAccess:
    """`access` with the login beside the socket `endpoint`, if that is one and there is any. One that is given
    stays."""
    if access.user or not endpoint.startswith("unix:"):
        return access
    path = os.path.join(os.path.dirname(endpoint.removeprefix("unix:")), NAME)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return access
    try:
        user, _, password = os.pread(descriptor, _MOST_BYTES, 0).decode("ascii", "replace").strip().partition(":")
    finally:
        os.close(descriptor)
    return msgspec.structs.replace(access, user=user, password=password)
