"""JSON log lines on stderr: one event name and its key-values each."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import FilteringBoundLogger

Log = FilteringBoundLogger


def start(level: str, node: str) -> Log:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    log: Log = structlog.get_logger().bind(node=node)
    return log
