"""One torchrun agent of a run: its leased member key, its view of the other agents, and its part as a leader.

One thread does the writing. It is woken by the watch on etcd and by the handler, decides with
`recovery.membership`, and hosts the TCPStore of each generation that it publishes. The handler's thread reads and
waits; it writes only to leave or to close the run.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid

import msgspec

from elastic.agent.etcd.member_writes import MemberKey, next_record
from elastic.agent.peers.store import Stores
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import (
    BrokenRecord,
    GenerationHead,
    GenerationRecord,
    MemberRecord,
    ProtocolVersionMismatch,
    decode,
    encode,
)
from elastic.contract.records.phases import PhaseTrigger, after
from elastic.etcd.client import Absent, Compare, Delete, Etcd, EtcdError, Lease, ModIs, Op, Put, View
from elastic.recovery.facts import membership
from elastic.recovery.facts.membership import Change, NodeLimits
from elastic.recovery.facts.view import JobView

from .settings import TorchrunSettings

# As torch logs, without structlog: this runs inside torchrun, whose output is the user's.
log = logging.getLogger(__name__)

CLOSED_KEPT_S = 3600.0
"""How long the mark of a closed run stays in etcd; afterwards its id can be used again."""


class RendezvousParticipant:
    """Safe to read from any thread. `changed` is notified whenever a field below may have changed."""

    def __init__(self, etcd: Etcd, settings: TorchrunSettings) -> None:
        self.etcd = etcd
        self.keys = ClusterKeys(settings.conf.cluster).job(settings.job)
        self.incarnation = uuid.uuid4().hex
        self.host = settings.local_addr or _own_address(settings.access.endpoints[0])
        self.node = f"{socket.gethostname()}-{os.getpid()}-{self.incarnation[:6]}"
        self.changed = threading.Condition()
        self.view = JobView()
        self.contact = "etcd has not answered yet"
        """Why there is no contact with etcd; empty: there is."""
        self.fault = ""
        """Why the records in etcd cannot be read; empty: they can."""
        self.waiting_for = "nothing known"
        """What a new generation waits for, as far as this agent can tell."""
        self.active: GenerationRecord | None = None
        """The generation that this agent's workers run in, or ran in last."""
        self._settings = settings
        self._limits = NodeLimits(settings.min_nodes, settings.max_nodes, settings.conf.last_call_timeout)
        self._stores = Stores(self.host)
        ttl_s = settings.conf.lease_ttl
        self._key = MemberKey(etcd, self.keys.member(self.node), ttl_s, ttl_s * 0.3, self._on_lost)
        self._wanted = False
        self._give_up: BrokenRecord | None = None
        self._absence_ignored_until_s = 0.0
        """Until then, an absent member may be one that has not rejoined after an outage of etcd yet."""
        self._enough_since_s: float | None = None
        self._newcomers_since_s: float | None = None
        self._written_revision = 0
        self._shown_lease = 0
        """The lease of this agent's member record in `view`; 0: the record is not in it."""
        self._wipes = 0
        """How often this agent has seen etcd lose its data."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elastic-party", daemon=True)
        self._again_s = 0.0
        self._woken = False

    def start(self) -> None:
        self.etcd.watch(self.keys.root, self._on_view)
        self._thread.start()

    # For the handler

    def join(self) -> None:
        with self.changed:
            self._wanted = True
            self._wake()

    def give_up(self, generation: GenerationRecord, why: str) -> None:
        """Report that `generation` is broken, unless that has been reported."""
        record = BrokenRecord(generation=generation.number, node=self.node, kind="exit", detail=why, charged=False)
        with self.changed:
            self._give_up = record
            self._wake()

    def trouble(self, running: GenerationRecord) -> str:
        """Why `running` cannot go on: another generation followed, it is broken, or a node is gone. Empty: it can."""
        with self.changed:
            generation, broken = self.view.generation, self.view.broken
            if generation is not None and generation != running:
                return f"generation {generation.number} has taken its place: {generation.why}"
            if generation == running and broken is not None:
                return f"{broken.kind} on {broken.node}: {broken.detail}"
            gone = self._gone(running)
            return f"node {gone[0]} is gone" if gone else ""

    def leave(self, within_s: float = 3.0) -> bool:
        """Stop taking part; the others see it at once. Returns whether etcd was told. May be called twice."""
        with self.changed:
            self._closing = True
            self._wake()
        if self._thread.is_alive():
            self._thread.join(within_s)
        notified = True
        try:
            if (lease := self._key.held) is not None:
                self.etcd.revoke(lease.id)
                self._clean_up()
        except EtcdError as error:
            notified = False
            log.warning("rendezvous.not_deregistered node=%s error=%s", self.node, error)
        self._key.drop()
        return notified

    def close(self) -> None:
        self._stores.close()

    # The watch's thread

    def _on_view(self, view: View) -> None:
        with self.changed:
            was_away = bool(self.contact) and self.view.revision > 0
            self.contact = view.error
            if view.connected:
                try:
                    new = JobView.read(self.keys, view.kvs, view.revision)
                except (ProtocolVersionMismatch, msgspec.DecodeError, UnicodeDecodeError) as error:
                    self.fault = str(error)
                else:
                    wiped = view.revision < self.view.revision
                    if was_away or wiped:
                        # etcd was unreachable, or lost its data: leases start again, and members have yet to rejoin.
                        self._absence_ignored_until_s = time.monotonic() + self._settings.conf.lease_ttl + 1
                        self._written_revision = 0
                    self._wipes += wiped
                    mine = view.kvs.get(self._key.key)
                    self._shown_lease = mine.lease if mine is not None else 0
                    self.view, self.fault = new, ""
            self._wake()

    # The participant's own thread

    def _wake(self) -> None:
        self._woken = True
        self.changed.notify_all()

    def _run(self) -> None:
        pause_s = 0.0
        while True:
            with self.changed:
                if pause_s:  # a call to etcd failed; new views do not shorten the pause
                    self.changed.wait_for(lambda: self._closing, pause_s)
                else:
                    left_s = self._again_s - time.monotonic() if self._again_s else 60.0
                    self.changed.wait_for(lambda: self._woken or self._closing, max(0.0, left_s))
                if self._closing:
                    return
                self._woken, self._again_s = False, 0.0
            try:
                self._turn()
                pause_s = 0.0
            except EtcdError as error:
                log.warning("rendezvous.etcd error=%s", error)
                pause_s = 0.3

    def _turn(self) -> None:
        if not self._wanted or self.contact or self.fault or self.view.revision == 0:
            return
        lease = self._key.held or self._register()
        with self.changed:
            view, shown = self.view, self._shown_lease == lease.id
        if not shown:
            return  # a view from before our record was in it, perhaps of an etcd that has been wiped since
        if self._give_up is not None:
            self._say_broken(view, self._give_up)
        if view.revision < self._written_revision or view.state.phase.over:
            return  # the view does not show our own last write yet, or the run is over
        current = self._current(view)
        if membership.leader(view, frozenset(), current) == self.node:
            self._lead(view, current)

    def _register(self) -> Lease:
        record = MemberRecord(node=self.node, incarnation=self.incarnation, host=self.host, port=0, slots=1, ready=(0,))
        return self._key.join(encode(record))

    def _on_lost(self, reason: str) -> None:
        log.warning("rendezvous.lease_lost node=%s reason=%s", self.node, reason)
        with self.changed:
            self._wake()

    def _guards(self, generation_revision: int) -> list[Compare]:
        """The generation is still at this revision: see `MemberKey.guards`. The view has our member record."""
        return self._key.guards(self.keys.generation, generation_revision)

    def _say_broken(self, view: JobView, record: BrokenRecord) -> None:
        number = view.generation.number if view.generation is not None else 0
        if number == record.generation and view.broken is None:
            key = self.keys.broken(record.generation)
            done = self.etcd.txn([Absent(key), *self._guards(view.generation_revision)], [Put(key, encode(record))]).ok
        else:
            done = number >= record.generation  # lower: etcd has lost the generation, which will be written back
        with self.changed:
            if done and self._give_up is record:
                self._give_up = None

    # Leading

    def _current(self, view: JobView) -> GenerationRecord | None:
        """The generation that the next one follows; None if its nodes are all gone (an earlier run of the same id)."""
        current = view.generation or self.active
        alive = {m.id for m in view.members.values()}
        if current and not any((p.node, p.incarnation) in alive for p in current.nodes):
            return self.active if self._blind() else None
        return current

    def _blind(self) -> bool:
        return time.monotonic() < self._absence_ignored_until_s

    def _gone(self, generation: GenerationRecord) -> list[str]:
        if self._blind():
            return []
        alive = {m.id for m in self.view.members.values()}
        return [p.node for p in generation.nodes if (p.node, p.incarnation) not in alive]

    def _lead(self, view: JobView, current: GenerationRecord | None) -> None:
        if view.generation is None and current is not None:
            self._restore(current)
            return
        now_s, limits = time.monotonic(), self._limits
        last_call_s = limits.join_wait_s
        complete = current is not None and not self._gone(current)
        seated = {(p.node, p.incarnation) for p in current.nodes} if current else set()
        newcomers = [m for m in view.members.values() if m.id not in seated]
        enough = len(view.members) >= limits.min_nodes
        self._enough_since_s = (self._enough_since_s or now_s) if enough else None
        self._newcomers_since_s = (self._newcomers_since_s or now_s) if newcomers else None
        waited_s = now_s - (self._enough_since_s or now_s)
        settled = len(view.members) >= limits.max_nodes or now_s - (self._newcomers_since_s or now_s) >= last_call_s
        situation = membership.Situation(
            view, current, limits, frozenset(), steps_advance=complete, settled=settled, min_reached_for_s=waited_s
        )
        decision = membership.next_generation(situation)
        if isinstance(decision, Change):
            self._publish(view, current, decision)
            return
        self.waiting_for = str(decision.reason)
        ends_s = [self._absence_ignored_until_s] + [
            s + last_call_s for s in (self._enough_since_s, self._newcomers_since_s) if s
        ]
        with self.changed:
            self._again_s = min((s for s in ends_s if s > now_s), default=0.0)

    def _restore(self, current: GenerationRecord) -> None:
        """Write back the record of a running generation, which etcd has lost."""
        result = self.etcd.txn(self._guards(0), [Put(self.keys.generation, encode(current))])
        if result.ok:
            self._written_revision = result.revision
        log.warning("rendezvous.restored generation=%d", current.number)

    def _publish(self, view: JobView, current: GenerationRecord | None, change: Change) -> None:
        before = view.generation or current
        number = before.number + 1 if before else 1
        basis = self._wipes, view.generation_revision
        try:
            record = next_record(self._stores, self.node, number, change, basis=basis)
        except (OSError, RuntimeError) as error:
            self.waiting_for = f"cannot open a store on {self.host}: {error}"
            log.warning("rendezvous.no_store host=%s error=%s", self.host, error)
            with self.changed:
                self._again_s = time.monotonic() + 1
            return
        then: list[Op] = [Put(self.keys.generation, encode(record))]
        if view.broken is not None:
            then.append(Delete(self.keys.broken(view.broken.generation)))
        result = self.etcd.txn(self._guards(view.generation_revision), then)
        if result.ok:
            self._written_revision = result.revision
            self._enough_since_s = self._newcomers_since_s = None
            log.info("rendezvous.published generation=%d nodes=%d why=%s", number, len(change.nodes), change.why)

    def _clean_up(self) -> None:
        """The last agent to leave deletes the run's records, except that a closed run stays closed for a while."""
        if self.fault or self.etcd.newest(self.keys.members).count:
            return
        if (last := self.etcd.get(self.keys.generation)) is not None:
            number = decode(GenerationHead, last.value).number
            then = [Delete(self.keys.generation), Delete(self.keys.broken(number))]
            self.etcd.txn([ModIs(self.keys.generation, last.mod_revision)], then)

    def close_run(self) -> None:
        """Close the run: no generation of it may be formed any more. Raises EtcdError."""
        state = after(self.view.state, PhaseTrigger.CLOSED, "closed by a node", time.time())
        self.etcd.put(self.keys.state, encode(state), self.etcd.grant(CLOSED_KEPT_S))


def _own_address(endpoint: str) -> str:
    """The address at which others reach this host: the source address of its route to etcd, or its host name if etcd
    runs here."""
    if endpoint.startswith("unix:"):
        return _own_name()
    host = endpoint.rpartition("//")[2].rpartition(":")[0].strip("[]")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing; only picks the route
            address = str(probe.getsockname()[0])
    except OSError:
        return _own_name()
    return _own_name() if address.startswith("127.") or address == "::1" else address


def _own_name() -> str:
    name = socket.getfqdn()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name
