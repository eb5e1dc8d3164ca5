"""What can go wrong in the daemon, and whose fault it is.

DaemonError
├── InvalidConfig          a setting is wrong: a person must change it; retrying is useless (exit code 78)
├── AlreadyRuns        another elasticd has this state directory (exit code 75)
├── EtcdUnsound        this etcd version loses data: another one is needed (exit code 78)
├── CannotStart        something of the machine is in the way: a port, a binary, a permission (exit code 69)
└── Refused            a request that cannot be done as asked; `status` is the HTTP status that says why
"""

from __future__ import annotations


class DaemonError(Exception):
    code = 70


class InvalidConfig(DaemonError):
    code = 78


class AlreadyRuns(DaemonError):
    code = 75


class EtcdUnsound(DaemonError):
    code = 78


class CannotStart(DaemonError):
    code = 69


class Refused(DaemonError):
    """A request that cannot be done as asked."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
