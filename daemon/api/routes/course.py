"""A job's course on this node: the points that its agent has kept, as the answer of the API."""

from __future__ import annotations

import msgspec

from elastic.contract.agent_files import History
from elastic.contract.records.job_records import GenerationRecord, SpecRecord
from elasticd.base import answers
from elasticd.base.folders import Folder, read_file

MOST_BYTES = 1024 * 1024
"""An agent's file has 60 kB at most; it may be another user's."""
NODES_NAMED = 8

_DECODER = msgspec.json.Decoder(History)


def read(logs: Folder, spec: SpecRecord | None = None) -> answers.History | None:
    """`logs`: the job's folder of logs, beside the agent's; `spec`: the job, if etcd has it: the file may be that of an
    earlier one of its name. None: no agent of the job has written a point here."""
    try:
        agent = Folder(logs.root, (*logs.names[:-1], "agent"))
        found = _DECODER.decode(read_file(agent, "history.json", MOST_BYTES))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if spec is not None and found.submitted_wall_s != spec.submitted_wall_s:
        return None
    points = [msgspec.convert(msgspec.structs.asdict(point), answers.Point) for point in found.points]
    return answers.History(every_s=found.every_s, points=points)


def nowhere(job: str, generation: GenerationRecord | None, node: str) -> str:
    """Why there is no course of `job` here."""
    others = [p.node for p in generation.nodes if p.node != node] if generation else []
    ask = f": ask on {', '.join(others[:NODES_NAMED])}" if others else ""
    return f"job {job!r} has made no step on node {node!r}{ask}"
