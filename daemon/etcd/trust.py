"""Whether the jobs in etcd may be run: elasticd as root runs them as root, whichever user wrote them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from elasticd.base.config import host_port, is_loopback
from elasticd.base.errors import InvalidConfig
from elasticd.base.settings import EtcdSettings

FIX = (
    "give etcd.user and etcd.password_file, or etcd.ca_file with etcd.cert_file and etcd.key_file; or set "
    "etcd.insecure = true where every user who reaches etcd may be root on every node"
)


def check(etcd: EtcdSettings, euid: int) -> None:
    """Refuse an etcd in plain text elsewhere, settings with which root would run jobs from anyone, and secrets that
    other users may read. Raises InvalidConfig."""
    for name in ("password_file", "key_file"):
        if file := getattr(etcd, name):
            check_secret(f"etcd.{name}", file, euid, etcd.allow_readable_secrets)
    remote = [e for e in etcd.endpoints if not e.startswith("unix:")]
    for endpoint in set(etcd.endpoints) - set(remote):
        _check_socket(endpoint, euid)
    if (plain := in_plain_text(etcd)) and not etcd.insecure:
        sent = "the password and " if etcd.user else ""
        raise InvalidConfig(
            f"etcd.endpoints = {', '.join(plain)}: without etcd.ca_file {sent}all records go over the network in plain "
            "text: set etcd.ca_file to the authority (PEM) of etcd's certificates, or etcd.insecure = true where the "
            "network between the nodes is trusted"
        )
    if euid == 0 and remote and not (etcd.user or etcd.cert_file or etcd.insecure):
        raise InvalidConfig(
            f"etcd.endpoints = {', '.join(remote)}: elasticd runs as root what stands in etcd, and an etcd without "
            f"password or client certificates takes it from anyone: {FIX}"
        )


def in_plain_text(etcd: EtcdSettings) -> tuple[str, ...]:
    """Endpoints on other machines that are reached without TLS."""
    if etcd.ca_file:
        return ()
    return tuple(
        e for e in etcd.endpoints if not e.startswith("unix:") and not is_loopback(host_port("etcd.endpoints", e)[0])
    )


def check_secret(setting: str, file: str, euid: int, readable: bool = False) -> None:
    """Refuse a file with a secret that other users may read or change. Raises InvalidConfig.

    `readable`: other users may read it, as in a container, where a mounted secret has mode 0644 and there is no other
    user. Credentials of systemd are private by themselves, whatever their mode says (an ACL shows as a group's rights).
    """
    entry = os.stat(file)
    if (folder := os.environ.get("CREDENTIALS_DIRECTORY")) and Path(file).parent == Path(folder):
        return
    wrong = stat.S_IWGRP | stat.S_IWOTH if readable else stat.S_IRWXO | stat.S_IWGRP
    if entry.st_mode & wrong:
        done = "change it" if readable else "read or change it"
        raise InvalidConfig(
            f"{setting} = {file!r}: other users may {done} (mode {entry.st_mode & 0o7777:04o}): chmod 600 {file}. If "
            "it is mounted (a Kubernetes secret), set defaultMode: 0400 there, or etcd.allow_readable_secrets = true"
        )
    if entry.st_uid not in (0, euid):
        raise InvalidConfig(f"{setting} = {file!r}: belongs to uid {entry.st_uid}: chown it to uid {euid}")


def _check_socket(endpoint: str, euid: int) -> None:
    folder = os.path.dirname(endpoint.removeprefix("unix:"))
    try:
        entry = os.stat(folder)
    except OSError as error:
        raise InvalidConfig(f"etcd.endpoints = {endpoint!r}: {folder}: {error.strerror}") from None
    if entry.st_uid not in (0, euid) or entry.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise InvalidConfig(f"etcd.endpoints = {endpoint!r}: other users may open {folder}: chmod 700 it")
