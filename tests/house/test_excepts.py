"""Errors are caught by name; nobody polls by sleeping."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest
from support.source import modules, tree, where

BROAD = {
    "elasticd.base.threads:Threads.run": "the daemon's loop and threads: ends the process",
    "elastic.worker.boot.zygote:_import": "modules that the job names: any mistake in them is reported, not ours",
    "elastic.worker.boot.bootstrap:_run": "the top of the training process, as in the interpreter: report, exit code 1",
    "elastic.worker.run:ManagedWorker._one_generation": "user code: raised again unless the group's end caused it",
}
"""module:function -> why it may catch everything and go on."""

MAX_BROAD, MAX_PASSED_ON = 4, 5

PASSED_ON = {
    "elasticd.base.errors:our_faults": "a request's error that is a bug of the daemon's: logged, and answered as one",
    "elasticd.base.entry_points:Guard.call": "what a plug-in raises, logged with its traceback",
    "elastic.checkpoint.stored.remote:_as_remote_error": "each file system of fsspec raises its own exceptions",
    "elastic.worker.comm.group:Group.form": "torch reports a group that was cut while forming as errors of many kinds",
    "elastic.worker.run:ManagedWorker._built_state": "groups of a kind that torch makes otherwise: setup runs again",
}
"""module:function -> why it may catch everything, although it always raises it again or another in its place."""

SLEEPS = {
    "elastic.testing.cluster:eventually": "asks daemons and files that send no event; with a deadline",
    "elastic.testing.injection:strike": "a signal to oneself may take a moment",
    "elastic.worker.comm.fence:Fence._count": "a store's counters send no event; with a deadline",
    "elastic.worker.state.handover.sync:Handover._seen_by_all": "a folder that others write sends no event; bounded",
    "elasticd.machine.processes.guard:_end_children": "no event tells of children that are spared; with a deadline",
    "elasticd.ctl.jobs.run_command:ready_cluster": "no event tells of a daemon that starts; with a deadline",
    "elasticd.ctl.output:DaemonRestarts.endure": "a daemon that restarts sends no event; with a deadline",
    "elasticd.ctl.jobs.stopping:_save": "a checkpoint that is written sends no event; with a deadline",
    "elasticd.ctl.jobs.debug:_asked": "a command that asks again until a step is made; with a deadline",
}
"""module:function -> why it may sleep. Everything else waits for an event, with a deadline."""


def _functions(module: ast.Module) -> list[tuple[str, ast.AST]]:
    """(qualified name, node) of every node, with the innermost function it stands in."""
    found: list[tuple[str, ast.AST]] = []

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}" if name else child.name
            found.append((inner, child))
            walk(child, inner)

    walk(module, "")
    return found


def broad_excepts(module: ast.Module) -> list[tuple[str, int]]:
    """(function, line) of each handler for everything after which the function goes on."""
    return [(name, line) for name, line, raises in _broad(module) if not raises]


def passed_on(module: ast.Module) -> list[tuple[str, int]]:
    """(function, line) of each handler for everything that ends in `raise`."""
    return [(name, line) for name, line, raises in _broad(module) if raises]


def _broad(module: ast.Module) -> list[tuple[str, int, bool]]:
    """(function, line, ends in `raise`) of each handler for everything: bare, Exception, BaseException, alone or in a
    tuple, and `suppress` of them."""
    found = []
    for name, node in _functions(module):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(k is None or ast.unparse(k) in ("Exception", "BaseException") for k in kinds):
                found.append((name, node.lineno, isinstance(node.body[-1], ast.Raise)))
        if isinstance(node, ast.Call) and _called(node) == "suppress":
            found += [(name, node.lineno, False) for a in node.args if ast.unparse(a) in ("Exception", "BaseException")]
    return found


def sleeps(module: ast.Module) -> list[tuple[str, int]]:
    calls = [(name, n) for name, n in _functions(module) if isinstance(n, ast.Call)]
    return [(name, n.lineno) for name, n in calls if _called(n) == "sleep"]


def _called(call: ast.Call) -> str:
    """The last name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def offenders(find: Callable[[ast.Module], list[tuple[str, int]]]) -> dict[str, str]:
    """module:function -> file:line."""
    return {f"{name}:{f}": f"{where(path)}:{line}" for name, path in modules().items() for f, line in find(tree(path))}


@pytest.mark.parametrize(("find", "listed"), [(broad_excepts, BROAD), (passed_on, PASSED_ON), (sleeps, SLEEPS)])
def test_only_the_listed_catch_everything_or_sleep(
    find: Callable[[ast.Module], list[tuple[str, int]]], listed: dict[str, str]
) -> None:
    there = offenders(find)
    assert not {function: at for function, at in there.items() if function not in listed}
    assert set(listed) <= set(there), "the list names what is not there any more"


def test_few_catch_everything() -> None:
    assert len(BROAD) <= MAX_BROAD
    assert len(PASSED_ON) <= MAX_PASSED_ON


def test_the_checks_bite() -> None:
    source = (
        "def f():\n    try:\n        g()\n    except (OSError, Exception):\n        time.sleep(1)\n"
        "class C:\n    def m(self):\n        with suppress(BaseException):\n            pass\n"
        "    def o(self):\n        try:\n            g()\n"
        "        except Exception:\n            h()\n            raise\n"
        "    def p(self):\n        try:\n            g()\n"
        "        except Exception as error:\n            raise Ours() from error\n"
        "    def n(self):\n        try:\n            g()\n        except:\n            pass\n"
        "        except OSError:\n            pass\n"
    ).replace("        except:\n            pass\n        except OSError:", "        except:")
    module = ast.parse(source)
    assert [name for name, _ in broad_excepts(module)] == ["f", "C.m", "C.n"]
    assert [name for name, _ in passed_on(module)] == ["C.o", "C.p"]
    assert [name for name, _ in sleeps(module)] == ["f"]
