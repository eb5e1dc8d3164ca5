"""The agents on this node: start, adoption after a daemon restart, orders, supervision, end.

Owned by the loop's thread, except for `retire`. The only helper threads wait for an agent's end and post it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from elastic.contract.agent_files import LEFT, MARK_ENV, AgentConfig, AgentOrders, AgentStatus
from elastic.contract.keys import NAME, check_name
from elastic.contract.records.job_records import PROTOCOL
from elastic.util.files import read_file, replace_file
from elastic.util.processes import is_shortage, signal_name, wait_until_gone
from elasticd.access.authority import Account
from elasticd.base import ownership
from elasticd.base.errors import CannotStart
from elasticd.base.folders import Folder
from elasticd.base.log import Log
from elasticd.base.threads import Threads
from elasticd.machine import host
from elasticd.machine.processes import launch
from elasticd.machine.processes import shutdown as leftovers

from . import job_folders
from .etcd_grants import EtcdGrants

FIRST_PAUSE_S = 0.2
"""Pause from an agent's death to the next start: long enough to learn from etcd that the job is over."""
AFTER_LEAVING_S = 1.0
"""Pause from an agent's clean exit to the next start for the same job."""
LONGEST_PAUSE_S = 30.0
SHORT_OF_S = 2.0
"""Longest pause while this machine lacks a resource, which is not the fault of agent or job."""
T = TypeVar("T", AgentConfig, AgentStatus, AgentOrders)

MOST_SLOTS = 4096
"""Of one agent; a number below 1 would make slots of this node appear free that are not."""
SHORT_FOR_S = 15.0
"""A shortage that lasts this long is the node's: the job goes on with others, if there are any."""
STABLE_S = 60.0
"""An agent that lived this long resets the back-off."""


Owner = tuple[int, int]
"""User id and group id."""


@dataclass(slots=True)
class Running:
    config: AgentConfig
    pid: int
    since_s: float
    owner: Owner | None = None
    """The user that it runs as; None: this daemon's own."""
    status: AgentStatus | None = None
    orders: AgentOrders = field(default_factory=AgentOrders)
    ending_s: float | None = None
    """Monotonic time at which it was signalled to end."""


@dataclass(slots=True)
class Trouble:
    """Recent failures of a job's agents on this node."""

    failures: int = 0
    """Consecutive exits before the agent reported anything; a failed start counts too."""
    not_before_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    why: str = ""
    short_since_s: float = math.inf
    """Monotonic time since which this machine has lacked what an agent takes to start; inf: it does not."""

    @property
    def short(self) -> bool:
        return self.short_since_s < math.inf


@dataclass(frozen=True, slots=True)
class Gone:
    job: str
    pid: int
    code: int | None
    """Exit code, negative for a signal; None if it was not our child: then it may have left the code in its status."""


