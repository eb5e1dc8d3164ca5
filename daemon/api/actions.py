"""Requests of users, each carried out in etcd, in the thread of the request.

The loop is not involved: it acts on the change that it then sees in etcd, on every node alike.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from elastic.contract.job.spec import InvalidSpec, parse_job
from elastic.contract.keys import ClusterKeys, JobKeys, check_name
from elastic.contract.records.job_records import (
    JobState,
    Phase,
    ProtocolVersionMismatch,
    Record,
    SpecRecord,
    decode,
    encode,
)
from elastic.contract.records.node_records import AskedRecord, CordonRecord, DrainRecord
from elastic.contract.records.phases import PhaseTrigger, after, allows
from elastic.contract.records.reasons import Text
from elastic.etcd.client import Absent, Compare, Delete, Etcd, EtcdError, EtcdForged, EtcdUnavailable, ModIs, Op, Put
from elastic.etcd.signing import ending
from elasticd.access.authority import Account, Authority, Peer
from elasticd.base.errors import Refused
from elasticd.base.settings import PerUserSettings
from elasticd.cluster import reconcile
from elasticd.cluster.cluster import Cluster, Job
from elasticd.cluster.published_state import PublishedState, Snapshot
from elasticd.cluster.quotas import Quotas, check_spec
from elasticd.node.writer import KEY_MISSING

SEEN_S = 2.0
"""How long an answer waits until this daemon's view of etcd contains its own write."""
AT_ONCE = 64
"""Jobs forgotten in one transaction: etcd takes 128 conditions and 128 operations, of which each job has two."""
TRIES = 5
"""Attempts at a change when the same record is changed concurrently."""

R = TypeVar("R", bound=Record)
RefusalOf = Callable[[SpecRecord], Text]


