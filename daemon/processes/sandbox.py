"""The unit properties of an agent, and of the embedded etcd: its user, its limits, its isolation. Pure.

See systemd.exec(5) and systemd.resource-control(5). The limits hold for the agent and all its workers on this node
together. Without systemd there are none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from elastic.contract.job.spec import JobSpec
from elasticd.access.authority import Account

_IN_TMP = re.compile(r"(?:^|[=:,])/(?:var/)?tmp(?:/|$)")
"""A text that names a file in a folder for temporary files."""

INSTALLED = (sys.executable, __file__)
"""The interpreter of agents whose job names none, and the package that they import."""


def properties(spec: JobSpec, user: Account | None) -> tuple[str, ...]:
    """`user`: the account that the agent runs as; None: elasticd's own."""
    limits = spec.limits
    lines = [
        "UMask=0027",
        "NoNewPrivileges=yes",
        f"PrivateTmp={'no' if uses_tmp(spec) else 'yes'}",
        f"TasksMax={limits.tasks}",
    ]
    if limits.memory:
        lines.append(f"MemoryMax={limits.memory}")
    if limits.cpu:
        lines.append(f"CPUQuota={limits.cpu * 100:.0f}%")
    if user is not None:
        lines += [f"User={user.user}", f"Group={user.gid}"]
    return tuple(lines)


def of_etcd(user: Account | None, folder: Path, binary: str) -> tuple[str, ...]:
    """Of the embedded etcd's unit, which writes to `folder` alone. `user`: None: there is none of its own."""
    in_tmp = any(_IN_TMP.search(text) for text in (str(folder), binary, *INSTALLED))
    lines = [
        "TasksMax=infinity", "UMask=0077", "NoNewPrivileges=yes", "CapabilityBoundingSet=", "ProtectSystem=strict",
        f"ReadWritePaths={folder}", "ProtectHome=read-only", f"PrivateTmp={'no' if in_tmp else 'yes'}",
        "PrivateDevices=yes", "ProtectKernelTunables=yes", "ProtectKernelModules=yes", "ProtectKernelLogs=yes",
        "ProtectControlGroups=yes", "ProtectClock=yes", "ProtectHostname=yes", "RestrictNamespaces=yes",
        "RestrictRealtime=yes", "RestrictSUIDSGID=yes", "LockPersonality=yes", "MemoryDenyWriteExecute=yes",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK", "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service", "SystemCallErrorNumber=EPERM",
    ]  # fmt: skip
    return (*lines, f"User={user.user}", f"Group={user.gid}") if user is not None else tuple(lines)


def uses_tmp(spec: JobSpec) -> bool:
    """Whether the job needs files in /tmp or /var/tmp, so that it is to see the machine's, not folders of its own: it
    names some, or elasticd is installed there."""
    return any(_IN_TMP.search(text) for text in (*_texts(spec), *INSTALLED))


def _texts(spec: JobSpec) -> Iterator[str]:
    yield from (spec.script, spec.workdir, spec.python, spec.env_file, spec.checkpoint.dir, spec.checkpoint.remote)
    yield from spec.args
    yield from spec.env.values()
