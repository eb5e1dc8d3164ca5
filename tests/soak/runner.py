"""Runs one case with real processes: agents and workers under a real etcd, and the same script alone for comparison."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch.distributed as dist
from support import scratch
from support.etcd_server import EtcdServer
from support.incidents import on_record
from support.procs import Procs, Started, alive, end_all
from support.wait import eventually
from support.warm import forge

from elastic.contract.agent_files import AgentConfig
from elastic.contract.job.spec import parse_job
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import GenerationHead, JobState, SpecRecord, decode, encode
from elastic.contract.timeouts import Timeouts
from elastic.etcd.client import Etcd, EtcdError

from .grammar import ALL, Case, Script
from .judge import Incident, Record, Reference, Verdict, cause, judge
from .render import loop_lines, render

LIB = pathlib.Path(__file__).parent
LINES = {"forward": 150, "optimizer": 120, "elastic": 500, "backward": 8, "finish": 20}
"""About how many lines run in a region in one step: `Place.at` counts within these."""
OVER_S = 60.0
"""A case that takes longer has failed; a large one gets ten times this."""
LAST_WORDS_S = 10.0
"""So long after one rank of the undisturbed run has failed, the others may say why they do."""


class Soak:
    """One etcd for many cases, which may run in several threads."""

    def __init__(self, keep: pathlib.Path | None = None) -> None:
        """`keep`: where the scripts and the records of failed cases go."""
        self._keep = keep
        self._references: dict[tuple[Script, int], Reference] = {}
        self._lock = threading.Lock()
        self._large = threading.Lock()
        """One at a time: they need some ten gigabytes."""

    def __enter__(self) -> Soak:
        scratch.remove_orphans()
        self._folder = pathlib.Path(scratch.folder("soak"))
        self._procs = Procs()
        self._server = EtcdServer()
        try:
            self._server.start()
            forge()  # before there are several threads
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._procs.close()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, case: Case) -> Verdict:
        """Run the case and say whether it came out right; its folder stays with `keep` when not."""
        with self._large if case.script.size == "2gb" else contextlib.nullcontext():
            return self._run(case)

    def _run(self, case: Case) -> Verdict:
        folder = self._folder / f"case{case.number}"
        folder.mkdir()
        try:
            reference = self._reference(case, folder)
            record = None if reference.error else self._managed(case, folder)
            verdict = judge(case, reference, record)
        except (EtcdError, OSError) as error:
            return Verdict(right=False, said=f"the case could not be run: {type(error).__name__}: {error}")
        else:
            if self._keep is not None and not verdict.right:
                self._save(case, folder, verdict, record)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return verdict

    def _save(self, case: Case, folder: pathlib.Path, verdict: Verdict, record: Record | None) -> None:
        assert self._keep is not None
        target = self._keep / f"case{case.number}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target, ignore=lambda at, names: [n for n in names if n in ("checkpoints",)
                        or (pathlib.Path(at) / n).is_socket() or (pathlib.Path(at) / n).is_fifo()])  # fmt: skip
        (target / "verdict.txt").write_text(f"{case}\n{verdict.said}\n\n{record}\n")

    # ── undisturbed ─────────────────────────────────────────────────────────────────────────────────────────

    def _reference(self, case: Case, folder: pathlib.Path) -> Reference:
        key = case.script, case.world_size
        with self._lock:
            if key not in self._references:
                self._references[key] = self._alone(case, folder)
            return self._references[key]

    def _alone(self, case: Case, folder: pathlib.Path) -> Reference:
        """The script's ranks as torchrun would start them, with the store that its agent would hold."""
        script, record = self._write(case, folder), folder / "alone"
        record.mkdir()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = []
        for rank in range(case.world_size):
            env = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
                **self._env(record),
            }  # fmt: skip
            with (record / f"{rank}.log").open("ab") as log:
                ranks.append(self._procs.python([str(script)], output=log, env=env))
        codes = self._codes(ranks, self._limit_s(case))
        if not any(code is None for code in codes) and not any(codes):
            return Reference(finals=_finals(record))
        failed = [rank for rank, code in enumerate(codes) if code]
        if not failed:
            return Reference(error="the undisturbed run does not end")
        return Reference(error=cause([(record / f"{rank}.log").read_text(errors="replace") for rank in failed])[-3000:])

    def _codes(self, ranks: Sequence[Started], limit_s: float) -> list[int | None]:
        """Exit codes; None of one that had to be ended: what it has written may be cut short, or nothing at all."""
        with contextlib.suppress(AssertionError):
            eventually(lambda: any(rank.poll() for rank in ranks) or all(rank.poll() == 0 for rank in ranks), limit_s)
            eventually(lambda: all(rank.poll() is not None for rank in ranks), LAST_WORDS_S)
        codes = [rank.poll() for rank in ranks]
        end_all([rank.pid for rank, code in zip(ranks, codes, strict=True) if code is None])
        return codes

    def _write(self, case: Case, folder: pathlib.Path) -> pathlib.Path:
        script = folder / "train.py"
        script.write_text(render(case.script))
        return script

    def _env(self, record: pathlib.Path, kill: Sequence[object] = ()) -> dict[str, str]:
        return {"SOAK_RECORD": str(record), "SOAK_LIB": str(LIB), "SOAK_KILL": json.dumps(kill)}

    def _limit_s(self, case: Case) -> float:
        return OVER_S * (10 if case.script.size in ("2gb", "many") else 1)

    # ── under elasticd ──────────────────────────────────────────────────────────────────────────────────────

    def _managed(self, case: Case, folder: pathlib.Path) -> Record:
        script, record = self._write(case, folder), folder / "record"
        record.mkdir()
        name = f"case{case.number}-{os.urandom(3).hex()}"
        keys = ClusterKeys("soak").job(name)
        large = case.script.size in ("2gb", "many")
        checkpoint = {} if case.checkpoint == "none" else {"dir": str(folder / "checkpoints"), "every_steps": 2}
        spec = parse_job({
            "name": name, "script": str(script), "nodes": str(case.nodes), "workers_per_node": case.workers,
            "workdir": str(folder), "join_wait_s": 20.0, "stop_grace_s": 1.0,
            "env": self._env(record, plan(case)), "checkpoint": checkpoint,
            "hang": {} if large else {"floor_s": 6.0},  # a busy machine; the large ones are there for the floor
        })  # fmt: skip
        etcd = Etcd(self._server.access, call_s=20.0)
        agents: list[Started] = []
        try:
            put = SpecRecord(spec=spec, submitted_wall_s=time.time(), submitted_by="soak")
            etcd.put(keys.spec, encode(put))
            agents = [self._agent(name, folder / f"n{index}", case.workers) for index in range(case.nodes)]
            state = self._wait(case, etcd, keys.state, agents)
            generation = etcd.get(keys.generation)
            incidents = on_record(keys, etcd.get_prefix(keys.root).kvs)
        finally:
            self._end(agents)
            etcd.close()
        lines = _lines(record)
        return Record(
            phase=state.phase.value if state.phase.over else "",
            reason=str(state.reason),
            restarts=state.restarts,
            generations=decode(GenerationHead, generation.value).number if generation else 0,
            incidents=[
                Incident(kind=i.kind, steps_lost=i.steps_lost, restored_from=i.restored_from, detail=i.text)
                for i in incidents
            ],
            lines=lines,
            finals=_finals(record),
            tracebacks=_tracebacks(folder),
        )

    def _agent(self, job: str, folder: pathlib.Path, slots: int) -> Started:
        folder.mkdir()
        config = AgentConfig(
            cluster="soak", node=folder.name, job=job, address="127.0.0.1", slots=slots, interface="lo",
            etcd=self._server.access, timeouts=Timeouts(), agent_dir=str(folder), logs_dir=str(folder / "logs"),
        )  # fmt: skip
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        with (folder / "agent.out").open("ab") as output:
            return self._procs.python(["-m", "elastic.agent", str(folder)], output=output)

    def _wait(self, case: Case, etcd: Etcd, key: str, agents: list[Started]) -> JobState:
        end_s = time.monotonic() + self._limit_s(case)
        state = JobState()
        while time.monotonic() < end_s:
            try:
                kv = etcd.get(key)
            except EtcdError:  # a machine that a large case has filled up
                kv = None
            if kv is not None:
                state = decode(JobState, kv.value)
            if state.phase.over or all(agent.poll() is not None for agent in agents):
                break
            time.sleep(0.05)
        return state

    def _end(self, agents: list[Started]) -> None:
        """Let them end by themselves for a moment; their children die with them."""
        end_s = time.monotonic() + 3.0
        while time.monotonic() < end_s and any(agent.poll() is None for agent in agents):
            time.sleep(0.02)
        end_all([agent.pid for agent in agents if agent.poll() is None and alive(agent.pid)])


