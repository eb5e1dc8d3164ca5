"""Nodes with real daemons, agents, workers and etcd, on this machine and in a temporary folder, struck by real faults.
All of it is ended, process by process, when the `with` block is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from elasticd.ctl.client import Client, Unreachable

from .faults import AnyFault, BadFaultError, DropLink, FillDisk, LoseNode, Plan, RankFault, StopEtcd, WipeEtcd
from .history import NODE_ENV, PLAN_ENV, History, claim
from .incidents import Incident
from .runs import Record

TAG = "ELASTIC_TESTING_TAG"
MOST_BYTES = 1 << 30  # a file system with more space than this is not one that was made for a test
_OF_ALL = "/", "/var", "/run", "/home", "/dev/shm", tempfile.gettempdir(), os.path.expanduser("~")


def eventually(check: Callable[[], object], deadline_s: float, what: str) -> None:
    """Call `check` until it returns something true. Raises TimeoutError."""
    end_s = time.monotonic() + deadline_s
    while not check():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.05)


def end_all(pids: Iterable[int]) -> None:
    """All are stopped before the first is killed: at once, as far as this can be done. Returns when they are gone."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    if left := [p for p in psutil.wait_procs(processes, 10.0)[1] if p.status() != psutil.STATUS_ZOMBIE]:
        raise TimeoutError(f"still there after SIGKILL: {left}")


def tagged(tag: str) -> list[int]:
    """Ids of the living processes whose environment has this tag, wherever they hang in the process tree."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to read
            if f"{TAG}={tag}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def check(fault: AnyFault) -> None:
    """Raises BadFaultError where it cannot be done, or would strike what is not the test's."""
    if isinstance(fault, DropLink):
        nft("list tables")
    elif isinstance(fault, FillDisk):
        folder, why = fault.folder, ""
        others = {os.stat(path).st_dev: path for path in _OF_ALL if os.path.exists(path)}
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            why = "it is no folder that you may write to"
        elif near := others.get(os.stat(folder).st_dev):
            why = f"it lies on the file system of {near}, which others need"
        elif (there := os.statvfs(folder)).f_bfree * there.f_frsize > MOST_BYTES:
            why = f"more than {MOST_BYTES >> 20} MiB are left there, so that others may need them"
        if why:
            fix = "name a mount of its own, made by: mount -t tmpfs -o size=64m tmpfs FOLDER"
            raise BadFaultError(f"FillDisk.folder = {folder!r}: {why}; {fix}")


@contextlib.contextmanager
def full(folder: str) -> Iterator[None]:
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name
        size, piece = 0, MOST_BYTES
        while piece:
            try:
                os.posix_fallocate(file.fileno(), size, piece)
                size += piece
            except OSError:
                piece //= 2
        if left := os.statvfs(folder).f_bavail:
            raise BadFaultError(f"FillDisk.folder = {folder!r}: {left} blocks stay free: name a tmpfs")
        yield


