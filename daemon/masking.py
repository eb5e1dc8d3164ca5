"""Secrets in a job's description, hidden in what is shown of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "********"

_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|COOKIE|AUTH|PRIVATE|SIGNATURE|DSN|WEBHOOK", re.IGNORECASE)
"""Names of environment variables whose values are hidden. Rather one too many than one too few."""
_OPTION = re.compile(
    r"--?(?:[a-z0-9]+[-_])*(?:token|key|apikey|secret|password|passwd|pass|credentials?|cookie)", re.IGNORECASE
)
"""Options of a script whose values are hidden: whole words only, since --tokenizer and --keep are no secrets."""
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
    return masked_args(value) if name == "notify.command" else value


def masked_env(env: Mapping[str, str]) -> dict[str, str]:
    return {k: MASK if v and _NAME.search(k) else masked_text(v) for k, v in env.items()}


def masked_args(args: Sequence[str]) -> list[str]:
    """`--token=X` and `--token X` without X."""
    shown, hide = [], False
    for arg in args:
        name, equals, value = arg.partition("=")
        secret = bool(_OPTION.fullmatch(name))
        if hide and not arg.startswith("-"):
            shown.append(MASK)
        elif secret and equals and value:
            shown.append(f"{name}={MASK}")
        else:
            shown.append(masked_text(arg))
        hide = secret and not equals
    return shown


def masked(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A job's description, as JSON, without its secrets."""
    shown = {name: masked_text(value) if isinstance(value, str) else value for name, value in spec.items()}
    shown["env"], shown["args"] = masked_env(spec.get("env", {})), masked_args(spec.get("args", ()))
    if isinstance(checkpoint := spec.get("checkpoint"), Mapping):
        shown["checkpoint"] = {k: masked_text(v) if isinstance(v, str) else v for k, v in checkpoint.items()}
    return shown


def mask_in(spec: Mapping[str, Any]) -> str:
    """The field of a description that holds MASK in place of a value, as after a copy from a status; '' if none."""
    env, args = spec.get("env"), spec.get("args")
    if isinstance(env, Mapping):
        for name, value in env.items():
            if isinstance(value, str) and MASK in value:
                return f"env.{name}"
    return "args" if isinstance(args, list) and any(isinstance(a, str) and MASK in a for a in args) else ""
