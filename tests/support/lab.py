"""Several hosts on one machine: network namespaces on a bridge, whose links can be cut and whose processes can be
killed or frozen all at once. Needs root (marker `netns`), and with `systemd=True`, where each host is a booted systemd
with processes and files of its own, more of the machine (marker `systemd`).

    with Hosts(3) as hosts:
        hosts[0].popen(["etcd", …])
        hosts.partition(0, 1)                 # packets between them vanish; one_way=True: those of 0 to 1 only
        hosts[2].power_off()                  # nothing says goodbye
        hosts.heal()

Without systemd, files are shared by all; addresses, ports and host names are each host's own. Hosts live in cgroups
and anonymous namespaces held by a process that dies with its parent, so that no name is left in the system.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

from .machine import cgroup2
from .procs import Procs
from .source import ROOT
from .wait import eventually

_count = itertools.count()
_LAB = pathlib.Path(__file__).parent / "lab"
_ROOT = pathlib.Path(__file__).parents[2]
_ENTER = 'echo 0 > "$1" && shift && exec nsenter --target "$1" --net --uts -- "${@:2}"'


def _ip(batch: Sequence[str], inside: int | None = None) -> None:
    """Run `ip` commands, in the network namespace of process `inside`."""
    enter = ["nsenter", "--target", str(inside), "--net", "--"] if inside else []
    done = subprocess.run(
        [*enter, "ip", "-batch", "-"], input="\n".join(batch), capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode:
        raise RuntimeError(f"ip: {done.stderr.strip()} in {list(batch)}")


def _claim_subnet() -> tuple[str, IO[str]]:
    """'10.99.7' that no other test run on this machine uses, until the file is deleted and closed."""
    for number in range(1, 250):
        lock = pathlib.Path(f"/run/lock/elastic-test-net-{number}").open("w")  # noqa: SIM115 (held by Hosts)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno())):
                return f"10.99.{number}", lock
        except (BlockingIOError, FileNotFoundError):  # the latter, as above: its holder has just deleted it
            pass
        lock.close()
    raise RuntimeError("all test networks are taken")


def _release(lock: IO[str]) -> None:
    os.unlink(lock.name)
    lock.close()


class Cgroup:
    """A control group (v2) whose processes are killed or frozen together."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        path.mkdir()

    def pids(self) -> list[int]:
        found: list[int] = []
        for listing in [self.path / "cgroup.procs", *self.path.rglob("*/cgroup.procs")]:
            try:
                found += map(int, listing.read_text().split())
            except OSError:  # the folder went away meanwhile
                continue
        return found

    def kill(self) -> None:
        """SIGKILL to all at once, frozen ones too; returns when none is left."""

        def killed() -> bool:
            (self.path / "cgroup.kill").write_text("1")  # again: one may just have been on its way in
            return "populated 0" in self._events()

        eventually(killed, 10.0, f"{self.path} is empty", every_s=0.005)

    def freeze(self, frozen: bool = True) -> None:
        (self.path / "cgroup.freeze").write_text("1" if frozen else "0")
        eventually(lambda: f"frozen {int(frozen)}" in self._events(), 10.0, f"{self.path} freezes")

    def remove(self) -> None:
        if not self.path.exists():
            return
        self.kill()
        for folder in [*sorted((p for p in self.path.rglob("*") if p.is_dir()), reverse=True), self.path]:
            eventually(lambda folder=folder: _rmdir(folder), 5.0, f"{folder} goes")  # type: ignore[misc]

    def _events(self) -> str:
        return (self.path / "cgroup.events").read_text()


def _comm(pid: int | str) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _rmdir(folder: pathlib.Path) -> bool:
    try:
        folder.rmdir()
    except OSError:  # EBUSY for a moment after its last process
        return not folder.exists()
    return True


