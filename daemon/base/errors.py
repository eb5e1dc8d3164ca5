"""Errors of the daemon.

DaemonError
├── InvalidConfig      a setting is wrong: needs an operator; retrying is useless (exit code 78)
├── AlreadyRuns        another elasticd uses this state directory (exit code 75)
├── CannotStart        the machine prevents it: a port, a binary, a permission (exit code 69)
├── PluginFailed       what a package adds to elasticd has raised (exit code 69)
├── Unsaved            `elasticd --stop` would lose steps of a job (exit code 1)
├── Fault              a bug of ours, met at a request: status 500
└── Refused            a request that cannot be carried out; `status` is the HTTP status for it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .log import Log  # imports structlog, which `lean` must import first


class DaemonError(Exception):
    code = 70


class InvalidConfig(DaemonError):
    code = 78


class AlreadyRuns(DaemonError):
    code = 75


class CannotStart(DaemonError):
    code = 69


class PluginFailed(DaemonError):
    code = 69


class Unsaved(DaemonError):
    code = 1


class Fault(DaemonError):
    """A bug of ours, met at a request; it is in the log."""


class Refused(DaemonError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def our_faults(log: Log, event: str, **fields: object) -> Iterator[None]:
    """Raises Fault in place of any exception but Refused and OSError, and logs that with its traceback as `event`."""
    try:
        yield
    except (Refused, OSError):
        raise
    except Exception as error:
        log.error(event, exc_info=True, **fields)
        raise Fault(f"elasticd failed at this request: {type(error).__name__}; its log has the traceback") from error
