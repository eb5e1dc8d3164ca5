"""The whole cluster as stored in etcd, decoded. Pure: one immutable view in, one immutable Cluster out."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys, JobKeys
from elastic.contract.records.decoding import Decoder, Member, R
from elastic.contract.records.generation_delta import GenerationReader
from elastic.contract.records.incident_account import IncidentAccount
from elastic.contract.records.incident_fold import incidents
from elastic.contract.records.job_records import (
    BrokenRecord,
    GenerationRecord,
    IncidentRecord,
    JobState,
    MemberRecord,
    ProgressRecord,
    ProtocolVersionMismatch,
    SpecRecord,
    decode,
    encode,
)
from elastic.contract.records.node_records import AskedRecord, CordonRecord, DrainRecord, KnownNode, NodeRecord
from elastic.contract.records.phases import PhaseTrigger, after, allows
from elastic.contract.records.rank_records import RanksRecord
from elastic.contract.records.reasons import Text
from elastic.contract.records.report_size import fitted, reader
from elastic.etcd.client import KV, Refusal

KEPT_INCIDENTS = 250
"""Of a job, the newest, and so many accounts and failure reports. Its agents keep about as many in etcd; its user may
have written more."""
_Told = tuple[list[IncidentAccount], list[BrokenRecord], int, list[tuple[str, IncidentRecord]]]
"""What is on record of a job's incidents: accounts, failure reports, the newest generation that has stepped, and (key,
record) of what breaks no generation."""
_DECODERS: dict[Any, Any] = {kind: reader(kind) for kind in (BrokenRecord, IncidentAccount, IncidentRecord)}


@dataclass(frozen=True, slots=True)
class Node:
    record: NodeRecord
    create_revision: int
    """Create revision of its key: the smallest is the oldest."""
    cordon: CordonRecord | None = None
    drain: DrainRecord | None = None

    @property
    def name(self) -> str:
        return self.record.node

    @property
    def state(self) -> tuple[str, Text]:
        """`ready`, or why it accepts no new work: what it is, and the reason for that."""
        if self.drain or self.record.draining:
            return "draining", self.drain.reason if self.drain else self.record.draining or ""
        if not self.record.healthy:
            return "unhealthy", self.record.reason or "no reason given"
        return ("cordoned", self.cordon.reason) if self.cordon else ("ready", "")

    @property
    def why_not(self) -> str:
        """Why it accepts no new work; empty: it does."""
        state, why = self.state
        return f"{state}: {why}" if state != "ready" else ""


@dataclass(frozen=True, slots=True)
class Job:
    """One job. Without a `spec` it was wiped from etcd while agents ran: they will write it again."""

    name: str
    spec: SpecRecord | None = None
    submitted: int = 0
    """Create revision of the spec: the order of submission."""
    spec_revision: int = 0
    state: JobState = field(default_factory=JobState)
    state_revision: int = 0
    stop_is_due: bool = False
    """It is to stop, and etcd has another state of it: `state` is the one that follows."""
    members: Mapping[str, Member] = field(default_factory=dict)
    generation: GenerationRecord | None = None
    progress: ProgressRecord | None = None
    ranks: Mapping[str, RanksRecord] = field(default_factory=dict)
    """Node -> what its agent has published of its ranks, some seconds old."""
    asked: AskedRecord = field(default_factory=AskedRecord)
    incidents: tuple[IncidentRecord, ...] = ()
    """Oldest first."""

    @property
    def over(self) -> bool:
        return self.state.phase.over

    @property
    def ended(self) -> bool:
        """It is over, and all its processes have ended: what a script does after training is done as well."""
        return self.over and not self.members

    @property
    def wanted(self) -> JobSpec:
        """Its description, of a job that has one."""
        assert self.spec is not None
        return self.spec.spec

    def slots_on(self, node_slots: int) -> int:
        """Its workers on a node with `node_slots` slots."""
        each = self.wanted.workers_per_node
        return max(1, node_slots) if isinstance(each, str) else each


@dataclass(frozen=True, slots=True)
class Cluster:
    nodes: Mapping[str, Node] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    cordons: Mapping[str, CordonRecord] = field(default_factory=dict)
    drains: Mapping[str, DrainRecord] = field(default_factory=dict)
    revision: int = 0
    events: Mapping[str, bytes] = field(default_factory=dict)
    """Key -> EventRecord as encoded: they are decoded when a user asks for them."""
    foreign: Mapping[str, str] = field(default_factory=dict)
    """Key -> error: a record of an incompatible protocol, or not a valid record. Such a key is left alone."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Key -> why its signature is not valid. Such a record is not used."""
    known: Mapping[str, KnownNode] = field(default_factory=dict)
    """The inventory: every node that was here and was not forgotten."""

    @property
    def oldest_first(self) -> list[str]:
        """Names of its nodes, in the order in which they registered."""
        return sorted(self.nodes, key=lambda name: (self.nodes[name].create_revision, name))

    @property
    def absent(self) -> dict[str, KnownNode]:
        """Nodes of the inventory that are not there, by name."""
        return {name: known for name, known in sorted(self.known.items()) if name not in self.nodes}

    def is_draining(self, job: Job, node: str) -> bool:
        """Whether the node is about to leave the job: itself, or the job's agent there."""
        there, member = self.nodes.get(node), job.members.get(node)
        return bool((there and (there.drain or there.record.draining)) or (member and member.record.draining))

    def by_age(self) -> list[Job]:
        """Jobs whose spec is known, oldest first."""
        return sorted((j for j in self.jobs.values() if j.spec), key=lambda j: j.submitted)

    def jobs_on(self, node: str) -> list[str]:
        """Names of the jobs that have an agent on this node: as a member in etcd, or as a process there."""
        there = self.nodes[node].record.jobs if node in self.nodes else ()
        return sorted({*there, *(job.name for job in self.jobs.values() if node in job.members)})

    def is_empty(self, node: str) -> bool:
        """Whether no agent runs on this node, as far as is known. One that is drained is empty only once its daemon has
        written that it drains: it starts no agent from then on."""
        registered = self.nodes.get(node)
        heard = registered is None or registered.drain is None or registered.record.draining == registered.drain.reason
        return heard and not self.jobs_on(node)


