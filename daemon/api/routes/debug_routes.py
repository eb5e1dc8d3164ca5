"""The API's answers about a job's gradients: request a sample, and read it. See docs/api.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from elastic.contract.agent_files import GRADIENTS_BYTES, GradientSamples
from elastic.contract.records.job_records import ProgressRecord
from elasticd.api import request
from elasticd.api.actions import job_of
from elasticd.api.request import Query, Request
from elasticd.base.answers import Json
from elasticd.base.errors import Refused
from elasticd.base.folders import Folder
from elasticd.diagnosis import gradients
from elasticd.views.views import newest_progress

from .course import agent_file
from .job_routes import rows_elsewhere

AHEAD_S = 6.0
"""A sample is requested for a step this long ahead: orders reach all nodes before it."""
LATE_S = 1.0
"""So long after a step each rank's sample of it is in its file."""
_DECODER = msgspec.json.Decoder(GradientSamples)


def post_debug(h: Request, query: Query, job: str) -> Json:
    snapshot = h.service.published.now
    known = job_of(snapshot, job)
    progress = newest_progress(snapshot, known)
    if known.over or progress is None or not progress.step:
        raise Refused(409, f"job {job!r} makes no steps now: there is nothing to sample")
    if not progress.managed:
        raise Refused(409, f"job {job!r} does not call elastic.run: its gradients cannot be sampled")
    step = progress.step + 2 + math.ceil(progress.steps_per_s * AHEAD_S)
    step = h.service.actions.sample(job, step, h.peer(), next_step=progress.step + 1)
    return {"job": job, "step": step, "steps_per_s": progress.steps_per_s}


def get_gradients(h: Request, query: Query, job: str) -> Json:
    snapshot = h.service.published.now
    known = job_of(snapshot, job)
    h.service.authority.check_job(h.peer(), job, known.spec, "read the gradients of")
    further, unanswered = rows_elsewhere(h, query, job, "gradients", {})
    rows = [*read(h.service.logs(job), known.spec.submitted_wall_s if known.spec else 0.0), *further]
    rows.sort(key=lambda row: (row["step"], row["rank"]))
    world_size = known.generation.world_size if known.generation else 0
    step = _shown(rows, request.count(query, "step", 0), world_size)
    chosen = [row for row in rows if row["step"] == step]
    return {
        "job": job, "step": step, "world_size": world_size,
        "passed": len(chosen) < world_size and _passed(step, newest_progress(snapshot, known)),
        "ranks": [row["rank"] for row in chosen], "layers": gradients.layers(chosen),
        "findings": list(gradients.findings(gradients.in_short(chosen))), "samples": rows, "unanswered": unanswered,
    }  # fmt: skip


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
    written = agent_file(logs, "gradients.json", GRADIENTS_BYTES, _DECODER)
    if written is None or written.submitted_wall_s != submitted_wall_s:
        return []
    return [msgspec.to_builtins(sample) for sample in written.ranks]
