"""The agent's writes to etcd: each effect of the recovery state machine that concerns etcd, put on a write queue."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import structlog

from elastic.agent import saved_generations
from elastic.agent.write_queue import WriteQueue
from elastic.contract.keys import JobKeys
from elastic.contract.records.generation_delta import Written, written
from elastic.contract.records.incident_account import IncidentAccount
from elastic.contract.records.job_records import (
    BrokenRecord,
    GenerationHead,
    GenerationRecord,
    IncidentRecord,
    JobState,
    MemberRecord,
    Phase,
    ProgressRecord,
    ProtocolVersionMismatch,
    Record,
    SpecRecord,
    decode,
)
from elastic.contract.records.job_records import encode as _strictly
from elastic.contract.records.phases import PhaseTrigger, after
from elastic.contract.records.rank_records import RanksRecord
from elastic.contract.records.report_size import fitted
from elastic.etcd.client import Absent, Compare, Delete, Etcd, EtcdError, EtcdUnavailable, ModIs, Op, Put, TxnResult
from elastic.etcd.types import EtcdForged
from elastic.recovery.facts.evidence import merged
from elastic.recovery.facts.view import JobView
from elastic.recovery.machine import effects
from elastic.recovery.machine.events import Event, Joined, LeaseLost, PublishFailed
from elastic.recovery.machine.model import Policy

from .member_writes import MemberKey, OpensStores, next_record

log = structlog.get_logger()

Post = Callable[[Event], None]
LEAVE_S = 3.0
TRIES = 10
"""How often a record that others change at the same time is read and written before the write is postponed."""
KEPT_RECORDS = 200
"""Failures and incidents of this many generations are kept in etcd."""
KEPT_BESIDE = 50
"""This many failed checkpoints and late exits of one agent are kept in etcd."""


@dataclass
class EtcdWriter:
    """The writes of one agent. Methods but `leave` return at once; the outcome arrives by `post` or by the watch."""

    etcd: Etcd
    keys: JobKeys
    policy: Policy
    stores: OpensStores
    post: Post
    spec: SpecRecord
    queue: Callable[[str], WriteQueue] = WriteQueue
    wall: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._urgent, self._lazy = self.queue("urgent"), self.queue("lazy")
        self._beside: deque[str] = deque()
        """Keys of failed checkpoints and late exits that this agent has written, oldest first."""
        self._restored = 0
        """Number of records that this agent has written back after etcd had lost them."""
        times, key = self.policy.timeouts, self.keys.member(self.policy.node)
        self._key = MemberKey(
            self.etcd, key, times.lease_ttl_s, times.lease_renew_s, lambda why: self.post(LeaseLost(why))
        )
        self._first = True
        self.saved_generation = 0
        self.folder = ""
        """As in `MemberRecord`, once this agent has joined."""
        self._member: MemberRecord | None = None
        self._state = JobState()

    def start(self) -> None:
        self._urgent.start()
        self._lazy.start()

    def do(
        self, effect: effects.Effect, view: JobView, progress: Callable[[], ProgressRecord | None] = lambda: None
    ) -> None:
        """Carry out an effect that concerns etcd. `view`: the one that it was decided on; `progress`: what the job has
        reached by now."""
        match effect:
            case effects.PutIncident(account):
                self.put_account(account)
            case effects.PutBroken(record, member):
                self.put_broken(record, member)
            case effects.Publish():
                self.publish(effect, view)
            case effects.PutMember(record):
                self.put_member(record)
            case effects.Rejoin(record):
                self.rejoin(record)
            case effects.PutState():
                self.put_state(effect, progress)
            case effects.Restore(generation, state, spec):
                self.restore(generation, state, spec)
            case _:
                raise AssertionError(f"no way to do {effect!r}")

    # ── membership ──────────────────────────────────────────────────────────────────────────────────────────

    def rejoin(self, record: MemberRecord) -> None:
        """Get a new lease, and put this agent's member record under it."""
        self._member = record
        self._urgent.ask("join", self._join, persist=True)

    def put_member(self, record: MemberRecord) -> None:
        self._member = record
        self._urgent.ask("member", self._write_member, persist=True)

    def _join(self) -> None:
        assert self._member is not None
        self._key.drop()
        if self._first:  # else the key would keep the create revision of the previous agent, whose store is gone
            self.etcd.delete(self._key.key)
            self.saved_generation = saved_generations.of_own_folder(self.policy.spec)
            self.folder = saved_generations.shared_folder(self.policy.spec)
        lease = self._key.join(self._encoded(self._member))
        self._first = False
        log.info("member.joined", lease=f"{lease.id:x}")
        self.post(Joined())

    def _write_member(self) -> None:
        assert self._member is not None
        if (lease := self._key.held) is not None:
            self.etcd.put(self._key.key, self._encoded(self._member), lease.id)

    def _encoded(self, member: MemberRecord) -> bytes:
        return encode(msgspec.structs.replace(member, saved_generation=self.saved_generation, folder=self.folder))

    # ── generations ─────────────────────────────────────────────────────────────────────────────────────────

    def put_broken(self, record: BrokenRecord, member: MemberRecord | None) -> None:
        """The first report names the failure; later ones are merged into it. Retried until etcd has it."""
        key = self.keys.broken(record.generation)
        if member is not None:
            self._member = member

        def order() -> None:
            if (ours := self._no_other_submission(key)) is None:
                return
            also: list[Op] = []
            if member is not None and self._member is not None and self._key.lease is not None:
                # The newest one: this may be a retry, and the record may have changed since.
                also = [Put(self._key.key, self._encoded(self._member), self._key.lease.id)]
            result = put_report(self.etcd, [Absent(key), ours], key, record, also, also)
            log.info(
                "generation.broken",
                generation=record.generation,
                kind=record.kind,
                detail=record.detail,
                first=result.ok,
            )
            if not result.ok:
                self._add_to_broken(key, record, ours)

        # By failure: of two ranks with bad numbers neither report may displace the other.
        failure = f"{record.generation} {record.node} {record.kind} {record.slots} {record.ranks}"
        self._urgent.ask(f"broken {failure}", order, persist=True)

    def _add_to_broken(self, key: str, record: BrokenRecord, ours: Compare) -> None:
        for _ in range(TRIES):
            kv = self.etcd.get(key)
            if kv is None:
                raise EtcdUnavailable(f"{self.keys.spec} has changed meanwhile, or etcd was wiped", maybe_done=False)
            first = decode(BrokenRecord, kv.value)
            if (more := merged(first, record)) == first:
                return
            if put_report(self.etcd, [ModIs(key, kv.mod_revision), ours], key, more).ok:
                return
        raise EtcdUnavailable(f"{key} changed under {TRIES} tries in a row", maybe_done=False)

    def publish(self, effect: effects.Publish, view: JobView) -> None:
        def order() -> None:
            done = False
            try:
                done = self._publish(effect, view)
            finally:
                if not done:
                    self.post(PublishFailed(effect.number))

        self._urgent.ask("publish", order, persist=False)

    def _publish(self, effect: effects.Publish, view: JobView) -> bool:
        guards = self._key.guards(self.keys.state, view.state_revision)
        number, previous = effect.number, view.generation.number if view.generation else 0
        record = next_record(
            self.stores,
            self.policy.node,
            number,
            effect.change,
            basis=(self._restored, effect.expect_revision),
            previous=previous,
            at_step=effect.at_step,
            managed=effect.managed,
        )
        large = len(record.nodes) > self.policy.crowd
        told = written(record, view.generation, view.base, view.base_revision > 0) if large else Written(record)
        ops: list[Op] = [Put(self.keys.generation, encode(told.generation))]
        if told.base is not None:
            ops.append(Put(self.keys.base, encode(told.base)))
        elif large:  # etcd may have been wiped since
            guards.append(ModIs(self.keys.base, view.base_revision))
        if effect.state is not None:
            ops.append(Put(self.keys.state, encode(effect.state)))
        if number > KEPT_RECORDS:
            ops += self._outdated(number, view)
        guards.append(ModIs(self.keys.generation, effect.expect_revision))
        if effect.at_step is not None:  # a generation that has just broken does not reach the boundary
            guards.append(Absent(self.keys.broken(previous)))
        done = self.etcd.txn(guards, ops).ok
        log.info(
            "generation.published" if done else "generation.lost_race",
            generation=record.number,
            world_size=record.world_size,
            nodes=[p.node for p in record.nodes],
            why=record.why,
            at_step=record.at_step,
        )
        return done

    def _outdated(self, number: int, view: JobView) -> list[Op]:
        """All below a number, not those of one generation: numbers may have been left out. What the view shows of the
        newest failures stays, however far back that is."""
        shown = [*(account.first for account in view.accounts), *(report.generation for report in view.broken_before)]
        first = min([number - KEPT_RECORDS + 1, *shown])
        below = ((self.keys.broken_all, self.keys.broken(first)), (self.keys.incidents, self.keys.incident(first)))
        return [Delete(prefix, prefix=True, before=before) for prefix, before in below]

    # ── the job's state ─────────────────────────────────────────────────────────────────────────────────────

    def put_state(self, effect: effects.PutState, progress: Callable[[], ProgressRecord | None] = lambda: None) -> None:
        puts, queue = [Put(self.keys.state, encode(effect.state))], self._urgent
        if effect.state.phase is Phase.SUCCEEDED:
            queue = self._lazy  # after the incidents: a complete job is not to be seen with one that is still open
            if last := progress():
                # In one transaction: it must not be seen at an earlier step than its last, either. Of a job that fails
                # the workers are stopped first, as each millisecond is another step with bad numbers.
                puts.insert(0, Put(self.keys.progress, encode(last)))

        def order() -> None:
            done = self.etcd.txn(self._key.guards(self.keys.state, effect.expect_revision), puts).ok
            state = effect.state
            log.info("job.state", phase=state.phase.value, reason=state.reason, restarts=state.restarts, done=done)

        # By phase: of two states decided on one revision one is written, and none may displace the other before that.
        queue.ask(f"state {effect.state.phase.value}", order, persist=False)

    def restore(self, generation: GenerationRecord | None, state: JobState, spec: SpecRecord | None) -> None:
        """etcd came back empty, or with older data: write back the job's spec, state and generation, unless another
        agent already has."""

        def order() -> None:
            if (guard := self._no_other_submission(self.keys.generation)) is None:
                return
            if generation is not None:
                self._restored += self._restore_generation(generation, guard)
            # The spec last: without it no agent leads.
            for key, record in ((self.keys.state, state), (self.keys.spec, spec or self.spec)):
                self._restored += self.etcd.txn([Absent(key), guard], [Put(key, encode(record))]).ok
            log.warning("etcd.restored", generation=generation.number if generation else 0)

        self._urgent.ask("restore", order, persist=False)

    def _no_other_submission(self, key: str) -> ModIs | None:
        return no_other_submission(self.etcd, self.keys.spec, self.spec, key)

    def _spec_is_ours(self, key: str) -> ModIs | None:
        """The same. Raises EtcdUnavailable while there is no spec: the job was forgotten, or is yet to be restored."""
        if (ours := self._no_other_submission(key)) is not None and not ours.revision:
            raise EtcdUnavailable(f"{self.keys.spec} is not there", maybe_done=False)
        return ours

    def _restore_generation(self, generation: GenerationRecord, guard: Compare) -> bool:
        """Guarded by the revision alone, since this agent may not be a member yet. Should etcd be wiped again between
        the two calls, and be back at the same revision with a newer generation, the agents that hold that generation
        find it missing and write it back."""
        key = self.keys.generation
        # In one transaction: `JobView.written_back` compares their revisions.
        puts = [Put(key, encode(generation)), Put(self.keys.restored, b"{}")]
        kv, done = self.etcd.get(key), False
        if kv is None:
            done = self.etcd.txn([Absent(key), guard], puts).ok
        elif decode(GenerationHead, kv.value).number < generation.number:
            done = self.etcd.txn([ModIs(key, kv.mod_revision), guard], puts).ok
        return done

    # ── incidents ───────────────────────────────────────────────────────────────────────────────────────────

    def put_account(self, account: IncidentAccount) -> None:
        key = self.keys.account(account.first, self.policy.node, self.policy.incarnation, account.repeat)
        self._put_own(key, account)

    def put_beside(self, what: str, record: IncidentRecord, number: int = 0) -> None:
        """See `JobKeys.beside_incident`. While a disk stays full every save fails, for as long as the job runs: the
        oldest records are deleted."""
        key = self.keys.beside_incident(what, record.generation, record.node, number)
        if key not in self._beside:
            self._beside.append(key)
        old = [self._beside.popleft()] if len(self._beside) > KEPT_BESIDE else []
        self._put_own(key, record, [Delete(k) for k in old])

    def _put_own(self, key: str, record: IncidentRecord | IncidentAccount, also: Sequence[Op] = ()) -> None:
        """A key that this agent alone writes."""

        def order() -> None:
            if (ours := self._spec_is_ours(key)) is None:
                return
            if not put_report(self.etcd, [ours], key, record, also).ok:
                raise EtcdUnavailable(f"{self.keys.spec} has changed meanwhile", maybe_done=False)

        self._lazy.ask(key, order, persist=True)

    def put_progress(self, record: ProgressRecord, generation_revision: int) -> None:
        """Not if the job has another generation than that of `generation_revision`: an agent that has stood still takes
        itself for the leader until it sees the others' changes, and the job may have been set back meanwhile."""

        def order() -> None:
            self.etcd.txn([ModIs(self.keys.generation, generation_revision)], [Put(self.keys.progress, encode(record))])

        self._lazy.ask("progress", order, persist=False)

    def put_ranks(self, record: RanksRecord) -> None:
        key = self.keys.ranks_of(self.policy.node)

        def order() -> None:
            if (ours := self._spec_is_ours(key)) is None:
                return
            self.etcd.txn([ours], [Put(key, encode(record))])

        self._lazy.ask("ranks", order, persist=False)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────

    def leave(self) -> None:
        """Give up membership; the last agent to leave a stopping job marks it as stopped. Blocks for a few seconds
        at most."""
        self._urgent.close(LEAVE_S)
        self._lazy.close(LEAVE_S)
        try:
            self._key.drop(revoke=True)
            others = self.etcd.newest(self.keys.members).count
            kv = self.etcd.get(self.keys.state)
            if kv is None or others:
                return
            state = decode(JobState, kv.value)
            if state.phase is Phase.STOPPING:
                stopped = after(state, PhaseTrigger.LEFT, state.reason, self.wall())
                self.etcd.txn([ModIs(self.keys.state, kv.mod_revision)], [Put(self.keys.state, encode(stopped))])
        except (EtcdError, ProtocolVersionMismatch, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("member.not_deregistered", error=str(error))


R = TypeVar("R", bound=Record)


def encode(record: Record) -> bytes:
    return _strictly(readable(record))


def readable(record: R) -> R:
    """A script's error may contain text that UTF-8 cannot encode, such as a file name in another encoding. Such a
    failure must be written all the same, or the job would fail in this way again and again."""
    try:
        _strictly(record)
    except UnicodeEncodeError:
        return msgspec.convert(_readable(msgspec.to_builtins(record)), type(record))
    return record


def _readable(value: Any) -> Any:
    """Plain data with characters that UTF-8 cannot encode replaced by escape sequences."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_readable(key): _readable(item) for key, item in value.items()}
        case list() | tuple():
            return [_readable(item) for item in value]
    return value


def put_report(
    etcd: Etcd,
    compares: Sequence[Compare],
    key: str,
    record: BrokenRecord | IncidentRecord | IncidentAccount,
    also: Sequence[Op] = (),
    otherwise: Sequence[Op] = (),
) -> TxnResult:
    """Write a failure report, or what is told of an incident, if `compares` hold, in a size that etcd takes: a failure
    that is not reported breaks no generation, and an incident that is not told is never over."""
    return etcd.txn(compares, [Put(key, _strictly(fitted(readable(record)))), *also], otherwise)


def no_other_submission(etcd: Etcd, spec_key: str, ours: SpecRecord, key: str) -> ModIs | None:
    """Holds as long as no other job has taken the name of `ours`, whose spec may be gone (revision 0); None: one has,
    and `key` is not to be written."""
    try:
        kv = etcd.get(spec_key)
        same = kv is None or decode(SpecRecord, kv.value).submission == ours.submission
    except EtcdForged:  # signed for another submission
        kv, same = None, False
    if not same:
        log.warning("etcd.not_written", key=key, why="another job has taken the name")
        return None
    return ModIs(spec_key, kv.mod_revision if kv else 0)