@dataclass(eq=False)
class Agents:
    """`grants`: for agents that run as another user; without it there are none."""

    state_dir: Path
    launcher: launch.Launcher
    threads: Threads
    post: Callable[[Gone], None]
    log: Log
    grants: EtcdGrants | None = None

    def __post_init__(self) -> None:
        self.jobs_dir = self.state_dir / "jobs"
        self.running: dict[str, Running] = {}
        self.trouble: dict[str, Trouble] = {}
        self._unwatched: dict[str, tuple[int, Callable[[], None]]] = {}
        """Job -> pid of its agent and the wait for its end, for which no thread could be started yet."""
        self._starting = threading.Lock()
        """Held while an agent is started, and while a folder is retired."""

    def dir(self, job: str) -> Path:
        """Raises ValueError for an invalid job name, which could lead out of `jobs_dir`."""
        return self.jobs_dir / check_name("job", job) / "agent"

    def logs(self, job: str) -> Folder:
        """Raises ValueError for an invalid job name."""
        return Folder(self.jobs_dir, (check_name("job", job), "logs"))

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def find(self) -> None:
        """Adopt the agents that an earlier daemon started."""
        self.jobs_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        for folder in sorted(self.jobs_dir.iterdir()):
            if NAME.fullmatch(folder.name) and folder.name not in self.running:
                try:
                    if not self.adopt(folder.name):
                        self._end_leftovers(folder.name)
                except OSError as error:  # e.g. out of descriptors: `start` will look again
                    self.log.error("agent.cannot_look", job=folder.name, why=str(error))

    def adopt(self, job: str, fallback: AgentConfig | None = None) -> bool:
        """Adopt the agent of `job` if it is running. `fallback` replaces a damaged config.json."""
        folder = self.dir(job)
        status = _read(folder / "status.json", AgentStatus)
        pid = launch.holder(folder / "lock")
        if pid is None:
            return False
        owner = _owner(folder)
        if owner is not None and (uid := host.uid_of(pid)) != owner[0]:
            # A user can hand the own lock file's descriptor to any service: that one must not be signalled for it.
            self.log.error("agent.lock_held_by_another_user", job=job, pid=pid, uid=uid)
            return False
        config = _read(folder / "config.json", AgentConfig)
        if config is None or config.job != job or not 1 <= config.slots <= MOST_SLOTS:  # its user may have changed it
            self.log.error("agent.unreadable", job=job, pid=pid, file=str(folder / "config.json"))
            if fallback is None:
                return False
            write(folder / "config.json", fallback, owner)
            config = fallback
        orders = _read(folder / "orders.json", AgentOrders) or AgentOrders()
        status = status if status and status.pid == pid else None
        self.running[job] = Running(config, pid, time.monotonic(), owner, status, orders)
        self.log.info("agent.found", job=job, pid=pid)
        self._watch(job, pid, None)
        return True

    def refresh(self) -> None:
        """Read the agents' status files; renew their access to etcd."""
        self._watch_all()
        if self.grants is not None:
            self.grants.renew(dict(running.owner for running in self.running.values() if running.owner is not None))
        for job, running in self.running.items():
            status = _read(self.dir(job) / "status.json", AgentStatus)
            if status is not None and status.pid == running.pid:
                running.status = status
                self.trouble.pop(job, None) if time.monotonic() - running.since_s > STABLE_S else None

    # ── starting and ending ─────────────────────────────────────────────────────────────────────────────────

    def may_start(self, job: str, now_s: float) -> bool:
        return job not in self.running and now_s >= self.trouble.get(job, Trouble()).not_before_s

    def next_start_s(self) -> float:
        """Monotonic time at which the next job may be tried again; inf: none is waiting."""
        return min((t.not_before_s for job, t in self.trouble.items() if job not in self.running), default=math.inf)

    def start(
        self, config: AgentConfig, python: str, user: Account | None = None, properties: Sequence[str] = ()
    ) -> None:
        """Start an agent, or adopt the running one. A failure is recorded in `trouble`.

        `user`: the account that the agent runs as; None: this daemon's own. `properties`: of its unit.
        """
        with self._starting:
            self._start(config, python, user, properties)

    def _start(self, config: AgentConfig, python: str, user: Account | None, properties: Sequence[str]) -> None:
        job, folder = config.job, Path(config.agent_dir)
        owner = (user.uid, user.gid) if user else None
        try:
            if self.adopt(job, config):
                return
            if user is not None and (why := ownership.closed_to(python or sys.executable, user.uid, user.groups)):
                raise CannotStart(f"{user.user} cannot run {python or sys.executable}: {why}; {ownership.OPEN_PYTHON}")
            if user is not None and self.grants is not None:
                config = msgspec.structs.replace(config, etcd=self.grants.of(user))
            job_folders.prepare(folder.parent, owner)
            self._end_leftovers(job)
            _set_aside_status(folder)
            write(folder / "orders.json", AgentOrders(), owner)
            write(folder / "config.json", config, owner)
            service = launch.ServiceProcess(
                f"elasticd-job-{job}",
                [python or sys.executable, "-m", "elastic.agent", str(folder)],
                launch.environment() | {MARK_ENV: leftovers.mark_of(folder)},
                folder,  # not the job's workdir: a file in it must not be imported in place of ours
                folder / "agent.log" if user is None else folder.parent / job_folders.OUTPUT,
                properties,
                f"elasticd: agent of job {job}",
            )
            started = self.launcher.start(service)
        except (CannotStart, OSError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            short = cause is not None and is_shortage(cause)
            now_s, trouble = time.monotonic(), self.trouble.setdefault(job, Trouble())
            trouble.short_since_s = min(trouble.short_since_s, now_s) if short else math.inf
            lasts = now_s - trouble.short_since_s >= SHORT_FOR_S
            self._failed(job, f"the agent could not be started: {error}", failed_start=lasts or not short)
            if short:
                trouble.pause_s = min(trouble.pause_s, SHORT_OF_S)
            return
        self.running[job] = Running(config, started.pid, time.monotonic(), owner)
        self.trouble.get(job, Trouble()).short_since_s = math.inf
        who = user.user if user else ""
        self.log.info("agent.started", job=job, pid=started.pid, slots=config.slots, unit=started.unit, user=who)
        self._watch(job, started.pid, started.child)

    def _end_leftovers(self, job: str) -> None:
        """End processes that the workers of a dead agent started and left behind."""
        if launch.holder(self.dir(job) / "lock") is not None:
            return
        if pids := leftovers.end_leftovers(self.dir(job)):
            self.log.warning("agent.leftovers_ended", job=job, pids=pids)

    def gone(self, event: Gone) -> None:
        running = self.running.get(event.job)
        if running is None or running.pid != event.pid:
            return
        del self.running[event.job]
        try:
            self._end_leftovers(event.job)
        except OSError as error:  # e.g. out of descriptors: the next start looks again
            self.log.error("agent.cannot_look", job=event.job, why=str(error))
        lived_s = time.monotonic() - running.since_s
        code = self._left_code(event) if event.code is None else event.code
        if code == 0:  # a clean exit: the job is over, or leaves this node
            self.log.info("agent.left", job=event.job, pid=event.pid, lived_s=round(lived_s, 3))
            self.trouble[event.job] = Trouble(not_before_s=time.monotonic() + AFTER_LEAVING_S)
            return
        self.log.warning("agent.gone", job=event.job, pid=event.pid, code=code, lived_s=round(lived_s, 3))
        if lived_s > STABLE_S:
            self.trouble.pop(event.job, None)
        reported = running.status is not None or (self.dir(event.job) / "status.json").exists()
        how = "ended" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal_name(-code)}"
        last = job_folders.last_line(self.dir(event.job).parent)
        why = f"the agent {how}: {last_words(last)}" if last else f"the agent {how}"
        self._failed(event.job, why, failed_start=not reported)

    def _left_code(self, event: Gone) -> int | None:
        """The exit code as the agent wrote it with its last status; None: it was killed, or wrote nonsense."""
        last = _read(self.dir(event.job) / "status.json", AgentStatus)
        code = last.exit_code if last is not None and last.pid == event.pid else None
        return code if code is not None and 0 <= code <= 255 else None

    def _failed(self, job: str, why: str, *, failed_start: bool) -> None:
        trouble = self.trouble.setdefault(job, Trouble())
        trouble.failures = trouble.failures + 1 if failed_start else 0
        trouble.not_before_s = time.monotonic() + trouble.pause_s
        trouble.pause_s = min(LONGEST_PAUSE_S, trouble.pause_s * 2)
        trouble.why = why
        self.log.warning("agent.trouble", job=job, why=why, failures=trouble.failures)

    def retire(self, job: str) -> Path | None:
        """Rename the folder of a job that has no agent here, so that it can be removed while a new job takes the name.
        None: it has an agent. Called from any thread. Raises OSError, ValueError for an invalid job name."""
        folder = self.dir(job).parent
        with self._starting:
            if job in self.running or job_folders.has_agent(folder):
                return None
            return job_folders.set_aside(folder, os.lstat(folder).st_uid)

    def signal(self, job: str, number: signal.Signals) -> None:
        if running := self.running.get(job):
            self.log.warning("agent.signalled", job=job, pid=running.pid, signal=number.name)
            with contextlib.suppress(ProcessLookupError):  # its end is about to be posted
                os.kill(running.pid, number)

    def why_none(self, jobs: Collection[str]) -> dict[str, str]:
        """Job -> the last failure of its agent, for those in `jobs`: a job without a place here lacks no agent."""
        return {job: trouble.why for job, trouble in self.trouble.items() if trouble.why and job in jobs}

    def forget(self, job: str) -> None:
        self.trouble.pop(job, None)

    # ── orders ──────────────────────────────────────────────────────────────────────────────────────────────

    def order(self, job: str, orders: AgentOrders) -> None:
        running = self.running[job]
        if running.orders == orders:
            return
        try:
            write(self.dir(job) / "orders.json", orders, running.owner)
        except OSError as error:  # a full disk: the next turn tries again
            self.log.error("agent.cannot_order", job=job, why=str(error))
            return
        running.orders = orders
        self.log.info("agent.ordered", job=job, draining=orders.draining, checkpoint=orders.checkpoint)
        if running.status is not None:  # it has reported, so its handler is installed: before, SIGHUP would end it
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGHUP)

    # ── waiting for the end ─────────────────────────────────────────────────────────────────────────────────

    def _watch(self, job: str, pid: int, child: subprocess.Popen[bytes] | launch.GuardedChild | None) -> None:
        def wait() -> None:
            code = None
            if child is not None:
                code = child.wait()
            else:
                wait_until_gone(pid)
            self.post(Gone(job, pid, code))
            if isinstance(child, launch.GuardedChild):
                child.reap()

        self._unwatched[job] = pid, wait
        self._watch_all()

    def _watch_all(self) -> None:
        for job, (pid, wait) in tuple(self._unwatched.items()):
            running = self.running.get(job)
            if running is None or running.pid != pid or self.threads.try_start(f"agent-{job}", wait):
                del self._unwatched[job]


