"""Signatures of the records in etcd: write access to etcd alone must not make a node act.

A signed value is the record's JSON followed by one line, so that `etcdctl get` stays readable:

    {"protocol":3,…}
    elasticd-signed-1 <key id> <submission> <stamp> <cluster MAC> <job MAC>

Each MAC is HMAC-SHA256 over the etcd key, the submission, the stamp and the JSON, so that a record is valid under its
own key only. `-` stands for an absent field.

- The **cluster key** is held by the daemons. It signs what only they decide: specs, nodes, cordons, drains, requests.
- A **job key** is derived from it for one submission of one job, and given to that job's agents. It signs the job's
  state, generation, members, failure reports, incidents and progress. An agent runs as the job's user, who can
  therefore sign for this job only, and not its spec. A spec carries both MACs: daemons check that of the cluster key,
  agents that of the job key.
- The **submission** is random per submission of a job: records of an earlier job of the same name are refused.
- The **stamp** is the time in nanoseconds, and grows with each write of a key, whatever the clocks of its writers say.
  A reader refuses a record that is older than one of the same key that it has read (`stamps`), so each writer of a key
  reads it before, or is the only one. A stamp more than `AHEAD_NS` ahead of the reader's clock is refused: there might
  be none above it.
- A record that belongs to a process has a **lease**, and is refused without one.
"""

from __future__ import annotations

import abc
import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from elastic.contract.agent_files import JobKey
from elastic.contract.keys import ClusterKeys, SigningAuthority

from .stamps import Stamps
from .types import KV, Delete, EtcdError, EtcdForged, Op, Put, Refusal

MARK = "elasticd-signed-1"
_LINE = f"\n{MARK} ".encode()
KEY_BYTES = 32
"""Length of a cluster key."""
NONE = "-"
AHEAD_NS = 24 * 3600 * 10**9
"""A clock set to another time zone is wrong by less. What is read within this is followed by a higher stamp."""


class _Trailer(NamedTuple):
    key_id: str
    submission: str
    stamp: int
    cluster_mac: str
    job_mac: str


class _Submission(msgspec.Struct):
    submission: str = ""


_SUBMISSION = msgspec.json.Decoder(_Submission)


def key_id(secret: bytes) -> str:
    """Names a cluster key without revealing it: equal on all nodes that have the same key."""
    return hmac.digest(secret, b"elasticd key id", "sha256").hex()[:8]


def job_secret(secret: bytes, root: str, job: str, submission: str) -> bytes:
    """The key of one submission of one job, derived from the cluster key."""
    return hmac.digest(secret, f"elasticd job key\n{root}\n{job}\n{submission}".encode(), "sha256")


def ending(keys: ClusterKeys, key: str) -> tuple[Op, Op]:
    """Delete the record at `key` for good: one that was signed before this is refused when it is put back."""
    return Delete(key), Put(keys.ended(key), b"{}")


def stripped(value: bytes) -> tuple[bytes, bool]:
    """A value without its signature, which is not checked; and whether it had one."""
    payload, line, _ = value.rpartition(_LINE) if not value.endswith(b"}") else (b"", b"", b"")
    return (payload, True) if line else (value, False)


