"""The first zygote is a fork of its agent: torch is imported once for both, and its pages are shared.

That takes a process that has no thread yet, so no gRPC, and that has imported torch in the environment of the job:
libraries read variables when they are loaded. So a child reads the job's record from etcd beforehand. Whatever does not
fit leaves the job to a zygote that is a process of its own (`zygote.py`), as later ones are: another interpreter, a
variable that only `exec` can set, a thread that an import has started, an etcd that does not answer at once. The agent
reads the record again; if it has become another one, this zygote is not used.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from elastic.contract.agent_files import MARK_ENV, AgentConfig
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import ProtocolVersionMismatch, SpecRecord, decode
from elastic.contract.worker import messages
from elastic.contract.worker.messages import Preload
from elastic.util.capped_log import open_log
from elastic.util.processes import die_with, has_ended

from . import worker_env

TORCH = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.rendezvous")
"""What the agent imports of torch. The zygote imports more, once it is forked."""
ZYGOTE = "elastic.worker.boot.zygote"
SPEC_S = 10.0
"""For the child that reads the job's record: longer than a call to etcd may take."""
AT_EXEC = ("LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "PYTHON", "TZ")
"""Variables that the linker, the C library and Python read when a program is executed, by how they begin."""
SET_FOR_ALL = "PYTHONUNBUFFERED"
"""Among them, but a worker makes its output streams by itself."""
MOST_DESCRIPTORS = 1 << 16


class FirstZygote(msgspec.Struct, frozen=True):
    pid: int
    """0 in the zygote itself."""
    agent_pid: int
    control: socket.socket
    """This process's end."""
    incarnation: str
    """Of the agent; the name of the zygote's log has it."""
    python: str
    env: Mapping[str, str]
    preload: Preload
    log_file: str

    def fits(self, python: str, env: Mapping[str, str], preload: Preload) -> bool:
        return (self.python, dict(self.env), self.preload) == (python, dict(env), preload)


class ForkedChild:
    """What `subprocess.Popen` is for an executed child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self._code is None:
            if not has_ended(self._pidfd, timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._code = 0
            with contextlib.suppress(ChildProcessError):
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self._code


def log_file(config: AgentConfig, incarnation: str) -> str:
    return str(Path(config.logs_dir) / f"zygote.{incarnation[:8]}.log")


def fork(folder: str) -> FirstZygote | None:
    """Import torch, and fork the zygote of the job in `folder`; None: it needs a process of its own."""
    marked = os.environ.pop(MARK_ENV, "")  # not for what the agent executes
    try:
        config = msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=AgentConfig)
        spec = _spec(config) if marked else None
        if spec is None or (spec.spec.python or sys.executable) != sys.executable:
            return None
        os.environ.setdefault("RES_OPTIONS", worker_env.QUICK_DNS)
        env = worker_env.base(config, spec.spec, os.environ)
    except (OSError, msgspec.MsgspecError, ProtocolVersionMismatch, worker_env.InvalidEnvFile):
        return None  # the agent meets it again, and reports it
    # The environment that /proc shows of a fork is that of this program: daemons look for the mark there.
    if env[MARK_ENV] != marked or not _can_be_set(env):
        return None
    _find_arguments()
    own = dict(os.environ)
    _become(env)
    first = _forked(config, spec, env) if _import_torch() else None
    if first is None or first.pid:
        _become(own)
    return first


def become(first: FirstZygote) -> int:
    """Turn this fork into the zygote. Returns its exit code, or that of a worker, a fork of it."""
    os.setsid()
    with open(os.devnull, "rb") as null, open(_log(first.log_file), "ab") as log:
        os.dup2(null.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    control = first.control.detach()
    os.closerange(3, control)
    os.closerange(control + 1, MOST_DESCRIPTORS)
    zygote = importlib.import_module(
        ZYGOTE
    )  # by its name, as for a program: agent and worker import nothing of each other
    return int(zygote.main([str(control), str(first.agent_pid), messages.encode_preload(first.preload).decode()]))


def _forked(config: AgentConfig, spec: SpecRecord, env: Mapping[str, str]) -> FirstZygote | None:
    if len(os.listdir("/proc/self/task")) > 1:
        return None
    incarnation, agent_pid = uuid.uuid4().hex, os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gc.collect()
    gc.freeze()  # collections leave the shared pages alone
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return None
    own_end, other = (ours, theirs) if pid else (theirs, ours)
    other.close()
    return FirstZygote(
        pid=pid,
        agent_pid=agent_pid,
        control=own_end,
        incarnation=incarnation,
        python=sys.executable,
        env=env,
        preload=worker_env.preload(spec.spec),
        log_file=log_file(config, incarnation),
    )


def _spec(config: AgentConfig) -> SpecRecord | None:
    """The job's record, read by a child; None: there is none, or etcd does not answer. Raises what `decode` raises."""
    reader, writer = os.pipe()
    agent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _tell_spec(config, writer, agent_pid)
    os.close(writer)
    readable, _, _ = select.select([reader], [], [], SPEC_S)
    if not readable:
        os.kill(pid, signal.SIGKILL)
    with open(reader, "rb") as came:
        raw = came.read()
    os.waitpid(pid, 0)
    return decode(SpecRecord, raw) if raw else None


def _tell_spec(config: AgentConfig, writer: int, agent_pid: int) -> NoReturn:
    from elastic.etcd.client import Etcd, EtcdError, JobSigner

    raw = b""
    try:
        if die_with(agent_pid):
            signer = JobSigner(config.job_key) if config.job_key else None
            etcd = Etcd(config.etcd, call_s=config.timeouts.etcd_call_s, signer=signer)
            kv = etcd.get(ClusterKeys(config.cluster).job(config.job).spec)
            raw = kv.value if kv is not None else b""
    except EtcdError:
        pass  # the agent asks again, and reports it
    finally:
        with contextlib.suppress(OSError), open(writer, "wb") as told:
            told.write(raw)
        os._exit(0)


def _import_torch() -> bool:
    try:
        for name in TORCH:
            importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return False  # the zygote and the agent meet it again, and report it
    return True


def _find_arguments() -> None:
    """Have setproctitle find where the kernel shows this program's arguments, for the zygote's title: it looks for them
    before the environment as that is in the beginning."""
    os.environ.setdefault("SPT_NOENV", "1")
    try:
        import setproctitle
    except ImportError:  # as in the zygote, it is left as it is
        return
    setproctitle.getproctitle()


def _can_be_set(env: Mapping[str, str]) -> bool:
    """Whether a process that runs already can take this environment, in place of its own."""
    names = [name for name in {*env, *os.environ} if name.startswith(AT_EXEC) and name != SET_FOR_ALL]
    return all(env.get(name) == os.environ.get(name) for name in names)


def _become(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def _log(path: str) -> int:
    Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    return open_log(path)
