"""The API's answers about one job from what its agents have kept: stacks, course, gradients. See docs/api.md."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from elastic.contract.agent_files import GRADIENTS_BYTES, GradientSamples, History
from elastic.contract.records.job_records import GenerationRecord, ProgressRecord, RankRow, SpecRecord
from elasticd.api import request
from elasticd.api.actions import job_of
from elasticd.api.request import Query, Request
from elasticd.api.views.views import newest_progress
from elasticd.base import answers
from elasticd.base.answers import Json
from elasticd.base.command_answers import Gradients, Layer, Stack, Stacks
from elasticd.base.errors import Refused
from elasticd.base.folders import Folder, read_file
from elasticd.cluster.published_state import LocalAgent, Snapshot
from elasticd.diagnosis import gradients
from elasticd.node.asks import User, ask_each


def get_stacks(h: Request, query: Query, job: str) -> Stacks:
    snapshot = h.service.published.now
    h.service.authority.check_job(h.peer(), job, job_of(snapshot, job).spec, "read the stacks of")
    rank = request.count(query, "rank", 0) if "rank" in query else None
    rows = of_workers(snapshot.agents.get(job), rank, dump)
    further, unanswered = rows_elsewhere(h, query, job, "stacks", {"rank": rank} if rank is not None else {}, rank)
    rows += [msgspec.convert(row, Stack) for row in further]
    if not rows and not unanswered and "here" not in query:
        raise Refused(404, f"job {job!r} has no {'worker' if rank is None else f'rank {rank}'} now")
    rows.sort(key=lambda row: (row.rank < 0, row.rank, row.node, row.slot))
    return Stacks(job=job, stacks=rows, unanswered=unanswered)


def rows_elsewhere(
    h: Request, query: Query, job: str, what: str, asked: Mapping[str, object], rank: int | None = None
) -> tuple[list[Json], dict[str, str]]:
    """(the rows that the other nodes with workers of the job answer, node -> why it has not answered); none where
    another node asks."""
    if "here" in query:
        return [], {}
    nodes = other_nodes(h.service.published.now, job, h.service.identity.node, rank)
    answers = ask_each(h.service.asker, nodes, f"/v1/jobs/{job}/{what}", asked, asking(h))
    key = {"gradients": "samples"}.get(what, what)
    rows = [row for answer in answers.values() for row in answer.get(key, ())]
    return rows, {node: str(answer["error"]) for node, answer in answers.items() if "error" in answer}


def asking(h: Request) -> User:
    """The user of this request, for the daemon of another node."""
    peer = h.peer()
    return User(name=peer.user, uid=peer.uid, admin=h.service.authority.is_admin(peer))


def other_nodes(snapshot: Snapshot, job: str, me: str, rank: int | None = None) -> Sequence[str]:
    """The nodes besides `me` that have workers of the job, or `rank`."""
    current = snapshot.cluster.jobs.get(job)
    if current is None:
        return []
    generation = current.generation
    if rank is not None:
        places = generation.nodes if generation else ()
        return [p.node for p in places if generation and rank in generation.ranks(p.node).values() and p.node != me]
    placed = {p.node for p in generation.nodes} if generation else set()
    workers = {n for n, node in snapshot.cluster.nodes.items() if any(w.job == job for w in node.record.workers)}
    return sorted(({*current.members} | placed | workers) - {me})


HISTORY_BYTES = 1024 * 1024
"""An agent's file has 60 kB at most; it may be another user's."""
NODES_NAMED = 8

T = TypeVar("T")


def history(logs: Folder, spec: SpecRecord | None = None) -> answers.History | None:
    """`logs`: the job's folder of logs, beside the agent's; `spec`: the job, if etcd has it: the file may be that of an
    earlier one of its name. None: no agent of the job has written a point here."""
    written = agent_file(logs, "history.json", HISTORY_BYTES, History)
    if written is None or (spec is not None and written.submitted_wall_s != spec.submitted_wall_s):
        return None
    return msgspec.convert(written, answers.History, from_attributes=True)


def agent_file(logs: Folder, name: str, most_bytes: int, kind: type[T]) -> T | None:
    """What the job's agent has written to a file of its own, beside `logs`; None: nothing that is valid."""
    try:
        raw = read_file(Folder(logs.root, (*logs.names[:-1], "agent")), name, most_bytes)
        return msgspec.json.decode(raw, type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def nowhere(job: str, generation: GenerationRecord | None, node: str) -> str:
    """Why there is no course of `job` here."""
    others = [p.node for p in generation.nodes if p.node != node] if generation else []
    ask = f": ask on {', '.join(others[:NODES_NAMED])}" if others else ""
    return f"job {job!r} has made no step on node {node!r}{ask}"


AHEAD_S = 6.0
"""A sample is requested for a step this long ahead: orders reach all nodes before it."""
LATE_S = 1.0
"""So long after a step each rank's sample of it is in its file."""


def post_debug(h: Request, query: Query, job: str) -> Json:
    snapshot = h.service.published.now
    current = job_of(snapshot, job)
    progress = newest_progress(snapshot, current)
    if current.over or progress is None or not progress.step:
        raise Refused(409, f"job {job!r} makes no steps now: there is nothing to sample")
    if not progress.managed:
        raise Refused(409, f"job {job!r} does not call elastic.run: its gradients cannot be sampled")
    step = progress.step + 2 + math.ceil(progress.steps_per_s * AHEAD_S)
    step = h.service.actions.sample(job, step, h.peer(), next_step=progress.step + 1)
    return {"job": job, "step": step, "steps_per_s": progress.steps_per_s}


def get_gradients(h: Request, query: Query, job: str) -> Gradients:
    snapshot = h.service.published.now
    current = job_of(snapshot, job)
    h.service.authority.check_job(h.peer(), job, current.spec, "read the gradients of")
    further, unanswered = rows_elsewhere(h, query, job, "gradients", {})
    rows = [*samples(h.service.logs(job), current.spec.submitted_wall_s if current.spec else 0.0), *further]
    rows.sort(key=lambda row: (row["step"], row["rank"]))
    world_size = current.generation.world_size if current.generation else 0
    step = _shown(rows, request.count(query, "step", 0), world_size)
    chosen = [row for row in rows if row["step"] == step]
    return Gradients(
        job=job, step=step, world_size=world_size,
        passed=len(chosen) < world_size and _passed(step, newest_progress(snapshot, current)),
        ranks=[row["rank"] for row in chosen], layers=msgspec.convert(gradients.layers(chosen), list[Layer]),
        findings=list(gradients.findings(gradients.in_short(chosen))), samples=rows, unanswered=unanswered,
    )  # fmt: skip


def _shown(rows: Sequence[Json], wanted: int, world_size: int) -> int:
    """`wanted`, or where an order came too late the first step after it that all ranks have sampled. 0: the newest."""
    steps = Counter(row["step"] for row in rows)
    if not wanted:
        return max(steps, default=0)
    return min((step for step, ranks in steps.items() if step >= wanted and ranks >= world_size > 0), default=wanted)


def _passed(step: int, progress: ProgressRecord | None) -> bool:
    """Whether the job is beyond `step`: a rank that has no sample of it has had the order too late."""
    return progress is not None and progress.step > step + progress.steps_per_s * LATE_S


def samples(logs: Folder, submitted_wall_s: float) -> list[Json]:
    """The samples of this node's ranks. `logs`: the job's folder of logs, beside the agent's."""
    written = agent_file(logs, "gradients.json", GRADIENTS_BYTES, GradientSamples)
    if written is None or written.submitted_wall_s != submitted_wall_s:
        return []
    return [msgspec.to_builtins(sample) for sample in written.ranks]


AT_ONCE = 8
"""Dumps at a time: those of processes that do not answer must not add up to more than another node waits for."""
MOST_WORKERS = 64
DUMP_S = 5.0
"""Time limit of one dump; it takes 0.1 s on an idle machine."""
STACK_CHARS = 20_000
NO_STACK = "no stack could be read"


def of_workers(agent: LocalAgent | None, rank: int | None, dump: Callable[[int], str]) -> list[Stack]:
    """A row per worker of this node's agent, or that of `rank` alone; of the first MOST_WORKERS."""
    if agent is None or agent.status is None:
        return []
    wanted = [row for row in agent.status.ranks if rank is None or row.rank == rank][:MOST_WORKERS]

    def one(row: RankRow) -> Stack:
        # The agent's file names the process, and a job's user may write that file: it must not make root look at the
        # processes of other users.
        theirs = 0 < row.pid < 1 << 31 and same_user(row.pid, agent.pid)
        stack = dump(row.pid) if theirs else f"process {row.pid} is no worker of this job"
        return Stack(row.rank, row.node, row.slot, row.pid, row.phase, row.step, stack)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, wanted))


def same_user(pid: int, other: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.stat(f"/proc/{other}").st_uid
    except OSError:
        return False


def dump(pid: int, environment: Mapping[str, str] = os.environ) -> str:
    """The Python stack of each thread of a process; why there is none, if it cannot be read."""
    tool = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if tool is None:
        return "py-spy is not installed: pip install py-spy"
    argv = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(argv, env=dict(environment), capture_output=True, timeout=DUMP_S, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"{NO_STACK}: {error}"
    if done.returncode:
        return f"{NO_STACK}: {(done.stderr.decode(errors='replace').strip() or str(done.returncode))[-500:]}"
    return done.stdout.decode(errors="replace")[:STACK_CHARS]
