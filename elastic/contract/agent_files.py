"""How a daemon and an agent on the same host communicate: only by files in the agent's own folder.

    <state_dir>/jobs/<job>/agent/config.json    AgentConfig, written by the daemon before it starts the agent
    <state_dir>/jobs/<job>/agent/lock           flock held by the running agent (the kernel releases it at its exit)
    <state_dir>/jobs/<job>/agent/status.json    AgentStatus, replaced by the agent at least once a second
    <state_dir>/jobs/<job>/agent/left.json      the last status.json of an agent before, which the daemon sets aside:
                                                the next agent of the same submission goes on from it
    <state_dir>/jobs/<job>/agent/orders.json    AgentOrders, replaced by the daemon; read by the agent on SIGHUP
                                                and once a second
    <state_dir>/jobs/<job>/agent/history.json   History, replaced by the agent every ten seconds
    <state_dir>/jobs/<job>/agent/gradients.json GradientSamples, replaced by the agent when a sample is complete
    <state_dir>/jobs/<job>/agent/code.jsonl     the script and its local modules as the job began with them, written and
                                                read by its workers
    <state_dir>/jobs/<job>/agent/agent.log      the agent's own log, JSON lines
    <state_dir>/jobs/<job>/logs/                the workers' logs and error files, kept across restarts

So neither needs the other to be running, and a restarted daemon finds the agents of its predecessor.
"""

from __future__ import annotations

import msgspec

from elastic.contract.records.job_records import PROTOCOL, ProgressRecord, RankRow
from elastic.contract.records.rank_records import RanksRecord
from elastic.contract.records.reasons import Text
from elastic.contract.worker.messages import GradientRow

from .timeouts import Timeouts

LEFT = "left.json"
KEPT_CODE = "code.jsonl"
GRADIENTS_BYTES = 2_000_000
"""Of gradients.json at most: one daemon's answer to another has 2 MiB."""
MARK_ENV = "ELASTIC_AGENT_DIR"
"""Environment variable of all processes that the agent's workers start: it names their agent, should that crash."""


SYSTEMD_VARIABLES = (
    "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "INVOCATION_ID",
    "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "CREDENTIALS_DIRECTORY", "MAINPID", "MANAGERPID", "PIDFILE", "FDSTORE",
    "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "CACHE_DIRECTORY", "LOGS_DIRECTORY", "CONFIGURATION_DIRECTORY",
    "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "EXIT_CODE", "EXIT_STATUS", "SERVICE_RESULT",
)  # fmt: skip
"""Variables that systemd sets for one service only (systemd.exec(5)): not for the processes that it starts."""


def mark(device: int, inode: int, path: str) -> str:
    """The value of MARK_ENV: identifies an agent's folder among those of all machines, containers and daemons."""
    return f"{device:x}:{inode:x}:{path}"


class EtcdAccess(msgspec.Struct, frozen=True, kw_only=True):
    endpoints: tuple[str, ...]
    """host:port each."""
    user: str = ""
    password: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


class JobKey(msgspec.Struct, frozen=True, kw_only=True):
    """With which the agents of one submission of a job sign its records; see `elastic.etcd.signing`."""

    root: str
    """Root of the cluster's keys in etcd."""
    job: str
    submission: str
    key_id: str
    secret: str
    """Hexadecimal."""
    newest: dict[str, int] = {}
    """Key of the job's head -> stamp of the newest record that the daemon has read: the agent takes no older one."""
    after: int = 0
    """The agent's own stamps are higher than this, whatever the clock says: an earlier agent here has signed, too."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    cluster: str
    node: str
    job: str
    address: str
    """Host name or IP address at which other nodes reach this one."""
    slots: int
    """Workers to run here, as determined from the spec and the node's slots."""
    gpus: tuple[int, ...] = ()
    """CUDA device index of each slot; empty on CPU nodes."""
    interface: str = ""
    """Network interface for GLOO_/NCCL_SOCKET_IFNAME; empty: the backend chooses."""
    ports: tuple[int, int] = (0, 0)
    """First and last port for the agent's own sockets; (0, 0): any port."""
    etcd: EtcdAccess
    job_key: JobKey | None = None
    """None: the cluster has no key, and its records are not signed."""
    timeouts: Timeouts = Timeouts()
    agent_dir: str
    logs_dir: str
    submission: str = ""
    """Of the job, as in its spec: it is part of its logs' names."""
    protocol: int = PROTOCOL


class AgentOrders(msgspec.Struct, frozen=True, kw_only=True):
    draining: Text | None = None
    """Move the workers off this node at a step boundary, for this reason."""
    drain_deadline_s: float = 0.0
    """Seconds from the order until the node goes away in any case; 0: no deadline."""
    checkpoint: int = 0
    """Counts requests for a checkpoint; an increase is a request."""
    sample_step: int = 0
    """Sample the gradients of this step, or of the next one; a change is a request."""


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    incarnation: str = ""
    job: str
    node: str
    phase: str
    """joining, forming, running, repairing, waiting, draining, finishing."""
    reason: Text
    leader: bool = False
    generation: int = 0
    etcd_ok: bool = False
    written_wall_s: float
    ranks: tuple[RankRow, ...] = ()
    """Workers on this node."""
    progress: ProgressRecord | None = None
    """As known on this node, newer than the record in etcd."""
    rank_times: RanksRecord | None = None
    """Where the time of each rank here went; newer than the record in etcd."""
    standbys: int = 0
    """Those that have finished their set-up."""
    why_fresh: str = ""
    """Why workers are started here as new processes, which takes seconds longer than a fork; empty: they are forks."""
    doing: Text = ""
    """The activity of an agent whose workers are not at work yet; empty: they are."""
    doing_since_wall_s: float = 0.0
    preloaded: tuple[str, ...] = ()
    """Modules that the zygote has imported for the job: its `preload`, and those that the script begins with."""
    submitted_wall_s: float = 0.0
    """Of the job: a later one of the same name begins anew; 0: not known."""
    version: str = ""
    """Of the elasticd that the agent was started from; empty: one that did not tell it."""
    exit_code: int | None = None
    """In the last status of all: a daemon that did not start this agent itself is not told the code by the kernel."""
    protocol: int = PROTOCOL


class Point(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The job at one instant, as this node saw it."""

    wall_s: float
    step: int
    loss: float | None
    steps_per_s: float
    world_size: int


class History(msgspec.Struct, frozen=True, kw_only=True):
    """A job's course on this node, in a bounded number of points. Not read by any decision."""

    submitted_wall_s: float
    """Of the job: a later one of the same name begins anew."""
    every_s: float
    """Shortest time between two points; doubled whenever there are too many, and every second point is dropped."""
    points: tuple[Point, ...] = ()
    protocol: int = PROTOCOL


class RankSample(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients and weights of one rank in one step."""

    rank: int
    node: str
    slot: int
    generation: int
    step: int
    wall_s: float
    gradients: str
    """Digest of its own gradients, before they were summed; '' if it has none."""
    weights: str
    rows: tuple[GradientRow, ...]


class GradientSamples(msgspec.Struct, frozen=True, kw_only=True):
    submitted_wall_s: float
    """Of the job: a later one of the same name begins anew."""
    ranks: tuple[RankSample, ...] = ()
    protocol: int = PROTOCOL
