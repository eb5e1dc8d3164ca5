"""Which user may do what: decided by the user id that the kernel gives for the other end of the socket. Pure.

The owner of a job is the user who submitted it. Admins are root, the daemon's own user and the members of
`admin_group`. Owner and admins may change a job and read its logs; admins alone may change nodes; status is for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.contract.records.job_records import SpecRecord
from elasticd.base.errors import Refused

ROOT = 0


@dataclass(frozen=True, slots=True)
class Account:
    uid: int
    gid: int
    user: str
    """Its name; the number as text, if this machine knows no name for it."""
    groups: frozenset[int] = frozenset()
    """All its groups."""


@dataclass(frozen=True, slots=True)
class Peer(Account):
    """The process at the other end of the Unix socket (SO_PEERCRED), and its user."""

    pid: int = 0


UNKNOWN = Peer(-1, -1, "unknown")
"""A peer whose identity the kernel does not give: owns nothing."""


@dataclass(frozen=True, slots=True)
class Authority:
    daemon_uid: int
    admin_gid: int | None = None
    admin_group: str = ""

    def is_admin(self, peer: Peer) -> bool:
        return peer.uid in (ROOT, self.daemon_uid) or (self.admin_gid is not None and self.admin_gid in peer.groups)

    def may_change(self, peer: Peer, spec: SpecRecord | None) -> bool:
        """Whether `peer` may change this job and read what it wrote."""
        return self.is_admin(peer) or (spec is not None and owns(peer, spec))

    def check_job(self, peer: Peer, job: str, spec: SpecRecord | None, verb: str) -> None:
        """Raise Refused (403) unless `peer` may `verb` this job."""
        if not self.may_change(peer, spec):
            owner = owner_name(spec)
            can = f"{owner}, {self._admins()}" if spec and spec.uid not in (None, ROOT) else self._admins()
            raise Refused(403, f"you ({peer.user}) may not {verb} job {job!r}: it belongs to {owner}; {can} can")

    def check_logs(self, peer: Peer, job: str, spec: SpecRecord | None, folder_uid: int | None) -> None:
        """Raise Refused (403) unless `peer` may read this job's logs on this node. `folder_uid`: owner of the folder
        that holds them, None: there is none. A folder may be left from an earlier job of the same name."""
        if self.is_admin(peer):
            return
        if spec is not None:
            self.check_job(peer, job, spec, "read the logs of")
        if folder_uid not in (None, peer.uid):
            raise Refused(
                403, f"you ({peer.user}) may not read the logs of {job!r} on this node: they are of uid {folder_uid}, "
                f"from an earlier job of that name; {self._admins()} can"
            )  # fmt: skip

    def check_node(self, peer: Peer, node: str, verb: str) -> None:
        """Raise Refused (403) unless `peer` may `verb` this node."""
        if not self.is_admin(peer):
            raise Refused(403, f"you ({peer.user}) may not {verb} node {node!r}: {self._admins()} can")

    def submitter(self, peer: Peer, wanted: str, found: Account | None) -> Account:
        """The user of a new job: `peer`, or for root the user named `wanted`, whose account is `found`.

        Raises Refused (400, 403).
        """
        if not wanted:
            return peer
        if peer.uid != ROOT:
            raise Refused(403, f"you ({peer.user}) may not submit as {wanted!r}: root can")
        if found is None:
            raise Refused(400, f"as = {wanted!r}: there is no such user on this machine")
        return found

    def _admins(self) -> str:
        if self.admin_gid is None:
            return "root" if self.daemon_uid == ROOT else f"elasticd's own user (uid {self.daemon_uid}) or root"
        return f"a member of group {self.admin_group} or root"


def owns(peer: Peer, spec: SpecRecord) -> bool:
    """Whether the job is the peer's: same user id, and no different name for it."""
    names = {name for name in (peer.user, spec.user) if name and not name.isdigit()}
    return spec.uid is not None and spec.uid == peer.uid and len(names) < 2


def owner_name(spec: SpecRecord | None) -> str:
    """'alice'; 'uid 1000' for a user without a name."""
    if spec is None:
        return "an unknown user"
    if spec.uid is None:
        return f"{spec.submitted_by} (submitted by an earlier elasticd, which recorded no user id)"
    return spec.user if spec.user and not spec.user.isdigit() else f"uid {spec.uid}"
