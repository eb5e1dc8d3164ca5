"""The etcd key of each record. The only module that spells keys.

`KINDS` has one row for each kind of record, below /elastic/<cluster>/: which key signs it, and how a record that is put
back is recognised. A new kind needs its row there, and nothing else, to be signed and ordered (`elastic.etcd.stamps`);
a deletion that is to last leaves a record at `ClusterKeys.ended` (`elastic.etcd.signing.ending`).

Below `head/` are the keys that every agent of a job watches, however large the job: see `watch_scope`. Those below
`ranks/` sort after all others of the job, so that agents can watch the others alone: no agent reads them.
"""

from __future__ import annotations

import enum
import re

import msgspec

NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
"""A valid cluster, node or job name: lower-case letters, digits, ``.``, ``_``, ``-``; at most 63 characters."""

LAST_WALL_S = 253402300799.0
"""The end of the year 9999, the last that can be written as a date."""
NUMBER_DIGITS = 10
"""Of a generation's number in a key, so that keys sort by it."""
KEPT_EVENTS = 2000
"""How many events of a cluster are kept; the daemon of the oldest node deletes older ones."""


def check_name(field: str, value: str) -> str:
    """Return `value`, or raise ValueError naming `field`, the value and the rule."""
    if not NAME.fullmatch(value):
        raise ValueError(
            f"{field} = {value!r}: use 1 to 63 of a-z 0-9 . _ -, beginning and ending with a letter or digit"
        )
    return value


class SigningAuthority(enum.Enum):
    """Which key signs a record (see `elastic.etcd.signing`)."""

    NONE = "none"  # not a key of this cluster
    CLUSTER = "cluster"  # written by daemons only
    JOB = "job"  # written by the job's agents too
    BOTH = "both"  # written by daemons only, and checked by the job's agents: a spec


class Kind(msgspec.Struct, frozen=True):
    by: SigningAuthority
    leased: bool = False
    """It ends with the process that wrote it, a daemon or an agent: without a lease it is refused."""
    acted_on: bool = True
    """Daemons act on it, so its stamp is on the disk before they do. Of others it is saved along with these."""
    ordered: bool = True
    """False: each key is written once, so that there is no older record of it."""


_CLUSTER, _JOB = SigningAuthority.CLUSTER, SigningAuthority.JOB
KINDS = {
    "nodes/*": Kind(_CLUSTER, leased=True),  # NodeRecord
    "known/*": Kind(_CLUSTER),  # KnownNode (the inventory: stays until a user forgets it)
    "cordons/*": Kind(_CLUSTER),  # CordonRecord
    "drains/*": Kind(_CLUSTER),  # DrainRecord
    "ended/*": Kind(_CLUSTER),  # {}: the record at that key was deleted for good
    "events/*": Kind(_CLUSTER, acted_on=False, ordered=False),  # EventRecord (the newest `KEPT_EVENTS` of the cluster)
    "jobs/*/head/spec": Kind(SigningAuthority.BOTH),  # SpecRecord
    "jobs/*/head/state": Kind(_JOB),  # JobState
    "jobs/*/head/generation": Kind(_JOB),  # GenerationRecord (compare-and-swap), or GenerationDelta, since the base
    "jobs/*/head/restored": Kind(_JOB, acted_on=False),  # {}: written with a generation that etcd had lost
    "jobs/*/head/broken/*": Kind(_JOB, acted_on=False),  # BrokenRecord, by generation (first failure wins)
    "jobs/*/members/*": Kind(_JOB, leased=True),  # MemberRecord, by node
    "jobs/*/incidents/*": Kind(_JOB, acted_on=False),  # IncidentAccount (each agent its own), and IncidentRecord
    "jobs/*/base": Kind(_JOB, acted_on=False),  # BaseRecord (of a large job: with its head, or before)
    "jobs/*/progress": Kind(_JOB, acted_on=False),  # ProgressRecord (leader, every few seconds)
    "jobs/*/ranks/*": Kind(_JOB, acted_on=False),  # RanksRecord, by node (each agent, every ten seconds or less often)
    "jobs/*/asked": Kind(_CLUSTER),  # AskedRecord (daemons pass it on to their agents)
}
"""Keys below the cluster's root -> the kind of their records. `*` stands for one name, in `ended/*` for a key."""
_UNKNOWN = {False: Kind(_CLUSTER), True: Kind(_JOB)}
"""Of keys that are in no row, which a later elasticd may have: of the cluster, of a job."""


