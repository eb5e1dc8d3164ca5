"""Why a worker ended: torch's error file if it wrote one, else how the process ended."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..core.records import WorkerError
from .pool import Exited

MESSAGE_CHARS = 500
TRACEBACK_CHARS = 8000
TAIL_BYTES = 4000


def read_error(ended: Exited, *, node: str, slot: int, rank: int, step: int | None) -> tuple[WorkerError | None, str]:
    """(error, fingerprint). None when nothing but the exit status is known.

    The fingerprint is the exception's type and the place it came from: equal for the same bug, whatever the values.
    """
    message, trace = _from_error_file(ended.error_file)
    if not message and ended.code not in (0, None):
        trace = _tail(ended.log_file)
        last = next((line.strip() for line in reversed(trace.splitlines()) if line.strip()), "")
        message = f"{ended.cause}: {last}" if last else ended.cause
    if not message:
        return None, ended.cause
    error = WorkerError(
        node=node,
        slot=slot,
        rank=rank,
        message=message[:MESSAGE_CHARS],
        traceback=trace[-TRACEBACK_CHARS:],
        exit_code=ended.code,
        signal=ended.signal,
        step=step,
    )
    return error, fingerprint(message, trace)


def fingerprint(message: str, trace: str) -> str:
    places = re.findall(r'File "([^"]+)", line (\d+)', trace)
    kind = message.split(":", 1)[0]
    return f"{kind} at {places[-1][0]}:{places[-1][1]}" if places else kind


def _from_error_file(path: str) -> tuple[str, str]:
    try:
        raw: Any = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return "", ""
    said = raw.get("message", "") if isinstance(raw, dict) else ""
    if isinstance(said, str):
        return said, ""
    extra = said.get("extraInfo", {})
    return str(said.get("message", "")), str(extra.get("py_callstack", ""))


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
