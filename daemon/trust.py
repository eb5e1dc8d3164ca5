"""Whether the jobs in etcd may be run: elasticd as root runs them as root, whichever user wrote them."""

from __future__ import annotations

import os
import stat

from .errors import InvalidConfig
from .settings import EtcdSettings

CURE = (
    "give etcd.user and etcd.password_file, or etcd.ca_file with etcd.cert_file and etcd.key_file; or set "
    "etcd.insecure = true where every user who reaches etcd may be root on every node"
)


def check(etcd: EtcdSettings, euid: int) -> None:
    """Refuse settings with which root would run jobs from anyone, and secrets that other users may read.

    Raises InvalidConfig.
    """
    for name in ("password_file", "key_file"):
        if file := getattr(etcd, name):
            _check_secret(f"etcd.{name}", file, euid)
    remote = [e for e in etcd.endpoints if not e.startswith("unix:")]
    for endpoint in set(etcd.endpoints) - set(remote):
        _check_socket(endpoint, euid)
    if euid == 0 and remote and not (etcd.user or etcd.cert_file or etcd.insecure):
        raise InvalidConfig(
            f"etcd.endpoints = {', '.join(remote)}: elasticd runs as root what stands in etcd, and an etcd without "
            f"password or client certificates takes it from anyone: {CURE}"
        )


def refusal(endpoint: str) -> str:
    """Error message for an etcd that answers without credentials."""
    return (
        f"etcd at {endpoint} answers without the password or certificate that is set here, so it takes writes from "
        "anyone, and elasticd runs as root what stands in it: turn on etcd's authentication or --client-cert-auth, or "
        "set etcd.insecure = true where every user who reaches etcd may be root on every node"
    )


def _check_secret(setting: str, file: str, euid: int) -> None:
    found = os.stat(file)
    if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        mode = f"{found.st_mode & 0o7777:04o}"
        why = f"other users may read or change it (mode {mode}): chmod 600 {file}"
        raise InvalidConfig(f"{setting} = {file!r}: {why}")  # fmt: skip
    if found.st_uid not in (0, euid):
        raise InvalidConfig(f"{setting} = {file!r}: belongs to uid {found.st_uid}: chown it to uid {euid}")


def _check_socket(endpoint: str, euid: int) -> None:
    folder = os.path.dirname(endpoint.removeprefix("unix:"))
    try:
        found = os.stat(folder)
    except OSError as error:
        raise InvalidConfig(f"etcd.endpoints = {endpoint!r}: {folder}: {error.strerror}") from None
    if found.st_uid not in (0, euid) or found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise InvalidConfig(f"etcd.endpoints = {endpoint!r}: other users may open {folder}: chmod 700 it")
