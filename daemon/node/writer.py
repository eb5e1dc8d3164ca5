"""The thread that writes to etcd for the loop, so that a slow etcd never blocks a turn."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

import msgspec

from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import JobState, ProtocolVersionMismatch, decode, encode
from elastic.contract.records.node_records import KnownNode, NodeRecord
from elastic.etcd.client import (
    KV,
    Absent,
    Delete,
    Etcd,
    EtcdDenied,
    EtcdError,
    EtcdForged,
    EtcdUnavailable,
    LeaseGone,
    MemberHealth,
    ModIs,
    Op,
    Put,
)
from elastic.etcd.signing import ending
from elasticd.base.log import Log
from elasticd.cluster.cluster import Job
from elasticd.etcd.versions import VersionSupport, judge

from .event_queue import EventQueue, NodeLeaseLost, NodeRegistered, Stop, Updated, Written

KEY_MISSING = (
    "the cluster's records are signed and this node has no cluster key: copy cluster.key from another node to "
    "/etc/elasticd (mode 0600), or set `cluster_key_file`, and restart elasticd"
)
EVENT_TRIES = 5


class ClusterWriter:
    def __init__(self, etcd: Etcd, keys: ClusterKeys, event_queue: EventQueue, log: Log) -> None:
        self._etcd = etcd
        self._keys = keys
        self._event_queue = event_queue
        self._log = log
        self._work: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()
        self._pending: set[str] = set()
        """Names of the queued work: each is there once, which bounds the queue by the number of jobs."""
        self.version = ""
        self.alarms: tuple[str, ...] = ()
        """As of the last check."""
        self.members: tuple[MemberHealth, ...] = ()
        """As last reported by `members.Members`."""
        self.anonymous: bool | None = None
        """Whether etcd accepts writes without a password or certificate; None: not known yet."""

    def run_one(self) -> None:
        """Wait for one piece of work, and run it: repeated by the thread."""
        name, work = self._work.get()
        error = ""
        try:
            work()
        except EtcdError as failure:
            error = f"{type(failure).__name__}: {failure}"
        self._event_queue.post(Written(name, error))

    def written(self, event: Written) -> None:
        """Called by the loop for each `Written`."""
        self._pending.discard(event.name)

    def _do(self, name: str, work: Callable[[], object]) -> None:
        """Queue `work`, unless work of the same name is queued or running."""
        if name not in self._pending:
            self._pending.add(name)
            self._work.put((name, work))

    # ── requests of the loop ────────────────────────────────────────────────────────────────────────────────

    def register(self, record: NodeRecord, ttl_s: float, renew_s: float) -> None:
        """Write our record under a new lease; posts NodeRegistered."""

        def work() -> None:
            key = self._keys.node(record.node)
            try:
                there = self._etcd.get(key)
            except EtcdForged as error:  # a record whose signature is not valid is replaced
                there = error.kv
            else:
                if there is not None and (why := taken(there.value, record)):
                    raise EtcdError(why)
            lease_id = 0
            lease = self._etcd.keep(ttl_s, renew_s, lambda why: self._event_queue.post(NodeLeaseLost(lease_id, why)))
            lease_id = lease.id
            put = Put(key, encode(record), lease.id)
            try:
                done = self._etcd.txn([ModIs(key, there.mod_revision if there else 0)], [put])
            except EtcdError:
                lease.close()
                raise
            if not done.ok:
                lease.close()
                raise EtcdUnavailable(f"{key} was written by another process meanwhile", maybe_done=False)
            self._event_queue.post(NodeRegistered(lease, record))

        self._do("register", work)

    @property
    def ignores_signatures(self) -> bool:
        """Whether records in etcd are signed and this node has no key to check them."""
        return self._etcd.signatures_ignored

    def update(self, record: NodeRecord, lease: int) -> None:
        """Write a newer record under our lease; posts Updated."""

        def work() -> None:
            try:
                self._etcd.put(self._keys.node(record.node), encode(record), lease)
            except LeaseGone as gone:
                self._event_queue.post(NodeLeaseLost(lease, str(gone)))
            else:
                self._event_queue.post(Updated(lease, record))

        self._do("update", work)

    def put_known(self, node: str, row: KnownNode | None, own: bool) -> None:
        """Write a node's row of the inventory, None: delete it; that of another node only while its record is gone."""
        key, there = self._keys.known_node(node), [] if own else [Absent(self._keys.node(node))]
        ops: Sequence[Op] = [Put(key, encode(row))] if row is not None else ending(self._keys, key)
        self._do(f"known {node}", lambda: self._etcd.txn(there, ops))

    def left(self, row: KnownNode) -> None:
        """The last write of a daemon that is stopped, in the calling thread. Without etcd the node counts as lost."""
        try:
            self._etcd.put(self._keys.known_node(row.node), encode(row))
        except EtcdError as error:
            self._log.warning("node.leaves_unsaid", error=str(error))

    def put_state(self, job: Job, state: JobState) -> None:
        """Write a job's state, unless it was changed meanwhile: the next view then shows the change."""
        keys = self._keys.job(job.name)
        compares = [ModIs(keys.state, job.state_revision), ModIs(keys.spec, job.spec_revision)]
        self._do(f"state {job.name}", lambda: self._etcd.txn(compares, [Put(keys.state, encode(state))]))

    def put_events(self, puts: Sequence[Put]) -> bool:
        """Write events; False: an earlier write is under way. Given up after EVENT_TRIES: no decision needs them."""
        if "events" in self._pending:
            return False

        def work() -> None:
            for left in reversed(range(EVENT_TRIES)):
                try:
                    self._etcd.txn([], puts)
                    return
                except EtcdUnavailable:
                    if not left:
                        raise

        self._do("events", work)
        return True

    def delete(self, what: str, keys: Sequence[str]) -> None:
        """Delete records that are too many: `what`, 'old events'."""
        self._do(what, lambda: self._etcd.txn([], [Delete(key) for key in keys]))

    def put_right(self, key: str, there: KV, newest: KV | None) -> None:
        """Write the newest record of `key` over the one that is `there`; None: it was deleted for good."""
        ops: list[Op] = [Put(key, newest.value)] if newest is not None else [Delete(key)]
        if newest is None and self._keys.is_spec(key):
            ops = [Delete(key.removesuffix(ClusterKeys.SPEC) + "/", prefix=True)]

        def work() -> None:
            if self._etcd.txn([ModIs(key, there.mod_revision)], ops).ok:
                self._log.warning("record.put_right", key=key, why="another record had been written in its place")

        self._do(f"right {key}", work)

    def check_alarms(self) -> None:
        """Check whether etcd has raised an alarm: it then answers reads and renewals, but accepts no writes."""

        def work() -> None:
            try:
                alarms = self._etcd.alarms()
            except EtcdDenied:
                return  # newer members tell them to etcd's root only; a refused write says so, too
            if alarms != self.alarms:
                self._log.warning("etcd.alarms", raised=alarms, before=self.alarms)
            self.alarms = alarms

        self._do("alarms", work)

    def compact(self, revision: int) -> None:
        """Discard etcd's history before `revision`; another daemon may have done so already."""

        def work() -> None:
            try:
                self._etcd.compact(revision)
            except EtcdUnavailable:
                raise
            except EtcdError as error:
                self._log.info("etcd.not_compacted", revision=revision, why=str(error))
            else:
                self._log.info("etcd.compacted", revision=revision)

        self._do("compact", work)

    def show_members(self, members: tuple[MemberHealth, ...]) -> None:
        """Called by the thread that queries the members."""
        self.members = members

    def check_anonymous(self, refuse: bool) -> None:
        """Check whether etcd answers without credentials; with `refuse`, the daemon then stops."""

        def work() -> None:
            endpoint = self._etcd.anonymous_endpoint()
            if endpoint is None:
                return  # the loop asks again
            self.anonymous = bool(endpoint)
            if endpoint and refuse:
                why = (
                    f"etcd at {endpoint} answers without the password or certificate that is set here, so it takes "
                    "writes from anyone, and elasticd runs as root what stands in it: turn on etcd's authentication or "
                    "--client-cert-auth, or set etcd.insecure = true where every user who reaches etcd may be root on "
                    "every node"
                )
                self._event_queue.post(Stop(why, code=78))
            elif endpoint:
                self._log.warning("etcd.anonymous", endpoint=endpoint, why="any client may write to it")

        self._do("anonymous", work)

    def check_version(self, refuse: bool) -> None:
        """Check etcd's version; with `refuse`, the daemon stops if it is unsupported or may lose data."""

        def work() -> None:
            members = self._etcd.members()
            for member in members:
                if not member.version:
                    continue
                verdict = judge(member.version, len(members))
                self.version = member.version
                if verdict.support is VersionSupport.SOUND:
                    self._log.info("etcd.version", endpoint=member.endpoint, version=member.version)
                elif refuse and verdict.support is not VersionSupport.FLAWED:
                    help_ = "or set etcd.allow_unsound_version = true where nothing is to be lost"
                    self._event_queue.post(Stop(f"{member.endpoint}: {verdict}, {help_}", code=78))
                else:
                    self._log.warning("etcd.version", endpoint=member.endpoint, why=str(verdict))

        self._do("version", work)


def taken(there: bytes, ours: NodeRecord) -> str:
    """Why the record under our name belongs to another elasticd; empty: it does not."""
    try:
        other = decode(NodeRecord, there)
    except ProtocolVersionMismatch as error:
        return str(error)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""  # not a record: replace it
    if other.hostname != ours.hostname:
        return f"another host ({other.hostname}, {other.address}) is already called {ours.node!r}: set `node`"
    if other.pid != ours.pid and other.started_wall_s != ours.started_wall_s and _is_elasticd(other.pid):
        return f"process {other.pid} on this host is already called {ours.node!r}: set `node`"
    return ""


def _is_elasticd(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"elasticd" in file.read()
    except OSError:
        return False
