"""The answers of the API, shared by the daemon, the page and elasticctl.

Every field has a default: an answer of an earlier daemon lacks some, and one of a later daemon has some that are not
here. The texts below the fields are the tables of docs/api.md (`python -m support.api_doc`, in tests/).
"""

# Annotations are values here, not texts: msgspec would compile each text, which `elasticctl status` waits for.

from typing import Any, TypeVar

import msgspec

from .safe_text import shown

SCHEMA = 1
"""Version of every answer. Fields may be added under the same version; none is removed or changes its meaning."""

LONGEST_WAIT_S = 60.0
"""A request that waits is answered after this time at the latest."""


Json = dict[str, Any]
"""An answer, or a row of one, that has no class here."""


class Answer(msgspec.Struct, kw_only=True):
    """Part of an answer."""


A = TypeVar("A", bound=Answer)


def read(data: Any, kind: type[A], *, safe: bool = True) -> A:
    """An answer as JSON in its class, with every text made safe for a terminal. Raises msgspec.ValidationError."""
    return msgspec.convert(shown(data) if safe else data, kind)


def printable(answer: A) -> A:
    return read(msgspec.to_builtins(answer), type(answer))


def error(status: int | None, message: str, **more: object) -> Json:
    """The answer to a request that is refused or has failed."""
    return {"schema": SCHEMA, "error": {"status": status, "message": message, **more}}


class Certificate(Answer):
    what: str = ""
    file: str = ""
    expires_wall_s: float = 0.0


class EtcdMember(Answer):
    endpoint: str = ""
    ok: bool = False
    version: str = ""
    error: str = ""
    database_mb: float = 0.0


class EtcdContact(Answer):
    """etcd"""

    connected: bool = True
    age_s: float | None = None
    """since it last confirmed the published state; null: never"""
    error: str = ""
    alarms: list[str] = []
    """raised by etcd itself: `NOSPACE` means that it accepts no writes"""
    version: str = ""
    endpoints: list[str] = []
    embedded: bool = False
    anonymous: bool = False
    """it accepts anonymous writes: no password, no client certificate"""
    certificates: list[Certificate] = []
    """those that this node uses"""
    signed: bool = False
    """records are signed with the cluster key"""
    key_id: str = ""
    """names that key; equal on all nodes that have it"""
    refused: dict[str, str] = {}
    """key in etcd → why its record is not used; at most 20"""
    members: list[EtcdMember] = []
    """one entry each; empty for an embedded etcd"""
    revision: int = 0


class Node(Answer):
    """A node"""

    node: str = ""
    jobs: list[str] = []
    slots_used: int = 0
    """by the plan: agents that are starting count, agents of a job that is over do not"""
    away_since_wall_s: float | None = None
    """of a node whose elasticd does not run; null: not known"""
    state: str = ""
    """`ready`, `cordoned`, `draining`, `unhealthy`, `no daemon`: its agents live, its elasticd does not; `lost`:
    neither does, and nothing announced that; `off`: its elasticd was stopped in order, and no agent of it lives"""
    reason: str = ""
    slots: int | None = None
    gpus: int | None = None
    up_since_wall_s: float | None = None
    older_agents: dict[str, str] = {}
    """job → elasticd of its agent there, where that is another than the node's, as after an upgrade"""
    address: str = ""
    hostname: str = ""
    version: str = ""
    why: str = ""
    """one line, always: the activity or the fault of the node, or `ready: idle`"""


class Evidence(Answer):
    source: str = ""
    line: str = ""
    from_log: bool = False
    """it is hidden from users who may not read the job's logs"""


class Cost(Answer):
    steps: int | None = None
    """committed steps that were done again, at least"""
    steps_at_most: int | None = None
    rank_s: float | None = None
    """ranks × seconds without a step, from the last one before the incident to the first one after it"""
    gpu_s: float | None = None
    """the same if each rank has a GPU"""


class Verdict(Answer, rename={"cls": "class"}):
    """A verdict"""

    cls: str = "unknown"
    """`user code`, `numerics`, `out of memory`, `GPU`, `node`, `network`, `storage`, `etcd`, `hang`, `planned`,
    `limit`, `environment`, `unknown`"""
    rule: str = ""
    """its name"""
    cause: str = ""
    """what failed, with the error's own text"""
    what: str = ""
    """the same after ranks and node"""
    evidence: list[Evidence] = []
    """lines; the one that decided is the first"""
    followed: list[str] = []
    """failures that followed from it"""
    done: str = ""
    """which ranks were replaced, which kept their process"""
    cost: Cost = msgspec.field(default_factory=Cost)
    held_by: str = ""
    """what the recovery waits for; empty: nothing, or it is over"""
    person: bool = False
    """whether a person is needed: only if the job has failed by this incident, if it has not recovered within 300 s, if
    etcd has refused writes for 60 s, or if no checkpoint is written because the folder is not shared"""
    fix: str = ""
    """what to do"""


