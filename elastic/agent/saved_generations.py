"""The newest generations that the job has checkpoints of: its number continues from them (see `leading`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import structlog

from elastic.checkpoint.format.errors import CheckpointError
from elastic.checkpoint.format.folder_id import folder_id
from elastic.checkpoint.stored.find import newest_generation, peek
from elastic.checkpoint.stored.remote import list_remote
from elastic.contract.job.spec import JobSpec
from elastic.recovery.machine.events import Event, NewestSaved

from .write_queue import FAILURES, WriteQueue

log = structlog.get_logger()


LIST_S = 10.0
"""For how long the remote end may take to list its checkpoints before publications go on without it."""
FRESH_S = 60.0
"""For how long the result of a listing that was late may be used: later there are copies that it does not know."""


class RemoteEnd:
    """Lists the checkpoints at the remote end in a thread: its storage may hang, and then no publication may wait."""

    def __init__(self, limit_s: float = LIST_S, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._begun_s = self._ended_s = 0.0
        self._listing: Future[int] | None = None
        """The one that is under way: no other is begun beside it, and a late result is used by a call that comes within
        `FRESH_S` of its end."""

    def newest(self, url: str, job: str) -> int:
        """The newest generation of `job` at `url`; 0: there is none. Raises CheckpointError, also if it takes longer
        than the limit, counted from the beginning of the listing."""
        listing = self._listing
        if listing is None or (listing.done() and self._clock() - self._ended_s > FRESH_S):
            self._listing, listing = None, Future()
            thread = threading.Thread(
                target=self._list, args=(listing, url, job), name="elastic-remote-list", daemon=True
            )
            thread.start()
            self._listing, self._begun_s = listing, self._clock()
        wait([listing], timeout=max(0.0, self._begun_s + self._limit_s - self._clock()))
        if not listing.done():
            raise CheckpointError(f"listing {url} takes longer than {self._limit_s:g} s")
        self._listing = None
        return listing.result()

    def _list(self, listing: Future[int], url: str, job: str) -> None:
        try:
            newest = max([0, *(generation for _, generation, _ in list_remote(url, job))])
        except FAILURES as error:
            self._ended_s = self._clock()
            listing.set_exception(error)
        else:
            self._ended_s = self._clock()
            listing.set_result(newest)


class NewestSavedFinder:
    """Carries out `FindNewestSaved` in a thread of its own, as folders may hang."""

    def __init__(self, spec: JobSpec, post: Callable[[Event], None]) -> None:
        self._spec, self._post, self._remote_end = spec, post, RemoteEnd()
        self._queue = WriteQueue("checkpoints")
        if spec.checkpoint.dir:
            self._queue.start()

    def find(self, *, remote: bool) -> None:
        self._queue.ask("newest saved", lambda: self.look(remote=remote), persist=False)

    def look(self, *, remote: bool) -> None:
        try:
            saved = NewestSaved(newest_saved(self._spec, self._remote_end if remote else None), remote)
        except (OSError, CheckpointError) as error:
            saved = NewestSaved(0, remote, str(error))
        self._post(saved)

    def close(self) -> None:
        if self._spec.checkpoint.dir:
            self._queue.close(0.0)


def newest_saved(spec: JobSpec, remote: RemoteEnd | None) -> int:
    """The newest generation of the checkpoints that this node may load; 0: there is none. `remote`: lists those at the
    remote end; None: they do not count. Raises OSError for the folder, and CheckpointError if only the remote end can
    have one and does not answer."""
    rules = spec.checkpoint
    newest = newest_generation(rules.dir, spec.name)
    if not rules.remote or remote is None:
        return newest
    try:
        return max(newest, remote.newest(rules.remote, spec.name))
    except CheckpointError as error:
        if not peek(rules.dir, spec.name):
            raise  # the workers need it, too
        log.warning("checkpoints.remote_not_listed", remote=rules.remote, error=str(error))
        return newest


def of_own_folder(spec: JobSpec) -> int:
    """The newest generation in this node's checkpoint folder, if no other node can see it; 0: there is none."""
    rules = spec.checkpoint
    if rules.shared or not rules.dir:
        return 0
    try:
        return newest_generation(rules.dir, spec.name)
    except OSError as error:  # its workers cannot load from it either
        log.warning("checkpoints.not_read", folder=rules.dir, error=str(error))
        return 0


def shared_folder(spec: JobSpec) -> str:
    """The id of the checkpoint folder, if several nodes are to share it; '' if they are not, or it cannot be read."""
    rules = spec.checkpoint
    if not rules.shared or not rules.dir or spec.max_nodes < 2:
        return ""
    try:
        return folder_id(rules.dir)
    except OSError as error:  # the first save fails for it, too
        log.warning("checkpoints.not_read", folder=rules.dir, error=str(error))
        return ""
