"""From what etcd shows to what the machine decides on: the job as one picture, whatever strange records lie in it."""

from __future__ import annotations

import time

import msgspec
import structlog

from ..core.keys import JobKeys
from ..core.model import Agent
from ..core.records import ProgressRecord, ProtocolVersionMismatch, decode
from ..core.view import JobView, Reader
from ..etcd import View
from .view_throttle import ViewThrottle

log = structlog.get_logger()


class ViewReader:
    """Reads the views of one job."""

    def __init__(self, keys: JobKeys) -> None:
        self._reader = Reader(keys)
        self._gathering = ViewThrottle(keys.generation)
        self._progress_key = keys.progress
        self._head = keys.head
        self.contact_wall_s = 0.0
        """When etcd last answered."""
        self.unreadable = ""
        """Why the newest view is not the picture in use; '' when it is."""
        self.known_step: int | None = None
        """What had been committed when this agent came, as the leader of then had told; None: not read yet."""

    def pick(self, newest: View | None, agent: Agent, now_s: float) -> View | None:
        """The view to read now, if any; `newest`: what came since the last call."""
        return self._gathering.pick(newest, agent.generation is not None, now_s)

    @property
    def due_s(self) -> float:
        """When to pick again even if nothing has come."""
        return self._gathering.due_s

    def read(self, view: View, agent: Agent) -> JobView:
        """Raises ProtocolVersionMismatch while the agent is in no generation; later it keeps to its last picture, since
        training goes on as it is, and what is new is not for us."""
        if view.connected:
            self.contact_wall_s = time.time()
        try:
            whole = view.prefix != self._head
            job = self._reader.read(view.kvs, view.revision, whole)
            if self.known_step is None and whole:
                told = view.kvs.get(self._progress_key)
                self.known_step = decode(ProgressRecord, told.value).step if told else 0
        except ProtocolVersionMismatch as error:
            if agent.generation is None:
                raise
            return self._last(agent, str(error))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            return self._last(agent, f"a record in etcd cannot be read: {error}")
        self.unreadable = ""
        return job

    def _last(self, agent: Agent, why: str) -> JobView:
        if why != self.unreadable:
            log.error("etcd.unreadable", error=why)
            self.unreadable = why
        return agent.view
