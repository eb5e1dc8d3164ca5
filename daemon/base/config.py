"""Settings from flag > environment > file > default, validated; and their documentation."""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import ipaddress
import math
import os
import re
import tomllib
import typing
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from elastic.contract.job.field_words import explained
from elastic.contract.job.spec import InvalidSpec, refuse_unknown
from elastic.contract.keys import check_name

from . import entry_points, masking
from .dotted import Raw, leaves, put, value_of
from .errors import InvalidConfig
from .settings import NotifySettings, Settings

ENVIRONMENT = "ELASTICD_"
"""Prefix of the environment variables: ELASTICD_NODE, ELASTICD_ETCD_ENDPOINTS, ELASTICD_TIMEOUTS_LEASE_TTL_S, …"""

MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket that Linux accepts, in bytes."""

FEWEST_PORTS = 8
"""Smallest range of `ports`: a recovery opens a store while the one before still has its port."""

MAKE_TOKEN = "(umask 077; head -c 24 /dev/urandom | base64 > FILE)"
"""A command that makes a file for `page.token_file`."""

EVENTS = NotifySettings().on
"""All that can be notified: by default, everything is."""


class SettingSource(enum.StrEnum):
    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Loaded:
    settings: Settings
    sources: Mapping[str, SettingSource]
    """Setting, as 'timeouts.beat_s' -> source of its value."""


def load(path: Path | None, environment: Mapping[str, str], flags: Mapping[str, str]) -> Loaded:
    """Read and validate all settings. `flags`: 'etcd.endpoints' -> text. Raises InvalidConfig naming the setting."""
    raw = _read(path) if path else {}
    sources = {name: SettingSource.FILE for name, _ in leaves(raw)}
    try:
        refuse_unknown(Settings, raw)
        for name, text in _from_environment(environment):
            put(raw, name, _value(name, text))
            sources[name] = SettingSource.ENVIRONMENT
        for name, text in flags.items():
            sources[name] = SettingSource.FLAG
            if name not in HINTS:
                probe: Raw = {}
                put(probe, ".".join(name.split(".")[:3]), text)  # no setting is nested deeper
                refuse_unknown(Settings, probe)
                raise ValueError(f"{name} = {text!r}: no such field: {name.rpartition('.')[0]} is no table")
            put(raw, name, _value(name, text))
        settings = msgspec.convert(raw, Settings)
        check(settings)
    except msgspec.ValidationError as error:
        raise InvalidConfig(_with_source(explained(error, Settings, raw), sources, path)) from None
    except (InvalidSpec, ValueError) as error:
        raise InvalidConfig(_with_source(str(error), sources, path)) from None
    return Loaded(settings, {name: sources.get(name, SettingSource.DEFAULT) for name in HINTS})


def _with_source(message: str, sources: Mapping[str, SettingSource], path: Path | None) -> str:
    """The message, prefixed with the sources of the settings that it names."""
    named = [name for name in sources if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", message)]
    places = (str(path) if sources[name] is SettingSource.FILE else sources[name].value for name in named)
    return ": ".join([*dict.fromkeys(places), message])


def check(settings: Settings) -> None:
    """Raise ValueError for values that are well-formed but cannot work."""
    check_name("cluster", settings.cluster)
    if settings.node:
        check_name("node", settings.node)
    port_range(settings.ports)
    settings.timeouts.check()
    for name in settings.timeouts.__struct_fields__:
        if not math.isfinite(value := getattr(settings.timeouts, name)):
            raise ValueError(f"timeouts.{name} = {value}: a finite number of seconds")  # agents get it as JSON
    etcd = settings.etcd
    for endpoint in etcd.endpoints:
        if not endpoint.startswith("unix:/"):
            host_port("etcd.endpoints", endpoint)
    listens = {"etcd.embedded_listen": etcd.embedded_listen, "http.listen": settings.http.listen,
               "page.listen": settings.page.listen}  # fmt: skip
    for name, listen in listens.items():
        host = host_port(name, listen, zero_ok=name != "etcd.embedded_listen")[0] if listen else "localhost"
        if name == "page.listen" and not settings.page.token_file and not is_loopback(host):
            raise ValueError(
                f"page.listen = {settings.page.listen!r}: other machines reach this address, so page.token_file is "
                f"needed ({MAKE_TOKEN}); or listen on 127.0.0.1, and read the page through ssh -L"
            )
    for a, b in (("user", "password_file"), ("cert_file", "key_file")):
        if bool(getattr(etcd, a)) != bool(getattr(etcd, b)):
            raise ValueError(f"etcd.{a} and etcd.{b}: give both or neither")
    for name in ("password_file", "ca_file", "cert_file", "key_file"):
        if (file := getattr(etcd, name)) and not os.access(file, os.R_OK):
            raise ValueError(f"etcd.{name} = {file!r}: cannot be read")
    _check_notify(settings.notify)
    for name in () if settings.preemption == "none" else (settings.preemption,):
        entry_points.find("preemption", name)
    for name in settings.health_checks:
        entry_points.find("health_checks", name)
    check_socket(f"socket = {settings.socket!r}", settings.socket, ValueError)


def check_socket(named: str, path: str, error: type[Exception]) -> None:
    """Raises `error` for a path that is too long."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise error(f"{named}: longer than the {MAX_SOCKET_PATH} bytes a Unix socket may have")


