"""The answers of the API that one command each asks for; see `answers`."""

# Annotations are values here, as in `answers`.
# ruff: noqa: RUF012 - each instance of a msgspec.Struct gets a list of its own

from typing import Any

import msgspec

from .answers import SCHEMA, Answer, EtcdContact, JobDetail, Node


class NodeDetail(Node):
    """A node by itself"""

    schema: int = SCHEMA
    empty: bool = False
    """no job has an agent there; and if the node is drained, its elasticd has seen that, and starts none any more"""


class DrainEffect(Answer):
    """What a drain does to a job"""

    job: str = ""
    effect: str = ""
    """`moves`: other nodes take the place; `shrinks`: it goes on with fewer nodes; `stops`: below its minimum, so it
    saves a checkpoint, if it has a folder for one, and waits. Without one, and if no other node has its state, it goes
    on until the drain's deadline"""
    nodes_after: int = 0
    min_nodes: int = 0
    to: list[str] = []
    """nodes that would take the place"""
    checkpoints: bool = False
    """it has a folder for checkpoints"""
    kept_on: list[str] = []
    """nodes of the job that stay, and keep its state in memory"""
    text: str = ""
    """the same in words"""


class DrainPreview(Answer):
    """What a drain would do"""

    schema: int = SCHEMA
    node: str = ""
    jobs: list[DrainEffect] = []
    """those that would stop come first"""


class Removed(Answer):
    """A removal"""

    folder: str = ""
    """name of the job's folder"""
    what: str = ""
    """`folder`: all of it; `logs`: files in its `logs`; `middle`: that of a log"""
    names: list[str] = []
    """of the files"""
    mb: float = 0.0
    why: str = ""


class Cleanup(Answer):
    """What a node does not keep"""

    schema: int = SCHEMA
    node: str = ""
    dry_run: bool = False
    removed: list[Removed] = []
    freed_mb: float = 0.0
    problems: list[str] = []
    """what could not be removed, and why"""
    jobs_known: bool = True
    """false while etcd cannot be reached: the folders of forgotten jobs stay until it can"""


class Stack(Answer):
    """Python stack of a worker"""

    rank: int = -1
    node: str = ""
    slot: int = 0
    pid: int = 0
    phase: str = ""
    step: int | None = None
    stack: str = ""


class Stacks(Answer):
    """The stacks of a job"""

    schema: int = SCHEMA
    job: str = ""
    stacks: list[Stack] = []
    unanswered: dict[str, str] = {}
    """node → why"""


class Layer(Answer):
    """Norms of a layer"""

    layer: str = ""
    own: dict[str, float] = {}
    """rank → norm of its gradient before it is averaged"""
    mean: dict[str, float] = {}
    """rank → norm of the gradient that was applied"""
    weight: dict[str, float] = {}


class Gradients(Answer):
    """A sample of a job's gradients"""

    schema: int = SCHEMA
    job: str = ""
    step: int = 0
    world_size: int = 0
    passed: bool = False
    """the job is past the step, and ranks that have no sample of it make none"""
    ranks: list[int] = []
    """those that have sampled the step"""
    layers: list[Layer] = []
    findings: list[str] = []
    """what is wrong, one sentence each"""
    samples: list[Any] = []
    """of all steps, as the agents keep them"""
    unanswered: dict[str, str] = {}
    """node → why"""


class Setting(Answer):
    name: str = ""
    value: Any = None
    source: str = ""
    """`flag`, `environment`, `file`, `default`"""
    doc: str = ""


class Relation(Answer):
    """A rule of two time-outs"""

    below: str = ""
    below_s: float = 0.0
    factor: float = 1.0
    """`below` times this must be less than `above`"""
    above: str = ""
    above_s: float = 0.0
    why: str = ""


class Config(Answer):
    """The settings of a node"""

    schema: int = SCHEMA
    settings: list[Setting] = []
    hierarchy: list[Relation] = []


class Top(Answer):
    """Ranks of jobs, as `elasticctl top --json` prints them"""

    schema: int = SCHEMA
    cluster: str = ""
    wall_s: float = 0.0
    etcd: EtcdContact = msgspec.field(default_factory=EtcdContact)
    nodes: list[Node] = []
    jobs: list[JobDetail] = []
    """those that are not over"""