class ClusterReader:
    """Decodes views of one cluster; a key that did not change since the previous view is not decoded again."""

    def __init__(self, keys: ClusterKeys, stopped: dict[str, tuple[str, AskedRecord]] | None = None) -> None:
        """`stopped`: job -> submission and order of one that was told to stop, here or as read: deleting the order does
        not call it off."""
        self._keys = keys
        self._decoder = Decoder()
        self._stopped = {} if stopped is None else stopped
        self._folded: dict[str, tuple[_Told, tuple[IncidentRecord, ...]]] = {}
        self._generations: dict[str, GenerationReader] = {}
        self._foreign: dict[str, str] = {}
        """See `Cluster.foreign`: of the view that is being read."""

    def read(
        self, kvs: Mapping[str, KV], revision: int, refused: Mapping[str, Refusal] | None = None, signed: bool = False
    ) -> Cluster:
        """`refused`: keys that are not among `kvs`, as their signatures are not valid; `signed`: whether signatures are
        checked. A job without a state is then not run: deleting the state of a finished job must not run it
        again."""
        keys = self._keys
        self._foreign = {}
        self._decoder.next_view()
        cordons = {n: r for n, (r, _) in self._below(keys.cordons, CordonRecord, kvs)}
        drains = {n: r for n, (r, _) in self._below(keys.drains, DrainRecord, kvs)}
        nodes = {
            name: Node(record, kv.create_revision, cordons.get(name), drains.get(name))
            for name, (record, kv) in self._below(keys.nodes, NodeRecord, kvs)
        }
        inventory = {n: r for n, (r, _) in self._below(keys.known, KnownNode, kvs)}
        by_job: dict[str, dict[str, KV]] = {}
        for key, kv in kvs.items():
            if key.startswith(keys.jobs):
                by_job.setdefault(key.removeprefix(keys.jobs).partition("/")[0], {})[key] = kv
        jobs = {}
        for name, records in by_job.items():
            try:
                job = keys.job(name)
            except ValueError as error:  # no job of ours can have this name
                self._foreign |= dict.fromkeys(records, str(error))
                continue
            jobs[name] = self._job(name, job, records, signed)
        for name in [name for name in (*self._stopped, *self._folded, *self._generations) if name not in jobs]:
            self._stopped.pop(name, None)
            self._folded.pop(name, None)
            self._generations.pop(name, None)
        events = {key: kv.value for key, kv in kvs.items() if key.startswith(keys.events)}
        why = {key: refusal.why for key, refusal in (refused or {}).items()}
        return Cluster(nodes, jobs, cordons, drains, revision, events, self._foreign, why, inventory)

    def _asked(self, name: str, spec: SpecRecord | None, asked: AskedRecord) -> AskedRecord:
        submission, stopped = self._stopped.get(name, ("", AskedRecord()))
        if spec is not None and asked.stop is not None:
            self._stopped[name] = spec.submission, asked
        elif stopped.stop is not None and (spec is None or spec.submission == submission):
            return msgspec.structs.replace(asked, stop=stopped.stop)
        return asked

    def _take(self, kind: type[R], kv: KV | None, read: Callable[[bytes], R] | None = None) -> R | None:
        """None where there is no record, or one of another protocol. `read`: how, if not by its kind alone."""
        if kv is None:
            return None
        try:
            return self._decoder.read(kind, kv.key, kv, read or _DECODERS.get(kind))
        except ProtocolVersionMismatch as error:
            self._foreign[kv.key] = str(error)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError among them
            self._foreign[kv.key] = f"is not a {kind.__name__}: {error}"
        return None

    def _below(self, prefix: str, kind: type[R], kvs: Mapping[str, KV]) -> Iterator[tuple[str, tuple[R, KV]]]:
        """(rest of the key, (record, what it was decoded from)) of each that is valid."""
        for key, kv in kvs.items():
            if key.startswith(prefix) and (record := self._take(kind, kv)) is not None:
                yield key.removeprefix(prefix), (record, kv)

    def _told(self, job: JobKeys, kvs: Mapping[str, KV]) -> _Told:
        keys, take = [key for key in kvs if key.startswith(job.incidents)], self._take
        own = sorted((kvs[key].create_revision, key) for key in keys if job.is_account(key))[-KEPT_INCIDENTS:]
        broken = sorted(key for key in kvs if key.startswith(job.broken_all))[-KEPT_INCIDENTS:] if own else ()
        progress = take(ProgressRecord, kvs.get(job.progress))
        return (
            [account for _, key in own if (account := take(IncidentAccount, kvs[key])) is not None],
            [report for key in broken if (report := take(BrokenRecord, kvs[key])) is not None],
            progress.stepped_in if progress is not None else 0,
            [(k, r) for k in keys if not job.is_account(k) and (r := take(IncidentRecord, kvs[k])) is not None],
        )

    def _job(self, name: str, job: JobKeys, kvs: Mapping[str, KV], signed: bool) -> Job:
        spec_kv, state_kv, base = kvs.get(job.spec), kvs.get(job.state), kvs.get(job.base)
        spec, ordered = self._take(SpecRecord, spec_kv), self._take(AskedRecord, kvs.get(job.asked))
        on_record = self._told(job, kvs)
        if name not in self._folded or self._folded[name][0] != on_record:
            self._folded[name] = on_record, _incidents(on_record)
        read = functools.partial(
            self._generations.setdefault(name, GenerationReader()).read, base=base.value if base else None
        )
        generation = self._take(GenerationRecord, kvs.get(job.generation), read)
        asked, state = self._asked(name, spec, ordered or AskedRecord()), self._take(JobState, state_kv)
        if asked.stop is None and ((signed and state_kv is None) or (state_kv is not None and state is None)):
            spec = spec_kv = None  # an incompatible version manages this job: leave it alone
        state = state or JobState()
        stop_is_due = asked.stop is not None and allows(state.phase, PhaseTrigger.STOP)
        if stop_is_due:  # whatever the job's user has written there
            state = after(state, PhaseTrigger.STOP, asked.stop or "", state.since_wall_s)
        return Job(
            name=name,
            spec=spec,
            submitted=spec_kv.create_revision if spec_kv else 0,
            spec_revision=spec_kv.mod_revision if spec_kv else 0,
            state=state,
            stop_is_due=stop_is_due,
            state_revision=state_kv.mod_revision if state_kv else 0,
            members={n: Member(r, kv.create_revision) for n, (r, kv) in self._below(job.members, MemberRecord, kvs)},
            generation=generation,
            progress=self._take(ProgressRecord, kvs.get(job.progress)),
            ranks={n: r for n, (r, _) in self._below(job.ranks, RanksRecord, kvs)},
            asked=asked,
            incidents=self._folded[name][1],
        )


def _incidents(on_record: _Told) -> tuple[IncidentRecord, ...]:
    """Oldest first. A job's user can write numbers with which a daemon cannot compute: such an incident is left out."""
    records = []
    for incident in map(fitted, incidents(*on_record[:3])):
        with contextlib.suppress(msgspec.ValidationError):
            records.append(decode(IncidentRecord, encode(incident)))
    records += [msgspec.structs.replace(record, id=key.rpartition("/")[2]) for key, record in on_record[3]]
    return tuple(sorted(records, key=lambda incident: incident.wall_s)[-KEPT_INCIDENTS:])
