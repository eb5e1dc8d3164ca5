"""The API's answers about one job's ranks, wherever they run. See docs/api.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from elasticd.api.actions import no_job
from elasticd.api.http import query_values
from elasticd.base.answers import SCHEMA, Json
from elasticd.base.errors import Refused
from elasticd.cluster.published_state import Snapshot
from elasticd.node.asks import User, ask_each

from . import stacks

if TYPE_CHECKING:
    from elasticd.api.request import Request


def get_stacks(h: Request, query: Mapping[str, str], job: str) -> None:
    snapshot, me = h.service.published.now, h.service.identity.node
    if job not in snapshot.cluster.jobs:
        raise no_job(job, snapshot)
    h.service.authority.check_job(h.peer(), job, snapshot.cluster.jobs[job].spec, "read the stacks of")
    rank = query_values.count(query, "rank", 0) if "rank" in query else None
    rows = stacks.of_workers(snapshot.agents.get(job), rank, stacks.dump)
    unanswered: dict[str, str] = {}
    if "here" not in query:
        asked: Json = {"rank": rank} if rank is not None else {}
        for node, answer in ask_each(
            h.service.asker, other_nodes(snapshot, job, me, rank), f"/v1/jobs/{job}/stacks", asked, asking(h)
        ).items():
            if "error" in answer:
                unanswered[node] = str(answer["error"])
            else:
                rows += answer["stacks"]
        if not rows and not unanswered:
            raise Refused(404, f"job {job!r} has no {'worker' if rank is None else f'rank {rank}'} now")
    rows.sort(key=lambda row: (row["rank"] < 0, row["rank"], row["node"], row["slot"]))
    h.send_json(200, {"schema": SCHEMA, "job": job, "stacks": rows, "unanswered": unanswered})


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
