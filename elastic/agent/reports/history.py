"""The job's course on this node, for `elasticctl loss` and `report`: a bounded number of points, in a file."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import msgspec

from elastic.contract.agent_files import History, Point
from elastic.contract.records.job_records import PROTOCOL, ProgressRecord
from elastic.recovery.machine.model import Agent

from .status import write_for_daemon

KEPT_POINTS = 1000
EVERY_S = 2.0
WRITE_S = 10.0

_DECODER = msgspec.json.Decoder(History)


def added(history: History, point: Point, *, last: bool = False) -> History:
    """With `point`, if it is the last one or dated at least `every_s` after the one before; or before it, by a clock
    that was set back.

    Of too many points every second one goes, so that the whole course is kept, ever more coarsely; the first one stays.
    """
    points = history.points
    if points and not last and abs(point.wall_s - points[-1].wall_s) < history.every_s:
        return history
    points = (*points, point)
    every_s = history.every_s
    if len(points) > KEPT_POINTS:
        points, every_s = points[::2], every_s * 2
    return msgspec.structs.replace(history, points=points, every_s=every_s)


class HistoryFile:
    """Continues the file of this node's previous agent."""

    def __init__(self, folder: Path, submitted_wall_s: float) -> None:
        self._path = folder / "history.json"
        self._history = _read(folder / "history.json", submitted_wall_s)
        self._due_s = -math.inf

    def note(self, agent: Agent, progress: ProgressRecord, now_s: float, *, last: bool = False) -> None:
        """Add the job as it is in `progress`, and write the file from time to time and at the end. An agent without a
        rank has nothing to add: its record repeats the leader's."""
        generation, history = agent.formed.generation, self._history
        if generation is not None and generation.ranks(agent.policy.node) and progress.step:
            loss = progress.loss if progress.loss is not None and math.isfinite(progress.loss) else None
            point = Point(
                wall_s=round(progress.wall_s, 1), step=progress.step, loss=loss, steps_per_s=progress.steps_per_s,
                world_size=progress.world_size,
            )  # fmt: skip
            self._history = added(history, point, last=last)
        if self._history.points and (last or now_s >= self._due_s):
            self._due_s = now_s + WRITE_S
            write_for_daemon(self._path, self._history)


def _read(path: Path, submitted_wall_s: float) -> History:
    """The file's content if it is whole and of this job, else an empty history."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = _DECODER.decode(path.read_bytes())
        if found.submitted_wall_s == submitted_wall_s and found.protocol == PROTOCOL and found.every_s >= EVERY_S:
            return found
    return History(submitted_wall_s=submitted_wall_s, every_s=EVERY_S)
