"""Checks of this node for `elasticctl doctor` and the daemon's start: what would make training fail or crawl later.

Each check measures something and hands it to a pure function that judges it; a Finding says what is wrong and how to
fix it. Nothing is changed on the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from elastic.contract.records.reasons import Code, Reason, reason
from elasticd.base import ownership
from elasticd.base.answers import Finding

from . import host

OK, WARNING, ERROR = "ok", "warning", "error"

LEAST_STATE_MB, LEAST_SHM_MB = 1000.0, 512.0
"""Free space below which a warning is given: logs and state; shared memory, which DataLoader workers pass batches in
(a container has 64 MB by default)."""
LEAST_FILES = 4096
LEAST_MEMLOCK_BYTES = 64 << 20
SLOW_SHARE = 0.3
"""An answer of etcd that takes this share of `timeouts.etcd_call_s` is slow."""
CLOCK_S = 1.0
"""Difference between two nodes' clocks beyond which times in logs and incidents mislead."""
ASKS = 5
"""Requests to etcd whose median is taken."""


# ── judgements: pure ────────────────────────────────────────────────────────────────────────────────────────


def judge_name(hostname: str, resolved: Sequence[str], alone: bool) -> Finding:
    """`resolved`: addresses that this host's own name resolves to. `alone`: all nodes are on this machine."""
    if not resolved:
        text = f"this host's own name {hostname!r} does not resolve"
        return Finding("name", WARNING, text, f"add it to /etc/hosts: ADDRESS {hostname}")
    loopback = [a for a in resolved if a.startswith("127.") or a == "::1"]
    if loopback and not alone:
        text = (
            f"this host's own name {hostname!r} resolves to {', '.join(loopback)}, and other nodes cannot reach that; "
            "elasticd passes `interface` to gloo and NCCL, other programs in a job may take this address"
        )
        return Finding("name", WARNING, text, f"in /etc/hosts, give {hostname} the address that the other nodes use")
    return Finding("name", OK, f"{hostname} is {', '.join(resolved)}")


def judge_free(check: str, path: str, free_mb: float, least_mb: float, what_for: str, fix: str) -> Finding:
    text = f"{path} has {free_mb:.0f} MB free"
    if free_mb >= least_mb:
        return Finding(check=check, text=text)
    return Finding(check=check, level=WARNING, text=f"{text}; {what_for}", fix=fix)


def judge_limit(name: str, have: int, least: int, fix: str) -> Finding:
    unlimited = have == resource.RLIM_INFINITY
    shown = "unlimited" if unlimited else str(have)
    if unlimited or have >= least:
        return Finding(check="limits", text=f"{name}: {shown}")
    return Finding(check="limits", level=WARNING, text=f"{name}: {shown}, at least {least} are advised", fix=fix)


def judge_mode(path: str, mode: int, uid: int, me: int) -> Finding:
    """Of a file with a secret. `uid`: its owner; `me`: this daemon's user."""
    if uid not in (0, me):
        text = f"{path} belongs to uid {uid}, which can read and replace it"
        return Finding("files", ERROR, text, f"chown {me} {path}")
    text = f"{path} has mode {mode & 0o777:04o}"
    if mode & 0o077:
        return Finding("files", ERROR, f"{text}: other users may read it", f"chmod 600 {path}")
    return Finding("files", OK, text)


def judge_clock(state: int | None) -> Finding:
    """`state`: of adjtimex(2); 5 (TIME_ERROR): no NTP daemon keeps the clock right. None: not known."""
    if state is None:
        return Finding(check="clock", text="the kernel does not say whether the clock is synchronised")
    if state == 5:
        text, fix = "this machine's clock is not synchronised by NTP", "timedatectl set-ntp true, or install chrony"
        return Finding("clock", WARNING, text, fix)
    return Finding(check="clock", text="synchronised")


