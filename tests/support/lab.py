"""Several hosts on one machine: network namespaces on a bridge, whose links can be cut and whose processes can be
killed or frozen all at once. Needs root (marker `netns`).

    with Hosts(3) as hosts:
        hosts[0].popen(["etcd", …])
        hosts.partition(0, 1)                 # packets between them vanish; one_way=True: those of 0 to 1 only
        hosts[2].power_off()                  # nothing says goodbye
        hosts.heal()

Files are shared by all; addresses, ports and host names are each host's own. Hosts live in cgroups and anonymous
namespaces held by a process that dies with its parent, so that no name is left in the system.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from .machine import cgroup2
from .procs import Procs
from .wait import eventually

_count = itertools.count()
_SWITCH = pathlib.Path(__file__).parent / "lab" / "tapsw.py"
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
    """'10.99.7' that no other test run on this machine uses, for as long as the file stays open."""
    for number in range(1, 250):
        lock = pathlib.Path(f"/run/lock/elastic-test-net-{number}").open("w")  # noqa: SIM115 (held by Hosts)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return f"10.99.{number}", lock
    raise RuntimeError("all test networks are taken")


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

    def popen(
        self, argv: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start `argv` on this host. It is ended with the hosts."""
        return self._hosts.procs.popen(self._command(argv), env=env, **options)

    def run(self, argv: Sequence[str], timeout_s: float = 10.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `argv` on this host to its end. Raises CalledProcessError for a non-zero exit, TimeoutExpired."""
        return subprocess.run(
            self._command(argv), capture_output=True, text=True, timeout=timeout_s, check=check,
            env=self._hosts.procs.env(), stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def pids(self) -> list[int]:
        """All processes that run on this host, whoever started them."""
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


def _nft(inside: int, commands: str) -> None:
    enter = ["nsenter", "--target", str(inside), "--net", "--"]
    done = subprocess.run(
        [*enter, "nft", "-f", "-"], input=commands, capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode:
        raise RuntimeError(f"nft: {done.stderr.strip()} in {commands!r}")


class Hosts:
    """`count` hosts node0, node1, … and this one (`outside`) on a network of their own.

    `quality` replaces the bridge by a switch in user space with a delay, jitter and loss for each link, which
    `set_quality` changes at any time (slow: some 100 MB/s at best).
    """

    def __init__(self, count: int, *, quality: bool = False) -> None:
        self.procs = Procs()
        self._count, self._quality = count, quality
        self._hosts: list[Host] = []
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
        for index in range(self._count):
            cgroup = Cgroup(self._cgroup.path / f"node{index}")
            host = Host(self, index, self._hold(), cgroup)
            self._hosts.append(host)
            subprocess.run(
                ["nsenter", "--target", str(host.holder), "--uts", "--", "hostname", host.name], check=True, timeout=10
            )
            chain = "add chain inet lab input { type filter hook input priority 0; policy accept; }"
            _nft(host.holder, f"add table inet lab\n{chain}")
        if self._quality:
            self._start_switch()
        else:
            self._build_bridge()
        for host in self._hosts:
            _ip([f"addr add {host.address}/24 dev eth0", "link set eth0 up", "link set lo up"], inside=host.holder)

    def _hold(self) -> int:
        """A process that holds new namespaces and dies with us; returns its id when the namespaces are there."""
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "sleep", "infinity"]
        process = self.procs.popen(argv)
        mine = os.readlink("/proc/self/ns/uts")  # made last, together with the other

        def inside() -> bool:
            assert process.poll() is None, f"{argv} ended with {process.returncode}"
            comm = pathlib.Path(f"/proc/{process.pid}/comm").read_text()
            return comm == "sleep\n" and os.readlink(f"/proc/{process.pid}/ns/uts") != mine

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
        argv = [sys.executable, str(_SWITCH), self._label, *ports, f"{os.getpid()}:{self._label}"]
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
        """End everything. Safe to call twice."""
        self.procs.close()
        if self._cgroup is not None:
            self._cgroup.remove()
        if pathlib.Path(f"/sys/class/net/{self._label}").exists():
            _ip([f"link del {self._label}"])
        if self._lock is not None:
            self._lock.close()
        self._hosts.clear()
        self._cgroup = self._lock = self._switch = None