def write(path: Path, content: AgentConfig | AgentOrders, owner: Owner | None = None) -> None:
    """Replace a file atomically: its reader sees the old or the new. It may hold etcd's password: for its owner, or
    this user, only."""
    replace_file(path, msgspec.json.encode(content), owner)


def _owner(folder: Path) -> Owner | None:
    """The user of an agent's folder, None if that is this daemon's own."""
    entry = os.stat(folder)
    return (entry.st_uid, entry.st_gid) if entry.st_uid != os.geteuid() else None


def last_words(line: str) -> str:
    """A line of an agent's log for a reader: of a JSON line its event and its error."""
    try:
        event = msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last: a user may write to that log
        return line[-300:]
    error = next((event[key] for key in ("error", "why", "reason", "exception") if event.get(key)), "")
    text = str(error).strip().rpartition("\n")[2] or str(event.get("event", ""))
    return text[:300] or line[-300:]


def _read(path: Path, kind: type[T]) -> T | None:
    """None for a file that is absent, damaged or of another version, which is treated as not written. The job's user
    may have written anything to it."""
    try:
        content = msgspec.json.decode(read_file(path), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return content if getattr(content, "protocol", PROTOCOL) == PROTOCOL else None


def _set_aside_status(folder: Path) -> None:
    """Leave what the last agent wrote for the next one to go on from: but no status of an agent that has ended. One
    that never had a generation does not replace what was left before it. Raises OSError."""
    file, left = folder / "status.json", folder / LEFT
    status = _read(file, AgentStatus)
    if status is not None and (status.progress is not None or not left.exists()):
        os.replace(file, left)
    else:
        file.unlink(missing_ok=True)
