"""Why a worker ended: torch's error file if it wrote one, else its log and exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from elastic.contract.records.job_records import WorkerError
from elastic.contract.records.reasons import Text, reason
from elastic.contract.texts import cut_middle, one_line
from elastic.recovery.facts.restart_budget import FATAL
from elastic.util.files import read_file

from .pool import Exited

MESSAGE_CHARS = 500
TRACEBACK_CHARS = 8000
TAIL_BYTES = 4000
LAST_LINES, LINE_CHARS, LAST_BYTES = 12, 300, 16_000
"""Of the log, kept beside a traceback from the error file."""
NO_STATE = "NoStateError"
"""See `worker.state.state_source`."""
_LEFT_OUT = "\n… (a part is left out here) …\n"
ERROR_FILE_BYTES = 1 << 20
"""A longer error file is truncated, and so invalid JSON: the log is used instead."""


def read_error(
    ended: Exited, *, node: str, slot: int, rank: int, step: int | None
) -> tuple[Text, WorkerError | None, str]:
    """(cause, error, fingerprint). The error is None when nothing but the exit status is known.

    The fingerprint is the exception's type and the line that raised it: equal for the same bug, whatever the values.
    """
    message, trace = _from_error_file(ended.error_file)
    raised, lines = _exception(message), last_lines(ended.log_file) if message else ()
    cause: Text = one_line(message)
    if not message:
        how = ended.cause
        if not (ended.misuse or ended.terminated or ended.code not in (0, None)):
            return how, None, ended.signal or how.code
        trace = _tail(ended.log_file)
        last = next((line.strip() for line in reversed(trace.splitlines()) if line.strip()), "")
        cause = ended.misuse or reason(how.code, *how.because, one_line(last), **how.values)
        message = str(cause)
    error = WorkerError(
        node=node,
        slot=slot,
        rank=rank,
        message=cut_middle(message, MESSAGE_CHARS),
        traceback=_shortened(trace, message),
        exit_code=ended.code,
        signal=ended.signal or ("SIGTERM" if ended.terminated else None),
        step=step,
        last_lines=lines,
        no_state=raised == NO_STATE,
        exception=raised,
        misuse=bool(ended.misuse),
    )
    return cause, error, fingerprint(message, trace)


def _shortened(trace: str, message: str) -> str:
    """`trace`, which ends with the exception's message, in at most TRACEBACK_CHARS: of a long message its ends, then of
    the whole its ends, so that the script's own frame, the innermost one and the end of the message stay."""
    if len(trace) > TRACEBACK_CHARS and len(message) > MESSAGE_CHARS:
        trace = trace.replace(message, cut_middle(message, TRACEBACK_CHARS // 4, _LEFT_OUT))
    return cut_middle(trace, TRACEBACK_CHARS, _LEFT_OUT)


def fingerprint(message: str, trace: str) -> str:
    places = re.findall(r'File "([^"]+)", line (\d+)', trace)
    kind = _exception(message)
    return f"{kind} at {places[-1][0]}:{places[-1][1]}" if places else kind


def _exception(message: str) -> str:
    """The exception's type, as torch's error file and a traceback name it before the message."""
    return message.split(":", 1)[0]


def _from_error_file(path: str) -> tuple[str, str]:
    """(message, traceback) as torch's `record` writes them; empty if the file holds anything else."""
    try:
        raw: Any = json.loads(read_file(Path(path), ERROR_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return "", ""
    said = raw.get("message") if isinstance(raw, dict) else None
    if not isinstance(said, dict):
        return _text(said), ""
    extra = said.get("extraInfo")
    return _text(said.get("message")), _text(extra.get("py_callstack")) if isinstance(extra, dict) else ""


def _tail(path: str, most_bytes: int = TAIL_BYTES) -> str:
    try:
        return read_file(Path(path), most_bytes, from_end=True).decode(errors="replace")
    except OSError:
        return ""


def last_lines(log_file: str) -> tuple[str, ...]:
    """The last lines of a worker's log, without the traceback that it ends with: the error has that already. Of a stack
    that faulthandler has written the beginning is kept, and half of the lines are those before it: a library says
    there why it aborts."""
    text = _tail(log_file, LAST_BYTES)
    before, fatal, stack = text.rpartition(FATAL)
    if fatal:
        said = _lines(before)[-LAST_LINES // 2 :]
        return (*said, *_lines(fatal + stack)[: LAST_LINES - len(said)])
    return tuple(_lines(text.rpartition("Traceback (most recent call last):")[0] or text)[-LAST_LINES:])


def _lines(text: str) -> list[str]:
    return [line.rstrip()[:LINE_CHARS] for line in text.replace("\0", "").splitlines() if line.strip("\0 \t\r")]


def _text(value: Any) -> str:
    """A string that records can hold: JSON may contain half of a surrogate pair."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else ""
