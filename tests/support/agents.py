"""Real agents on a real etcd, without daemons: what most tests of recovery need."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from elastic.contract.agent_files import AgentConfig, AgentStatus
from elastic.contract.job.spec import parse_job
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.generation_delta import GenerationReader
from elastic.contract.records.job_records import (
    GenerationRecord,
    IncidentRecord,
    JobState,
    Phase,
    ProgressRecord,
    SpecRecord,
    decode,
    encode,
)
from elastic.contract.timeouts import Timeouts
from elastic.etcd.client import Etcd

from . import etcd_server, procs, scratch
from .etcd_server import EtcdServer
from .incidents import on_record
from .wait import eventually

SCRIPT = Path(__file__).with_name("train_recorded.py")


@dataclasses.dataclass
class Read:
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    nbytes: int = 0


class Job:
    """One job on N agents of this machine. Everything is ended, by its id, when the block is left."""

    def __init__(
        self,
        *,
        nodes: str = "2:2",
        workers: int = 2,
        agents: int | None = None,
        script: Path = SCRIPT,
        args: Mapping[str, object] | None = None,
        spec: Mapping[str, Any] | None = None,
        timeouts: Timeouts | None = None,
        server: EtcdServer | None = None,
        gpus: tuple[int, ...] = (),
        warm: bool = True,
        apart: bool = False,
    ) -> None:
        """`apart`: each agent runs in its own folder, so that /proc/self/cwd is another one for each. `warm`: agents
        and zygotes are forked from a process that has imported torch, see support/warm.py."""
        self.folder = Path(scratch.folder("job"))
        self.record = self.folder / "record"
        self.record.mkdir()
        self._procs = procs.Procs()
        self.server = server or etcd_server.shared()
        self.workers = workers
        self._timeouts = timeouts or Timeouts()
        self._gpus, self._warm, self._apart = gpus, warm, apart
        given = [str(x) for k, v in (args or {}).items() for x in (f"--{k.replace('_', '-')}", v)]
        self.spec = parse_job(
            {
                "name": "job",
                "script": str(script),
                "args": ["--record", str(self.record), *given] if script == SCRIPT else given,
                "nodes": nodes,
                "workers_per_node": workers,
                "workdir": str(self.folder),
                "join_wait_s": 20.0,  # tests form with everybody
                **(spec or {}),
            }
        )
        self.count = agents if agents is not None else self.spec.max_nodes
        self._cluster = f"test-{os.urandom(4).hex()}"  # etcd is shared by all jobs of a test run
        self.keys = ClusterKeys(self._cluster).job("job")
        self.agents: dict[str, procs.Started] = {}
        self._read: dict[str, Read] = {}
        """What has been read of each record so far: tests ask fifty times a second."""

    def __enter__(self) -> Self:
        self.etcd = Etcd(self.server.access, call_s=20.0)  # a busy machine is no failure
        record = SpecRecord(spec=self.spec, submitted_wall_s=time.time(), submitted_by="test")
        self.etcd.put(self.keys.spec, encode(record))
        for index in range(self.count):
            self.start_agent(f"n{index}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.story())
        self._procs.close()
        self.etcd.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ── acting ──────────────────────────────────────────────────────────────────────────────────────────────

    def start_agent(self, node: str) -> None:
        folder = self.folder / node
        folder.mkdir(exist_ok=True)
        config = AgentConfig(
            cluster=self._cluster,
            node=node,
            job="job",
            address="127.0.0.1",
            slots=self.workers,
            gpus=self._gpus,
            interface="lo",
            etcd=self.server.access,
            timeouts=self._timeouts,
            agent_dir=str(folder),
            logs_dir=str(folder / "logs"),
        )
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        with open(folder / "agent.out", "ab") as output:
            self.agents[node] = self._procs.python(
                ["-m", "elastic.agent", str(folder)],
                output=output,
                warm=self._warm,
                cwd=str(folder) if self._apart else ".",
            )

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> int:
        """Returns the pid that was struck. Waits until the rank has a living process."""

        def find() -> int | None:
            rows = [row for status in self.statuses().values() for row in status.ranks]
            return next((row.pid for row in rows if row.rank == rank and row.pid and procs.alive(row.pid)), None)

        pid = eventually(find, 10.0, f"a living rank {rank}")
        assert pid
        os.kill(pid, number)
        return pid

    def kill_node(self, node: str) -> None:
        """The agent and, with it, all that it started."""
        self.agents[node].kill()
        self.agents[node].wait(timeout=60)

    # ── seeing ──────────────────────────────────────────────────────────────────────────────────────────────

    def statuses(self) -> dict[str, AgentStatus]:
        found = {}
        for node in self.agents:
            path = self.folder / node / "status.json"
            if path.exists():
                found[node] = msgspec.json.decode(path.read_bytes(), type=AgentStatus)
        return found

    def state(self) -> JobState:
        kv = self.etcd.get(self.keys.state)
        return decode(JobState, kv.value) if kv else JobState()

    def generation(self) -> GenerationRecord | None:
        kv, base = self.etcd.get(self.keys.generation), self.etcd.get(self.keys.base)
        return GenerationReader().read(kv.value, base.value if base else None) if kv else None

    def progress(self) -> ProgressRecord | None:
        kv = self.etcd.get(self.keys.progress)
        return decode(ProgressRecord, kv.value) if kv else None

    def incidents(self) -> list[IncidentRecord]:
        """Those that are over."""
        return [incident for incident in self.all_incidents() if not incident.open]

    def all_incidents(self) -> list[IncidentRecord]:
        return on_record(self.keys, self.etcd.get_prefix(self.keys.root).kvs)

    def lines(self) -> list[dict[str, Any]]:
        """All that the workers wrote down; the last line of a killed one may be cut short."""
        for path in self.record.glob("*.jsonl"):
            known = self._read.setdefault(path.name, Read())
            with path.open("rb") as file:
                file.seek(known.nbytes)
                new, end, _ = file.read().rpartition(b"\n")
            known.lines += [json.loads(line) for line in new.splitlines()]
            known.nbytes += len(new) + len(end)
        return [line for known in self._read.values() for line in known.lines]

    def commits(self) -> list[dict[str, Any]]:
        """Every commit of every worker process, in the order of their instants."""
        return sorted((line for line in self.lines() if "step" in line), key=lambda line: line["at_s"])

    def samples(self) -> dict[int, list[int]]:
        """step -> the samples that went into it, in the last generation in which a rank committed it."""
        generation = {line["step"]: line["generation"] for line in self.commits()}
        found: dict[int, list[int]] = {}
        for line in self.lines():
            if "part" in line and generation.get(line["part"]) == line["generation"]:
                found.setdefault(line["part"], []).extend(line["samples"])
        return found

    def steps(self) -> int:
        return max((line["step"] for line in self.commits()), default=0)

    def wait_step(self, step: int, deadline_s: float = 40.0) -> None:
        eventually(lambda: self._agents_live() and self.steps() >= step, deadline_s, f"step {step}")

    def wait_phase(self, phase: Phase, deadline_s: float = 60.0) -> JobState:
        def there() -> JobState | None:
            state = self.state()
            if state.phase is phase:
                return state
            if state.phase.over:
                raise RuntimeError(f"the job is {state.phase}: {state.reason}")
            return None if self._agents_live() else state

        return eventually(there, deadline_s, f"phase {phase.value}") or self.state()

    def _agents_live(self) -> bool:
        """Raises where all agents have ended with an error: that none could start, as a rule."""
        codes = [agent.poll() for agent in self.agents.values()]
        if codes and all(code is not None and code > 0 for code in codes):
            raise RuntimeError(f"the agents have ended with {codes}")
        return True

    def weights(self) -> set[str]:
        """Hashes of the final weights, as each finishing rank wrote them."""
        return {path.read_text() for path in self.record.glob("final-*.txt")}

    def story(self, lines: int = 40) -> str:
        """What to read when a test fails."""
        told = []
        for node in self.agents:
            for name in ("agent.out", "agent.log"):
                path = self.folder / node / name
                if path.exists():
                    told.append(f"── {node}/{name}\n" + "\n".join(path.read_text().splitlines()[-lines:]))
            for path in sorted((self.folder / node / "logs").glob("*.log")):
                text = path.read_text(errors="replace").splitlines()[-15:]
                if text:
                    told.append(f"── {node}/{path.name}\n" + "\n".join(text))
        return "\n".join(told)