def _check_notify(notify: NotifySettings) -> None:
    if notify.webhook:
        _check_webhook(notify.webhook)
    if notify.command:
        program = notify.command[0]
        named = f"notify.command = {program!r}"
        if any("\0" in part for part in notify.command):
            raise ValueError(f"{named}: a program and its arguments cannot contain the character NUL")
        if not os.path.isabs(program):
            raise ValueError(f"{named}: write the program's absolute path, as in ['/usr/local/bin/notify', 'argument']")
        if not os.path.isfile(program):
            raise ValueError(f"{named}: there is no such file on this machine")
        if not os.access(program, os.X_OK):
            raise ValueError(f"{named}: cannot be executed: chmod +x {program}")
    for event in notify.on:
        if event not in EVENTS:
            raise ValueError(f"notify.on = {event!r}: there is no such event; choose from {', '.join(EVENTS)}")
    if (notify.webhook or notify.command) and not notify.on:
        raise ValueError("notify.on = []: name at least one event, or leave out notify.webhook and notify.command")


def _check_webhook(url: str) -> None:
    named = f"notify.webhook = {masking.masked_url(url)!r}"
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{named}: {error}; write the whole URL, as in 'https://chat.example.org/hooks/…'") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{named}: write the whole URL, as in 'https://chat.example.org/hooks/…'")
    if parts.username is not None:
        raise ValueError(f"{named}: a user and password in the URL are not supported; send by notify.command instead")
    if not re.fullmatch(r"[!-~]+", url):
        raise ValueError(f"{named}: ASCII without blanks only; write other characters as %XX")


def host_port(field: str, text: str, zero_ok: bool = False) -> tuple[str, int]:
    """'10.0.0.1:2379' or '[::1]:2379' -> (host, port). Raises ValueError naming `field`."""
    match = re.fullmatch("([^/]+):([0-9]{1,5})", text)
    if not match or not (0 if zero_ok else 1) <= int(match[2]) <= 65535:
        raise ValueError(f"{field} = {text!r}: write host:port, as in '10.0.0.1:2379'")
    return match[1].strip("[]"), int(match[2])


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address as written, denotes this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def port_range(text: str) -> tuple[int, int]:
    """'29400-29500' -> (29400, 29500); '' -> (0, 0), any port. Raises ValueError."""
    if not text:
        return 0, 0
    if not (match := re.fullmatch("([0-9]+)-([0-9]+)", text)):
        raise ValueError(f"ports = {text!r}: write first-last, as in '29400-29500'")
    low, high = int(match[1]), int(match[2])
    if not (1 <= low <= high <= 65535 and high - low + 1 >= FEWEST_PORTS):
        raise ValueError(
            f"ports = {text!r}: from 1 to 65535, the smaller first, and at least {FEWEST_PORTS} of them, as each job "
            "takes up to three"
        )
    return low, high


def _read(path: Path) -> Raw:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidConfig(f"{path}: is not TOML: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    by_variable = {ENVIRONMENT + name.replace(".", "_").upper(): name for name in HINTS}
    for variable, text in environment.items():
        if variable in by_variable:
            yield by_variable[variable], text
        elif variable.startswith(ENVIRONMENT) and variable != f"{ENVIRONMENT}CONFIG":
            name = variable.removeprefix(ENVIRONMENT).lower()
            try:
                refuse_unknown(Settings, {name: text})
            except InvalidSpec as error:
                raise InvalidSpec(f"environment variable {variable}: {error}") from None


def _value(name: str, text: str) -> Any:
    """Value of a flag or an environment variable: lists are comma-separated."""
    hint = HINTS[name]
    if hint is str:
        return text
    if typing.get_origin(hint) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    return value_of(text)


def _is_table(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _hints(table: type[msgspec.Struct], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(table).items():
        if _is_table(hint):
            yield from _hints(hint, f"{path}{name}.")
        else:
            yield f"{path}{name}", hint


HINTS: Mapping[str, Any] = dict(_hints(Settings))
"""Every setting, as 'timeouts.beat_s' -> its type."""


@functools.cache
def explain(table: type[msgspec.Struct] = Settings, path: str = "") -> Mapping[str, str]:
    """Setting -> its documentation, read from the docstrings of the fields."""
    body = ast.parse(inspect.getsource(table)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs, hints = dict[str, str](), typing.get_type_hints(table)
    for field, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        name = field.target.id
        if _is_table(hints[name]):
            docs |= explain(hints[name], f"{path}{name}.")
        else:
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            docs[f"{path}{name}"] = inspect.cleandoc(str(said)).replace("\n", " ")
    return docs