def plan(case: Case) -> list[list[dict[str, Any]]]:
    """What the probe is told to strike, for each generation."""
    place = case.place
    if place.region == "none":
        return []
    text = render(case.script)
    lines = loop_lines(text)
    line = lines[min(int(place.at * len(lines)), len(lines) - 1)]
    if place.before:
        line = next(n for n in lines if text.splitlines()[n - 1].strip().startswith(place.before))
    order = {
        "rank": place.rank, "step": place.step, "region": place.region, "linger_s": place.linger_s,
        "together": case.world_size if place.rank == ALL else 1,
        "line": line, "nth": int(place.at * LINES.get(place.region, 1)),
    }  # fmt: skip
    if place.rank == ALL:
        return [[{**order, "rank": rank} for rank in range(case.world_size)]]
    if place.again == "none":
        return [[order]]
    # The replacement has the rank of the one before.
    again = place.rank if place.again == "same" else int(place.rank == 0)
    return [[order], [{**order, "rank": again, "step": place.step + 1}]]


def _lines(record: pathlib.Path) -> dict[int, list[dict[str, Any]]]:
    """pid -> its lines; the last of a killed process may be cut short."""
    return {
        int(path.stem): [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        for path in record.glob("*.jsonl")
    }


def _finals(record: pathlib.Path) -> dict[int, dict[str, str]]:
    return {int(path.name.split(".")[1]): json.loads(path.read_text()) for path in record.glob("final.*.json")}


def _tracebacks(folder: pathlib.Path) -> list[str]:
    found = []
    for path in sorted(folder.glob("n*/logs/*.log")):
        if not path.name.startswith("zygote") and "Traceback (" in (text := path.read_text(errors="replace")):
            found.append(f"{path.name}: {text.strip().splitlines()[-1][:300]}")
    return found