def judge_members(members: Sequence[tuple[str, bool, str, str]]) -> Iterator[Finding]:
    """`members`: (endpoint, ok, version, error)."""
    for endpoint, ok, _, error in members:
        if not ok:
            yield Finding(check="etcd", level=ERROR, text=f"etcd member {endpoint} does not work: {error}",
                          fix="see that member's log; etcd stops when half of its members are down")  # fmt: skip
    versions = sorted({version for _, ok, version, _ in members if ok and version})
    if len(versions) > 1:
        yield Finding(check="etcd", level=WARNING, text=f"etcd members have versions {', '.join(versions)}",
                      fix="upgrade all members to the newest of them")  # fmt: skip
    if len(members) == 2:
        yield Finding(check="etcd", level=WARNING, text="2 etcd members: the loss of either one stops etcd",
                      fix="run 3 or 5 members, or list all endpoints of the cluster")  # fmt: skip
    if good := [endpoint for endpoint, ok, _, _ in members if ok]:
        version = f" {versions[0]}" if len(versions) == 1 else ""
        yield Finding(check="etcd", text=f"{len(good)} of {len(members)} members work{version}: {', '.join(good)}")


def judge_latency(what: str, took_s: float, call_s: float, fix: str, node: str = "") -> Finding:
    text = f"{what} takes {took_s * 1000:.0f} ms"
    if took_s < SLOW_SHARE * call_s:
        return Finding(check="etcd", text=text, node=node)
    level = ERROR if took_s >= call_s else WARNING
    text += f"; timeouts.etcd_call_s is {call_s:g} s"
    return Finding(check="etcd", level=level, text=text, fix=fix, node=node)


STRICT = frozenset({"torch", "nccl", "elasticd"})
"""Versions that must be equal on all nodes; the others should be."""


