"""What other users see of a job's description: names, no values of its variables and no arguments. Pure.

Which of the values are secret nothing can tell: a password may be called anything, and stand anywhere in an argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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


MASK = "********"

_IN_URL = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]+(?=@)")
"""User and password in a URL."""


def masked_text(text: str) -> str:
    return _IN_URL.sub(MASK, text)


def masked_url(url: str) -> str:
    """A URL without what may be secret in it: its scheme, host and port. A chat's webhook has its token in the path."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    host = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    return f"{scheme}{mark}{host}" + (f"/{MASK}" if len(host) < len(rest) else "")


def masked_setting(name: str, value: Any) -> Any:
    """A setting of elasticd as it is shown."""
    if name == "notify.webhook":
        return masked_url(value)
    return [*value[:1], *[MASK] * len(value[1:])] if name == "notify.command" else value


def masked(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A job's description, as JSON, for users who may not change the job."""
    shown = {name: masked_text(value) if isinstance(value, str) else value for name, value in spec.items()}
    shown["env"] = {name: MASK if value else "" for name, value in spec.get("env", {}).items()}
    shown["args"] = [MASK] if spec.get("args") else []
    if isinstance(checkpoint := spec.get("checkpoint"), Mapping):
        shown["checkpoint"] = {**checkpoint, "remote": masked_url(checkpoint.get("remote", ""))}
    return shown


def mask_in(spec: Mapping[str, Any]) -> str:
    """The field of a description that holds MASK in place of a value, as after a copy from a status; '' if none."""
    env, args = spec.get("env"), spec.get("args")
    if isinstance(env, Mapping):
        for name, value in env.items():
            if isinstance(value, str) and MASK in value:
                return f"env.{name}"
    return "args" if isinstance(args, list) and any(isinstance(a, str) and MASK in a for a in args) else ""
