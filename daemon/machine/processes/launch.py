"""Start of processes that outlive this daemon: as a transient systemd unit, else in a session of their own.

An agent's unit, and that of the embedded etcd, have a user, limits and a sandbox: see systemd.exec(5) and
systemd.resource-control(5). The limits hold for the agent and all its workers on this node together.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from elastic.contract.agent_files import MARK_ENV, SYSTEMD_VARIABLES
from elastic.contract.job.spec import JobSpec
from elastic.util.files import closed_after
from elastic.util.processes import wait_until_gone
from elasticd.access.authority import Account
from elasticd.base.errors import CannotStart
from elasticd.machine import host

PROPERTIES = (
    "KillMode=control-group",  # nothing of the process tree is left behind
    "OOMPolicy=continue",  # the agent replaces a worker killed for memory
    "LimitMEMLOCK=infinity",
    "LimitNOFILE=1048576",
    "TimeoutStopSec=30s",
    "Slice=elasticd.slice",
    "Before=elasticd.service",  # when the machine shuts down, the daemon is stopped first: it drains the node
)

_NO_TEXT = re.compile("[\ud800-\udfff]")
"""Has what stands for bytes that are not UTF-8."""

HOLD = (sys.executable, "-I", "-S", str(Path(__file__).with_name("hold_lock.py")))
"""With a lock and a command after it: runs the command, which holds the lock for as long as it lives."""

PUBLIC_NAMES = frozenset({"PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH"})
PUBLIC_PREFIXES = (
    "LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "GRPC_",
    "ELASTIC_",
)  # fmt: skip
"""Variables that a unit gets: every user of the machine reads a unit's (`systemctl show`). A job's own come in its
description, which its agent reads from etcd, or from its `env_file`."""

HOLDER_S = 1.0
"""How long to look for the holder of a lock: it writes its id just after taking the lock."""
GUARD_S = 20.0
"""Time limit for the guard of an agent to start it."""
SYSTEMD_S = 10.0
"""Time limit for systemd's answer."""


class GuardedChild:
    """An agent whose parent is a guard (`guard.py`): that ends what the agent leaves, in whatever session and
    environment, also where no daemon runs any more."""

    def __init__(self, service: ServiceProcess, log: IO[bytes]) -> None:
        """Raises OSError."""
        if shutil.which(service.argv[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), service.argv[0])
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(theirs.fileno())],
                env={name: value for name, value in service.env.items() if name != MARK_ENV}, cwd=service.cwd,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        self._channel.settimeout(GUARD_S)
        self._said = self._channel.makefile("rb")
        try:
            command = [f"{MARK_ENV}={service.env[MARK_ENV]}", *service.argv]
            self._channel.sendall(b"\0".join(map(os.fsencode, command)))
            self._channel.shutdown(socket.SHUT_WR)
            self.pid = int(self._said.readline())
        except (OSError, ValueError) as error:
            self._guard.kill()
            self.reap()
            raise OSError(errno.EAGAIN, f"its parent process did not start it: {error}") from error
        self._channel.settimeout(None)  # for the thread that waits

    def wait(self) -> int | None:
        """The agent's exit code, negative for a signal; None: its guard was killed."""
        if answer := self._said.readline():
            return os.waitstatus_to_exitcode(int(answer))
        wait_until_gone(self.pid)
        return None

    def reap(self) -> None:
        """Wait until the guard has ended what the agent has left."""
        self._said.close()
        self._channel.close()
        self._guard.wait()


@dataclass(frozen=True, slots=True)
class Started:
    pid: int
    child: subprocess.Popen[bytes] | GuardedChild | None
    """Set if it is our own child, or that of its guard: then its exit code is available."""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    output: Path
    """stdout and stderr are appended to it."""
    properties: Sequence[str] = ()
    """Of its unit, such as its user and its limits, if it becomes one."""
    description: str = ""
    """Of its unit, for `systemctl status`: without one systemd shows the command line."""


