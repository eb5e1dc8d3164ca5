"""Log lines on stderr: one event name with key-value pairs. JSON, or text if stderr is a terminal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger

from elastic.util.capped_log import LogFile

Log = FilteringBoundLogger

VALUE_CHARS = 300
"""Characters of one value on a terminal; JSON has all of it."""

PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
"""Priorities of syslog(3)."""


def start(level: str, node: str) -> Log:
    output = LogFile(lambda raw: os.write(sys.stderr.fileno(), raw))
    render: Any = as_text if sys.stderr.isatty() else structlog.processors.JSONRenderer(default=str)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            with_priority(render) if to_journal() else render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, output)),
    )
    log: Log = structlog.get_logger().bind(node=node)
    return log


def to_journal() -> bool:
    """Whether systemd has connected stderr to its journal."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    entry = os.fstat(sys.stderr.fileno())
    return (device, inode) == (str(entry.st_dev), str(entry.st_ino))


def with_priority(render: Any) -> Any:
    """The output of `render`, prefixed with the event's priority for `journalctl --priority` (sd-daemon(3)). Each line
    of it becomes a separate journal entry."""

    def rendered(logger: Any, method: str, event: Any) -> str:
        mark = f"<{PRIORITIES.get(str(event.get('level')), 6)}>"
        return "\n".join(mark + line for line in str(render(logger, method, event)).split("\n"))

    return rendered


def as_text(logger: Any, method: str, event: Mapping[str, Any]) -> str:
    """'10:41:07 info    node.registered address=10.0.0.1 slots=4', and a traceback below it."""
    from .safe_text import block, line

    rest = dict(event)
    time, level, name = (str(rest.pop(key, "")) for key in ("timestamp", "level", "event"))
    trace = rest.pop("exception", "")
    rest.pop("node", None)
    given = ((key, value) for key, value in rest.items() if value not in ("", None))
    values = " ".join(f"{line(key)}={line(value, VALUE_CHARS)}" for key, value in given)
    head = f"{time.partition('T')[2][:8]} {level:7} {line(name)} {values}".rstrip()
    return f"{head}\n{block(trace)}" if trace else head
