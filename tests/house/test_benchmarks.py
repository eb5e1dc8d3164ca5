"""Benchmarks ask for jobs that the daemon takes: they run for half an hour, and not in the suite."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import msgspec
import pytest
from support.source import ROOT, tree, where

from elastic.contract.job.spec import Restarts


def test_failures_that_the_fault_benchmark_allows_are_allowed() -> None:
    tree = ast.parse((ROOT / "benchmarks" / "_faults_run.py").read_text())
    given = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RESTARTS"
    ]
    assert len(given) == 1
    msgspec.convert(given[0], Restarts)


def _calls(module: ast.Module, method: str) -> Iterator[ast.Call]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
            yield node


def _declared(module: ast.Module) -> set[str]:
    """The attributes that `parse_args` gives its result."""
    found: set[str] = set()
    for call in _calls(module, "add_argument"):
        dest = [ast.literal_eval(word.value) for word in call.keywords if word.arg == "dest"]
        name = dest[0] if dest else ast.literal_eval(call.args[0])
        found.add(name.lstrip("-").replace("-", "_"))
    return found


def _used(module: ast.Module) -> set[str]:
    """The attributes of what `parse_args` returned, that are read in the function (or module) that called it."""
    found: set[str] = set()
    for scope in [module, *(node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))]:
        nodes = [node for statement in scope.body for node in ast.walk(statement)]
        names = {
            ast.unparse(node.targets[0])
            for node in nodes
            if isinstance(node, ast.Assign) and ast.unparse(node.value).endswith(".parse_args()")
        }
        for node in nodes:
            if isinstance(node, ast.Attribute):
                of = ast.unparse(node.value)
                if of in names or of.endswith(".parse_args()"):
                    found.add(node.attr)
    return found


SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "parse_args()" in path.read_text()]


@pytest.mark.parametrize("path", SCRIPTS, ids=where)
def test_a_benchmark_reads_only_options_that_it_has(path: pathlib.Path) -> None:
    used = _used(tree(path))
    assert used
    assert used - _declared(tree(path)) == set()
