"""A job's course on this node: the points that its agent has kept, as the answer of the API."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from elastic.contract.agent_files import History
from elastic.contract.records.job_records import GenerationRecord, SpecRecord
from elasticd.base import answers
from elasticd.base.folders import Folder, read_file

MOST_BYTES = 1024 * 1024
"""An agent's file has 60 kB at most; it may be another user's."""
NODES_NAMED = 8

_DECODER = msgspec.json.Decoder(History)
T = TypeVar("T")


def read(logs: Folder, spec: SpecRecord | None = None) -> answers.History | None:
    """`logs`: the job's folder of logs, beside the agent's; `spec`: the job, if etcd has it: the file may be that of an
    earlier one of its name. None: no agent of the job has written a point here."""
    history = agent_file(logs, "history.json", MOST_BYTES, _DECODER)
    if history is None or (spec is not None and history.submitted_wall_s != spec.submitted_wall_s):
        return None
    points = [msgspec.convert(msgspec.structs.asdict(point), answers.Point) for point in history.points]
    return answers.History(every_s=history.every_s, points=points)


def agent_file(logs: Folder, name: str, most_bytes: int, decoder: msgspec.json.Decoder[T]) -> T | None:
    """What the job's agent has written to a file of its own; None: nothing that is valid. `logs`: as for `read`."""
    try:
        return decoder.decode(read_file(Folder(logs.root, (*logs.names[:-1], "agent")), name, most_bytes))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def nowhere(job: str, generation: GenerationRecord | None, node: str) -> str:
    """Why there is no course of `job` here."""
    others = [p.node for p in generation.nodes if p.node != node] if generation else []
    ask = f": ask on {', '.join(others[:NODES_NAMED])}" if others else ""
    return f"job {job!r} has made no step on node {node!r}{ask}"
