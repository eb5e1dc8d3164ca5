"""Faults on purpose: named faults in any training script, a cluster for tests, and a judge of what is told of them."""

from __future__ import annotations  # noqa: I001

from .cluster import Cluster, Job, Node
from .faults import (
    AnyFault, BadFaultError, Call, DropLink, Fail, FillDisk, Hang, Kill, LoseNode, Place, Plan, Stop, StopEtcd,
    WipeEtcd,
)  # fmt: skip
from .history import Commit, History, Struck
from .incidents import Difference, Injection
from .runs import How, Record, Recovery, judge, recoveries

__all__ = [
    "AnyFault", "BadFaultError", "Call", "Cluster", "Commit", "Difference", "DropLink", "Fail", "FillDisk", "Hang",
    "History", "How", "Injection", "Job", "Kill", "LoseNode", "Node", "Place", "Plan", "Record", "Recovery", "Stop",
    "StopEtcd", "Struck", "WipeEtcd", "judge", "recoveries",
]  # fmt: skip
