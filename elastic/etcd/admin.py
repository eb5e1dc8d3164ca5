"""An etcd of one's own, closed to all that have no login: its root administers it, the other user reads and writes
below one prefix, and nothing else."""

from __future__ import annotations

from contextlib import closing
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
    with closing(_Admin(endpoint, root_password)) as admin:
        try:
            admin.ask("UserList")
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
    with closing(_Admin(endpoint)) as admin:
        for name in admin.ask("UserList").users:
            admin.ask("UserDelete", name=name)
        for name in admin.ask("RoleList").roles:
            admin.ask("RoleDelete", role=name)
        for name, secret in ((ROOT, root_password), (USER, password)):
            admin.ask("RoleAdd", name=name)
            admin.ask("UserAdd", name=name, password=secret)
            admin.ask("UserGrantRole", user=name, role=name)
        admin.ask("RoleGrantPermission", name=USER, perm={"permType": _READ_WRITE, **protobuf.span(prefix)})
        admin.ask("AuthEnable")


def open_again(endpoint: str, root_password: str) -> None:
    """Turn authentication off. Raises EtcdError."""
    with closing(_Admin(endpoint, root_password)) as admin:
        admin.ask("AuthDisable")


class _Admin:
    """A connection of its own; without a password as nobody."""

    def __init__(self, endpoint: str, root_password: str = "") -> None:
        from .wire import Connection

        user = ROOT if root_password else ""
        access = EtcdAccess(endpoints=(endpoint,), user=user, password=root_password)
        self._connection = Connection(endpoint, access, find_login=False)

    def ask(self, what: str, **fields: Any) -> Any:
        """One request of etcd's service Auth."""
        kind = f"{what if what.startswith('Auth') else f'Auth{what}'}Request"
        return self._connection.call(f"Auth.{what}", lambda pb: getattr(pb, kind)(**fields), CALL_S)

    def close(self) -> None:
        self._connection.close()