@dataclass(eq=False)
class Actions:
    """Every method raises Refused (400, 403, 404, 409, 429, or 503 when etcd cannot be reached). `refusal`: why this
    node runs no jobs of a user."""

    etcd: Etcd
    keys: ClusterKeys
    published: PublishedState
    authority: Authority
    refusal: RefusalOf
    per_user: PerUserSettings

    def __post_init__(self) -> None:
        self._quotas = Quotas(self.per_user)

    def submit(self, raw: Mapping[str, Any], peer: Peer, owner: Account, replace: bool = False) -> str:
        """Validate a job's description and create the job of user `owner`. Returns its name."""
        try:
            spec = parse_job(raw)
        except InvalidSpec as error:
            raise Refused(400, str(error)) from None
        for field in ("script", "workdir", "env_file"):
            path = getattr(spec, field)
            if path and not os.path.isabs(path) and not (field == "script" and spec.workdir):
                raise Refused(400, f"{field} = {path!r}: an absolute path is needed here (elasticctl makes it one)")
        keys, now_s = self.keys.job(spec.name), time.time()
        record = SpecRecord(
            spec=spec,
            submitted_wall_s=now_s,
            submitted_by=peer.user,
            uid=owner.uid,
            gid=owner.gid,
            user=owner.user,
            submission=uuid.uuid4().hex,
        )
        if why := self.refusal(record):
            raise Refused(403, f"job {spec.name!r} cannot be submitted here: {why}")
        check_spec(spec)
        self._take(peer, record, self.published.now.cluster.jobs)
        state = JobState(phase=Phase.PENDING, since_wall_s=now_s)
        try:  # so that this record's stamp is higher than that of the deletion, by a daemon whose clock may be ahead
            self.etcd.get(self.keys.ended(keys.spec))
        except EtcdForged:
            pass  # it ends nothing
        except EtcdError as error:
            raise _unavailable(error) from error
        # What agents of an earlier job have written since that was forgotten, or have restored in part, goes as well.
        ops = [*_all_but_spec_and_state(keys), Put(keys.spec, encode(record)), Put(keys.state, encode(state))]
        if not self._txn([Absent(keys.spec)], ops):
            self._make_room(keys, spec.name, replace, peer)
            if not self._txn([Absent(keys.spec)], ops):
                raise Refused(409, f"job {spec.name!r} is being submitted by another request too")
        return spec.name

    def restart(self, job: str, peer: Peer) -> None:
        (spec, same), keys = self._owned(job, peer, "restart"), self._job(job)
        state, revision = self._read(JobState, keys.state)
        if state is None or not state.phase.over:
            raise Refused(409, f"job {job!r} is not over: stop it first")
        record = msgspec.structs.replace(
            spec, submitted_wall_s=time.time(), submitted_by=peer.user, submission=uuid.uuid4().hex
        )
        self._take(peer, record)
        pending = JobState(phase=Phase.PENDING, since_wall_s=record.submitted_wall_s)
        puts = [Put(keys.spec, encode(record)), Put(keys.state, encode(pending))]
        # In one transaction: a failure on the way loses nothing, and what another request has started anew stays.
        if not self._txn([same, ModIs(keys.state, revision)], [*_all_but_spec_and_state(keys), *puts]):
            raise _overtaken(job)

    def _take(self, peer: Peer, record: SpecRecord, jobs: Mapping[str, Job] = MappingProxyType({})) -> None:
        """Count a description that is about to be written. Raises Refused (429)."""
        if not self.authority.is_admin(peer):
            self._quotas.take(peer, record.spec, jobs)

    def _make_room(self, keys: JobKeys, name: str, replace: bool, peer: Peer) -> None:
        state, revision = self._read(JobState, keys.state)
        if state is None or not state.phase.over:
            phase = state.phase if state else Phase.PENDING
            raise Refused(409, f"job {name!r} is there already and {phase}: stop it first, or choose another name")
        if not replace:
            fix = f"choose another name, remove its records (elasticctl forget {name}), or give --replace"
            raise Refused(409, f"job {name!r} has {_ended(state.phase)}: {fix}")
        there, _ = self._read(SpecRecord, keys.spec)
        self.authority.check_job(peer, name, there, "replace")
        self._remove(keys, name, [ModIs(keys.state, revision)])

    def stop(self, job: str, reason: str, peer: Peer) -> None:
        """Stop a job. Complete when its phase is 'stopped'. The order is the cluster's own record: the job's user may
        write anything over its state, at any time."""
        spec, same = self._owned(job, peer, "stop")
        current = self.published.now.cluster.jobs.get(job)
        asked = msgspec.structs.replace(current.asked if current else AskedRecord(), stop=reason)
        if not self._txn([same], [Put(self._job(job).asked, encode(asked))]):
            raise _overtaken(job)
        self.published.told_to_stop[job] = spec.submission, asked  # also if it is deleted before the loop reads it

        def stopping(state: JobState) -> JobState | None:
            allowed = allows(state.phase, PhaseTrigger.STOP)
            return after(state, PhaseTrigger.STOP, reason, time.time()) if allowed else None

        try:  # for its agents, at once; else a daemon writes it (`reconcile.job_state`)
            self._change(JobState, self._job(job).state, stopping, JobState(), lambda: same)
        except Refused as refused:
            if refused.status != 409:
                raise

    def scale(self, job: str, nodes: str, peer: Peer) -> None:
        self._owned(job, peer, "scale")  # says what is wrong if there is no such job

        def scaled(record: SpecRecord) -> SpecRecord:
            self.authority.check_job(peer, job, record, "scale")
            raw = msgspec.to_builtins(record.spec) | {"nodes": nodes}
            self._take(peer, record)
            try:
                return msgspec.structs.replace(record, spec=parse_job(raw))
            except InvalidSpec as error:
                raise Refused(400, str(error)) from None

        self._change(SpecRecord, self._job(job).spec, scaled)

    def checkpoint(self, job: str, peer: Peer) -> None:
        """Request a checkpoint of a running job at its next agreed step."""
        verb = "request a checkpoint of"
        spec = self._owned(job, peer, verb)[0].spec
        state, _ = self._read(JobState, self._job(job).state)
        if state is not None and state.phase.over:
            raise Refused(409, f"job {job!r} has {_ended(state.phase)}")
        if not spec.checkpoint.dir:
            raise Refused(
                409, f"job {job!r} writes no checkpoints: its checkpoint.dir is empty. Submit it with one, as "
                "elasticctl run --checkpoints DIR does"
            )  # fmt: skip
        more: Callable[[AskedRecord], AskedRecord] = lambda asked: msgspec.structs.replace(  # noqa: E731
            asked, checkpoint=asked.checkpoint + 1
        )
        self._change(AskedRecord, self._job(job).asked, more, AskedRecord(), lambda: self._owned(job, peer, verb)[1])

    def sample(self, job: str, step: int, peer: Peer, *, next_step: int) -> int:
        """Request a sample of the gradients of a running job at `step`; returns the step. It is that of an earlier
        request which `next_step`, the job's next one, has not passed: a second one would take its place."""
        chosen = step

        def more(asked: AskedRecord) -> AskedRecord | None:
            nonlocal chosen
            chosen = asked.sample_step if next_step <= asked.sample_step <= step else step
            return msgspec.structs.replace(asked, sample_step=step) if chosen != asked.sample_step else None

        self._change(AskedRecord, self._job(job).asked, more, AskedRecord(), lambda: self._owned(job, peer, "debug")[1])
        return chosen

    def forget(self, job: str, peer: Peer, *, seen: bool = True) -> None:
        """Remove the records of a finished job, or of one that an elasticd of another protocol has left. Its logs and
        checkpoints stay. `seen`: return when this daemon's view has it."""
        if self._of_another_protocol(job):
            self.authority.check_job(peer, job, None, "forget")
            try:
                agents = self.etcd.newest(self._job(job).members).count
            except EtcdError as error:
                raise _unavailable(error) from error
            if agents:
                raise Refused(
                    409, f"job {job!r} has agents of another elasticd version: stop it with that version first"
                )
            self._remove(self._job(job), job, [], seen)
            return
        _, same = self._owned(job, peer, "forget")
        state, revision = self._read(JobState, self._job(job).state)
        if state is None or not state.phase.over:
            raise Refused(409, f"job {job!r} is not over: stop it first")
        self._remove(self._job(job), job, [same, ModIs(self._job(job).state, revision)], seen)

    def forget_each(self, jobs: Iterable[str], peer: Peer) -> list[str]:
        """Forget those of `jobs` that are over and that `peer` may forget; returns them. Those that are so in this
        daemon's view go in few transactions, each of which costs a write to the disk; if any of these has changed
        since, its transaction does nothing, and each job is looked at by itself."""
        names, view = list(dict.fromkeys(jobs)), self.published.now.cluster.jobs
        forgotten: list[str] = []
        for at in range(0, len(names), AT_ONCE):
            batch = names[at : at + AT_ONCE]
            seen = [(self._job(name), view[name]) for name in batch if name in view]
            seen = [(k, job) for k, job in seen if job.spec and job.over and self.authority.may_change(peer, job.spec)]
            same = [ModIs(k.spec, job.spec_revision) for k, job in seen]
            same += [ModIs(k.state, job.state_revision) for k, job in seen]
            done = seen and self._txn(same, [op for k, _ in seen for op in self._removal(k)], seen=False)
            gone = {job.name for _, job in seen} if done else set()
            forgotten += [name for name in batch if name in gone or self._forgets(name, peer)]
        self.published.wait(lambda s: s.cluster.jobs.keys().isdisjoint(forgotten), SEEN_S)
        return forgotten

    def _forgets(self, job: str, peer: Peer) -> bool:
        try:
            self.forget(job, peer, seen=False)
        except Refused as refused:  # of another user; forgotten or started again meanwhile
            if refused.status not in (403, 404, 409):
                raise
            return False
        return True

    def cordon(self, node: str, reason: str) -> None:
        """Assign no new work to this node; running work stays."""
        check_known(node, self.published.now.cluster)
        record = CordonRecord(reason=reason, since_wall_s=time.time())
        self._txn([], [Put(self.keys.cordon(node), encode(record))])

    def drain(self, node: str, why: Text, deadline_s: float) -> None:
        """Move all work off this node at a step boundary, and assign it no new work."""
        check_known(node, self.published.now.cluster)
        record = DrainRecord(reason=why, deadline_s=deadline_s, since_wall_s=time.time())
        self._txn([], [Put(self.keys.drain(node), encode(record))])

    def uncordon(self, node: str) -> None:
        """Undo a cordon or drain, and the exclusion of this node by jobs."""
        check_known(node, self.published.now.cluster)
        keys = self.keys
        self._txn([], [*ending(keys, keys.cordon(node)), *ending(keys, keys.drain(node))])

        def pardoned(state: JobState) -> JobState | None:
            return reconcile.pardoned(state, node) if node in state.excluded_nodes else None

        for job in self.published.now.cluster.jobs.values():
            if node in job.state.excluded_nodes and not job.over:
                self._change(JobState, self._job(job.name).state, pardoned, JobState())

    def forget_node(self, node: str) -> None:
        """Remove a node that does not come back from the inventory, with its cordon or drain."""
        check_known(node, self.published.now.cluster)
        cluster = self.published.now.cluster
        jobs = cluster.jobs_on(node)
        if node in cluster.nodes or jobs:
            there = "its elasticd runs" if node in cluster.nodes else f"agents of {', '.join(jobs)} run there"
            raise Refused(409, f"node {node!r} is not gone: {there}; drain it and stop its elasticd first")
        self.uncordon(node)
        if not self._txn([Absent(self.keys.node(node))], list(ending(self.keys, self.keys.known_node(node)))):
            raise Refused(409, f"node {node!r} is not gone: it has just come back")

    def _job(self, name: str) -> JobKeys:
        return self.keys.job(checked("job", name))

    def _of_another_protocol(self, job: str) -> bool:
        try:
            kv = self.etcd.get(self._job(job).spec)
            if kv is not None:
                decode(SpecRecord, kv.value)
        except ProtocolVersionMismatch:
            return True
        except (EtcdError, msgspec.DecodeError, UnicodeDecodeError):
            pass  # told by the reader of the record
        return False

    def _owned(self, job: str, peer: Peer, verb: str) -> tuple[SpecRecord, Compare]:
        """The job as it stands in etcd now, if `peer` may do this to it, and a condition for the write that follows: by
        then the name may be that of another user's new job. Raises Refused (403, 404)."""
        key = self._job(job).spec
        spec, revision = self._read(SpecRecord, key)
        if spec is None:
            raise _absent(job, self.published.now.cluster)  # etcd was asked
        self.authority.check_job(peer, job, spec, verb)
        return spec, ModIs(key, revision)

    def _change(
        self,
        kind: type[R],
        key: str,
        change: Callable[[R], R | None],
        default: R | None = None,
        allowed: Callable[[], Compare] | None = None,
    ) -> None:
        """Read, change, write back unless the record was written meanwhile; then again, up to TRIES times. `allowed`
        checks the request before each of them, and gives the condition under which that holds."""
        for _ in range(TRIES):
            guards = [allowed()] if allowed is not None else []
            there, revision = self._read(kind, key)
            record = there if there is not None else default
            if record is None:
                raise Refused(404, f"{key} is not there")
            changed = change(record)
            if changed is None or self._txn([*guards, ModIs(key, revision)], [Put(key, encode(changed))]):
                return
        raise Refused(409, f"{key} is changed by other requests all the time; try again")

    def _read(self, kind: type[R], key: str) -> tuple[R | None, int]:
        try:
            kv = self.etcd.get(key)
            return (decode(kind, kv.value), kv.mod_revision) if kv else (None, 0)
        except EtcdForged as error:
            if kind is JobState:  # the job's user can write anything there, and must not keep others from stopping it
                return None, error.kv.mod_revision
            raise Refused(409, f"{error}: only root may repair this, with etcdctl (docs/security.md)") from error
        except EtcdError as error:
            raise _unavailable(error) from error
        except (ProtocolVersionMismatch, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(409, f"{key}: {error}") from error

    def _txn(self, compares: Sequence[Compare], then: Sequence[Op], seen: bool = True) -> bool:
        """Whether the transaction was applied; if so, this daemon's view contains it, unless the watch is slow."""
        if self.etcd.signatures_ignored:
            raise Refused(409, KEY_MISSING)
        try:
            result = self.etcd.txn(compares, then)
        except EtcdUnavailable as error:
            unknown = "; whether it was done all the same is not known: look before you repeat it"
            raise Refused(503, f"{_unavailable(error)}{unknown if error.maybe_done else ''}") from error
        except EtcdError as error:
            raise _unavailable(error) from error
        if result.ok and seen:
            self.published.wait(lambda s: s.cluster.revision >= result.revision, SEEN_S)
        return result.ok

    def _remove(self, keys: JobKeys, name: str, compares: Sequence[Compare], seen: bool = True) -> None:
        """Unless another request has changed the job since it was looked at: it may have been started anew."""
        if not self._txn(compares, self._removal(keys), seen):
            raise _overtaken(name)

    def _removal(self, keys: JobKeys) -> tuple[Op, Op]:
        return Delete(keys.root, prefix=True), ending(self.keys, keys.spec)[1]


def _all_but_spec_and_state(keys: JobKeys) -> list[Op]:
    """Removes a job's other records, in one transaction with new ones of these two."""
    gone: list[Op] = [Delete(key) for key in (keys.generation, keys.base, keys.restored, keys.progress, keys.asked)]
    below = (keys.members, keys.ranks, keys.broken_all, keys.incidents)
    return gone + [Delete(prefix, prefix=True) for prefix in below]


def checked(field: str, name: str) -> str:
    """`name`, or Refused (400)."""
    try:
        return check_name(field, name)
    except ValueError as error:
        raise Refused(400, str(error)) from None


def job_of(snapshot: Snapshot, name: str) -> Job:
    """Raises Refused (404, 503)."""
    if (job := snapshot.cluster.jobs.get(name)) is None:
        raise _absent(name, snapshot.cluster) if snapshot.cluster.revision else _not_read(f"job {name!r}")
    return job


def _absent(job: str, cluster: Cluster) -> Refused:
    return Refused(404, f"there is no job {job!r}; there are: {', '.join(sorted(cluster.jobs)) or 'none'}")


def known_nodes(cluster: Cluster) -> set[str]:
    """Those of the inventory, and those of which etcd holds a record, a cordon or a drain."""
    return {*cluster.nodes, *cluster.known, *cluster.cordons, *cluster.drains}


def check_known(node: str, cluster: Cluster) -> None:
    """Raises Refused (400, 404, 503) for a node that cannot be, that is not there, or that is not known yet."""
    if checked("node", node) in (known := known_nodes(cluster)):
        return
    if not cluster.revision:
        raise _not_read(f"node {node!r}")
    raise Refused(404, f"there is no node {node!r}; there are: {', '.join(sorted(known)) or 'none'}")


def _not_read(subject: str) -> Refused:
    return Refused(503, f"whether {subject} is there is not known: elasticd has not reached etcd since it was started")


def _ended(phase: Phase) -> str:
    return "been stopped" if phase is Phase.STOPPED else str(phase)


def _overtaken(job: str) -> Refused:
    return Refused(409, f"job {job!r} is being changed by another request too; try again")


def _unavailable(error: EtcdError) -> Refused:
    return Refused(503, f"etcd cannot be reached now, and this needs it: {error}")
