"""Starts processes that outlive this daemon: as a transient unit of systemd, else in a session of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from . import host
from .errors import CannotStart

STRIPPED = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES",
            "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "CREDENTIALS_DIRECTORY", "MAINPID")  # fmt: skip
"""What systemd tells this service alone."""

PROPERTIES = (
    "KillMode=control-group",  # nothing of the process's tree is left behind
    "OOMPolicy=continue",  # a worker killed for memory is the agent's to replace
    "TasksMax=infinity",
    "LimitMEMLOCK=infinity",
    "LimitNOFILE=1048576",
    "TimeoutStopSec=30s",
    "Slice=elasticd.slice",
)

SYSTEMD_S = 10.0
"""Longest wait for systemd's answer."""


@dataclass(frozen=True, slots=True)
class Started:
    pid: int
    child: subprocess.Popen[bytes] | None
    """Set when it is our own child, whose exit code we learn."""
    unit: str = ""


class Launcher(Protocol):
    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path) -> Started:
        """Start `argv`; stdout and stderr are appended to `output`. Raises CannotStart."""


class Detached:
    """A session of its own: neither our end nor our terminal's reaches it."""

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path) -> Started:
        try:
            with output.open("ab") as log:
                child = subprocess.Popen(
                    argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise CannotStart(f"{argv[0]}: {error.strerror} (to run {name})") from error
        return Started(child.pid, child)


class TransientUnit:
    """A unit of its own: outside our cgroup and sandbox, and systemd keeps its exit code."""

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path) -> Started:
        unit = f"{name}.service"
        command = ["systemd-run", "--quiet", "--collect", f"--unit={unit}", f"--working-directory={cwd}"]
        command += [f"--property={p}" for p in PROPERTIES]
        command += [f"--property=StandardOutput=append:{output}", f"--property=StandardError=append:{output}"]
        command += [f"--setenv={key}" for key in env]  # the value is taken from our environment: not to be seen in ps
        command += ["--", *argv]
        try:
            self._run(command, env)
        except CannotStart:
            self._clear(unit)
            self._run(command, env)
        pid = self._run(["systemctl", "show", "--property=MainPID", "--value", unit], os.environ).strip()
        if not pid.isdigit() or pid == "0":
            raise CannotStart(f"{unit} ended at once; see: journalctl -u {unit}, {output}")
        return Started(int(pid), None, unit)

    def _clear(self, unit: str) -> None:
        """End what is left of an earlier process of that name, if its main process has ended."""
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


def launcher() -> Launcher:
    """Transient units where systemd runs us as a system service, else detached processes."""
    return TransientUnit() if host.as_system_service() and shutil.which("systemd-run") else Detached()


def environment() -> dict[str, str]:
    """Ours, without what is meant for this very process, and what is no text: agents hand it on to workers as JSON."""
    env = {k: v for k, v in os.environ.items() if k.isidentifier() and k not in STRIPPED and _is_text(k + v)}
    env = {k: v for k, v in env.items() if not k.startswith("ELASTICD_")}
    return env | {"GRPC_ENABLE_FORK_SUPPORT": "0"}


def _is_text(raw: str) -> bool:
    try:
        raw.encode()
    except UnicodeEncodeError:
        return False
    return True


_HOLD = """
import fcntl, os, signal, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
signal.alarm(2)  # somebody may look at it for a moment; if somebody keeps it, that is our end
fcntl.flock(lock, fcntl.LOCK_EX)
signal.alarm(0)
os.ftruncate(lock, 0)
os.write(lock, str(os.getpid()).encode())
os.set_inheritable(lock, True)
os.execv(sys.argv[2], sys.argv[2:])
"""


def holding(lock: Path, argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` while it holds `lock`, for as long as it lives."""
    return [sys.executable, "-I", "-S", "-c", _HOLD, str(lock), *argv]


def holder(lock: Path) -> int | None:
    """Id of the process that holds `lock`, or None: nobody does. The kernel drops the lock at its holder's death."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.read(descriptor, 32).decode(errors="replace").strip()
        return int(written) if written.isdigit() else _holder_by_inode(descriptor)
    finally:
        os.close(descriptor)
    return None


def _holder_by_inode(descriptor: int) -> int | None:
    inode = os.fstat(descriptor).st_ino
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "FLOCK" in fields and fields[-3].endswith(f":{inode}"):
                return int(fields[-4])
    return None
