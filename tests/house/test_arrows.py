"""Who may import whom: the wings of the house, and a core without side effects."""

from __future__ import annotations

import graphlib
import json
import subprocess
import sys

from support.source import imports, modules, where

MAY_IMPORT = {
    "elastic": {"elastic", "worker"},  # only the lazy names of `import elastic`
    "core": {"core"},
    "etcd": {"etcd", "core"},
    "checkpoint": {"checkpoint", "core"},
    "agent": {"agent", "core", "etcd", "checkpoint", "elastic"},
    "worker": {"worker", "core", "checkpoint", "elastic"},
    "elasticd": {"elasticd", "core", "etcd", "elastic"},
}
"""Wing -> wings. `elastic` stands for the version number in elastic/__init__.py."""

PURE = {
    "__future__", "abc", "ast", "base64", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime",
    "decimal", "difflib", "enum", "fractions", "functools", "graphlib", "hashlib", "heapq", "itertools", "json", "math",
    "operator", "re", "statistics", "string", "struct", "textwrap", "types", "typing", "msgspec", "xxhash",
}  # fmt: skip
"""All that the core may import from elsewhere: no clock, no randomness, no files, no sockets, no threads."""


HOMES = {
    "core": "core",
    "etcd": "etcd",
    "checkpoint": "checkpoint",
    "agent": "agent",
    "worker": "worker",
    "__version__": "elastic",
}
"""First name below `elastic` -> wing. A new one is added on purpose."""


def wing(module: str) -> str:
    """The wing of one of our modules (or of a name out of elastic/__init__.py)."""
    top, _, rest = module.partition(".")
    if top == "elasticd" or not rest:
        return top
    first = rest.partition(".")[0]
    if first.startswith("_etcd"):  # private parts of the adapter
        return "etcd"
    return HOMES.get(first, f"nowhere ({module})")


def ours(module: str) -> bool:
    return module.partition(".")[0] in ("elastic", "elasticd")


def test_imports_follow_the_arrows() -> None:
    assert {wing(name) for name in modules()} <= set(MAY_IMPORT)
    wrong = [
        f"{where(path)}:{i.line} imports {i.module}"
        for name, path in modules().items()
        for i in imports(name)
        if ours(i.module) and wing(i.module) not in MAY_IMPORT.get(wing(name), ())
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_is_pure() -> None:
    wrong = [
        f"{where(path)}:{i.line} imports {i.module}"
        for name, path in modules().items()
        for i in imports(name)
        if wing(name) == "core" and not ours(i.module) and i.module.partition(".")[0] not in PURE
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_loads_nothing_heavy() -> None:
    names = [n for n in modules() if wing(n) == "core"]
    code = f"import sys, json, {', '.join(names)}; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    heavy = {"torch", "numpy", "grpc", "etcd3", "socket", "asyncio", "multiprocessing"} & set(json.loads(out))
    assert not heavy


def test_etcd3_is_imported_only_in_the_etcd_package() -> None:
    users = {n for n in modules() for i in imports(n) if i.module.partition(".")[0] in ("etcd3", "grpc")}
    assert {wing(n) for n in users} <= {"etcd"}, users


def test_no_import_cycles() -> None:
    """Counting what runs at import time; raises CycleError with the ring."""
    graph = {
        name: {i.module for i in imports(name) if i.eager and ours(i.module) and i.module != name} for name in modules()
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())
