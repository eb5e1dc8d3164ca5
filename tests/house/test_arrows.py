"""Which package may import which, and decisions without side effects."""

from __future__ import annotations

import collections
import graphlib
import json
import subprocess
import sys

from support.source import imports, modules, where

MAY_IMPORT = {
    "elastic": {"elastic", "worker"},  # only the lazy names of `import elastic`
    "contract": {"contract"},
    "recovery": {"recovery", "contract"},
    "util": {"util"},
    "etcd": {"etcd", "contract"},
    "checkpoint": {"checkpoint", "contract", "util"},
    "agent": {"agent", "recovery", "contract", "util", "etcd", "checkpoint", "elastic"},
    "torchrun": {"torchrun", "agent", "recovery", "contract", "etcd", "util"},
    "worker": {"worker", "contract", "util", "checkpoint", "elastic"},
    "integrations": {"integrations", "worker", "contract", "elastic"},
    "testing": {"testing", "worker", "contract", "util", "elasticd", "elastic"},  # which none of them imports
    "elasticd": {"elasticd", "contract", "util", "etcd", "elastic"},
}
"""Package -> packages. `elastic` stands for the version number in elastic/__init__.py."""
STRIKES = "elasticd.ctl.jobs.fault"
"""The command that adds to a plan of `elastic.testing`, which no other module outside imports."""

PURE = {
    "__future__", "abc", "ast", "base64", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime",
    "decimal", "difflib", "enum", "fractions", "functools", "graphlib", "hashlib", "heapq", "itertools", "json", "math",
    "operator", "re", "statistics", "string", "struct", "textwrap", "types", "typing", "msgspec", "xxhash",
}  # fmt: skip
"""All that decisions may import from elsewhere: no clock, no randomness, no files, no sockets, no threads."""


PURE_MODULES = {
    "elastic.checkpoint.interval", "elastic.checkpoint.format.errors", "elastic.checkpoint.format.manifest",
    "elastic.checkpoint.format.shard_plan",
    "elastic.worker.data.sharding", "elastic.worker.link.misuse", "elastic.worker.state.state_source",
}  # fmt: skip
"""Decisions outside `contract` and `recovery`, next to what they decide about."""


def wing(module: str) -> str:
    """The package of one of our modules (or of a name out of elastic/__init__.py)."""
    top, _, rest = module.partition(".")
    if top == "elasticd" or not rest or rest == "__version__":
        return top
    first = rest.partition(".")[0]
    return first if first in MAY_IMPORT else f"nowhere ({module})"


def pure() -> list[str]:
    """Names of the modules that may import nothing but each other and PURE."""
    assert set(modules()) >= PURE_MODULES
    return [name for name in modules() if wing(name) in ("contract", "recovery") or name in PURE_MODULES]


def ours(module: str) -> bool:
    return module.partition(".")[0] in ("elastic", "elasticd")


def test_imports_follow_the_arrows() -> None:
    assert {wing(name) for name in modules()} <= set(MAY_IMPORT)
    wrong = [
        f"{where(path)}:{i.line} imports {i.module}"
        for name, path in modules().items()
        for i in imports(name)
        if ours(i.module) and wing(i.module) not in MAY_IMPORT.get(wing(name), ())
        if (name, i.module) != (STRIKES, "elastic.testing.faults")
    ]
    assert not wrong, "\n".join(wrong)


def test_decisions_are_pure() -> None:
    wrong = [
        f"{where(path)}:{i.line} imports {i.module}"
        for name in pure()
        for path in [modules()[name]]
        for i in imports(name)
        if (not ours(i.module) and i.module.partition(".")[0] not in PURE)
        or (ours(i.module) and i.eager and i.module not in pure() and i.module not in ("elastic", "elasticd"))
    ]
    assert not wrong, "\n".join(wrong)


def test_decisions_load_nothing_heavy() -> None:
    names = pure()
    code = f"import sys, json, {', '.join(names)}; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    heavy = {"torch", "numpy", "grpc", "etcd3", "socket", "asyncio", "multiprocessing"} & set(json.loads(out))
    assert not heavy


def test_etcd3_is_imported_only_in_the_etcd_package() -> None:
    users = {n for n in modules() for i in imports(n) if i.module.partition(".")[0] in ("etcd3", "grpc")}
    assert {wing(n) for n in users} <= {"etcd"}, users


def test_no_circle_of_files() -> None:
    """Imports for types and within functions count, too. Raises CycleError with the ring."""
    graph = {name: {i.module for i in imports(name) if ours(i.module) and i.module != name} for name in modules()}
    graph["elastic"] = set()  # its names are found when they are used
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_no_circle_of_folders() -> None:
    """In each package: its modules and sub-packages, by what is imported anywhere below them."""
    for package in {name.rpartition(".")[0] for name in modules()} - {""}:
        graph: dict[str, set[str]] = collections.defaultdict(set)
        for name in modules():
            if name.startswith(f"{package}."):
                below = {i.module for i in imports(name) if i.module.startswith(f"{package}.")}
                graph[_child(package, name)] |= {_child(package, other) for other in below} - {_child(package, name)}
        tuple(graphlib.TopologicalSorter(graph).static_order())


def _child(package: str, name: str) -> str:
    return name[len(package) + 1 :].partition(".")[0]
