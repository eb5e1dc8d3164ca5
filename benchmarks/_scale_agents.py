"""Many agents in a few processes: the real loop, etcd_writer, peers and etcd client, and a pool that has no processes.

The agents of a process share its imports, its interpreter lock and nothing else: each has its own connection to etcd,
its own threads, and decodes every record itself. Run as a program it is one of those processes: it reads orders as
JSON lines and writes what happened.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import resource
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import msgspec  # noqa: E402
import psutil  # noqa: E402
import structlog  # noqa: E402

from elastic.agent import loop as agent_loop  # noqa: E402
from elastic.agent.etcd.watch_scope import WatchScope  # noqa: E402
from elastic.agent.etcd.writer import EtcdWriter  # noqa: E402
from elastic.agent.inbox import Inbox  # noqa: E402
from elastic.agent.loop import AgentLoop  # noqa: E402
from elastic.agent.peers.peers import Peers  # noqa: E402
from elastic.agent.peers.store import Stores  # noqa: E402
from elastic.agent.workers.pool import Pool, PoolEvent  # noqa: E402
from elastic.checkpoint.saving.saver import versions  # noqa: E402
from elastic.contract.agent_files import AgentConfig, EtcdAccess  # noqa: E402
from elastic.contract.job.spec import JobSpec  # noqa: E402
from elastic.contract.keys import ClusterKeys  # noqa: E402
from elastic.contract.origin import Origin  # noqa: E402
from elastic.contract.records.job_records import GenerationRecord, SpecRecord  # noqa: E402
from elastic.contract.timeouts import Timeouts  # noqa: E402
from elastic.contract.worker import messages  # noqa: E402
from elastic.etcd.client import Etcd  # noqa: E402
from elastic.recovery.facts import view  # noqa: E402
from elastic.recovery.machine.events import (  # noqa: E402
    Event,
    Progress,
    Start,
    WorkerExited,
    WorkerSaid,
)
from elastic.recovery.machine.model import Agent, Policy  # noqa: E402

AGENTS_PER_PROCESS = 64
START_S = 240.0
STEP_S = 5.0
"""What the workers that are not there pretend to take for a step."""
TIMEOUTS = Timeouts(beat_s=STEP_S, abort_s=3.0, respawn_s=20.0, lease_ttl_s=15.0, lease_renew_s=5.0)


class NoProcesses(Pool):
    """A pool whose workers do at once what they are told. Only the loop calls it, so that it need not be woken."""

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector(), sys.executable, messages.Preload(), 0.0)
        self.post: Callable[[Event], None] = lambda event: None
        self._generation = 0
        self._step = 0
        self._yield: tuple[int, messages.StopAtStep] | None = None

    def fork(
        self, worker_id: int, slot: int, env: Mapping[str, str], argv: Sequence[str], workdir: str, log_file: str
    ) -> None:
        self.post(WorkerSaid(0, worker_id, messages.Ready()))

    def tell(self, worker_id: int, message: messages.Message, descriptors: Sequence[int] = ()) -> None:
        post = self.post
        match message:
            case messages.Form(generation=generation):
                self._generation = generation
                self._step += 1
                synced = messages.Synced(generation=generation, step=self._step, origin=Origin.LIVE, source="live")
                stepping = messages.Stepping(generation=generation, step=self._step)
                for said in (messages.Formed(generation=generation), synced, stepping):
                    post(WorkerSaid(0, worker_id, said))
                post(Progress(generation, self._step, STEP_S))
            case messages.AbortGroup(generation=generation):
                post(self._group_closed(worker_id, generation))
            case messages.StopAtStep():
                self._yield = (worker_id, message)

    def _group_closed(self, worker_id: int, generation: int) -> WorkerSaid:
        return WorkerSaid(0, worker_id, messages.GroupClosed(generation=generation, step=self._step, clean=True))

    def kill(self, worker_id: int, graceful: bool = False, late: bool = False) -> None:
        self.post(WorkerExited(0, worker_id, "killed"))

    def tick(self) -> list[PoolEvent]:
        """A step has passed."""
        if self._generation:
            self._step += 1
            self.post(Progress(self._generation, self._step, STEP_S))
        if self._yield and self._step >= self._yield[1].at_step:
            worker_id, message = self._yield
            self._yield = None
            self.post(self._group_closed(worker_id, message.generation))
        return []

    def reap(self) -> None:
        pass

    def handle(self, key: tuple[str, int]) -> list[PoolEvent]:
        return []

    def close(self) -> None:
        pass


class OneAgent(AgentLoop):
    """The loop without signals, in a thread of its own; it can vanish as a killed process does."""

    vanished = False
    formed: Callable[[Agent, GenerationRecord], None]

    def run(self, env: dict[str, str]) -> int:
        beat_s = self.config.timeouts.beat_s
        self._turn(Start())
        due_s = time.monotonic() + beat_s * (0.5 + hash(self.config.node) % 100 / 100)
        while self._ended is None and not self.vanished:
            self._wait(due_s)
            if (now_s := time.monotonic()) >= due_s and not self.vanished:
                due_s = now_s + beat_s
                self._on_tick(now_s)
            self._drain_inbox()
        return 0

    def prepare(self) -> None:
        self._selector.register(self._inbox.readable, selectors.EVENT_READ, ("wake", 0))

    def _turn(self, event: Event) -> None:
        before = self.agent.formed.generation
        super()._turn(event)
        if (generation := self.agent.formed.generation) is not None and generation is not before:
            self.formed(self.agent, generation)


class Host:
    """The agents of one process."""

    def __init__(self, access: EtcdAccess, spec: JobSpec, folder: Path) -> None:
        self._access, self._spec, self._folder = access, spec, folder
        self._agents: dict[int, tuple[OneAgent, Peers, Etcd, EtcdWriter]] = {}
        self._said = threading.Lock()

    def say(self, **what: object) -> None:
        with self._said:
            os.write(1, (json.dumps(what) + "\n").encode())

    def start(self, index: int) -> None:
        node, incarnation = f"n{index}", f"i{index}"
        folder = self._folder / node
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        etcd = Etcd(self._access, call_s=10.0)
        keys = ClusterKeys("scale").job("job")
        config = AgentConfig(
            cluster="scale", node=node, job="job", address="127.0.0.1", slots=1, etcd=self._access,
            timeouts=TIMEOUTS, agent_dir=str(folder), logs_dir=str(folder / "logs"),
        )  # fmt: skip
        inbox = Inbox()
        peers = Peers(incarnation, inbox.post)
        policy = Policy(
            node=node, incarnation=incarnation, host="127.0.0.1", port=peers.port, slots=1, managed=True,
            spec=self._spec, timeouts=TIMEOUTS,
        )  # fmt: skip
        record = SpecRecord(spec=self._spec, submitted_wall_s=0.0, submitted_by="benchmark")
        etcd_writer = EtcdWriter(etcd, keys, policy, Stores("127.0.0.1"), inbox.post, record)
        sight = WatchScope(etcd, keys, policy.crowd)
        pool = NoProcesses()
        never: Any = lambda *_: ""  # noqa: E731
        loop = OneAgent(config, Agent(policy), inbox, etcd_writer, peers, sight, keys, record, pool, never, never)
        pool.post = inbox.post

        def formed(agent: Agent, generation: GenerationRecord) -> None:
            now_s, whole = time.monotonic(), agent.etcd.view.has_all_members
            self.say(
                agent=index, generation=generation.number, world_size=generation.world_size, at_s=now_s, whole=whole
            )

        loop.formed = formed
        loop.prepare()
        self._agents[index] = (loop, peers, etcd, etcd_writer)
        etcd_writer.start()
        peers.start()
        self.say(agent=index, ready_s=time.monotonic())
        sight.start(inbox.post, time.monotonic())
        threading.Thread(target=loop.run, args=[{}], daemon=True).start()

    def lose(self, index: int) -> None:
        """As SIGKILL would: nothing is revoked, the port is refused."""
        loop, peers, etcd, etcd_writer = self._agents.pop(index)
        loop.vanished = True
        peers.close()
        if etcd_writer._key.lease is not None:
            etcd_writer._key.lease.close(revoke=False)  # it is not renewed any more
        threading.Thread(target=etcd.close, daemon=True).start()


def main() -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=True
    )
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    threading.stack_size(512 << 10)
    # One collection would walk the objects of all agents here, and halt them; an agent alone has few.
    gc.disable()
    # Threads of many agents wait for one lock here; without need none of them is to be interrupted.
    sys.setswitchinterval(0.05)
    found = versions()
    vars(agent_loop)["versions"] = lambda: found  # reads files for 0.05 s, once per agent
    # A cache by content, which on one node only one agent fills.
    view._member = view._member.__wrapped__  # type: ignore[assignment]
    first = json.loads(sys.stdin.readline())
    access = msgspec.convert(first["access"], EtcdAccess)
    host = Host(access, msgspec.convert(first["spec"], JobSpec), Path(first["folder"]))
    host.say(up=os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        for index in order.get("start", ()):
            host.start(index)
        for index in order.get("lose", ()):
            host.lose(index)
    os._exit(0)  # our stdin is closed: the benchmark is over


class Fleet:
    """`count` agents and those that join, spread over a few processes."""

    def __init__(self, access: EtcdAccess, spec: JobSpec, folder: Path, count: int) -> None:
        self._held: dict[int, tuple[int, int, float]] = {}
        """agent -> number and world of its newest generation, and when it had it."""
        self.narrow: dict[int, int] = {}
        """generation -> how many agents heard of it that followed the head of the job only."""
        self._ready: dict[int, float] = {}
        self._awaited: tuple[int, int, set[int]] = (0, 0, set())
        """Number (at least), world, and the agents that do not have such a generation yet."""
        self._up = 0
        self._ended = ""
        self._changed = threading.Condition()
        first = {"access": msgspec.to_builtins(access), "spec": msgspec.to_builtins(spec), "folder": str(folder)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            for _ in range(max(min(4, count // 2), math.ceil(count / AGENTS_PER_PROCESS)))
        ]
        for process in self._processes:
            self._send(process, first)
            threading.Thread(target=self._listen, args=[process], daemon=True).start()
        with self._changed:
            if not self._changed.wait_for(lambda: self._up == len(self._processes) or self._ended, START_S):
                raise TimeoutError("the processes for the agents did not start")
        self._bare_mb = self._rss_mb()

    def _send(self, process: subprocess.Popen[str], order: object) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            with self._changed:
                if "up" in said:
                    self._up += 1
                elif "ready_s" in said:
                    self._ready[said["agent"]] = said["ready_s"]
                else:
                    self.narrow[said["generation"]] = self.narrow.get(said["generation"], 0) + (not said["whole"])
                    self._holds(said["agent"], said["generation"], said["world_size"], said["at_s"])
                    if self._awaited[2]:
                        continue
                self._changed.notify_all()
        process.stdout.close()
        with self._changed:
            self._ended = f"the process {process.pid} of the agents ended with {process.wait()}"
            self._changed.notify_all()

    def _holds(self, agent: int, number: int, world_size: int, at_s: float) -> None:
        self._held[agent] = number, world_size, at_s
        least, wanted, awaited = self._awaited
        if number >= least and world_size == wanted:
            awaited.discard(agent)

    def _order(self, what: str, agents: Iterable[int]) -> float:
        began_s = time.monotonic()
        spread: dict[int, list[int]] = {}
        for agent in agents:
            spread.setdefault(agent % len(self._processes), []).append(agent)
        for index, some in spread.items():
            self._send(self._processes[index], {what: some})
        return began_s

    def start(self, agents: Iterable[int]) -> float:
        return self._order("start", agents)

    def lose(self, agents: Iterable[int]) -> float:
        """Returns the instant of the order."""
        return self._order("lose", agents)

    def ready_s(self, agent: int) -> float:
        return self._ready[agent]

    def wait(self, generation: int, agents: Iterable[int], limit_s: float) -> float:
        """The instant at which the last of `agents` held a generation of just these, of at least this number.

        Raises TimeoutError, and RuntimeError when a process of theirs has ended.
        """
        everyone = list(agents)
        with self._changed:
            self._awaited = generation, len(everyone), set(everyone)
            for agent, held in tuple(self._held.items()):
                self._holds(agent, *held)
            left = self._awaited[2]
            if not self._changed.wait_for(lambda: not left or self._ended, limit_s):
                known = sorted({held[:2] for held in self._held.values()})
                raise TimeoutError(
                    f"{len(left)} of {len(everyone)} agents, {min(left)} among them, have no generation {generation} of"
                    f" {len(everyone)} after {limit_s:g} s; (number, world) held: {known}"
                )
            if left:
                raise RuntimeError(self._ended)
            return max(self._held[agent][2] for agent in everyone)

    def cpu_s(self) -> float:
        return sum(sum(psutil.Process(p.pid).cpu_times()[:2]) for p in self._processes)

    def threads(self) -> int:
        return sum(psutil.Process(p.pid).num_threads() for p in self._processes)

    def memory_mb(self) -> float:
        """What the agents have added to their processes."""
        return self._rss_mb() - self._bare_mb

    def _rss_mb(self) -> float:
        return sum(psutil.Process(p.pid).memory_info().rss for p in self._processes) / 1e6

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=5)


if __name__ == "__main__":
    main()