def nft(words: str) -> str:
    """What it prints. Raises BadFaultError."""
    done = subprocess.run(["sh", "-c", f"nft {words}"], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise BadFaultError(f"DropLink needs root, and nft (apt-get install nftables): {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def cut(fault: DropLink, history: History) -> Iterator[None]:
    pids = {commit.rank: commit.pid for commit in history.commits}
    one, other = pids.get(fault.rank), pids.get(fault.other)
    ends = {(c.pid, *c.laddr, *c.raddr) for c in psutil.net_connections("tcp") if c.raddr}
    links = [(a, b) for pid, host, a, far, b in ends if pid == one and (other, far, b, host, a) in ends]
    if not links:
        raise BadFaultError(f"DropLink: ranks {fault.rank} and {fault.other} have no connection with each other")
    table = f"inet elastic_testing_{uuid.uuid4().hex[:12]}"
    hook = f"add chain {table} out {{ type filter hook output priority 0; policy accept; }}"
    both = [*links, *(pair[::-1] for pair in links)]
    rules = [f"add rule {table} out oif lo tcp sport {a} tcp dport {b} drop" for a, b in both]
    with subprocess.Popen(["nft", "-i"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as owner:
        # A table with an owner goes when the nft that has made it ends: when its input does, if only with this process.
        print(f"add table {table} {{ flags owner; }}", hook, *rules, sep="\n", file=owner.stdin, flush=True)
        eventually(lambda: rules[-1].partition(" lo ")[2] in nft("list ruleset"), 10.0, "packets are dropped")
        yield


class Node:
    """A daemon and what it starts."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.name, self._cluster = f"node{index}", cluster
        self.folder = cluster.folder / self.name
        self.state_dir = self.folder / "state"
        self.state_dir.mkdir(parents=True)
        self.client = Client(str(self.folder / "s"))
        self.tag = f"{cluster.tag}.{self.name}."

    def start(self) -> None:
        """Start its daemon; returns when it says that it is ready."""
        cluster, first = self._cluster, self._cluster.nodes[0]
        timeouts = {"lease_ttl_s": 3.0, "lease_renew_s": 0.8, **cluster.timeouts}
        settings: dict[str, object] = {
            "cluster": "testing", "node": self.name, "address": "127.0.0.1", "slots": cluster.slots, "interface": "lo",
            "state_dir": str(self.state_dir), "socket": self.client.path, "http.listen": "",
            "etcd.endpoints": [] if first is self else [f"unix:{first.state_dir}/etcd/client:0"],
            "etcd.allow_unsound_version": True, **{f"timeouts.{name}": value for name, value in timeouts.items()},
        }  # fmt: skip
        config = self.folder / "elasticd.toml"
        lines = (f"{name} = {json.dumps(value)}\n" for name, value in {**settings, **cluster.settings}.items())
        config.write_text("".join(lines))
        argv = [sys.executable, "-m", "elasticd.main", "--config", str(config)]
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                argv, env={**os.environ, TAG: self.tag, NODE_ENV: self.name}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        cluster.started.append(self.daemon)
        eventually(self._ready, 60.0, f"{self.name} is ready; see {self.folder}/daemon.log")

    def _ready(self) -> bool:
        with contextlib.suppress(Unreachable):
            rows = self.client.get("/v1/nodes")["nodes"]
            return any((row["node"], row["state"]) == (self.name, "ready") for row in rows)
        return False

    def pids(self) -> list[int]:
        """Daemon, agents and workers; not the etcd that the first node runs for all."""
        return [pid for pid in tagged(self.tag) if pid != self._cluster.etcd_pid()]


class Job(Record):
    """A job of a cluster, and what it suffers."""

    def __init__(self, cluster: Cluster, name: str, faults: Sequence[AnyFault]) -> None:
        self.plan = cluster.folder / f"{name}.json"
        super().__init__(cluster.folder / f"{name}.record", faults)
        self.cluster, self.name = cluster, name
        self._back: list[tuple[float, Callable[[], object]]] = []  # when, and how, a fault ends
        Plan(faults=self.faults).write(self.plan)

    def row(self) -> dict[str, Any]:
        """As `elasticctl status JOB --json`."""
        return self.cluster.client().get(f"/v1/jobs/{self.name}")

    def phase(self) -> str:
        return str(self.row()["phase"])

    def incidents(self) -> list[Incident]:
        return list(self.cluster.client().get("/v1/incidents", {"job": self.name})["incidents"])

    def wait(self, timeout_s: float = 300.0) -> str:
        """Until the job is over and its incidents are closed, striking what is not of a rank on the way. Returns the
        phase; raises TimeoutError."""
        over = ("succeeded", "failed", "stopped")
        eventually(lambda: self._struck() and self.phase() in over, timeout_s, f"job {self.name} is over")
        for _, back in self._back:
            back()
        eventually(lambda: not any(i["open"] for i in self.incidents()), 20.0, "its incidents are closed")  # type: ignore[index]
        return self.phase()

    def _struck(self) -> bool:
        """What is due now has struck, and what is over has ended."""
        for due in [one for one in self._back if time.monotonic() >= one[0]]:
            self._back.remove(due)
            due[1]()
        past = [struck.fault for struck in self.struck()]
        step = self.history.step()
        for fault in self.faults:
            if isinstance(fault, RankFault) or fault in past or fault.step > step:
                continue
            claim(self.folder, fault, node=getattr(fault, "node", ""))
            back = self.cluster.strike(fault, self)
            if (for_s := getattr(fault, "for_s", None)) is not None and back is not None:
                self._back.append((time.monotonic() + for_s, back))
        return True


class Cluster:
    """`nodes` nodes, node0, node1, …, with `slots` slots each. `settings`, `timeouts`: of the daemons,
    as in elasticd.toml."""

    def __init__(
        self, nodes: int = 2, slots: int = 1, *, settings: Mapping[str, object] | None = None,
        timeouts: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.slots, self.settings, self.timeouts = slots, dict(settings or {}), dict(timeouts or {})
        self._count = nodes
        self.tag = uuid.uuid4().hex
        self.nodes: list[Node] = []
        self.started: list[subprocess.Popen[bytes]] = []
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="elastic-testing-"))
        with contextlib.ExitStack() as undo:
            undo.callback(self.__exit__)
            for index in range(self._count):
                self.nodes.append(Node(self, index))
                self.nodes[-1].start()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._ends:
            while pids := tagged(self.tag):  # new ones may be born meanwhile
                end_all(pids)
        for process in self.started:
            process.wait()
        shutil.rmtree(self.folder)

    def etcd_pid(self) -> int:
        return int((self.nodes[0].state_dir / "etcd" / "lock").read_text() or 0)

    def client(self) -> Client:
        """Of the first node whose daemon lives."""
        return next(node.client for node in self.nodes if node.daemon.poll() is None)

    def run(
        self, script: str | os.PathLike[str], *args: object, workers: int = 0, nodes: str = "", name: str = "job",
        faults: Sequence[AnyFault] = (), **spec: object,
    ) -> Job:  # fmt: skip
        """Submit a script, with what it is to suffer. `workers`: on each node (0: one per slot); `nodes`: as in a
        job's description, by default all; `spec`: further fields of that."""
        for fault in faults:  # what cannot be is refused before anything runs
            check(fault)
        job = Job(self, name, faults)
        env = {**dict(spec.pop("env", {})), PLAN_ENV: str(job.plan)}  # type: ignore[call-overload]
        fields = {
            "name": name, "script": os.path.abspath(script), "args": [str(arg) for arg in args],
            "nodes": nodes or str(self._count), "workers_per_node": workers or self.slots, "env": env,
            "preload": ["elastic.testing.preload"], "workdir": str(self.folder), "stop_grace_s": 1.0, **spec,
        }  # fmt: skip
        self.client().post("/v1/jobs", {"spec": fields})
        return job

    def strike(self, fault: AnyFault, job: Job) -> Callable[[], object] | None:
        """Do what is not of a rank. Returns what ends it."""
        match fault:
            case FillDisk() | DropLink():
                check(fault)
                end = self._ends.enter_context(contextlib.ExitStack())
                end.enter_context(full(fault.folder) if isinstance(fault, FillDisk) else cut(fault, job.history))
                return end.close
            case StopEtcd():
                os.kill(pid := self.etcd_pid(), signal.SIGSTOP)
                return lambda: os.kill(pid, signal.SIGCONT)
            case WipeEtcd():  # its daemon starts it anew
                os.kill(pid := self.etcd_pid(), signal.SIGSTOP)
                shutil.rmtree(self.nodes[0].state_dir / "etcd" / "data")
                end_all([pid])
            case LoseNode():
                node = next(node for node in self.nodes if node.name == fault.node)
                end_all(node.pids())
                return node.start
        return None
