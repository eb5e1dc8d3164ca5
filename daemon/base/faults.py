"""A bug at a request of a client, or of another node's daemon, ends the request and not the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import Fault, Refused
from .log import Log


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
