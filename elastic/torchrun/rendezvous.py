"""The RendezvousHandler that torchrun's agent calls. Its view of etcd and its writes are in `participant`."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic.contract.records.job_records import GenerationRecord, JobState, ProtocolVersionMismatch, decode
from elastic.etcd.client import Etcd, EtcdDenied, EtcdError
from elastic.util.sealed_store import SealedStore

from .participant import RendezvousParticipant
from .settings import BACKEND, TorchrunSettings

T = TypeVar("T")
log = logging.getLogger(__name__)

_CONNECT_S = 2.0
"""Time-out of one attempt to connect to a store."""

_STORE_FAILURES = 30
"""After more failed requests to a store in a row than this, 0.1 s apart, it is given up."""


class EtcdRendezvousHandler(RendezvousHandler):
    """The leader publishes a generation as soon as one is due, whether or not all its nodes have called
    `next_rendezvous` yet; they meet on its store. So re-forming takes one write, and one more to report what broke.
    """

    def __init__(self, settings: TorchrunSettings) -> None:
        self._settings = settings
        self._etcd = Etcd(settings.access)
        self._party = RendezvousParticipant(self._etcd, settings)
        self._shut = False
        self._deadline_s = 0.0

    def start(self) -> None:
        """Connect. Raises RendezvousConnectionError when etcd denies access, but not when it does not answer yet."""
        try:
            self._etcd.get(self._party.keys.state)
        except EtcdDenied as error:
            self._etcd.close()
            raise RendezvousConnectionError(f"etcd refuses this login: {error}") from error
        except EtcdError as error:
            log.warning("rendezvous.etcd_away error=%s", error)
        _keep_from_workers()
        self._party.start()
        atexit.register(self.shutdown)  # torchrun does not call it when ended by a signal

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Workers form their group on the generation's own store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until all nodes of a new generation that includes this node have arrived."""
        self._deadline_s = time.monotonic() + self._settings.join_s
        done = self._party.active
        self._party.join()
        if done is not None and not self._party.trouble(done):
            self._party.give_up(done, "its workers ended; the node asks for a new generation")
        while True:
            generation = self._seat(done)
            if (store := self._meet(generation)) is not None:
                break
            if not self._party.trouble(generation):
                self._party.give_up(generation, f"{self._party.node} cannot use its store")
            done = generation
        self._party.active = generation
        place = generation.node_of(self._party.node, self._party.incarnation)
        assert place is not None
        bootstrap = RendezvousStoreInfo(generation.store_host, generation.store_port)
        return RendezvousInfo(store, generation.nodes.index(place), len(generation.nodes), bootstrap)

    def num_nodes_waiting(self) -> int:
        """Above 0 when the workers must be restarted: for new nodes, and for a lost node or worker.

        Never raises: without contact to etcd, the run continues as it is.
        """
        active = self._party.active
        if active is None or not (trouble := self._party.trouble(active)):
            return 0
        log.info("rendezvous.reform generation=%d why=%s", active.number, trouble)
        return 1

    def is_closed(self) -> bool:
        try:
            kv = self._etcd.get(self._party.keys.state)
        except EtcdError as error:
            raise RendezvousConnectionError(str(error)) from error
        try:
            return kv is not None and decode(JobState, kv.value).phase.over
        except (ProtocolVersionMismatch, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RendezvousStateError(str(error)) from error

    def set_closed(self) -> None:
        try:
            self._party.close_run()
        except EtcdError as error:
            raise RendezvousConnectionError(str(error)) from error

    def shutdown(self) -> bool:
        """Leave. The run stays open for the others."""
        if self._shut:
            return True
        self._shut = True
        atexit.unregister(self.shutdown)
        notified = self._party.leave()
        self._etcd.close()
        self._party.close()
        return notified

    def _seat(self, done: GenerationRecord | None) -> GenerationRecord:
        """Wait for a generation other than `done` that includes this node."""
        party = self._party

        def found() -> GenerationRecord | None:
            generation = party.view.generation
            if generation is None or generation == done or party.trouble(generation):
                return None
            return generation if generation.node_of(party.node, party.incarnation) else None

        with party.changed:
            while (generation := found()) is None:
                self._refuse()
                if self._spare():  # others run at full size without this node: no deadline
                    self._deadline_s = time.monotonic() + self._settings.join_s
                if (left_s := self._deadline_s - time.monotonic()) <= 0:
                    break
                party.changed.wait(min(left_s, 1.0))
        if generation is not None:
            return generation
        raise self._too_late(party.waiting_for)

    def _too_late(self, reason: str) -> Exception:
        contact = self._party.contact
        self.shutdown()  # so that the others do not count on this node
        if contact:
            return RendezvousConnectionError(f"no contact with etcd: {contact}")
        return RendezvousTimeoutError(f"no rendezvous within {self._settings.join_s:g} s: {reason}")

    def _refuse(self) -> None:
        if self._party.fault:
            raise RendezvousStateError(self._party.fault)
        if self._party.view.state.phase.over:
            raise RendezvousClosedError(f"run {self._settings.run_id!r} is closed: {self._party.view.state.reason}")

    def _spare(self) -> bool:
        running = self._party.view.generation
        full = running is not None and len(running.nodes) >= self._settings.max_nodes
        return running is not None and full and not self._party.trouble(running)

    def _meet(self, generation: GenerationRecord) -> SealedStore | None:
        """Wait on the generation's store until all its nodes have arrived. None: they will not."""
        party = self._party

        def worth_it() -> bool:
            with party.changed:
                self._refuse()
                going = not party.trouble(generation)
            if going and time.monotonic() >= self._deadline_s:
                raise self._too_late(f"not all {len(generation.nodes)} nodes came to generation {generation.number}")
            return going

        store: SealedStore | None = None
        while store is None:
            if not worth_it():
                return None
            store = _attempt(lambda: self._connect(generation))
        here = _attempt(lambda: store.add("elastic/here", 1))
        if here is None:
            return None
        if here == len(generation.nodes):
            _attempt(lambda: store.set("elastic/all_here", "1"))
        pause_s, failed = 0.002, 0
        # Not its wait(), which logs a line for every time-out.
        while not (all_here := _attempt(lambda: store.check(["elastic/all_here"]))):
            failed = failed + 1 if all_here is None else 0
            if failed > _STORE_FAILURES or not worth_it():
                return None
            with party.changed:
                party.changed.wait(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        return store

    def _connect(self, generation: GenerationRecord) -> SealedStore:
        timeout = timedelta(seconds=_CONNECT_S)
        host, port = generation.store_host, generation.store_port
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        store.set_timeout(timedelta(seconds=self._settings.conf.read_timeout))
        return SealedStore(store, generation.store_secret)


def _attempt(act: Callable[[], T]) -> T | None:
    """The result of `act`, or None if the store failed or did not answer in time."""
    try:
        return act()
    except (OSError, RuntimeError):
        return None


def _keep_from_workers() -> None:
    """torchrun passes its environment on: remove what is set for the gRPC of this process, which has read it by now."""
    for name, ours in (("GRPC_ENABLE_FORK_SUPPORT", "0"), ("GRPC_VERBOSITY", "NONE")):
        if os.environ.get(name) == ours:
            del os.environ[name]
