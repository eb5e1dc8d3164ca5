"""An etcd of one's own, closed to all that have no login: its root administers it, the other user reads and writes
below one prefix, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from elastic.contract.agent_files import EtcdAccess

from . import protobuf
from .login import NOT_ENABLED
from .types import EtcdDenied, EtcdError

ROOT, USER = "root", "elasticd"
"""etcd's superuser, and the user of daemons and agents: the name in the client certificates of other nodes, too."""
CALL_S = 5.0
_READ_WRITE = 2


def is_closed(endpoint: str, root_password: str) -> bool:
    """Whether authentication is on, and root has this password. Raises EtcdError, EtcdDenied for another password."""
    with _asking(endpoint, root_password) as ask:
        try:
            ask("UserList")
        except EtcdDenied:
            raise
        except EtcdError as error:
            if NOT_ENABLED in str(error):
                return False
            raise
    return True


def close(endpoint: str, prefix: str, root_password: str, password: str) -> None:
    """Turn authentication on: root, and USER with all rights below `prefix`. Users and roles that anyone has made while
    it was off are removed. Raises EtcdError."""
    with _asking(endpoint) as ask:
        for name in ask("UserList").users:
            ask("UserDelete", name=name)
        for name in ask("RoleList").roles:
            ask("RoleDelete", role=name)
        for name, secret in ((ROOT, root_password), (USER, password)):
            ask("RoleAdd", name=name)
            ask("UserAdd", name=name, password=secret)
            ask("UserGrantRole", user=name, role=name)
        ask("RoleGrantPermission", name=USER, perm={"permType": _READ_WRITE, **protobuf.span(prefix)})
        ask("AuthEnable")


def open_again(endpoint: str, root_password: str) -> None:
    """Turn authentication off. Raises EtcdError."""
    with _asking(endpoint, root_password) as ask:
        ask("AuthDisable")


@contextmanager
def _asking(endpoint: str, root_password: str = "") -> Iterator[Callable[..., Any]]:
    """A function that calls the RPCs of etcd's Auth service over its own connection; without a password the client
    is not authenticated."""
    from .wire import Connection

    access = EtcdAccess(endpoints=(endpoint,), user=ROOT if root_password else "", password=root_password)
    with closing(Connection(endpoint, access, find_login=False)) as connection:

        def ask(what: str, **fields: Any) -> Any:
            kind = f"{what if what.startswith('Auth') else f'Auth{what}'}Request"
            return connection.call(f"Auth.{what}", lambda pb: getattr(pb, kind)(**fields), CALL_S)

        yield ask
