"""Benchmarks ask for jobs that the daemon takes: they run for half an hour, and not in the suite."""

from __future__ import annotations

import ast

import msgspec
from support.source import ROOT

from elastic.contract.spec import Restarts


def test_failures_that_the_fault_benchmark_allows_are_allowed() -> None:
    tree = ast.parse((ROOT / "benchmarks" / "_faults_run.py").read_text())
    given = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RESTARTS"
    ]
    assert len(given) == 1
    msgspec.convert(given[0], Restarts)