class ClusterKeys:
    SPEC = "/head/spec"
    """How the keys of specs end."""

    def kind(self, key: str) -> Kind:
        """The kind of the record at `key`, which is one of this cluster."""
        first, _, rest = key[len(self.root) :].partition("/")
        if first != "jobs":
            return KINDS.get(f"{first}/*", _UNKNOWN[False])
        rest = rest.partition("/")[2]
        return KINDS.get(f"jobs/*/{rest}") or KINDS.get(f"jobs/*/{rest.rpartition('/')[0]}/*", _UNKNOWN[True])

    def authority(self, key: str) -> tuple[SigningAuthority, str]:
        """Which key signs the record at `key`; and the job that it belongs to, '' for none."""
        if not key.startswith(self.root):
            return SigningAuthority.NONE, ""
        return self.kind(key).by, key[len(self.jobs) :].partition("/")[0] if key.startswith(self.jobs) else ""

    def is_spec(self, key: str) -> bool:
        return key.startswith(self.jobs) and key.endswith(self.SPEC)

    def is_leased(self, key: str) -> bool:
        """Whether the record at `key` ends with the process that wrote it: a daemon or an agent."""
        return key.startswith(self.root) and self.kind(key).leased

    def ended(self, key: str) -> str:
        """Where a record says that the one at `key` was deleted for good: none signed before that is accepted."""
        return f"{self.endings}{key[len(self.root) :]}"

    def ends(self, key: str) -> str:
        """The key of which the record at `key` says that it was deleted for good; '': of none."""
        return self.root + key[len(self.endings) :] if key.startswith(self.endings) else ""

    def beside(self, key: str) -> str:
        """The inventory's row of the node whose record is at `key`, and the reverse; '': it is neither."""
        for here, there in ((self.nodes, self.known), (self.known, self.nodes)):
            if key.startswith(here):
                return there + key[len(here) :]
        return ""

    def __init__(self, cluster: str) -> None:
        self.root = f"/elastic/{check_name('cluster', cluster)}/"
        self.nodes = f"{self.root}nodes/"
        self.known = f"{self.root}known/"
        self.cordons = f"{self.root}cordons/"
        self.drains = f"{self.root}drains/"
        self.events = f"{self.root}events/"
        self.endings = f"{self.root}ended/"
        self.jobs = f"{self.root}jobs/"

    def node(self, node: str) -> str:
        return f"{self.nodes}{node}"

    def known_node(self, node: str) -> str:
        return f"{self.known}{node}"

    def cordon(self, node: str) -> str:
        return f"{self.cordons}{node}"

    def drain(self, node: str) -> str:
        return f"{self.drains}{node}"

    def event(self, when_wall_s: float, node: str, unique: str) -> str:
        """Sorts by time; `unique` tells two events of one node in one millisecond apart. A time that is no date, as a
        job's records may name, is the nearest one that is."""
        return f"{self.events}{int(1000 * max(0.0, min(when_wall_s, LAST_WALL_S))):015d}.{node}.{unique}"

    def job(self, job: str) -> JobKeys:
        return JobKeys(self, job)


class JobKeys:
    def __init__(self, cluster: ClusterKeys, job: str) -> None:
        self.root = f"{cluster.jobs}{check_name('job', job)}/"
        self.head = f"{self.root}head/"
        self.spec = f"{self.head}spec"
        self.state = f"{self.head}state"
        self.generation = f"{self.head}generation"
        self.restored = f"{self.head}restored"
        self.base = f"{self.root}base"
        self.progress = f"{self.root}progress"
        self.asked = f"{self.root}asked"
        self.members = f"{self.root}members/"
        self.ranks = f"{self.root}ranks/"
        self.broken_all = f"{self.head}broken/"
        self.incidents = f"{self.root}incidents/"

    def member(self, node: str) -> str:
        return f"{self.members}{node}"

    def ranks_of(self, node: str) -> str:
        return f"{self.ranks}{node}"

    def broken(self, generation: int) -> str:
        return f"{self.broken_all}{generation:0{NUMBER_DIGITS}d}"

    def incident(self, generation: int) -> str:
        """The keys of what is on record of incidents of this generation begin with it."""
        return f"{self.incidents}{generation:0{NUMBER_DIGITS}d}"

    def account(self, first: int, node: str, incarnation: str, repeat: int = 0) -> str:
        """What one agent tells of the incident that began with generation `first`. If that stood still, stepped again,
        and stood still or failed later, it tells of each under a key of its own: `repeat` counts them."""
        return f"{self.incident(first)}.by.{node}.{incarnation}.{repeat}"

    def is_account(self, key: str) -> bool:
        return key.startswith(self.incidents) and key[len(self.incidents) + NUMBER_DIGITS :].startswith(".by.")

    def beside_incident(self, what: str, generation: int, node: str, number: int = 0) -> str:
        """Of what breaks no generation, beside the incident of `generation`: 'exit', of a process (`number`: its worker
        id) that did not exit after its script had ended; 'save', of a checkpoint (its step) that failed; 'stray', of
        checkpoints of a node that the job goes on without."""
        return f"{self.incident(generation)}.{what}.{node}.{number}"