class Signer(abc.ABC):
    """Signs what one client of etcd writes and checks what it reads. Thread-safe. See `ClusterSigner`, `JobSigner`."""

    def __init__(self, root: str, name: str, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._keys = ClusterKeys(root.removeprefix("/elastic/").rstrip("/"))
        self.key_id = name
        self._clock_ns = clock_ns
        self._last = 0
        """Stamp of the last record that was signed here and whose key had none ahead of it."""
        self._ahead: dict[str, int] = {}
        """Key -> stamp of the last record that was signed here, where it is ahead of that: a job's user chooses the
        stamps of its records, and must not choose those of others."""
        self.stamps = Stamps(self._keys)

    def sealed(self, ops: Sequence[Op]) -> list[Op]:
        """The operations with signed values. Raises EtcdForged for a record that this client must not sign."""
        submissions: dict[str, str] = {}
        return [self._sealed(op, submissions) if isinstance(op, Put) else op for op in ops]

    def opened(self, kv: KV) -> KV:
        """The key with its value verified and without the signature. Raises EtcdForged."""
        authority, job = self._keys.authority(kv.key)
        if authority is SigningAuthority.NONE:
            return kv
        payload, trailer = _parsed(kv)
        if trailer.key_id != self.key_id:
            raise EtcdForged(
                kv, f"it is signed with another cluster key ({trailer.key_id}; here {self.key_id})", older=False
            )
        if not self._valid(kv.key, payload, trailer, authority, job):
            raise EtcdForged(kv, "its signature is not valid for this key")
        if (ahead_ns := trailer.stamp - self._clock_ns()) > AHEAD_NS:
            hours = ahead_ns // 3_600_000_000_000
            raise EtcdForged(kv, f"it was signed {hours} hours ahead of this node's clock: compare the nodes' clocks")
        kind = self._keys.kind(kv.key)
        if kind.leased and not kv.lease:
            raise EtcdForged(kv, "it has no lease: the process that wrote it has ended")
        with self.stamps.lock:
            if kind.ordered:
                self._refuse_old(kv, trailer.stamp)
            self._refuse_foreign(kv, trailer, authority, job)
            if kind.ordered:
                self._remember(kv, trailer)
        return KV(kv.key, payload, kv.create_revision, kv.mod_revision, kv.lease, trailer.stamp)

    def verified(self, kvs: Iterable[KV]) -> tuple[dict[str, KV], dict[str, Refusal]]:
        """The accepted keys, and the others. Specs are checked first: they say which submission is the current one; and
        before them what was deleted for good."""
        accepted: dict[str, KV] = {}
        refused: dict[str, Refusal] = {}
        keys = self._keys
        for kv in sorted(kvs, key=lambda kv: (not kv.key.startswith(keys.endings), not keys.is_spec(kv.key))):
            try:
                accepted[kv.key] = self.opened(kv)
            except EtcdForged as error:
                newer = error.older if error.older is not None else self._counts_on(kv.key)
                refused[kv.key] = Refusal(kv, error.why, newer)
        return accepted, refused

    def deleted(self, keys: Iterable[str]) -> None:
        """These keys are not in etcd any more."""
        self.stamps.deleted(keys)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def _sealed(self, put: Put, submissions: dict[str, str]) -> Put: ...
    @abc.abstractmethod
    def _valid(self, key: str, payload: bytes, trailer: _Trailer, authority: SigningAuthority, job: str) -> bool: ...
    @abc.abstractmethod
    def _refuse_foreign(self, kv: KV, trailer: _Trailer, authority: SigningAuthority, job: str) -> None: ...

    def _counts_on(self, key: str) -> bool:
        """Whether the record that was read before counts on, whatever has been written over it."""
        return False

    def _stamp(self, key: str) -> int:
        """Newer than every stamp that was read here of this key and of a key that it ends, whatever the clocks of other
        nodes say. A node's record and its row of the inventory each are newer than the other: of a node that is
        installed anew, perhaps with its clock behind, the row alone says what the one before has signed."""
        now_ns = self._clock_ns()

        def above(stamp: int) -> int:
            return stamp + 1 if stamp <= now_ns + AHEAD_NS else 0

        with self.stamps.lock:
            self._last = max(now_ns, above(self._last))
            names = (key, self._keys.ends(key), self._keys.beside(key))
            read = (above(self.stamps.of(name).stamp) for name in names if name)
            stamp = max(self._last, above(self._ahead.pop(key, 0)), *read)
            if stamp > self._last:
                self._ahead = {k: s for k, s in self._ahead.items() if s > now_ns} | {key: stamp}
            return stamp

    def _newest(self, key: str) -> int:
        """Stamp of the newest record that was read; 0: that was while this node's clock was far ahead."""
        stamp = self.stamps.of(key).stamp
        return stamp if stamp <= self._clock_ns() + AHEAD_NS else 0

    def _refuse_old(self, kv: KV, stamp: int) -> None:
        kind, newest = self._keys.kind(kv.key), self._newest(kv.key)
        if stamp < newest:
            raise EtcdForged(kv, "it is an older record that was written again", older=not kind.leased)
        if stamp == newest and kind.leased and self.stamps.of(kv.key).gone:
            raise EtcdForged(kv, "the process that wrote it has ended, and it was written again")

    def _remember(self, kv: KV, trailer: _Trailer) -> None:
        if trailer.stamp >= self._newest(kv.key):
            self.stamps.take(kv.key, trailer.stamp, trailer.submission if self._keys.is_spec(kv.key) else "")
        if kv.key.startswith(self._keys.endings):
            self.stamps.end(self._keys.ends(kv.key), trailer.stamp)


class ClusterSigner(Signer):
    """A daemon's: has the cluster key, and so every job key."""

    def __init__(self, root: str, secret: bytes, clock_ns: Callable[[], int] = time.time_ns) -> None:
        super().__init__(root, key_id(secret), clock_ns)
        self._secret = secret

    def follow(self, key: str, unsaved_s: float) -> None:
        """`key` is written by this process only, and was by one before it, whose last `unsaved_s` of stamps may not be
        remembered here. If that one's clock was ahead of ours, what is signed from now on is newer all the same."""
        if (stamp := self.stamps.of(key).stamp) > self._clock_ns():
            self._last = max(self._last, stamp + int(unsaved_s * 1e9))

    def _counts_on(self, key: str) -> bool:
        newest = self.stamps.of(key)
        return bool(newest.stamp) and not newest.gone and not self._keys.is_leased(key)

    def job_key(self, job: str, submission: str) -> JobKey:
        """What the agents of a job are given."""
        secret, keys = job_secret(self._secret, self._keys.root, job, submission), self._keys.job(job)
        newest = {key: self.stamps.of(key).stamp for key in (keys.spec, keys.state, keys.generation)}
        return JobKey(
            root=self._keys.root, job=job, submission=submission, key_id=self.key_id, secret=secret.hex(),
            newest=newest if self.stamps.submission(job) == submission else {}, after=self.stamps.highest(job),
        )  # fmt: skip

    def _sealed(self, put: Put, submissions: dict[str, str]) -> Put:
        authority, job = self._keys.authority(put.key)
        if authority is SigningAuthority.NONE:
            return put
        submission = ""
        if authority is SigningAuthority.BOTH:
            submission = submissions[job] = _SUBMISSION.decode(put.value).submission
        elif job:
            submission = submissions.get(job, self.stamps.submission(job) or "")
        stamp = self._stamp(put.key)
        message = _message(put.key, submission, stamp, put.value)
        cluster = job_mac = NONE
        if authority is not SigningAuthority.JOB:
            cluster = _mac(self._secret, message)
        if authority in (SigningAuthority.JOB, SigningAuthority.BOTH):
            job_mac = _mac(job_secret(self._secret, self._keys.root, job, submission), message)
        return Put(put.key, _joined(put.value, self.key_id, submission, stamp, cluster, job_mac), put.lease)

    def _valid(self, key: str, payload: bytes, trailer: _Trailer, authority: SigningAuthority, job: str) -> bool:
        message = _message(key, trailer.submission, trailer.stamp, payload)
        if authority is SigningAuthority.JOB:
            secret = job_secret(self._secret, self._keys.root, job, trailer.submission)
            return _equal(_mac(secret, message), trailer.job_mac) and trailer.cluster_mac == NONE
        valid = _equal(_mac(self._secret, message), trailer.cluster_mac)
        if authority is SigningAuthority.BOTH:
            secret = job_secret(self._secret, self._keys.root, job, trailer.submission)
            return valid and _equal(_mac(secret, message), trailer.job_mac)
        return valid and trailer.job_mac == NONE

    def _refuse_foreign(self, kv: KV, trailer: _Trailer, authority: SigningAuthority, job: str) -> None:
        current = self.stamps.submission(job) if job and authority is not SigningAuthority.BOTH else None
        if current is not None and current != trailer.submission:
            raise EtcdForged(kv, "it belongs to an earlier job of this name")


class JobSigner(Signer):
    """An agent's: has the key of its own job."""

    def __init__(self, key: JobKey, clock_ns: Callable[[], int] = time.time_ns) -> None:
        super().__init__(key.root, key.key_id, clock_ns)
        self._secret = bytes.fromhex(key.secret)
        self._job = key.job
        self._submission = key.submission
        self._spec: bytes | None = None
        """The newest valid spec as it was signed by a daemon."""
        self._revisions: dict[str, int] = {}
        """Key -> mod revision of the newest record."""
        self._last = key.after
        spec = self._keys.job(key.job).spec
        self.stamps.load((k, stamp, False, key.submission if k == spec else "") for k, stamp in key.newest.items())

    def opened(self, kv: KV) -> KV:
        found = super().opened(kv)
        if self._keys.is_spec(kv.key):
            self._spec = kv.value
        return found

    def _sealed(self, put: Put, submissions: dict[str, str]) -> Put:
        authority, job = self._keys.authority(put.key)
        if authority is SigningAuthority.NONE:
            return put
        if job == self._job and authority is SigningAuthority.BOTH and self._spec is not None:
            # After etcd has lost its data the agents write the spec back. They cannot sign one: it is the daemon's.
            return Put(put.key, self._spec, put.lease)
        if job != self._job or authority is not SigningAuthority.JOB:
            raise EtcdError(f"{put.key}: an agent of job {self._job!r} cannot sign this record")
        stamp = self._stamp(put.key)
        mac = _mac(self._secret, _message(put.key, self._submission, stamp, put.value))
        return Put(put.key, _joined(put.value, self.key_id, self._submission, stamp, NONE, mac), put.lease)

    def _valid(self, key: str, payload: bytes, trailer: _Trailer, authority: SigningAuthority, job: str) -> bool:
        if job != self._job or authority is SigningAuthority.CLUSTER:
            return False
        message = _message(key, trailer.submission, trailer.stamp, payload)
        return _equal(_mac(self._secret, message), trailer.job_mac)

    def _refuse_old(self, kv: KV, stamp: int) -> None:
        """A lower revision: etcd was set back to a backup, and agents see to that (`recovery.effects.Restore`)."""
        if kv.mod_revision > self._revisions.get(kv.key, 0):
            super()._refuse_old(kv, stamp)

    def _remember(self, kv: KV, trailer: _Trailer) -> None:
        if trailer.stamp >= self._newest(kv.key):
            self._revisions[kv.key] = kv.mod_revision
        super()._remember(kv, trailer)

    def _refuse_foreign(self, kv: KV, trailer: _Trailer, authority: SigningAuthority, job: str) -> None:
        if trailer.submission != self._submission:
            raise EtcdForged(kv, "it belongs to another job of this name")


def _message(key: str, submission: str, stamp: int, payload: bytes) -> bytes:
    # The length makes the fields unambiguous: a foreign key may hold spaces and line ends.
    return f"{MARK} {len(key)} {key} {submission or NONE} {stamp}\n".encode(errors="backslashreplace") + payload


def _mac(secret: bytes, message: bytes) -> str:
    return hmac.digest(secret, message, hashlib.sha256).hex()


def _equal(ours: str, theirs: str) -> bool:
    return hmac.compare_digest(ours.encode(), theirs.encode(errors="replace"))


def _joined(payload: bytes, name: str, submission: str, stamp: int, cluster: str, job: str) -> bytes:
    return payload + f"\n{MARK} {name} {submission or NONE} {stamp} {cluster} {job}".encode()


def _parsed(kv: KV) -> tuple[bytes, _Trailer]:
    payload, line, rest = kv.value.rpartition(_LINE)
    fields = rest.decode("ascii", "replace").split(" ")
    if not line or len(fields) != 5:
        raise EtcdForged(kv, "it is not signed")
    name, submission, stamp, cluster, job = fields
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) < 20):
        raise EtcdForged(kv, "its signature is malformed")
    return payload, _Trailer(name, "" if submission == NONE else submission, int(stamp), cluster, job)