def compare(facts: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """`facts`: node -> what -> version. One finding for each that differs between nodes, else one for all."""
    for what in sorted({name for versions in facts.values() for name in versions}):
        by_version: dict[str, list[str]] = {}
        for node, versions in sorted(facts.items()):
            by_version.setdefault(versions.get(what, "none"), []).append(node)
        if len(by_version) > 1:
            where = "; ".join(f"{version} on {', '.join(nodes)}" for version, nodes in sorted(by_version.items()))
            level = ERROR if what in STRICT else WARNING
            yield Finding("versions", level, f"{what} differs: {where}", f"install the same {what} on all nodes")
    if len(facts) > 1:
        yield Finding(check="versions", text=f"compared on {len(facts)} nodes: {', '.join(sorted(facts))}")


def judge_clocks(offsets: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """`offsets`: node -> (its clock minus ours in seconds, by how much that may be wrong)."""
    for node, (offset_s, error_s) in sorted(offsets.items()):
        if abs(offset_s) - error_s > CLOCK_S:
            way = "ahead of" if offset_s > 0 else "behind"
            yield Finding(check="clock", level=WARNING, node=node,
                          text=f"its clock is {abs(offset_s):.1f} s {way} this node's",
                          fix="synchronise both by NTP: times in logs and incidents do not fit together")  # fmt: skip


def worst(findings: Iterable[Finding]) -> str:
    return max((finding.level for finding in findings), key=(OK, WARNING, ERROR).index, default=OK)


# ── measurements ────────────────────────────────────────────────────────────────────────────────────────────


def installed(*packages: str) -> str:
    """Version of the first of these packages that is there; '': none is."""
    import importlib.metadata  # with the parsers of e-mail and zip, a megabyte: imported when the node is examined

    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def versions() -> dict[str, str]:
    """What must be alike on all nodes, without importing torch."""
    facts = {"python": platform.python_version(), "kernel": platform.release()}
    for what, packages in {"torch": ("torch",), "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12")}.items():
        if version := installed(*packages):
            facts[what] = version
    with contextlib.suppress(OSError):  # no NVIDIA driver
        facts["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    return facts


def free_mb(path: str) -> float:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize / 1e6


def clock_state() -> int | None:
    """What adjtimex(2) says of the clock; None if it cannot be asked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = int(libc.adjtimex(ctypes.create_string_buffer(256)))  # struct timex, modes = 0: nothing is set
    except (OSError, AttributeError):
        return None
    return state if state >= 0 else None


def resolved(hostname: str) -> list[str]:
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def median_s(ask: Callable[[], object], times: int = ASKS) -> float:
    took = []
    for _ in range(times):
        began_s = time.monotonic()
        ask()
        took.append(time.monotonic() - began_s)
    return sorted(took)[len(took) // 2]


def local(
    *, address: str, interface: str, state_dir: str, secrets: Sequence[str], gpus: bool, alone: bool
) -> list[Finding]:
    """The checks of this machine that need neither etcd nor another node. `secrets`: paths of files with secrets."""
    hostname = socket.gethostname()
    rows = [judge_name(hostname, resolved(hostname), alone), _address(address), *_interface(interface)]
    rows += [f for path in secrets if path for f in _mode(path)]
    rows += _free(state_dir)
    files, memlock = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rows.append(judge_limit("open files of elasticd", files, LEAST_FILES, "LimitNOFILE=65536 in the unit; ulimit -n"))
    if gpus:
        rows.append(judge_limit("locked memory of elasticd, in bytes", memlock, LEAST_MEMLOCK_BYTES,
                                 "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited"))  # fmt: skip
    rows.append(judge_clock(clock_state()))
    if host.as_system_service() and (why := ownership.closed_to(sys.executable)):  # agents run as their jobs' users
        rows.append(Finding(check="python", level=ERROR, text=why, fix=ownership.OPEN_PYTHON))
    return rows


def blocking(interface: str, state_dir: str) -> Reason | None:
    """Why no job can run on this machine, with the fix; None: some can. Checked before the node takes work."""
    for found in (*_interface(interface), *_free(state_dir)):
        if found.level == ERROR:
            return reason(Code.HEALTH_CHECK, f"{found.text}: {found.fix}, then restart elasticd", check=found.check)
    return None


def _address(address: str) -> Finding:
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(target)
    except OSError as error:
        text = f"no server can listen on address {address}: {error.strerror or error}"
        fix = "set `address` to one of this machine, or leave it empty"
        return Finding(check="address", level=ERROR, text=text, fix=fix)
    return Finding(check="address", text=f"other nodes reach this one at {address}")


def _interface(interface: str) -> Iterator[Finding]:
    import psutil

    if not interface:
        return
    status = psutil.net_if_stats().get(interface)
    if status is None or not status.isup:
        what = "does not exist" if status is None else "is down"
        yield Finding(check="interface", level=ERROR, text=f"interface {interface} {what}",
                      fix=f"set `interface` to one of: {', '.join(sorted(psutil.net_if_stats()))}")  # fmt: skip
        return
    speed = f", {status.speed} Mbit/s" if status.speed else ""
    yield Finding(check="interface", text=f"{interface} is up, MTU {status.mtu}{speed}")


def _mode(path: str) -> Iterator[Finding]:
    try:
        entry = os.stat(path)
    except OSError as error:
        yield Finding(check="files", level=ERROR, text=f"{path}: {error.strerror}", fix="see [etcd] in the settings")
        return
    yield judge_mode(path, stat.S_IMODE(entry.st_mode), entry.st_uid, os.geteuid())


def _free(state_dir: str) -> Iterator[Finding]:
    wants = (
        ("disk", state_dir, LEAST_STATE_MB, "logs and agents' state go there", "free some, or set `state_dir`"),
        ("shm", "/dev/shm", LEAST_SHM_MB, "DataLoader workers pass their batches in it",
         "enlarge it: mount -o remount,size=8G /dev/shm; docker run --shm-size=8g"),
    )  # fmt: skip
    for check, path, least_mb, what_for, fix in wants:
        try:
            yield judge_free(check, path, free_mb(path), least_mb, what_for, fix)
        except OSError as error:
            yield Finding(check=check, level=ERROR, text=f"{path}: {error.strerror}", fix=fix)
