"""Turns views of etcd into the job view that the state machine decides on, tolerating records it cannot read."""

from __future__ import annotations

import msgspec
import structlog

from elastic.contract.keys import JobKeys
from elastic.contract.records.generation_delta import BaseMissing
from elastic.contract.records.job_records import ProgressRecord, ProtocolVersionMismatch, decode
from elastic.etcd.client import View
from elastic.recovery.facts.view import JobReader, JobView
from elastic.recovery.machine.model import LARGE_JOB_NODES, Agent

PAUSE_S = 0.001
"""With more than LARGE_JOB_NODES keys: seconds per key until the next view. With 1,000 nodes one per second, rather
than two per new node."""


class ViewThrottle:
    """Holds views back, keeping the newest only, until a generation is formed or the pause is over."""

    def __init__(self, generation_key: str) -> None:
        self._generation_key = generation_key
        self._held_back: View | None = None
        self._next_s = 0.0

    @property
    def due_s(self) -> float:
        """When the held-back view may be processed; inf: there is none."""
        return self._next_s if self._held_back is not None else float("inf")

    def pick(self, newest: View | None, formed: bool, now_s: float) -> View | None:
        """The view to process now, if any. `newest`: the one received since the last call; `formed`: whether the agent
        is in a generation, which a delay could harm."""
        view = newest or self._held_back
        self._held_back = None
        if view is None:
            return None
        crowd = len(view.kvs) > LARGE_JOB_NODES and not formed and self._generation_key not in view.kvs
        if crowd and now_s < self._next_s:
            self._held_back = view
            return None
        self._next_s = now_s + PAUSE_S * len(view.kvs)
        return view


log = structlog.get_logger()


class ViewReader:
    """Reads the views of one job."""

    def __init__(self, keys: JobKeys) -> None:
        self._reader = JobReader(keys)
        self.throttle = ViewThrottle(keys.generation)
        self._progress_key = keys.progress
        self._head = keys.head
        self._decoded, self._broken = (keys.spec, keys.state, keys.generation), keys.broken_all
        self.unreadable = ""
        """Why the newest view could not be read and the previous one is in use; '' when it could."""
        self.lacks_base = False
        """It could not be read as its generation tells its changes since nodes that are not known here."""
        self.known_step: int | None = None
        """Step in the leader's progress record when this agent first saw the whole job; None: not read yet."""

    def read(self, view: View, agent: Agent) -> JobView:
        """Raises ProtocolVersionMismatch while the agent is in no generation. Later it returns the previous job view
        instead: training continues as it is, and records of a newer version do not concern this agent."""
        self.lacks_base = False
        try:
            has_all_members = view.prefix != self._head
            job = self._reader.read(view.kvs, view.revision, has_all_members)
            if self.known_step is None and has_all_members:
                told = view.kvs.get(self._progress_key)
                self.known_step = decode(ProgressRecord, told.value).step if told else 0
        except ProtocolVersionMismatch as error:
            if agent.formed.generation is None:
                raise
            return self._last(agent, str(error))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            self.lacks_base = isinstance(error, BaseMissing)
            return self._last(agent, f"a record in etcd cannot be read: {error}")
        # Without one of these the view would say something else. Another refused key is as if it were not there.
        if head := min((k for k in view.refused if k in self._decoded or k.startswith(self._broken)), default=""):
            return self._last(agent, f"{head} in etcd is refused: {view.refused[head].why}")
        self.unreadable = ""
        return job

    def _last(self, agent: Agent, why: str) -> JobView:
        if why != self.unreadable:
            log.error("etcd.unreadable", error=why)
            self.unreadable = why
        return agent.etcd.view
