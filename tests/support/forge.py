"""A process that has torch, the agent, the worker and the daemon imported, and forks agents and scripts: a start costs
milliseconds of a core where the imports cost seconds.

    python forge.py SOCKET PADDING

`support.warm` is the client. Each connection is one process: an order comes in with the descriptors 0, 1 and 2; the
answer is {"pid": …}, later {"code": …}; or {"cold": why} where a fork would not be as a new process is. A fork joins
the network, the host name, the control group and the limits of the process that asks. All forks die with this process,
which ends when its stdin does. It imports gRPC and never uses it: a process that has must not fork.
"""

from __future__ import annotations

import array
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import pathlib
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 1 << 20
AGENT, ZYGOTE = ["-m", "elastic.agent"], ["-m", "elastic.worker.boot.zygote"]
WARM = (
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.utils.data",
    "elastic.agent.__main__",
    "elastic.agent.node",
    "elastic.agent.torch_agent",
    "elastic.agent.peers.store",
    "elastic.worker.run",
    "elastic.worker.boot.bootstrap",
    "elastic.worker.boot.zygote",
    "elasticd.main",
    "elasticd.service",
    "elastic.etcd.wire",  # gRPC: a process that has not used it may fork
)
NAMESPACES = ("net", "uts", "mnt", "ipc")
LIMITS = ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_MEMLOCK")
EARLY = ("PYTHON", "LD_", "FAKETIME")
"""Variables with these beginnings act at the start of a process: a fork cannot have others than this process."""
TOO_LATE = frozenset({"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"})
"""Of these, what makes no difference here: streams are opened anew, and the stacks of a crash are always shown."""
LATE = "ELASTIC_TEST_LATE_SITE"
"""A folder of PYTHONPATH whose sitecustomize may also run in a process that has its imports behind it."""


def differs(env: Mapping[str, str], than: Mapping[str, str]) -> str:
    """A variable for which a fork of a process with the environment `than` would not do; '' if there is none."""
    names = {name for name in {*env, *than} if name.startswith(EARLY) and name not in TOO_LATE}
    if LATE in env:
        names.discard("PYTHONPATH")
    return next((name for name in sorted(names) if env.get(name) != than.get(name)), "")


def show(env: Mapping[str, str]) -> None:
    """Have /proc show `env`, by which tests and daemons find processes. Whole variables, as far as there is room."""
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    text = b""
    for name in sorted(env, key=lambda name: not name.startswith("ELASTIC_")):
        if len(text) + len(more := f"{name}={env[name]}\0".encode(errors="surrogateescape")) < end - start:
            text += more
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def take_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    show(env)


def take_streams(descriptors: Sequence[int]) -> None:
    """Make these the descriptors 0, 1, 2 (and so on), and close all other files."""
    for to, number in enumerate(descriptors):
        os.dup2(number, to, inheritable=to < 3)
    os.closerange(len(descriptors), 4096)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process lives
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable()


class Server:
    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{path}.new")
        self._listener.listen(128)
        os.rename(f"{path}.new", path)
        self._new: list[socket.socket] = []
        self._children: dict[int, socket.socket] = {}
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> tuple[dict[str, Any], list[int], int] | None:
        """Returns in each fork what it is to be: the order, its descriptors, and the process that asked. None when
        this process is to end."""
        signal.set_wakeup_fd(self._woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            readable, _, _ = select.select([0, self._wake, self._listener, *self._new], [], [])
            if 0 in readable:
                return None
            if self._wake in readable:
                os.read(self._wake, 4096)
                self._reap()
            if self._listener in readable:
                self._new.append(self._listener.accept()[0])
            for asking in [one for one in self._new if one in readable]:
                self._new.remove(asking)
                if (order := self._take(asking)) is not None:
                    return order

    def _take(self, asking: socket.socket) -> tuple[dict[str, Any], list[int], int] | None:
        raw, ancillary, _, _ = asking.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(4 * 4))
        if not raw:
            asking.close()
            return None
        order = json.loads(raw)
        descriptors = list(array.array("i", ancillary[0][2]))
        peer = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        if why := differs(order["env"], os.environ):
            asking.send(json.dumps({"cold": why}).encode())
            asking.close()
        elif pid := os.fork():
            if order["adopt"]:
                os.waitpid(pid, 0)
                asking.close()
            else:
                self._children[pid] = asking
                asking.send(json.dumps({"pid": pid}).encode())
        else:
            if order["adopt"]:
                orphan()
                asking.send(json.dumps({"pid": os.getpid()}).encode())
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for ours in (self._listener, asking, *self._new, *self._children.values()):
                ours.detach()  # their numbers will be those of other files
            return order, descriptors, peer
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            with self._children.pop(pid) as asked:
                try:
                    asked.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
                except OSError:  # it is no longer waited for
                    pass


