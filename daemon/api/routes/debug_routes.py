"""The API's answers about a job's gradients: request a sample, and read it. See docs/api.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from elastic.contract.agent_files import GRADIENTS_BYTES, GradientSamples
from elastic.contract.records.job_records import ProgressRecord
from elasticd.api.actions import no_job
from elasticd.api.http import query_values
from elasticd.base.answers import SCHEMA, Json
from elasticd.base.errors import Refused
from elasticd.base.folders import Folder, read_file
from elasticd.diagnosis import gradients
from elasticd.node.asks import ask_each
from elasticd.views.views import newest_progress

from .job_routes import asking, other_nodes

if TYPE_CHECKING:
    from elasticd.api.request import Request

AHEAD_S = 6.0
"""A sample is requested for a step this long ahead: orders reach all nodes before it."""
LATE_S = 1.0
"""So long after a step each rank's sample of it is in its file."""
_DECODER = msgspec.json.Decoder(GradientSamples)


def post_debug(h: Request, query: Mapping[str, str], job: str) -> None:
    snapshot = h.service.published.now
    if job not in snapshot.cluster.jobs:
        raise no_job(job, snapshot)
    known = snapshot.cluster.jobs[job]
    progress = newest_progress(snapshot, known)
    if known.over or progress is None or not progress.step:
        raise Refused(409, f"job {job!r} makes no steps now: there is nothing to sample")
    if not progress.managed:
        raise Refused(409, f"job {job!r} does not call elastic.run: its gradients cannot be sampled")
    step = progress.step + 2 + math.ceil(progress.steps_per_s * AHEAD_S)
    step = h.service.actions.sample(job, step, h.peer(), next_step=progress.step + 1)
    h.send_json(200, {"schema": SCHEMA, "job": job, "step": step, "steps_per_s": progress.steps_per_s})


def get_gradients(h: Request, query: Mapping[str, str], job: str) -> None:
    snapshot, me = h.service.published.now, h.service.identity.node
    if job not in snapshot.cluster.jobs:
        raise no_job(job, snapshot)
    known = snapshot.cluster.jobs[job]
    h.service.authority.check_job(h.peer(), job, known.spec, "read the gradients of")
    rows, unanswered = read(h.service.logs(job), known.spec.submitted_wall_s if known.spec else 0.0), {}
    if "here" not in query:
        answers = ask_each(h.service.asker, other_nodes(snapshot, job, me), f"/v1/jobs/{job}/gradients", {}, asking(h))
        for node, answer in answers.items():
            if "error" in answer:
                unanswered[node] = str(answer["error"])
            else:
                rows += answer["samples"]
    rows.sort(key=lambda row: (row["step"], row["rank"]))
    world_size = known.generation.world_size if known.generation else 0
    step = _shown(rows, query_values.count(query, "step", 0), world_size)
    chosen = [row for row in rows if row["step"] == step]
    h.send_json(200, {
        "schema": SCHEMA, "job": job, "step": step, "world_size": world_size,
        "passed": len(chosen) < world_size and _passed(step, newest_progress(snapshot, known)),
        "ranks": [row["rank"] for row in chosen], "layers": gradients.layers(chosen),
        "findings": gradients.findings(gradients.in_short(chosen)), "samples": rows, "unanswered": unanswered,
    })  # fmt: skip


def _shown(rows: Sequence[Json], wanted: int, world_size: int) -> int:
    """`wanted`, or where an order came too late the first step after it that all ranks have sampled. 0: the newest."""
    steps = Counter(row["step"] for row in rows)
    if not wanted:
        return max(steps, default=0)
    return min((step for step, ranks in steps.items() if step >= wanted and ranks >= world_size > 0), default=wanted)


def _passed(step: int, progress: ProgressRecord | None) -> bool:
    """Whether the job is beyond `step`: a rank that has no sample of it has had the order too late."""
    return progress is not None and progress.step > step + progress.steps_per_s * LATE_S


def read(logs: Folder, submitted_wall_s: float) -> list[Json]:
    """The samples of this node's ranks. `logs`: the job's folder of logs, beside the agent's."""
    try:
        agent = Folder(logs.root, (*logs.names[:-1], "agent"))
        found = _DECODER.decode(read_file(agent, "gradients.json", GRADIENTS_BYTES))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    if found.submitted_wall_s != submitted_wall_s:
        return []
    return [msgspec.to_builtins(sample) for sample in found.ranks]
