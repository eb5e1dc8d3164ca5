"""`elasticctl fault`: a signal to a worker of this node, or leave to add to its job's plan (docs/testing.md)."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from elastic.contract.records.job_records import SpecRecord
from elastic.util.processes import has_ended, stat_fields
from elasticd.access.authority import owner_name
from elasticd.api.actions import job_of
from elasticd.api.request import Query, Request, read_body
from elasticd.api.views.views import newest_progress
from elasticd.base.answers import LONGEST_WAIT_S, Json
from elasticd.base.errors import Refused
from elasticd.cluster.cluster import Job
from elasticd.cluster.published_state import LocalAgent, Snapshot

from . import job_routes

PLAN_ENV, PRELOAD = "ELASTIC_TESTING", "elastic.testing.preload"
"""What the description of a job with a plan of faults has; as elastic.testing reads it."""


class Strike(msgspec.Struct):
    """The body; further fields are the plan's."""

    do: Literal["kill", "stop", "hang", "fail", "call"]
    rank: Annotated[int, Meta(ge=0)]
    step: Annotated[int, Meta(ge=0)] | None = None
    for_s: Annotated[float, Meta(gt=0)] | None = None
    signal: Literal["SIGKILL", "SIGTERM", "SIGINT", "SIGABRT", "SIGSEGV", "SIGBUS"] = "SIGKILL"


def post_fault(h: Request, query: Query, job: str) -> Json:
    snapshot, asked, me = h.service.published.now, read_body(h, Strike), h.service.identity.node
    current = job_of(snapshot, job)
    h.service.authority.check_job(h.peer(), job, current.spec, "strike")
    agent, pid = _worker(snapshot, current, asked.rank, me)
    if not h.service.allow_faults:
        raise Refused(
            409, f"node {me!r} takes no faults: set allow_faults = true in its settings (elasticctl config show), and "
            "restart its elasticd"
        )  # fmt: skip
    struck: Json = {"job": job, "do": asked.do, "rank": asked.rank, "node": me}
    if plan := _plan(current.spec):
        if current.spec is None or h.peer().uid != current.spec.uid:  # root must not write where a user says
            owner = owner_name(current.spec)
            raise Refused(403, f"the plan {plan} is a file of {owner}, who alone adds to it: be {owner} (sudo -u)")
        return struck | {"plan": plan, "step": _step(snapshot, current, asked.step)}
    further = sorted(h.body().keys() - {"do", "rank", "for_s" if asked.do == "stop" else "signal"})
    if asked.do not in ("kill", "stop") or further:
        what = f"{asked.do} with {', '.join(further)}" if further else asked.do
        raise Refused(
            409, f"job {job!r} has no plan of faults, so that only a kill or a stop at once is possible, not {what}: "
            f"submit it with preload = [{PRELOAD!r}] and {PLAN_ENV} in its env (docs/testing.md)"
        )  # fmt: skip
    if asked.for_s is not None and asked.for_s > LONGEST_WAIT_S:
        raise Refused(400, f"for_s = {asked.for_s:g}: at most {LONGEST_WAIT_S:g} s; without it, for good")
    number = signal.Signals.SIGSTOP if asked.do == "stop" else signal.Signals[asked.signal]
    h.service.log.warning("fault.strikes", job=job, rank=asked.rank, pid=pid, signal=number.name, by=h.peer().user)
    ended = _send(agent, pid, number, asked.for_s)
    return struck | {"pid": pid, "signal": number.name, "for_s": asked.for_s, "ended": ended}


def _worker(snapshot: Snapshot, job: Job, rank: int, me: str) -> tuple[LocalAgent, int]:
    """(this node's agent of the job, the process of the rank). Raises Refused (404, 409)."""
    if job.over or job.generation is None:
        raise Refused(409, f"job {job.name!r} does not run: it is {job.state.phase}; a fault needs one that trains")
    agent = snapshot.agents.get(job.name)
    rows = agent.status.ranks if agent and agent.status else ()
    if agent and (pid := next((row.pid for row in rows if row.rank == rank and row.node == me), 0)):
        return agent, pid
    if there := job_routes.other_nodes(snapshot, job.name, me, rank):
        raise Refused(
            409, f"rank {rank} runs on node {there[0]!r}, and a node strikes its own workers only: run elasticctl "
            f"fault there, or with --socket of the elasticd of {there[0]}"
        )  # fmt: skip
    ranks = job.generation.world_size
    wrong = f"it has ranks 0 to {ranks - 1}" if rank >= ranks else "its worker is being started: try again"
    raise Refused(404 if rank >= ranks else 409, f"job {job.name!r} has no worker of rank {rank}: {wrong}")


def _plan(spec: SpecRecord | None) -> str:
    """The path of the job's plan of faults; empty: it has none."""
    if spec is None or PRELOAD not in spec.spec.preload or not (path := spec.spec.env.get(PLAN_ENV)):
        return ""
    return os.path.join(spec.spec.workdir, path)


def _step(snapshot: Snapshot, job: Job, wanted: int | None) -> int:
    """The step at which a fault of the plan strikes: `wanted`, or one so far ahead that all have read it by then."""
    progress = newest_progress(snapshot, job)
    if progress is None or not progress.managed:
        if wanted is None:
            raise Refused(409, f"job {job.name!r} tells no steps now: say at which one, with --step")
        return wanted
    if wanted is not None and wanted <= progress.step:
        raise Refused(409, f"step {wanted} has passed: job {job.name!r} is at {progress.step}; leave out --step")
    return wanted or progress.step + 2 + math.ceil(progress.steps_per_s * job_routes.AHEAD_S)


def _send(agent: LocalAgent, pid: int, number: int, for_s: float | None) -> bool | None:
    """Whether the process has ended while it was stopped for `for_s`; None: it was not. The agent's file names it, and
    the job's user may write that file: so it is to be the agent's child, and of its user. Raises Refused (409)."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        raise Refused(409, f"process {pid} has just ended: try again") from None
    try:
        if stat_fields(pid)[1:2] != [str(agent.pid)] or not job_routes.same_user(pid, agent.pid):
            raise Refused(409, f"process {pid} is no worker of this job now: try again")
        signal.pidfd_send_signal(pidfd, number)
        if for_s is None:
            return None
        try:
            ended = has_ended(pidfd, for_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        return ended
    except OSError as error:
        raise Refused(409, f"process {pid} cannot be struck: {error}") from error
    finally:
        os.close(pidfd)