class Detached:
    """A process in a session of its own, which survives the end of this daemon and of its terminal; an agent with a
    guard as its parent."""

    switches_user = False
    """Whether it can start a process as another user."""

    def start(self, service: ServiceProcess) -> Started:
        """Raises CannotStart."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(service.output, flags, 0o640), "ab") as log:
                if MARK_ENV in service.env:
                    agent = GuardedChild(service, log)
                    return Started(agent.pid, agent)
                child = subprocess.Popen(
                    service.argv, env=dict(service.env), cwd=service.cwd, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=log, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise CannotStart(f"{service.argv[0]}: {error.strerror} (to run {service.name})") from error
        return Started(child.pid, child)


class TransientUnit:
    """A systemd unit of its own: outside our cgroup and sandbox, and systemd keeps its exit code."""

    switches_user = True

    def start(self, service: ServiceProcess) -> Started:
        """Raises CannotStart."""
        unit, env = f"{service.name}.service", public(service.env)
        command = ["systemd-run", "--quiet", "--collect", f"--unit={unit}", f"--working-directory={service.cwd}"]
        command += [f"--description={service.description or service.name}"]
        command += [f"--property={p}" for p in (*PROPERTIES, *service.properties)]
        command += [f"--property=Standard{stream}=append:{service.output}" for stream in ("Output", "Error")]
        # The values are taken from our environment, so that ps does not show them.
        command += [f"--setenv={key}" for key in env]
        command += ["--", *service.argv]
        try:
            self._run(command, env)
        except CannotStart:
            self._clear(unit)
            self._run(command, env)
        pid = self._run(["systemctl", "show", "--property=MainPID", "--value", unit], os.environ).strip()
        if not pid.isdigit() or pid == "0":
            raise CannotStart(f"{unit} ended at once; see: journalctl -u {unit}, {service.output}")
        return Started(int(pid), None, unit)

    def _clear(self, unit: str) -> None:
        """End the remains of an earlier unit of that name, if its main process has ended."""
        state = self._run(["systemctl", "show", "--property=ActiveState", "--value", unit], os.environ).strip()
        if state in ("deactivating", "failed"):
            self._run(["systemctl", "kill", "--signal=SIGKILL", unit], os.environ)
            self._run(["systemctl", "stop", unit], os.environ)

    @staticmethod
    def _run(command: Sequence[str], env: Mapping[str, str]) -> str:
        try:
            done = subprocess.run(
                command, env=dict(env), capture_output=True, text=True, timeout=SYSTEMD_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotStart(f"{command[0]}: {error}") from error
        if done.returncode:
            raise CannotStart(f"{command[0]} failed: {done.stderr.strip() or done.returncode}")
        return done.stdout


Launcher = Detached | TransientUnit


def launcher() -> Launcher:
    """Transient units if this daemon is a systemd system service, else detached processes."""
    return TransientUnit() if host.as_system_service() and shutil.which("systemd-run") else Detached()


def environment() -> dict[str, str]:
    """Ours, without variables meant for this process only and without non-text ones: agents send it to workers as
    JSON."""
    env = {k: v for k, v in os.environ.items() if k.isidentifier() and not _NO_TEXT.search(k + v)}
    ours = {k for k in env if k in SYSTEMD_VARIABLES or k.startswith("ELASTICD_")}
    return {k: v for k, v in env.items() if k not in ours} | {"GRPC_ENABLE_FORK_SUPPORT": "0"}


def public(env: Mapping[str, str]) -> dict[str, str]:
    """What of an environment may be known to every user of the machine."""
    return {k: v for k, v in env.items() if k in PUBLIC_NAMES or k.startswith(PUBLIC_PREFIXES)}


class HeldElsewhere(OSError):
    """A lock is held, but by no process that is visible from here."""


def holder(lock: Path) -> int | None:
    """Id of the process that holds `lock`; None if it is free. The kernel releases the lock at its holder's death.

    Never an unrelated process: the file has the holder's id, but for a moment that of the holder before, and the id of
    a holder in another pid namespace (a container that shares the directory) means another process here. So the process
    must be the one reported by the kernel, or be seen to have the file open. Raises HeldElsewhere.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)  # it may lie in another user's folder
    except FileNotFoundError:
        return None
    with closed_after(descriptor):
        deadline_s = time.monotonic() + HOLDER_S
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            written = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            lockers = _lockers(os.fstat(descriptor).st_ino)
            number = written.isascii() and written.isdigit()  # a job's user may have written it: int("²") fails
            for pid in dict.fromkeys([*([int(written)] if number else []), *lockers]):
                if _has_open(pid, descriptor, unseen=pid in lockers):
                    return pid
            if time.monotonic() >= deadline_s:
                break
            threading.Event().wait(0.01)  # flock has no time-out
    raise HeldElsewhere(
        f"{lock} is held by a process that cannot be seen from here (its id there: {written or 'unknown'}), in another "
        "container or on another machine: end it there, or give each its own state_dir"
    )


def _lockers(inode: int) -> list[int]:
    """Processes that hold a lock on a file of this inode number, on any file system."""
    pids = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "FLOCK" in fields and "->" not in fields and fields[-3].endswith(f":{inode}"):
                pids.append(int(fields[-4]))
    return [pid for pid in pids if pid > 0]


def _has_open(pid: int, descriptor: int, *, unseen: bool) -> bool:
    """Whether a process has the file of our `descriptor` open; `unseen`: the answer if access is denied."""
    wanted = os.fstat(descriptor)
    folder, ours = f"/proc/{pid}/fd", (os.getpid(), str(descriptor))
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                if (pid, name) != ours and os.path.samestat(os.stat(f"{folder}/{name}"), wanted):
                    return True
    except PermissionError:
        return unseen
    except OSError:  # it is gone
        return False
    return False


_IN_TMP = re.compile(r"(?:^|[=:,])/(?:var/)?tmp(?:/|$)")
"""A text that names a file in a folder for temporary files."""

INSTALLED = (sys.executable, __file__)
"""The interpreter of agents whose job names none, and the package that they import."""


def of_agent(spec: JobSpec, user: Account | None) -> tuple[str, ...]:
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
    texts = (spec.script, spec.workdir, spec.python, spec.env_file, spec.checkpoint.dir, spec.checkpoint.remote)
    return any(_IN_TMP.search(text) for text in (*texts, *spec.args, *spec.env.values(), *INSTALLED))