class Host:
    """One host; made by Hosts."""

    def __init__(self, hosts: Hosts, index: int, holder: int, cgroup: Cgroup) -> None:
        self.index, self.cgroup, self._hosts = index, cgroup, hosts
        self.name = f"node{index}"
        self.address = f"{hosts.subnet}.{index + 1}"
        self.holder = holder
        """Id of the process that holds the namespaces."""

    def _command(self, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
        procs = str(self.cgroup.path / "cgroup.procs")
        return ["bash", "-c", _ENTER, "host", procs, str(self.holder), *map(os.fspath, argv)]

    def _env(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return self._hosts.procs.env(env)

    def popen(
        self, argv: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start `argv` on this host. It is ended with the hosts."""
        return self._hosts.procs.popen(self._command(argv), env=env, **options)

    def run(
        self, argv: Sequence[str | os.PathLike[str]], timeout_s: float = 10.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on this host to its end. Raises CalledProcessError for a non-zero exit, TimeoutExpired."""
        done = subprocess.run(
            self._command(argv), capture_output=True, text=True, timeout=timeout_s, check=False,
            env=self._env(None), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if check and done.returncode:
            error = subprocess.CalledProcessError(done.returncode, list(argv), done.stdout, done.stderr)
            error.add_note(f"on {self.name}, it said:\n{done.stdout}{done.stderr}")
            raise error
        return done

    def pids(self) -> list[int]:
        """All processes that run on this host."""
        return self.cgroup.pids()

    def link_down(self) -> None:
        """As when the cable is pulled; its address stays."""
        self._hosts.link(self, up=False)

    def link_up(self) -> None:
        self._hosts.link(self, up=True)

    def kill_processes(self) -> None:
        """All its processes end at once; the host itself goes on answering (with refusals)."""
        self.cgroup.kill()

    def power_off(self) -> None:
        """Link and processes go at once: peers are told nothing. `link_up` brings an empty host back."""
        self.link_down()
        self.cgroup.kill()

    def freeze(self) -> None:
        """No process runs on; the kernel still acknowledges what arrives, as on a host that hangs."""
        self.cgroup.freeze()

    def thaw(self) -> None:
        self.cgroup.freeze(False)

    def filter(self, rule: str) -> None:
        """Add an nftables rule to what arrives here, e.g. 'tcp dport 2379 reject with tcp reset'."""
        _nft(self.holder, f"add rule inet lab input {rule}")


class SystemdHost(Host):
    """A host with a booted systemd: an overlay of this machine's files, and a process tree of its own."""

    def __init__(self, hosts: Hosts, index: int, holder: int, cgroup: Cgroup, work: pathlib.Path) -> None:
        super().__init__(hosts, index, holder, cgroup)
        self.share = work / "share"
        """Seen inside as /mnt; a file system of the outside."""

    def _command(self, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
        clean = ["env", "-i", "--chdir=/", "HOME=/root", "LANG=C.UTF-8", f"PATH={_PATH}"]
        return ["nsenter", "--target", str(self.holder), "--all", "--", *clean, *map(os.fspath, argv)]

    def popen(
        self, argv: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        return super().popen(["env", *(f"{k}={v}" for k, v in (env or {}).items()), *argv], **options)

    def link_venv(self) -> None:
        """/opt/elasticd is the environment of these tests, open to all users of this host."""
        for path in (pathlib.Path(sys.executable).resolve(), ROOT, pathlib.Path(sys.prefix)):
            for parent in path.parents:  # a copy of the machine's: what is changed there stays there
                self.run(["chmod", "o+x", str(parent)], check=False)
        self.run(["ln", "-s", sys.prefix, "/opt/elasticd"])

    def systemctl(self, *words: str, check: bool = True, timeout_s: float = 20.0) -> str:
        """What `systemctl WORDS` says (stdout)."""
        return self.run(["systemctl", *words], timeout_s, check).stdout.strip()

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Properties of a unit."""
        said = self.systemctl("show", unit, *(f"--property={p}" for p in properties))
        return dict(line.partition("=")[::2] for line in said.splitlines())

    def journal(self, unit: str) -> str:
        """Messages of a unit so far, one a line."""
        return self.run(["journalctl", "--quiet", "--no-pager", "--output=cat", f"--unit={unit}"]).stdout

    def outer_pid(self, pid: int) -> int:
        """The id that a process inside has for us. Raises LookupError when it is gone."""
        for candidate in self.pids():
            try:
                status = pathlib.Path(f"/proc/{candidate}/status").read_text()
            except OSError:  # gone meanwhile
                continue
            ids = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
            if ids[-1] == str(pid):
                return candidate
        raise LookupError(f"no process {pid} on {self.name}")


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _to_show() -> list[str]:
    """Folders that an overlay of / does not show by itself: this checkout and its Python, on other file systems."""
    root_device = os.stat("/").st_dev
    found = []
    for path in {str(_ROOT), sys.prefix, sys.base_prefix}:
        hidden = path.startswith(("/tmp/", "/var/tmp/", "/run/", "/mnt/", "/dev/"))
        if hidden or os.stat(path).st_dev != root_device:
            found.append(path)
    return sorted(found)  # an outer folder before what lies in it


def _nft(inside: int, commands: str) -> None:
    enter = ["nsenter", "--target", str(inside), "--net", "--"]
    done = subprocess.run(
        [*enter, "nft", "-f", "-"], input=commands, capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode:
        raise RuntimeError(f"nft: {done.stderr.strip()} in {commands!r}")


class Hosts:
    """`count` hosts node0, node1, … and this one (`outside`) on a network of their own.

    `systemd`: each host is a SystemdHost. `quality` replaces the bridge by a switch in user space with a delay, jitter
    and loss for each link, which `set_quality` changes at any time (slow: some 100 MB/s at best).
    """

    def __init__(self, count: int, *, quality: bool = False, systemd: bool = False) -> None:
        self.procs = Procs()
        self._count, self._quality, self._systemd = count, quality, systemd
        self._hosts: list[Host] = []
        self._work: list[pathlib.Path] = []
        self._label = f"elt{os.getpid()}" + "abcdefghijklmnopqrstuvwxyz"[next(_count) % 26]
        self._lock: IO[str] | None = None
        self._cgroup: Cgroup | None = None
        self._switch: subprocess.Popen[str] | None = None
        self._bridge = 0
        self.subnet = ""

    def __enter__(self) -> Hosts:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def outside(self) -> str:
        """Address of the machine that the test itself runs on, as the hosts see it."""
        return f"{self.subnet}.254"

    def _open(self) -> None:
        root = cgroup2()
        assert root is not None, "no cgroup v2 hierarchy (mark the test with netns)"
        self.subnet, self._lock = _claim_subnet()
        self._cgroup = Cgroup(root / self._label)
        cgroups = [Cgroup(self._cgroup.path / f"node{index}") for index in range(self._count)]
        make = self._boot_all if self._systemd else self._hold_all
        self._hosts += make(cgroups)
        for host in self._hosts:
            chain = "add chain inet lab input { type filter hook input priority 0; policy accept; }"
            _nft(host.holder, f"add table inet lab\n{chain}")
        if self._quality:
            self._start_switch()
        else:
            self._build_bridge()
        for host in self._hosts:
            _ip([f"addr add {host.address}/24 dev eth0", "link set eth0 up", "link set lo up"], inside=host.holder)

    def _hold_all(self, cgroups: Sequence[Cgroup]) -> list[Host]:
        hosts = [Host(self, index, self._hold(), cgroup) for index, cgroup in enumerate(cgroups)]
        for host in hosts:
            enter = ["nsenter", "--target", str(host.holder), "--uts", "--"]
            subprocess.run([*enter, "hostname", host.name], check=True, timeout=10)
        return hosts

    def _boot_all(self, cgroups: Sequence[Cgroup]) -> list[Host]:
        """Boot them side by side; returns when all are up."""
        booting = []
        for index, cgroup in enumerate(cgroups):
            work = pathlib.Path(tempfile.mkdtemp(prefix=f"{self._label}-node{index}-", dir="/run"))
            self._work.append(work)
            env = {"WORK": str(work), "CGROUP": str(cgroup.path), "NAME": f"node{index}", "SHOW": " ".join(_to_show())}
            with (work / "boot.log").open("wb") as log:
                outer = self.procs.popen(["bash", _LAB / "boot.sh"], env=env, stdout=log, stderr=log)
            booting.append((index, cgroup, work, outer))
        return [self._booted(*one) for one in booting]

    def _booted(self, index: int, cgroup: Cgroup, work: pathlib.Path, outer: subprocess.Popen[bytes]) -> SystemdHost:
        def init() -> int | None:
            """The id of its PID 1, as seen from here."""
            assert outer.poll() is None, f"boot ended: {(work / 'boot.log').read_text()}"
            children = pathlib.Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            return next((int(p) for p in children if _comm(p) == "systemd"), None)

        holder = eventually(init, 20.0, "systemd starts")
        assert holder is not None
        host = SystemdHost(self, index, holder, cgroup, work)
        running = ["systemctl", "is-system-running"]
        eventually(
            lambda: host.run(running, check=False).stdout.strip() in ("running", "degraded"), 30.0,
            "systemd is up", every_s=0.05,
        )  # fmt: skip
        return host

    def _hold(self) -> int:
        """A process that holds new namespaces and dies with us; returns its id when the namespaces are there."""
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "sleep", "infinity"]
        process = self.procs.popen(argv)
        mine = os.readlink("/proc/self/ns/uts")  # made last, together with the other

        def inside() -> bool:
            assert process.poll() is None, f"{argv} ended with {process.returncode}"
            return _comm(process.pid) == "sleep" and os.readlink(f"/proc/{process.pid}/ns/uts") != mine

        eventually(inside, 10.0, "a new namespace", every_s=0.002)
        return process.pid

    def _build_bridge(self) -> None:
        self._bridge = bridge = self._hold()
        _ip([f"link add {self._label} type veth peer name outside netns {bridge}"])
        lines = ["link add bridge type bridge", "link set bridge up", "link set outside master bridge up"]
        for host in self._hosts:
            lines.append(f"link add {host.name} type veth peer name eth0 netns {host.holder}")
            lines.append(f"link set {host.name} master bridge up")
        _ip(lines, inside=bridge)
        _ip([f"addr add {self.outside}/24 dev {self._label}", f"link set {self._label} up"])

    def _start_switch(self) -> None:
        ports = [f"{host.holder}:eth0" for host in self._hosts]
        argv = [sys.executable, str(_LAB / "tapsw.py"), self._label, *ports, f"{os.getpid()}:{self._label}"]
        self._switch = self.procs.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._expect_switch("up")
        _ip([f"addr add {self.outside}/24 dev {self._label}", f"link set {self._label} up"])

    def _expect_switch(self, word: str) -> None:
        assert self._switch is not None, "made without quality=True"
        assert self._switch.stdout is not None
        line = self._switch.stdout.readline()
        assert line.strip() == word, f"the switch said {line!r}"

    def set_quality(self, host: int, *, delay_s: float = 0.0, jitter_s: float = 0.0, loss: float = 0.0) -> None:
        """What frames to and from `host` suffer from now on: delay each way, ± jitter, share lost (0 to 1)."""
        assert self._switch is not None, "made without quality=True"
        assert self._switch.stdin is not None
        change = {"port": host, "delay_s": delay_s, "jitter_s": jitter_s, "loss": loss}
        self._switch.stdin.write(json.dumps(change) + "\n")
        self._expect_switch("ok")

    def link(self, host: Host, *, up: bool) -> None:
        state = "up" if up else "down"
        if self._bridge:
            _ip([f"link set {host.name} {state}"], inside=self._bridge)
        else:
            _ip([f"link set eth0 {state}"], inside=host.holder)

    def link_down(self, host: int) -> None:
        self._hosts[host].link_down()

    def partition(self, a: int, b: int, one_way: bool = False) -> None:
        """From now on packets between hosts `a` and `b` vanish; `one_way`: only those from `a` to `b`."""
        self._hosts[b].filter(f"ip saddr {self._hosts[a].address} drop")
        if not one_way:
            self._hosts[a].filter(f"ip saddr {self._hosts[b].address} drop")

    def isolate(self, host: int, *, keep: Sequence[int] = ()) -> None:
        """Cut `host` off from all hosts except those in `keep` (the outside stays)."""
        for other in self._hosts:
            if other.index != host and other.index not in keep:
                self.partition(host, other.index)

    def heal(self) -> None:
        """Take back all partitions, filters, link failures, freezes and bad quality."""
        for host in self._hosts:
            _nft(host.holder, "flush chain inet lab input")
            host.link_up()
            host.thaw()
            if self._switch is not None:
                self.set_quality(host.index)

    def close(self) -> None:
        """End everything, whatever of it fails. Safe to call twice."""
        with contextlib.ExitStack() as last_first:
            if self._lock is not None:
                last_first.callback(_release, self._lock)
            last_first.callback(self._remove_link)
            for work in self._work:
                last_first.callback(shutil.rmtree, work)
            if self._cgroup is not None:
                last_first.callback(self._cgroup.remove)
            last_first.callback(self.procs.close)
            self._hosts.clear()
            self._work = []
            self._cgroup = self._lock = self._switch = None

    def _remove_link(self) -> None:
        if pathlib.Path(f"/sys/class/net/{self._label}").exists():
            try:
                _ip([f"link del {self._label}"])
            except RuntimeError:  # it goes by itself, a moment after its other end
                eventually(lambda: not pathlib.Path(f"/sys/class/net/{self._label}").exists(), 5.0)
