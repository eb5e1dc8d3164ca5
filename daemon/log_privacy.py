"""What workers wrote to their logs, hidden in answers to users who may not read the job's logs. Pure.

What stays visible: what failed where, the error's message and its traceback. The message of a worker that left no
error file ends with the last line that it wrote.
"""

from __future__ import annotations

from typing import Any

from .masking import MASK

Json = dict[str, Any]

TRACEBACK = "Traceback (most recent call last):"


def incident(row: Json) -> Json:
    """An incident, as `views.incident` makes it."""
    shown = {**row, "last_lines": _lines(row.get("last_lines")), "error": error(row.get("error"))}
    if verdict := row.get("verdict"):
        evidence = [{**e, "line": MASK} if e["from_log"] else e for e in verdict["evidence"]]
        shown["verdict"] = {**verdict, "evidence": evidence}
    return shown


def error(found: Json | None) -> Json | None:
    """A worker's error. Without an error file its traceback is the end of the log, which may hold more than that."""
    if not found:
        return found
    text, mark = found["traceback"], TRACEBACK
    at = text.rfind(mark)
    kept = text[at:] if at >= 0 else MASK if text else ""
    return {**found, "last_lines": _lines(found.get("last_lines")), "traceback": kept}


def job(row: Json) -> Json:
    """A job, as `views.job_row` and `views.job_detail` make it."""
    shown = {**row, "error": error(row["error"])}
    if row["last_incident"]:
        shown["last_incident"] = incident(row["last_incident"])
    if "recent_incidents" in row:
        shown["recent_incidents"] = [incident(each) for each in row["recent_incidents"]]
    return shown


def _lines(lines: Any) -> list[str]:
    return [MASK] if lines else []
