"""Nodes with real daemons, agents, workers and etcd on one machine, struck by real faults.

    with Cluster(nodes=2, slots=2) as cluster:
        job = cluster.submit(nodes="2:2")
        job.order("kill", Kill(rank=1, step=20))              # struck by the rank itself, at that step
        job.wait_over()
        job.check()                                           # the recorded history, not the impression

`network=True` puts each node, and etcd, on a host of its own (`cluster.hosts`, see support/lab.py); `members=3` makes
etcd a cluster of three; `password="…"` makes it ask for one; `disks_mb={1: 64}` puts the state of node 1 on a disk of
that size (needs root).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import psutil
from support import api, scratch
from support.etcd_server import etcd_binary, free_ports
from support.history import History, check
from support.incidents import check_injections, check_written
from support.lab import Host, Hosts
from support.procs import Procs, Started, alive, describe, end_all, kill, tagged
from support.wait import eventually
from support.warm import SOCKET_ENV, ready

from elastic.contract.records.incident_account import weight
from elastic.testing import AnyFault, Injection, Plan, Record, Struck
from elastic.testing.history import NODE_ENV, PLAN_ENV

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "train_chaos.py"
WARM_DAEMON = SCRIPT.with_name("warm_daemon.py")
BIN = pathlib.Path(sys.executable).parent
USER = "root"
"""User and password of an etcd that requires a login."""


class Etcd:
    """One member, on loopback or on a host of its own. `args`: further flags; `password`: empty, or USER's."""

    def __init__(
        self, name: str, folder: pathlib.Path, procs: Procs, host: Host | None, args: Sequence[str] = ()
    ) -> None:
        self.name, self._folder, self._procs, self._host = name, folder, procs, host
        self._args, self.password = tuple(args), ""
        self.address = host.address if host else "127.0.0.1"
        self.port, self.peer_port = (2379, 2380) if host else free_ports(2)
        self.endpoint = f"{self.address}:{self.port}"
        self.peer = f"{name}=http://{self.address}:{self.peer_port}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()

    def start(self, peers: str) -> None:
        binary = etcd_binary()
        assert binary is not None, "no etcd (mark the test with etcd)"
        url, peer = f"http://{self.endpoint}", f"http://{self.address}:{self.peer_port}"
        argv = [
            binary, f"--name={self.name}", f"--data-dir={self._folder / 'data'}", "--unsafe-no-fsync",
            f"--listen-client-urls={url}", f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster={peers}", "--log-level=warn", *self._args,
        ]  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            popen = self._host.popen if self._host else self._procs.popen
            self._process = popen(argv, stdout=log, stderr=log)

    def healthy(self) -> bool:
        return self.ctl("endpoint", "health", check=False).returncode == 0

    def ctl(
        self, *words: str, check: bool = True, timeout_s: float = 10.0, said: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run etcdctl; `said` goes to its stdin."""
        return subprocess.run(
            [*self.etcdctl(), *words], env={**os.environ, "ETCDCTL_API": "3"}, input=said,
            capture_output=True, text=True, timeout=timeout_s, check=check,
        )  # fmt: skip

    def etcdctl(self) -> list[str]:
        """The command that talks to this member alone."""
        binary = etcd_binary()
        assert binary is not None
        user = [f"--user={USER}:{self.password}"] if self.password else []
        return [str(pathlib.Path(binary).with_name("etcdctl")), f"--endpoints={self.endpoint}", *user]

    def leads(self) -> bool:
        """Whether it leads the members."""
        (said,) = json.loads(self.ctl("endpoint", "status", "-w=json").stdout)
        return bool(said["Status"]["leader"] == said["Status"]["header"]["member_id"])

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    # ── out of space ────────────────────────────────────────────────────────────────────────────────────────

    def fill(self) -> None:
        """Use its quota up: it takes no writes until `make_room`."""
        for index in range(1000):
            done = self.ctl("put", f"/ballast/{index:04}", said="x" * 500_000, check=False)
            if "database space exceeded" in done.stderr:
                return
            done.check_returncode()
        raise AssertionError("it has no end: start it with --quota-backend-bytes")

    def make_room(self) -> int:
        """As its manual says: delete, compact, defragment, disarm. Returns the revision before which all is gone."""
        self.ctl("del", "--prefix", "/ballast/")
        compacted = self.revision()
        self.ctl("compact", str(compacted))
        self.ctl("defrag", timeout_s=30.0)
        self.ctl("alarm", "disarm")
        return compacted

    def revision(self) -> int:
        (said,) = json.loads(self.ctl("endpoint", "status", "-w=json").stdout)
        return int(said["Status"]["header"]["revision"])

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._procs.end(self._process)

    def pause(self) -> None:
        kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        kill(self.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Its data is gone; it must be killed before."""
        shutil.rmtree(self._folder / "data")

    def back_up(self) -> None:
        """Copy its data; it must be killed before."""
        shutil.copytree(self._folder / "data", self._folder / "backup")

    def set_back(self) -> None:
        """Its data is that of the backup; it must be killed before."""
        self.wipe()
        shutil.copytree(self._folder / "backup", self._folder / "data")


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie is one of these, too
        return ""


class Node:
    """A daemon and what it starts."""

    def __init__(self, cluster: Cluster, index: int, host: Host | None) -> None:
        self.name, self.host, self._cluster = f"node{index}", host, cluster
        self.folder = cluster.folder / self.name
        self.folder.mkdir()
        self.socket = self.folder / "s"
        self._tag = f"{cluster.procs.tag}.{self.name}"
        self.env: dict[str, str] = {}
        """Further environment of its daemon and of all that this starts."""
        self.daemon: Started | None = None

    def start(self, wait: bool = True, code: pathlib.Path | None = None) -> None:
        """Start its daemon; returns when that is in the cluster. `code`: a folder with other `elastic` and `elasticd`
        packages to run from; otherwise the installed ones."""
        cluster = self._cluster
        address = self.host.address if self.host else "127.0.0.1"
        config = {
            "": {"cluster": "chaos", "node": self.name, "address": address, "slots": cluster.slots,
                 "interface": "eth0" if self.host else "lo", "state_dir": str(self.folder / "state"),
                 "socket": str(self.socket), **cluster.key, **cluster.settings},
            "etcd": {"endpoints": [e.endpoint for e in cluster.etcd], "allow_unsound_version": True, "insecure": True,
                     **cluster.login},
            "http": {"listen": ""},
            "timeouts": cluster.timeouts,
        }  # fmt: skip
        lines = []
        for table, fields in config.items():
            lines += [f"[{table}]"] if table else []
            lines += [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
        (self.folder / "elasticd.toml").write_text("\n".join(lines))
        popen = self.host.popen if self.host else cluster.procs.popen
        options = ["--config", str(self.folder / "elasticd.toml")]
        env = {NODE_ENV: self.name, "ELASTIC_TEST_NODE_TAG": self._tag, **self.env}
        with (self.folder / "daemon.log").open("ab") as log:
            if code is not None:
                command = [sys.executable, "-P", "-m", "elasticd.main", *options]
                self.daemon = popen(command, env={"PYTHONPATH": str(code), **env}, stdout=log, stderr=log)
            elif not cluster.warm:
                self.daemon = popen([str(BIN / "elasticd"), *options], env=env, stdout=log, stderr=log)
            else:
                env[SOCKET_ENV] = ready()
                command = [str(WARM_DAEMON), *options]
                if self.host:
                    self.daemon = popen([sys.executable, *command], env=env, stdout=log, stderr=log)
                else:
                    self.daemon = cluster.procs.python(command, output=log, env=env)
        if wait:
            eventually(lambda: self.state() == "ready", 40.0, f"{self.name} is in the cluster")

    def api(self, method: str, url: str, body: object = None, timeout_s: float = 10.0) -> dict[str, Any]:
        return api.call(self.socket, method, url, body, timeout_s)

    def state(self) -> str:
        """This node's state as its own daemon says it; '' while that cannot be asked."""
        assert self.daemon is not None
        assert self.daemon.poll() is None, f"the daemon of {self.name} ended with {self.daemon.returncode}"
        try:
            rows = self.api("GET", "/v1/nodes")["nodes"]
        except OSError:
            return ""
        return next((str(row["state"]) for row in rows if row["node"] == self.name), "")

    def pids(self) -> list[int]:
        """Daemon, agents and workers."""
        return tagged(self._tag, "ELASTIC_TEST_NODE_TAG")

    def kill_daemon(self) -> None:
        assert self.daemon is not None
        self._cluster.procs.end(self.daemon)

    def stop_daemon(self, deadline_s: float = 10.0) -> int:
        assert self.daemon is not None
        self.daemon.terminate()
        return self.daemon.wait(deadline_s)

    def events(self) -> list[dict[str, Any]]:
        """What its daemon has logged."""
        lines = (self.folder / "daemon.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def children(self, job: str = "job") -> list[int]:
        """What the agent of `job` has forked from its zygote: the zygote itself, the oldest, comes first."""
        agent = psutil.Process(self.agent_pid(job))
        forked = [c for c in agent.children() if _command(c).startswith(("elastic zygote", "elastic worker"))]
        return [c.pid for c in sorted(forked, key=lambda c: (c.create_time(), c.pid))]

    def agent_pid(self, job: str = "job") -> int:
        """Id of the agent of `job` here. Raises OSError, KeyError when there is none yet."""
        status = self.folder / "state" / "jobs" / job / "agent" / "status.json"
        return int(json.loads(status.read_text())["pid"])

    def agent_pid_by_lock(self, job: str = "job") -> int:
        """The same, from the file that its agent holds: also while the disk takes no new status."""
        return int((self.folder / "state" / "jobs" / job / "agent" / "lock").read_text())

    def kill_all(self) -> None:
        """The whole process tree at once, as far as this can be done: all are stopped before the first is killed."""
        if self.host is not None:
            self.host.kill_processes()
            return
        pids = self.pids()
        for pid in pids:
            kill(pid, signal.SIGSTOP)
        end_all(pids)
        end_all(self.pids())

    def power_off(self) -> None:
        """Nothing says goodbye. Needs `network=True`."""
        assert self.host is not None, "made without network=True"
        self.host.power_off()


class Job:
    """One run of train_chaos.py."""

    def __init__(self, cluster: Cluster, name: str, spec: Mapping[str, Any], steps: int, batch: int) -> None:
        self.cluster, self.name, self.spec, self.steps, self.batch = cluster, name, spec, steps, batch
        self.folder = cluster.folder / f"record-{name}"
        self._history = History(self.folder)
        self._record = Record(self.folder / "plan.record")
        self._ordered: dict[str, AnyFault] = {}
        self._stopped = False

    @property
    def history(self) -> History:
        """As written until now."""
        return self._history.read()

    def row(self) -> dict[str, Any]:
        return self.cluster.api("GET", f"/v1/jobs/{self.name}")

    def phase(self) -> str:
        return str(self.row()["phase"])

    def incidents(self) -> list[dict[str, Any]]:
        """Those that are over."""
        found: list[dict[str, Any]] = self.cluster.api("GET", f"/v1/incidents?job={self.name}")["incidents"]
        return [incident for incident in found if not incident["open"]]

    def open_incident(self) -> dict[str, Any]:
        """The one that lasts; empty while there is none."""
        found: list[dict[str, Any]] = self.cluster.api("GET", f"/v1/incidents?job={self.name}")["incidents"]
        return next((incident for incident in found if incident["open"]), {})

    def wait_step(self, step: int, deadline_s: float = 60.0) -> History:
        """Until `step` steps are committed somewhere."""
        eventually(lambda: self._alive() and self.history.step() >= step, deadline_s, f"step {step}")
        return self._history

    def _alive(self) -> bool:
        if self.cluster.reachable() and (phase := self.phase()) in ("failed", "stopped"):
            raise RuntimeError(f"job {self.name} is {phase}: {self.row()['reason']}")
        return True

    def wait_over(self, phase: str = "succeeded", deadline_s: float = 90.0) -> History:
        """Until the job is over, which must be in `phase`, and its agents have closed its incidents: they learn of the
        end as we do."""
        over = eventually(
            lambda: seen if (seen := self.phase()) in ("succeeded", "failed", "stopped") else "",
            deadline_s, f"job {self.name} ends", every_s=0.1,
        )  # fmt: skip
        assert over == phase, f"job {self.name} is {over}: {self.row()['reason']}"
        eventually(lambda: not self.open_incident(), 10.0, "its incidents are closed")
        return self.history

    def stop(self) -> None:
        """End it where it is: for a test whose faults take as long as the machine needs. `check` then looks at the
        steps that were done."""
        self.cluster.api("POST", f"/v1/jobs/{self.name}/stop", {})
        eventually(lambda: self.phase() == "stopped", 30.0, f"{self.name} stops")
        self._stopped = True

    def order(self, name: str, fault: AnyFault) -> None:
        """Have the worker with the fault's rank strike itself, at its place."""
        self._ordered[name] = fault
        self.plan()

    def plan(self) -> None:
        Plan(faults=tuple(self._ordered.values())).write(self.folder / "plan.json")

    def struck(self, name: str) -> Struck:
        """What was noted when fault `name` struck. Raises AssertionError: it did not strike."""
        found = [struck for struck in self._record.struck() if struck.fault == self._ordered[name]]
        assert found, f"fault {name} did not strike"
        return found[0]

    def hurry(self) -> None:
        """From now on a step takes as long as it must: all that the test does to the job is done."""
        (self.folder / "hurry").touch()

    def wait_struck(self, name: str, deadline_s: float = 60.0) -> Struck:
        eventually(lambda: self._alive() and self.struck(name), deadline_s, f"{name} strikes")
        return self.struck(name)

    def worker(self, rank: int) -> int:
        """Process id of the worker that committed as `rank` last."""
        return int([c for c in self.history.commits if c.rank == rank][-1].process.rpartition(".")[2])

    def worker_on(self, node: Node) -> int:
        """Process id of the worker of `node` that committed last."""
        return int([c for c in self.history.commits if c.node == node.name][-1].process.rpartition(".")[2])

    def workers(self) -> dict[int, int]:
        """rank -> process id, in the newest generation that committed."""
        return self.workers_of(self.history.generations()[-1])

    def workers_of(self, generation: int) -> dict[int, int]:
        """rank -> process id, of those that have committed in `generation`."""
        return {c.rank: int(c.process.rpartition(".")[2]) for c in self.history.of(generation)}

    def injection(self, fault: str, kind: str | tuple[str, ...] = "exit", **more: Any) -> Injection:
        """What a fault that was ordered has done."""
        struck = self.struck(fault)
        return Injection(kind, pids=(struck.pid,), struck_s=struck.at_s, **more)

    def check(
        self,
        *injections: Injection,
        lost: int = 0,
        frozen: Sequence[str] = (),
        since: int = 1,
        told: bool | None = None,
        clock: bool = True,
    ) -> History:
        """All that must hold for a complete run, in the workers' records and in etcd's (from revision `since` on,
        where what was before is compacted). One incident was told for each injection, and none besides. Without one
        what was told is looked at with `told=True` only: nothing. `clock=False`: instants cannot be compared."""
        history = self.history
        steps = history.step() if self._stopped else self.steps
        check(history, steps=steps, batch=self.batch, lost=lost, frozen=frozen, whole=not self._stopped)
        self.cluster.check_etcd(self.name, since, clock=clock)
        if told or injections:
            self.told(*injections, clock=clock)
        return history

    def told(self, *injections: Injection, clock: bool = True) -> None:
        """One incident for each of what the test did, in this order, and each says the truth."""
        with contextlib.suppress(AssertionError):  # then what was told is shown
            eventually(lambda: len(self.incidents()) >= len(injections), 10.0, "all is told")
        check_injections(self.history, self.incidents(), injections, clock=clock)


class Cluster:
    """`nodes` nodes with `slots` slots each, and etcd with `members` members."""

    def __init__(
        self,
        nodes: int = 2,
        *,
        slots: int = 1,
        members: int = 1,
        network: bool = False,
        quality: bool = False,
        timeouts: Mapping[str, float] | None = None,
        settings: Mapping[str, object] | None = None,
        etcd_args: Sequence[str] = (),
        signed: bool = True,
        password: str = "",
        disks_mb: Mapping[int, int] | None = None,
        warm: bool = True,
        unfit: Collection[str] = (),
    ) -> None:
        self.slots, self.settings = slots, dict(settings or {})
        self.warm = warm
        """Whether agents are forked from a process that has imported torch, see support/warm.py."""
        self._unfit = unfit  # nodes that do not become ready
        self._etcd_args, self._password, self._disks_mb = etcd_args, password, dict(disks_mb or {})
        self.key: dict[str, str] = {}
        """What the daemons' settings say of the cluster key."""
        self.login: dict[str, str] = {}
        """What the daemons' settings say of user and password."""
        self.timeouts = {"lease_ttl_s": 3.0, "lease_renew_s": 0.8, **(timeouts or {})}
        self._sizes, self._signed = (nodes, members), signed
        self._network, self._quality = network, quality
        self._stack = contextlib.ExitStack()
        self.hosts: Hosts | None = None
        self.etcd: list[Etcd] = []
        self.nodes: list[Node] = []
        self.jobs: list[Job] = []

    def __enter__(self) -> Cluster:
        count, members = self._sizes
        try:
            self.folder = pathlib.Path(scratch.folder("cluster"))
            self._stack.callback(shutil.rmtree, self.folder)
            if self._signed:
                file = self.folder / "cluster.key"
                file.write_text(secrets.token_hex(32))
                file.chmod(0o600)
                self.key = {"cluster_key_file": str(file)}
            if self._network:
                self.hosts = self._stack.enter_context(Hosts(count + members, quality=self._quality))
            self.procs = self.hosts.procs if self.hosts else self._stack.enter_context(Procs())
            for index in range(members):
                host = self.hosts[count + index] if self.hosts else None
                folder = self.folder / f"etcd{index}"
                self.etcd.append(Etcd(f"etcd{index}", folder, self.procs, host, self._etcd_args))
            self.start_etcd()
            if self._password:
                self._ask_for_password()
            for index in range(count):
                node = Node(self, index, self.hosts[index] if self.hosts else None)
                self.nodes.append(node)
                if size_mb := self._disks_mb.get(index):
                    self._stack.enter_context(small_disk(node.folder / "state", size_mb))
            for node in self.nodes:
                node.start(wait=False)
            for node in (node for node in self.nodes if node.name not in self._unfit):
                eventually(lambda node=node: node.state() == "ready", 40.0, f"{node.name} is ready")  # type: ignore[misc]
        except BaseException:
            self.tell()
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.tell()
        self._stack.close()

    def start_etcd(self) -> None:
        """Start all members that do not run, on their data of before if there are any."""
        peers = ",".join(member.peer for member in self.etcd)
        for member in self.etcd:
            if not member.running():
                member.start(peers)
        for member in self.etcd:
            eventually(member.healthy, 20.0, f"{member.name} has a leader", every_s=0.05)

    def _ask_for_password(self) -> None:
        first = self.etcd[0]
        for words in (
            ["user", "add", f"{USER}:{self._password}"],
            ["user", "grant-role", USER, "root"],
            ["auth", "enable"],
        ):
            first.ctl(*words)
        for member in self.etcd:
            member.password = self._password
        file = self.folder / "password"
        file.touch(0o600)
        file.write_text(self._password)
        self.login = {"user": USER, "password_file": str(file)}

    def _asked(self) -> Node:
        return next(n for n in self.nodes if n.daemon is not None and n.daemon.poll() is None and n.socket.exists())

    def reachable(self) -> bool:
        try:
            self.api("GET", "/v1/nodes")
        except (OSError, StopIteration):
            return False
        return True

    def api(self, method: str, url: str, body: object = None) -> dict[str, Any]:
        """Ask the first node whose daemon lives."""
        return self._asked().api(method, url, body)

    def submit(
        self,
        name: str = "job",
        *,
        nodes: str | None = None,
        steps: int = 60,
        batch: int = 8,
        pace_s: float = 0.02,
        setup_s: float = 0.0,
        env: Mapping[str, str] | None = None,
        **spec: object,
    ) -> Job:
        """Submit train_chaos.py. `spec`: further fields of the job."""
        full = {
            "name": name,
            "script": str(SCRIPT),
            "nodes": nodes or str(len(self.nodes)),
            "workers_per_node": self.slots,
            "workdir": str(self.folder),
            "join_wait_s": 20.0,  # form with everybody: tests name ranks
            "stop_grace_s": 1.0,
            "preload": ["elastic.testing.preload"],
            **spec,
        }
        job = Job(self, name, full, steps, batch)
        job.folder.mkdir()
        job.plan()
        full["env"] = {
            "RECORD_DIR": str(job.folder), "STEPS": str(steps), "BATCH": str(batch), "PACE_S": str(pace_s),
            "SETUP_S": str(setup_s), PLAN_ENV: str(job.folder / "plan.json"), **(env or {}),
        }  # fmt: skip
        self.api("POST", "/v1/jobs", {"spec": full})
        self.jobs.append(job)
        return job

    def script(self, name: str, body: str) -> str:
        """Path of a script that has train_chaos.py as `t`, changed by `body`."""
        path = self.folder / f"{name}.py"
        head = f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\nimport elastic, torch, train_chaos as t\n"
        path.write_text(f"{head}{textwrap.dedent(body)}\nelastic.run(t.setup, t.train)\n")
        return str(path)

    def workers_gone(self, deadline_s: float = 10.0) -> None:
        """Nothing but the daemons is left on the nodes."""

        def left() -> bool:
            daemons = {n.daemon.pid for n in self.nodes if n.daemon is not None}
            others = [p for n in self.nodes for p in n.pids() if p not in daemons and alive(p)]
            assert not others, describe(others)
            return True

        eventually(left, deadline_s, "agents and workers are gone")

    # ── etcd's own record ───────────────────────────────────────────────────────────────────────────────────

    def control_history(self, job: str, since: int = 1) -> list[tuple[str, dict[str, Any] | None]]:
        """Every write below the job from revision `since` on, in order: (key below the job, record; None for a
        deletion)."""
        root = f"/elastic/chaos/jobs/{job}/"
        member = next(m for m in self.etcd if m.healthy())
        # A progress notification would mark the end; with one member a key of our own does.
        member.ctl("put", f"{root}zz-end-of-test", "{}")
        watch = subprocess.Popen(
            [*member.etcdctl(), "watch", "--prefix", root, f"--rev={since}", "-w=json"],
            env={**os.environ, "ETCDCTL_API": "3"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        found: list[tuple[str, dict[str, Any] | None]] = []
        try:
            assert watch.stdout is not None
            for line in watch.stdout:
                for event in json.loads(line).get("Events", []):
                    key = _text(event["kv"]["key"]).removeprefix(root).removeprefix("head/")
                    if key == "zz-end-of-test":
                        return found
                    value = event["kv"].get("value")
                    record = _text(value).partition("\n")[0] if value else ""  # its signature follows
                    found.append((key, json.loads(record) if record else None))
        finally:
            watch.kill()
            watch.wait(5)
            if watch.stdout is not None:
                watch.stdout.close()
        raise AssertionError("etcd's history ended early")

    def check_etcd(self, job: str, since: int = 1, *, clock: bool = True) -> None:
        """One plan per generation, numbers that only grow; a generation's record of failures only gains; the
        beginning of an incident stays, and what is over stays so."""
        numbers: list[int] = []
        broken: dict[str, dict[str, Any]] = {}
        written = self.control_history(job, since)
        check_written(written, clock=clock)
        for key, record in written:
            if key == "generation" and record is not None:
                numbers.append(record["number"])
            if key.startswith("broken/") and record is not None:
                before = broken.get(key, record)
                assert _failures(before) <= _failures(record), f"{key} has lost a failure: {before} → {record}"
                assert weight(before["kind"]) <= weight(record["kind"]), (
                    f"{key} has lost its cause: {before} → {record}"
                )
                broken[key] = record
        assert numbers == sorted(set(numbers)), f"generations were written in this order: {numbers}"

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────

    def tell(self, lines: int = 25) -> None:
        """Print the ends of all logs, for the report of a failed test."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and (path.suffix == ".log" or path.name in ("log", "agent.out")):
                text = path.read_text(errors="replace").splitlines()[-lines:]
                if text and "etcd" not in path.parts[-2]:
                    print(f"── {path.relative_to(self.folder)}", *text, sep="\n")
        with contextlib.suppress(Exception):  # whatever fails here must not hide the test's own failure
            for job in self.jobs:
                print(f"── {job.name}", json.dumps(job.row(), indent=1)[:3000], sep="\n")


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, size_mb: int) -> Iterator[None]:
    """A file system of its own at `folder`."""
    folder.mkdir()
    options = f"size={size_mb}m,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True, timeout=10)


def _failures(broken: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Node and slot of each worker that a record of failures names."""
    return {(loss["node"], slot) for loss in (broken, *broken.get("also", ())) for slot in loss.get("slots", ())}


def _text(base64: str) -> str:
    import base64 as codec

    return codec.b64decode(base64).decode()


def now_s() -> float:
    """On the clock of the records."""
    return time.monotonic()