class WorkerError(Answer):
    """An error"""

    node: str = ""
    slot: int = 0
    rank: int = 0
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    signal: str | None = None
    """that ended it; beside an exit code SIGTERM, which its script has handled"""
    step: int | None = None
    last_lines: list[str] = []
    """of its log, if the traceback is not taken from that"""
    no_state: bool = False
    """no rank found a state to resume from"""
    exception: str = ""
    """its type, if it was one"""
    misuse: bool = False
    """elastic has refused what the script does: the next try would do the same"""


class Cause(Answer):
    generation: int = 0
    node: str = ""
    kind: str = ""
    ranks: list[int] = []
    detail: str = ""


class Incident(Answer):
    """An incident"""

    generation: int = 0
    """formed by the recovery"""
    kind: str = ""
    """of the first cause: exit, hang, comm, lost, unreachable, drain, `bad loss`, `drift`, …; planned; checkpoint"""
    node: str = ""
    """comma-separated: all that failed in the generation that failed first"""
    ranks: list[int] = []
    """the same"""
    detail: str = ""
    """the evidence"""
    wall_s: float = 0.0
    """when it began: the detection, or where all agents had died the last commit on record"""
    still_s: float = 0.0
    """for how long no step had been made by then, as the node knows that noticed it; 0: it is not known, or planned"""
    timeline_s: dict[str, float] = {}
    """phase → seconds since `wall_s`"""
    open: bool = False
    """the job has not stepped again, and was not given up"""
    repeat: int = 0
    """how many false alarms the same generation had had before: it stood still, and stepped on"""
    ended_wall_s: float | None = None
    """null while it is open"""
    causes: list[Cause] = []
    """every failure, the first one first; a collective that failed because of a death comes after it"""
    step: int | None = None
    """the newest step known to have been committed before"""
    steps_lost: int | None = None
    """committed steps that were done again, a lower bound; null: not known"""
    steps_lost_at_most: int | None = None
    """equal to `steps_lost` where the number is certain; null: no bound is known"""
    world_size_before: int = 0
    world_size_after: int = 0
    restored_from: str = ""
    """the state that training resumed from, in words"""
    origin: str | None = None
    """its kind: `live`, `snapshot`, `checkpoint`, `setup`: begun again from step 0, `nothing`: the job was given up;
    null: open, or not known"""
    stacks: dict[str, str] = {}
    """process → stack"""
    last_lines: list[str] = []
    """of the log of a worker that was killed by a signal"""
    error: WorkerError | None = None
    job: str = ""
    age_s: float = 0.0
    took_s: float | None = None
    """from the last step before it to the first one after it: `still_s`, and the time since `wall_s`; null: not
    known"""
    lost: str = "unknown"
    """the steps lost in words: "0 steps", "0 to 1 steps", "40 steps or more", "unknown\""""
    verdict: Verdict = msgspec.field(default_factory=Verdict)


class Checkpoint(Answer):
    step: int | None = None
    age_s: float | None = None
    error: str | None = None
    failed: int = 0
    """0 or 1"""
    interval: str = ""
    skipped: int = 0
    """due while the one before was still being written"""


class InMemorySnapshot(Answer):
    step: int | None = None
    """newest snapshot held whole in memory"""
    memory_mb: float = 0.0
    interval: str = ""
    lost_node_costs: str = ""
    """of a sharded job, in words; empty: it is not sharded"""


class Resumed(Answer):
    step: int = 0
    source: str = ""
    """in words"""
    complete: bool = False
    """it had all steps: none was made"""


class Goodput(Answer):
    goodput: float = 0.0
    """0 to 1"""
    badput: dict[str, float] = {}
    """cause → share; with `goodput` they sum to 1; `standstill` while the job makes no step: `open_rank_seconds`, which
    are goodput otherwise"""
    rank_seconds: dict[str, float] = {}
    """bucket → seconds summed over the ranks, never decreasing"""
    open_rank_seconds: float = 0.0
    """since the newest commit"""
    wall_s: float = 0.0


class SlowRank(Answer):
    rank: int = 0
    node: str = ""
    ratio: float = 1.0


