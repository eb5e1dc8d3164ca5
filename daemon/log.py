"""JSON log lines on stderr: one event name and its key-values each."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger

from elastic.core.lines import LogFile

Log = FilteringBoundLogger


def start(level: str, node: str) -> Log:
    output = LogFile(lambda raw: os.write(sys.stderr.fileno(), raw))
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, output)),
    )
    log: Log = structlog.get_logger().bind(node=node)
    return log
