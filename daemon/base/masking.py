"""What is shown of a job's description: to other users names, no values of its variables and no arguments; to those who
may change the job its arguments, too. Pure.

Which of the values are secret nothing can tell: a password may be called anything, and stand anywhere in an argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import structs

from .answers import Incident, Job, JobDetail, WorkerError

TRACEBACK = "Traceback (most recent call last):"


def incident(row: Incident) -> Incident:
    """An incident for users who may not read the job's logs."""
    evidence = [structs.replace(each, line=MASK) if each.from_log else each for each in row.verdict.evidence]
    return structs.replace(
        row, last_lines=_lines(row.last_lines), error=error(row.error),
        verdict=structs.replace(row.verdict, evidence=evidence),
    )  # fmt: skip


def error(shown: WorkerError | None) -> WorkerError | None:
    """A worker's error. Without an error file its traceback is the end of the log, which may hold more than that."""
    if shown is None:
        return None
    at = shown.traceback.rfind(TRACEBACK)
    kept = shown.traceback[at:] if at >= 0 else MASK if shown.traceback else ""
    return structs.replace(shown, last_lines=_lines(shown.last_lines), traceback=kept)


J = TypeVar("J", bound=Job)


def job(row: J) -> J:
    """A job for users who may not read its logs."""
    last = incident(row.last_incident) if row.last_incident else None
    masked = structs.replace(row, error=error(row.error), last_incident=last)
    if isinstance(masked, JobDetail):
        masked.recent_incidents = [incident(each) for each in masked.recent_incidents]
    return masked


def _lines(lines: list[str]) -> list[str]:
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
    if name == "notify.webhook":
        return masked_url(value)
    return [*value[:1], *[MASK] * len(value[1:])] if name == "notify.command" else value


def masked(spec: Mapping[str, Any], *, own: bool = False) -> dict[str, Any]:
    """A job's description, as JSON. `own`: for those who may change the job, who see its arguments in `ps` as well."""
    shown = {name: masked_text(value) if isinstance(value, str) else value for name, value in spec.items()}
    shown["env"] = {name: MASK if value else "" for name, value in spec.get("env", {}).items()}
    if not own:
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