class StepTime(Answer):
    ranks: int = 0
    """how many are measured: those of the leader's node or of this one"""
    step_s: float = 0.0
    parts_s: dict[str, float | None] = {}
    """`data`, `compute`, `collectives`, `optimizer`, `snapshot`: mean seconds; null: not measured yet on a GPU"""
    slow_ranks: list[SlowRank] = []
    """of the whole job"""


class NoProgress(Answer):
    since_wall_s: float = 0.0
    for_s: float = 0.0
    rank: int | None = None
    """the probable cause; null: not known"""
    node: str = ""
    because: str = ""
    """a sentence"""
    declared: bool = False
    """the script declared the span with `job.quiet`: the job counts as healthy"""


class Job(Answer):
    """A job"""

    job: str = ""
    phase: str = ""
    """`pending`, `running`, `waiting` (below its minimum of nodes, state kept), `stopping`, `succeeded`, `failed`,
    `stopped`"""
    reason: str = ""
    since_wall_s: float = 0.0
    submitted_wall_s: float | None = None
    submitted_by: str = ""
    owner: str = ""
    """the user that the job belongs to"""
    uid: int | None = None
    """null: it was submitted by an earlier elasticd, which recorded none"""
    nodes: str = ""
    """wanted, as `min:max`"""
    spare_nodes: int = 0
    """wanted beyond"""
    members: int = 0
    """nodes with a living agent"""
    generation: int = 0
    """number of the current one"""
    world_size: int = 0
    """its ranks"""
    step: int | None = None
    """newest committed step known to this node"""
    steps_per_s: float | None = None
    """over the last 10 s, 0 once the newest step is three step times old, at least 1 s; null while no agent of
    the job is there"""
    loss: float | None = None
    """that of the lowest rank on the leader's node (rank 0, unless its node has just been replaced), of the newest step
    that reported one"""
    progress_age_s: float | None = None
    checkpoint: Checkpoint | None = None
    resumed: Resumed | None = None
    """the saved state that the job has gone on from"""
    snapshot: InMemorySnapshot | None = None
    """of the leader's node or this one"""
    goodput: Goodput | None = None
    """null also of a plain script; the ledger of the job's time since it was submitted; see [goodput.md](goodput.md)"""
    logged: dict[str, float] = {}
    """name → newest value of what the script gives to `job.log`"""
    logged_not_finite: dict[str, str] = {}
    """those that JSON has no number for, as `nan`, `inf` or `-inf`"""
    step_time: StepTime | None = None
    """where a step's time goes; see [goodput.md](goodput.md)"""
    managed: bool | None = None
    """whether the script calls `elastic.run`; null: not known"""
    restarts: int = 0
    """failures counted against its restart budget"""
    waiting_for: str = ""
    """a sentence; empty: for nothing"""
    queue_position: int | None = None
    """from 1, of a job that has no node and waits for its minimum, else null"""
    can_never_run: bool = False
    """whether its minimum is more than the cluster's nodes could hold if they were idle"""
    no_progress: NoProgress | None = None
    """of a job that has made no step for longer than ten step times"""
    incidents: int = 0
    """how many"""
    last_incident: Incident | None = None
    error: WorkerError | None = None
    """the first failing rank"""
    health: str = "healthy"
    """`healthy`, `degraded` (it waits for something other than its turn or, before its first step and for up to 30 s,
    its own start; it makes no step; a checkpoint failed) or `failed`"""
    why: str = ""
    """one line, always: what the job does, waits for or recovers from; which nodes it excludes, and until when; etcd's
    refusal"""


class SlotTime(Answer):
    since_wall_s: float = 0.0
    until_wall_s: float = 0.0
    goodput: float | None = None
    """0 to 1"""
    seconds: dict[str, float] = {}
    """bucket → seconds"""
    open_seconds: float = 0.0
    """since the newest commit; with `seconds` they sum to the time between the two instants"""


class Account(SlotTime):
    rank: int = 0
    node: str = ""
    slot: int = 0


class RankTime(Answer):
    ranks: int = 0
    """of all nodes that the job has had: they may be more than its world has now"""
    rank_wall_s: float = 0.0
    """the sum of their wall times"""
    wall_s: float = 0.0
    """its mean"""
    goodput: float = 0.0
    badput: dict[str, float] = {}
    """cause → share; with `goodput` they sum to 1"""
    rank_seconds: dict[str, float] = {}
    """bucket → seconds"""
    open_rank_seconds: float = 0.0
    """with `rank_seconds` they sum to `rank_wall_s`"""
    accounts: list[Account] = []
    """of a job that is over, one for each rank: where its time went"""


