"""Limits the disk space of the workers' logs, without involving the workers."""

from __future__ import annotations

import errno
from collections.abc import Iterable

import structlog

from elastic.util.log_trim import BLOCK_BYTES, trim

log = structlog.get_logger()


class Trimmer:
    """Trims logs; logs a warning the first time that this fails."""

    def __init__(self, limit_mb: float, own: str = "") -> None:
        """`own`: the agent's own log, trimmed with those of its workers."""
        self._own = own
        self._limit_bytes = max(4 * BLOCK_BYTES, int(limit_mb * 1e6))
        self._said = False

    def trim_all(self, workers: Iterable[str]) -> None:
        """The agent's own log, and the workers' logs of these paths."""
        for path in (*filter(None, [self._own]), *workers):
            self.trim(path)

    def trim(self, path: str) -> None:
        try:
            if freed := trim(path, self._limit_bytes):
                log.info("log.trimmed", path=path, freed_bytes=freed)
        except OSError as error:
            if not self._said:
                self._said = True
                hint = "its file system has no holes" if error.errno == errno.EOPNOTSUPP else "see the error"
                log.warning("log.not_trimmed", path=path, error=str(error), hint=hint)
