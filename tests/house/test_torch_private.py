"""torch's private API is used in two modules, so that a new version of torch is judged by reading those."""

from __future__ import annotations

import ast

from support.source import modules, tree, where

HOMES = {f"elastic.worker.torch_internals.{name}" for name in ("torch_private", "mesh_groups")}
ANYWHERE = {"_current_frames", "_version", "_exit", "_run_module_as_main"}
"""A tensor's version counter, which torch documents; `sys._current_frames`, `os._exit`, `runpy._run_module_as_main`."""
STORES = {"PrefixStore", "Store", "TCPStore"}
"""Public in torch.distributed, and typed in `torch._C._distributed_c10d` alone."""
INHERITED = {("elastic.agent.torch_agent", "_worker_group"), ("elastic.contract.records.reasons", "_value_")}
"""(module, name): inherited from a class of torch, or documented by the standard library."""


def private_names(module: ast.Module, ours: set[str]) -> list[tuple[str, int]]:
    """(name, line) of underscore names of torch: imported, or an attribute that none of our modules defines."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            given = [alias.name for alias in node.names]
            names = [] if set(given) <= STORES else [*(node.module or "").split("."), *given]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".") if alias.name.startswith("torch")]
        elif isinstance(node, ast.Attribute):
            names = [node.attr] if node.attr not in ours else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "operator.attrgetter", "attrgetter"):
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            names = [name for name in names if name not in ours]
        else:
            continue
        found += [(n, node.lineno) for n in names if n.startswith("_") and not n.startswith("__") and n not in ANYWHERE]
    return found


def defined(module: ast.Module) -> set[str]:
    """Names that a module defines: functions, classes, variables, attributes of `self`."""
    names: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_private_names_of_torch_have_one_home() -> None:
    ours = {n: path for n, path in modules().items() if n.startswith("elastic.") and ".integrations" not in n}
    defines = {name for name, path in ours.items() for name in defined(tree(path))}
    wrong = [
        f"{where(path)}:{line}: {name}"
        for module, path in ours.items()
        if module not in HOMES
        for name, line in private_names(tree(path), defines)
        if (module, name) not in INHERITED
    ]
    assert not wrong, "\n".join(wrong)


def test_the_check_sees_each_kind_of_use() -> None:
    source = """
from torch.utils import _pytree
from torch._C import Node
import torch._dynamo
torch._foreach_mul_(x, 2)
iterator._shutdown_workers()
getattr(scaler, "_per_optimizer_states")
self._mine = 1
self._mine
"""
    module = ast.parse(source)
    assert {name for name, _ in private_names(module, defined(module))} == {
        "_pytree", "_C", "_dynamo", "_foreach_mul_", "_shutdown_workers", "_per_optimizer_states",
    }  # fmt: skip