class Rank(Answer):
    """A rank"""

    rank: int = -1
    """-1: none yet"""
    node: str = ""
    slot: int = 0
    pid: int | None = None
    phase: str = ""
    step: int | None = None
    incarnation: int | None = None
    """how many workers the slot has had before"""
    rss_mb: float | None = None
    step_s: float | None = None
    """duration of its last step"""
    parts: dict[str, float | None] | None = None
    """of its steps lately, in seconds"""
    age_s: float | None = None
    """of a rank of another node: how old its values are, as its agent publishes them every 10 s, or the leader has been
    silent for more than 5 s; null: they are of now"""
    behind: int | None = None
    """steps behind the foremost rank; null: not known here, as while etcd is away, through which the steps of other
    nodes come"""
    time: SlotTime | None = None
    """where this slot's time went by its own agent's account"""


class Place(Answer):
    node: str = ""
    host: str = ""
    slots: list[int] = []


class Member(Answer):
    ready: list[int] = []
    """slots"""
    slots: int = 0
    draining: str | None = None
    address: str = ""


class Agent(Answer):
    pid: int | None = None
    version: str = ""
    phase: str = ""
    reason: str = ""
    leader: bool = False
    etcd_ok: bool | None = None
    standbys: int = 0
    """past their `setup`"""
    preloaded: list[str] = []
    """modules that the zygote has imported"""
    draining: str | None = None
    trouble: str = ""


class JobDetail(Job):
    """A job in full"""

    schema: int = SCHEMA
    spec: dict[str, Any] | None = None
    """all fields of job.toml"""
    failures_in_window: int = 0
    excluded_nodes: list[str] = []
    places: list[Place] = []
    """member nodes in rank order"""
    why_generation: str = ""
    member_nodes: dict[str, Member] = {}
    """by node"""
    ranks: list[Rank] = []
    """null where neither this node nor the leader has the value; for ranks on other nodes `pid` and `incarnation` are
    known, a few seconds old"""
    rank_time: RankTime | None = None
    """the accounts of all ranks of all nodes that the job has had, added up"""
    agent: Agent | None = None
    """of this node; null: none"""
    recent_incidents: list[Incident] = []
    """ten"""
    etcd: EtcdContact = msgspec.field(default_factory=EtcdContact)


class Status(Answer):
    """Status"""

    schema: int = SCHEMA
    cluster: str = ""
    node: str = ""
    """this one"""
    version: str = ""
    pid: int = 0
    uptime_s: float = 0.0
    metrics: str = ""
    """URL of /metrics, empty: none"""
    address: str = ""
    """of this node"""
    interface: str = ""
    address_why: str = ""
    """where the address comes from"""
    python: str = ""
    """interpreter of jobs that do not set one"""
    wall_s: float = 0.0
    etcd: EtcdContact = msgspec.field(default_factory=EtcdContact)
    health: str = "healthy"
    """the cluster's: `healthy`, or `degraded` while there are `problems` (etcd, nodes, this daemon)"""
    problems: list[str] = []
    """sentences"""
    nodes: list[Node] = []
    jobs: list[Job] = []
    jobs_left_out: int = 0
    """older jobs that are over: `?all=1` has them"""


class Event(Answer):
    """An event"""

    when_wall_s: float = 0.0
    kind: str = ""
    job: str = ""
    node: str = ""
    """empty: none"""
    user: str = ""
    """of the client, if it was a request; else empty"""
    uid: int | None = None
    pid: int | None = None
    text: str = ""


class Progress(Answer):
    """Progress of a job, in a followed log"""

    phase: str = ""
    step: int | None = None
    steps_per_s: float | None = None
    loss: float | None = None
    world_size: int = 0
    waiting_for: str = ""


class Point(Answer):
    wall_s: float = 0.0
    step: int = 0
    loss: float | None = None
    """of the node's lowest rank"""
    steps_per_s: float | None = None
    world_size: int = 0


class History(Answer):
    """A job's course"""

    schema: int = SCHEMA
    job: str = ""
    node: str = ""
    every_s: float = 0.0
    points: list[Point] = []
    """at most 1,000, ever farther apart the longer the job runs"""


class Finding(Answer):
    """A finding of the doctor"""

    check: str = ""
    level: str = "ok"
    """`ok`, `warning`, `error`"""
    text: str = ""
    fix: str = ""
    """what to do; empty if nothing is wrong"""
    node: str = ""
    """the node it is about; empty: the cluster"""


class Diagnosis(Answer):
    """The doctor's answer"""

    schema: int = SCHEMA
    node: str = ""
    worst: str = "ok"
    """the worst level of a finding"""
    versions: dict[str, dict[str, str]] = {}
    """node → what → version"""
    findings: list[Finding] = []
