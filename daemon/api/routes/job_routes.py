"""The API's answers about one job's ranks, wherever they run. See docs/api.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elasticd.api import request
from elasticd.api.actions import job_of
from elasticd.api.request import Query, Request
from elasticd.base.answers import Json
from elasticd.base.errors import Refused
from elasticd.cluster.published_state import Snapshot
from elasticd.node.asks import User, ask_each

from . import stacks


def get_stacks(h: Request, query: Query, job: str) -> Json:
    snapshot = h.service.published.now
    h.service.authority.check_job(h.peer(), job, job_of(snapshot, job).spec, "read the stacks of")
    rank = request.count(query, "rank", 0) if "rank" in query else None
    rows = stacks.of_workers(snapshot.agents.get(job), rank, stacks.dump)
    further, unanswered = rows_elsewhere(h, query, job, "stacks", {"rank": rank} if rank is not None else {}, rank)
    rows += further
    if not rows and not unanswered and "here" not in query:
        raise Refused(404, f"job {job!r} has no {'worker' if rank is None else f'rank {rank}'} now")
    rows.sort(key=lambda row: (row["rank"] < 0, row["rank"], row["node"], row["slot"]))
    return {"job": job, "stacks": rows, "unanswered": unanswered}


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
    known = snapshot.cluster.jobs.get(job)
    if known is None:
        return []
    generation = known.generation
    if rank is not None:
        places = generation.nodes if generation else ()
        return [p.node for p in places if generation and rank in generation.ranks(p.node).values() and p.node != me]
    placed = {p.node for p in generation.nodes} if generation else set()
    workers = {n for n, node in snapshot.cluster.nodes.items() if any(w.job == job for w in node.record.workers)}
    return sorted(({*known.members} | placed | workers) - {me})
