"""Faults on purpose: named faults in any training script, a cluster for tests, and a judge of what is told of them."""

from __future__ import annotations

from .cluster import Cluster, Job, Node
from .faults import AnyFault, BadFaultError, Call, Fail, Hang, Kill, LoseNode, Place, Plan, Stop, StopEtcd, WipeEtcd
from .ground_truth import Struck
from .history import Commit, History
from .incidents import Difference, Injection
from .runs import How, Record, Recovery, judge, recoveries

__all__ = [
    "AnyFault", "BadFaultError", "Call", "Cluster", "Commit", "Difference", "Fail", "Hang", "History", "How",
    "Injection", "Job", "Kill", "LoseNode", "Node", "Place", "Plan", "Record", "Recovery", "Stop", "StopEtcd",
    "Struck", "WipeEtcd", "judge", "recoveries",
]  # fmt: skip