def orphan() -> None:
    """Go on in a process whose parent is the next subreaper above the forge: the process that requested the fork, if
    it is one."""
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == middle:
        os.sched_yield()


def join(peer: int) -> None:
    """Enter the namespaces and the control group of `peer`, and take its limits."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in NAMESPACES:
        if os.readlink(path := f"/proc/{peer}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            namespace = os.open(path, os.O_RDONLY)
            if libc.setns(namespace, 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {path}")
            os.close(namespace)
    group, ours = (pathlib.Path(f"/proc/{pid}/cgroup").read_text() for pid in (peer, "self"))
    if group != ours:
        from support.machine import cgroup2

        inside = next(line[4:] for line in group.splitlines() if line.startswith("0::/"))
        pathlib.Path(cgroup2() or "", inside, "cgroup.procs").write_text("0")
    for limit in LIMITS:
        number = getattr(resource, limit)
        if (theirs := resource.prlimit(peer, number)) != resource.getrlimit(number):
            resource.setrlimit(number, theirs)


def become(order: dict[str, Any], descriptors: list[int], peer: int) -> int:
    """Be the process that was ordered, as `python ARGV` would; returns its exit code."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a run that is killed leaves no process behind
    os.setsid()
    take_streams(descriptors)
    join(peer)
    take_environment(order["env"])
    os.chdir(order["cwd"])
    if site := os.environ.get(LATE):
        sys.path.insert(1, site)
        runpy.run_path(f"{site}/sitecustomize.py")
    argv = order["argv"]
    if argv[:2] == AGENT:
        import setproctitle
        from support import warm_zygote

        sys.path[0] = order["cwd"]
        setproctitle.setproctitle(" ".join([sys.executable, *argv]))
        if (zygote := warm_zygote.offer()) is not None:
            return zygote.run()
        sys.argv = [sys.modules["elastic.agent.__main__"].__file__ or "", *argv[2:]]
        return int(sys.modules["elastic.agent.__main__"].main(argv[2:]))
    if argv[:2] == ZYGOTE:
        return int(sys.modules["elastic.worker.boot.zygote"].main(["3", *argv[3:]]))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    name, code = ("<string>", argv[1]) if argv[0] == "-c" else (argv[0], pathlib.Path(argv[0]).read_text())
    if argv[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *argv[2:]], ""
    else:
        sys.argv, sys.path[0] = argv, os.path.dirname(name)
        module.__file__ = name
    exec(compile(code, name, "exec"), module.__dict__)
    return 0


def main() -> int:
    sys.path[0] = str(pathlib.Path(__file__).parents[1])
    server = Server(sys.argv[1])
    import setproctitle
    import torch

    setproctitle.setproctitle("forge of tests")  # finds its room, which it would not find in the forks
    torch.set_num_threads(1)
    for name in (*WARM, "support.warm_zygote"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    taken = server.serve()
    return become(*taken) if taken is not None else 0


if __name__ == "__main__":
    sys.exit(main())
